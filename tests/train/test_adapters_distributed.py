"""Two processes train the adapter that one trains; engines that shard refuse it."""

import pytest
import torch
from safetensors.torch import load_file

from tests.train.test_distributed import ENTRY, as_overrides, launch
from train.loop import train

JOINT = (
    "adapter.r=4",
    "adapter.alpha=8",
    "adapter.warmup_share=0.34",
    "adapter.lm_weight=1.0",
    "trainer.lr=0.001",
    "trainer.batch_size=8",
    "trainer.micro_batch_size=2",
    "trainer.clip_norm=0.2",
    "trainer.save_every=3",
    "data.packing=false",
)


@pytest.mark.slow
def test_two_processes_train_the_same_adapter_as_one(make_config, make_values, tmp_path):
    train(make_config(*JOINT, f"output_dir={tmp_path}/one"))
    values = make_values(*JOINT, f"output_dir={tmp_path}/two")
    code, said = launch([*ENTRY, *as_overrides(values)])
    assert code == 0, said
    for name in ("adapter_model", "model", "optimizer"):
        one, two = (
            load_file(tmp_path / run / "checkpoints" / "step-000006" / f"{name}.safetensors") for run in ("one", "two")
        )
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
        assert name != "adapter_model" or all(tensor.any() for tensor in one.values())


@pytest.mark.slow
def test_an_engine_that_shards_is_refused_by_name(make_values):
    code, said = launch([*ENTRY, *as_overrides(make_values(*JOINT))], "fsdp2")
    assert code != 0
    assert said.count("FSDP would shard the heads but not the adapter") == 1
