"""Two processes that compile, or compute activations again, train the heads that one process trains without."""

import pytest
import torch
from safetensors.torch import load_file

from tests.train.test_distributed import ENTRY, as_overrides, launch
from train.config import from_hydra
from train.loop import train

SETTINGS = (
    "trainer.steps=3",
    "trainer.batch_size=8",
    "trainer.clip_norm=0.2",
    "trainer.eval_prompts=1",
    "trainer.save_every=3",
    "data.packing=false",
)
COMPILED = ("trainer.compile=true", "trainer.gradient_checkpointing=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("ddp", COMPILED),
        ("fsdp2", (*COMPILED, "trainer.shard_target=true")),
        ("zero2", COMPILED),
        ("zero3", ("trainer.gradient_checkpointing=true",)),
    ],
)
def test_every_engine_trains_the_heads_of_one_process(launcher, options, make_values, tmp_path):
    heads = {"kind": "eagle3", "num_steps": 3, "objective": {"ce_weight": 1.0, "kl_weight": 1.0}}
    train(from_hydra({**make_values(*SETTINGS), "heads": heads, "output_dir": f"{tmp_path}/one"}))
    values = {**make_values(*SETTINGS, *options), "heads": heads}
    code, said = launch([*ENTRY, "heads=eagle3", *as_overrides(values)], launcher)
    assert code == 0, said
    for name in ("model", "optimizer"):
        one, two = (
            load_file(tmp_path / run / "checkpoints" / "step-000003" / f"{name}.safetensors") for run in ("one", "run")
        )
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_zero3_does_not_compile(make_values):
    code, said = launch([*ENTRY, *as_overrides(make_values("trainer.compile=true"))], "zero3")
    assert code != 0
    assert said.count("ZeRO-3 fetches the weights of each layer by hooks") == 1
