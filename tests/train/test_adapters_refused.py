"""What an adapter is told: every choice of conf/adapter/ composes, and what cannot be trained is refused by name."""

from pathlib import Path

import pytest
import torch
from accelerate.utils import DistributedType
from hydra import compose, initialize_config_dir

from heads.target import TargetConfig, load_target
from train.adapter import Adapter, AdapterConfig
from train.config import from_hydra
from train.start import load_frozen_target

CONF = Path(__file__).parents[2] / "conf"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adapter.r=0"], r"adapter\.r=0 must be at least 1"),
        (["adapter.dropout=1.0"], r"adapter\.dropout=1\.0 must be in \[0, 1\)"),
        (["adapter.warmup_share=1"], r"adapter\.warmup_share=1\.0 must be in \[0, 1\)"),
        (["adapter.lr_ratio=0"], r"adapter\.lr_ratio=0\.0 must be above 0"),
        (["adapter.lm_weight=-1"], r"adapter\.lm_weight=-1\.0 must be at least 0"),
        (["adapter.targets=[]"], r"adapter\.targets=\[\] must name layers; q_proj"),
        (["adapter.rank=4"], r"unknown setting adapter\.rank.*known there: r, alpha"),
        (["adapter.r=4", "trainer.keep_features=true"], r"the target is trained here, but trainer\.keep_features=true"),
        (["adapter.r=4", "trainer.features=store"], r"but trainer\.features=store was stored from the original"),
        (["adapter.r=4", "model.adapter=other"], r"but model\.adapter=other is on the target.*merge_adapter\.py"),
    ],
)
def test_wrong_settings_are_refused(make_config, overrides, message):
    with pytest.raises(ValueError, match=message):
        make_config(*overrides)


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("llama", ["q_proj", "query"], r"query is no linear layer.*they have down_proj, gate_proj.*q_proj.*v_proj"),
        ("llama-tied", ["lm_head"], r"lm_head is no linear layer.*the LM head stay as they are"),
        ("llama", ["embed_tokens"], r"embed_tokens is no linear layer"),
        ("gemma2", ["q_proj"], r"type gemma2 cap their logits"),
    ],
)
def test_layers_and_targets_that_cannot_be_adapted_are_named(family, targets, message):
    with pytest.raises(ValueError, match=message):
        Adapter(
            load_target(TargetConfig("tiny", f"random:{family}"), "cpu", pack=False), AdapterConfig(targets=targets), 0
        )


def test_sharded_engines_are_refused(make_config):
    class Sharding:
        distributed_type = DistributedType.FSDP
        device = torch.device("cpu")

    with pytest.raises(ValueError, match=r"FSDP would shard the heads but not the adapter.*accelerate/ddp\.yaml"):
        load_frozen_target(make_config("adapter.r=4"), Sharding())  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", ["lora", "qlora"])
def test_every_adapter_of_conf_composes(choice):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = from_hydra(compose("train", overrides=[f"adapter={choice}", "adapter.r=8"]))
    assert config.adapter == AdapterConfig(r=8)
    assert config.model.quantization == {"lora": None, "qlora": "bitsandbytes-4bit"}[choice]
