"""The heads that a run starts from: those of another run go on as they were, or are refused by name."""

import json
from pathlib import Path

import pytest
import torch

from data.shards import prepare
from heads.family import DraftHeads
from heads.identity import identify
from heads.layout import load_heads, save_heads
from heads.target import TargetConfig, load_target
from train.config import TrainConfig, from_hydra
from train.first_heads import first_heads
from train.loop import train

FAMILIES = {
    "medusa": {"num_heads": 2, "init": "regression", "draft_vocab_size": 40},
    "hydra": {"num_heads": 2, "draft_vocab_size": 40, "prefix_attention": True},
    "eagle": {"num_steps": 2, "noise": 0.0},
    "eagle3": {"num_steps": 2, "draft_vocab_size": 40},
}


@pytest.fixture
def make(make_values):
    """make("eagle3", "trainer.steps=2", taps=[0]) -> the checked config of a run of that family."""

    def config(kind: str, *overrides: str, **heads) -> TrainConfig:
        settings = {"kind": kind, **FAMILIES[kind], **heads}
        return from_hydra({**make_values("trainer.lr=1e-3", *overrides), "heads": settings})

    return config


def started(config: TrainConfig) -> DraftHeads:
    target = load_target(config.model)
    return first_heads(config, target, prepare(config.data.train, config.data, target.tokenizer, target.eos_ids))


def losses(run: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", FAMILIES)
def test_heads_of_a_run_go_on_where_they_were(kind, make, tmp_path, caplog):
    first, again = tmp_path / "first", tmp_path / "again"
    trained = train(make(kind, f"output_dir={first}"))
    kept = load_heads(trained, load_target(TargetConfig("tiny", "random:llama")))
    now = started(make(kind, f"init_from={first}", objective={"decay": 0.5, "ce_weight": 1.0}))
    assert now.config.objective.decay == 0.5
    assert all(torch.equal(tensor, kept.state_dict()[name]) for name, tensor in now.state_dict().items())
    caplog.clear()
    train(make(kind, f"output_dir={again}", f"init_from={first}/checkpoints/step-000006"))
    assert "linear forecast" not in caplog.text
    assert losses(again)[0] < losses(first)[0]
    assert losses(again)[-1] < losses(first)[-1]


def test_imported_heads_in_bfloat16_of_a_fine_tune_start_as_float32(make, tmp_path):
    heads = started(make("eagle3"))
    save_heads(heads.to(torch.bfloat16), tmp_path / "imported", identify(heads.target), {})
    now = started(make("eagle3", f"init_from={tmp_path / 'imported'}", "model.path=random:llama-tied"))
    assert all(parameter.dtype == torch.float32 for parameter in now.parameters())
    weights = heads.state_dict()
    assert all(torch.equal(tensor, weights[name].to(tensor.dtype)) for name, tensor in now.state_dict().items())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"taps": [1]}, r"heads of heads.taps=\[0, 1\], but this run trains heads.taps=\[1\]; set heads.taps=\[0, 1\]"),
        ({"norm_output": True}, "heads of heads.norm_output=False, but this run trains heads.norm_output=True"),
        ({"draft_vocab_size": 41}, "set heads.draft_vocab_size=40, or start from new heads with init_from=null"),
        ({"layer": {"intermediate_size": 8}}, "but this run trains heads.layer.intermediate_size=8"),
    ],
)
def test_heads_of_another_structure_are_refused_by_name(other, message, make, tmp_path):
    heads = started(make("eagle3"))
    save_heads(heads, tmp_path / "known", identify(heads.target), {})
    with pytest.raises(ValueError, match=message):
        started(make("eagle3", f"init_from={tmp_path / 'known'}", **other))


def test_heads_of_another_family_or_no_heads_are_refused(make, tmp_path):
    heads = started(make("eagle3"))
    save_heads(heads, tmp_path / "known", identify(heads.target), {})
    with pytest.raises(ValueError, match="holds eagle3 heads; set heads=eagle3"):
        started(make("medusa", f"init_from={tmp_path / 'known'}"))
    with pytest.raises(ValueError, match=r"init_from=nowhere holds no config.json"):
        started(make("eagle3", "init_from=nowhere"))
