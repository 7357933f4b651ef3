"""A wrong setting fails before anything is loaded, and the message names it, the rule and the fix."""

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from heads import HEADS
from train.config import LEARNING_RATES, TrainConfig, TrainerConfig, from_hydra

CONF = Path(__file__).parents[2] / "conf"

WRONG = {
    "trainer.lr=-1": r"trainer\.lr=-1\.0 must be above 0",
    "trainer.lr=fast": r"trainer\.lr: Value 'fast'.*Float",
    "trainer.learning_rate=1": r"trainer\.learning_rate",
    "trainer.batch_size=0": r"trainer\.batch_size=0 must be at least 1",
    "trainer.save_every=-1": r"trainer\.save_every=-1 must be at least 0; 0 is for none",
    "trainer.warmup_ratio=2": r"trainer\.warmup_ratio=2\.0 must be in \[0, 1\]",
    "trainer.beta2=1": r"trainer\.beta2=1\.0 must be in \[0, 1\)",
    "trainer.precision=fp8": r"trainer\.precision=fp8 must be one of auto, float32, bfloat16",
    "trainer.tracker=mlflow": r"trainer\.tracker=mlflow must be one of wandb, tensorboard, none",
    "trainer.max_seconds=0": r"trainer\.max_seconds=0\.0 must be above 0",
    "heads.kind=medsa": r"heads\.kind=medsa must be one of medusa.*; choose with heads=<name>",
    "heads=medusa": r"heads=medusa must be a group of settings with a kind",
    "heads.num_head=3": r"heads\.num_head",
    "heads.num_heads=0": r"heads\.num_heads=0 must be at least 1",
    "heads.num_heads=many": r"heads\.num_heads: Value 'many'.*Integer",
    "heads.objective.decay=0": r"heads\.objective\.decay=0\.0 must be in \(0, 1\]; 0\.8 is customary",
    "model.dtype=int8": r"model\.dtype=int8 must be one of",
    "data.train=[]": r"data\.train=\[\] must name at least one source",
    "data.maxlength=3": r"data\.maxlength",
    "run_name=a/b": r"run_name='a/b' must be a name without '/'",
    "resum=true": r"resum\b",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_setting_is_refused_by_name(make_values, override):
    with pytest.raises(ValueError, match=WRONG[override]):
        from_hydra(make_values(override))


def test_tau_without_held_out_prompts_is_refused(make_values):
    with pytest.raises(ValueError, match=r"data\.heldout=\[\] must name prompts.*trainer\.eval_prompts=0"):
        from_hydra(make_values("trainer.eval_prompts=2", "data.heldout=[]"))


@pytest.mark.parametrize(("group", "name"), [("data", "train"), ("trainer", "features")])  # without and with a default
def test_a_missing_value_is_named(make_values, group, name):
    values = make_values()
    values[group][name] = "???"
    with pytest.raises(ValueError, match=rf"{group}\.{name} has no value.*: {group}\.{name}=\.\.\."):
        from_hydra(OmegaConf.create(values))


def test_the_family_decides_the_type_of_heads(make_config):
    config = make_config("heads.objective.kl_weight=0.5")
    assert isinstance(config, TrainConfig)
    assert config.kind == "medusa"
    assert (config.heads.num_heads, config.heads.objective.kl_weight) == (3, 0.5)


@pytest.mark.parametrize("given", [{}, {"objective": {"decay": 0.5}}])
def test_what_is_not_given_is_the_default_of_the_family(make_values, given):
    heads = from_hydra({**make_values(), "heads": {"kind": "eagle3", **given}}).heads
    own = HEADS["eagle3"].config_class()
    assert heads == replace(own, objective=replace(own.objective, **given.get("objective", {})))


@pytest.mark.parametrize(("given", "rate"), [(None, 1e-4), (3e-4, 3e-4)])
def test_a_family_learns_at_its_own_rate_unless_one_is_given(make_values, given, rate):
    values = {**make_values(), "heads": {"kind": "eagle3"}}
    config = from_hydra({**values, "trainer": {**values["trainer"], "lr": given}})
    assert config.trainer.lr == config.resolved()["trainer"]["lr"] == rate
    assert set(LEARNING_RATES) == set(HEADS)


def test_resolved_values_make_the_same_config(make_config):
    config = make_config("trainer.max_seconds=5")
    again = from_hydra(OmegaConf.create(config.resolved()))
    assert again.resolved() == config.resolved()


def test_default_trainer_yaml_shows_the_defaults_of_the_code():
    shown = OmegaConf.to_container(OmegaConf.load(CONF / "trainer" / "default.yaml"))
    assert shown["lr"] is None  # of the family
    assert TrainerConfig(**{**shown, "lr": TrainerConfig.lr}) == TrainerConfig()
    assert set(shown) == set(TrainerConfig.__dataclass_fields__)
