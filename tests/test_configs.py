"""Every YAML in conf/ composes into its checked dataclass."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from eval.config import from_hydra as from_hydra_config
from heads.target import TargetConfig
from scripts.extract_features import ExtractConfig
from scripts.regenerate import RegenerateConfig
from train.config import TrainConfig, from_hydra, with_heads

CONF = Path(__file__).parents[1] / "conf"
SOURCES = ("data.train=[a.jsonl]", "data.heldout=[b.jsonl]")
# What some choices leave to the command line.
STORED = ["trainer.features=somewhere"]
GIVEN = {
    "model=custom": ["model.path=somewhere"],
    "experiment=eagle3-stored": STORED,
    "experiment=eagle3-long": STORED,
    "experiment=hydra-long": STORED,
}
GROUPS = ("model", "heads", "data", "trainer", "adapter", "experiment")


def compose_train(*overrides: str) -> TrainConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return from_hydra(compose("train", overrides=[*overrides]))


def choices() -> list[str]:
    return [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


@pytest.mark.parametrize("choice", choices())
def test_every_choice_composes(choice):
    config = compose_train(choice, *SOURCES, *GIVEN.get(choice, []))
    group, name = choice.split("=")
    if group == "model":
        assert config.model.name == name
    if group == "heads":
        assert config.kind in name


def test_the_default_run_needs_no_argument():
    config = compose_train()
    assert config.run_name == f"medusa-{config.model.name}"
    assert config.output_dir == f"outputs/{config.run_name}"
    assert config.data.train == ["data/demo/train.jsonl.gz"]


def test_every_setting_of_a_target_can_be_overridden_in_every_preset():
    for choice in choices():
        if choice.startswith("model=") and choice != "model=custom":
            with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
                composed = compose("train", overrides=[choice])
            assert set(composed.model) == {field.name for field in fields(TargetConfig)}, choice


def test_every_experiment_says_how_to_run_it():
    for path in (CONF / "experiment").glob("*.yaml"):
        text = path.read_text()
        assert text.startswith("# @package _global_\n# "), path
        assert f"experiment={path.stem}" in text, path


def shown_command(experiment: str, script: str) -> list[str]:
    """The arguments of the command that an experiment's comment shows."""
    text = (CONF / "experiment" / f"{experiment}.yaml").read_text().replace("\\\n#", "")
    command = next(line for line in text.splitlines() if f"python scripts/{script}" in line)
    return command.split(script)[1].split()


@pytest.mark.parametrize("experiment", ["eagle3-stored", "eagle3-long"])
def test_the_features_that_an_experiment_says_to_extract_are_those_that_it_trains_from(experiment):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        composed = compose("extract", overrides=shown_command(experiment, "extract_features.py"))
    extracted, trained = with_heads(ExtractConfig, composed), compose_train(f"experiment={experiment}", *STORED)
    assert extracted.heads == replace(trained.heads, draft_vocab_size=None)
    assert extracted.data == trained.data


def test_the_long_recipe_trains_on_what_it_says_to_regenerate():
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        composed = compose("regenerate", overrides=shown_command("eagle3-long", "regenerate.py"))
    answers = from_hydra_config(RegenerateConfig, composed).output
    assert answers in compose_train("experiment=eagle3-long", *STORED).data.train


def test_launch_settings_leave_precision_to_the_trainer():
    for path in (CONF / "accelerate").glob("*.yaml"):
        settings = OmegaConf.load(path)
        assert settings.mixed_precision == "no", path
        assert "accelerate launch" in path.read_text(), path
