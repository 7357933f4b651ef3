"""What a run measures while it trains is what its files are worth: heads decode in the target's dtype, as served."""

import json

import pytest
import torch

from eval.benchmark import measure_tau
from eval.prompts import load_prompts
from heads import HEADS
from heads.layout import load_heads
from heads.target import TargetConfig, load_target
from train.config import from_hydra
from train.loop import train


@pytest.mark.parametrize("family", HEADS)
def test_a_run_in_bfloat16_measures_what_its_files_are_worth(family, make_values, tmp_path):
    values = make_values("trainer.steps=2", "trainer.eval_prompts=2", "trainer.eval_every=1", "model.dtype=bfloat16")
    directory = train(from_hydra({**values, "heads": {"kind": family}}))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    taus = [row["eval/tau"] for row in rows if "eval/tau" in row]
    target = load_target(TargetConfig("tiny", "random:llama", dtype="bfloat16"))
    assert target.dtype == torch.bfloat16
    prompts = load_prompts(values["data"]["heldout"], target, 2)
    tau, _ = measure_tau(target, load_heads(directory, target), prompts, 8)
    assert len(taus) == 2
    assert max(taus) == tau
