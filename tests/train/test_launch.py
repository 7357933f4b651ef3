"""Processes that would not train together, or not as they were asked, are refused by name."""

import re
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType

from train import launch
from train.launch import check_fsdp, check_processes, sharding_asked_for
from train.zero import check_settings

FSDP = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, "activation_checkpointing": False}


@pytest.fixture
def launcher(monkeypatch):
    """launcher(ACCELERATE_USE_FSDP="true", ...): the environment that a launcher made, and no more of its names."""
    for name in ("LOCAL_RANK", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    return lambda **names: [monkeypatch.setenv(name, value) for name, value in names.items()]


@pytest.mark.parametrize(
    ("processes", "running", "expected", "asked"),
    [
        (1, DistributedType.NO, 1, None),
        (2, DistributedType.MULTI_GPU, 2, None),
        (2, DistributedType.MULTI_CPU, 2, None),
        (1, DistributedType.FSDP, 1, DistributedType.FSDP),
        (2, DistributedType.DEEPSPEED, 2, DistributedType.DEEPSPEED),
    ],
)
def test_processes_that_do_what_was_asked_pass(processes, running, expected, asked):
    check_processes(processes, running, expected, asked)


@pytest.mark.parametrize(
    ("processes", "running", "expected", "asked", "problem"),
    [
        (1, DistributedType.NO, 2, None, "WORLD_SIZE=2, but accelerate runs 1 process(es)"),
        (2, DistributedType.NO, 2, None, "they would not share gradients"),
        (
            2,
            DistributedType.MULTI_CPU,
            2,
            DistributedType.DEEPSPEED,
            "asks for DEEPSPEED, but accelerate runs MULTI_CPU",
        ),
        (2, DistributedType.NO, 2, DistributedType.FSDP, "asks for FSDP, but accelerate runs NO"),
        (1, DistributedType.DEEPSPEED, 2, DistributedType.DEEPSPEED, "WORLD_SIZE=2, but accelerate runs 1"),
    ],
)
def test_processes_that_do_something_else_are_refused(processes, running, expected, asked, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        check_processes(processes, running, expected, asked)


def test_what_the_launcher_asks_for(launcher):
    assert sharding_asked_for() is None
    launcher(LOCAL_RANK="0", ACCELERATE_USE_DEEPSPEED="false", ACCELERATE_USE_FSDP="true")
    assert sharding_asked_for() == DistributedType.FSDP


def test_sharding_without_a_launcher_is_refused(launcher):
    launcher(ACCELERATE_USE_FSDP="true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP=true, but no launcher runs; start with"):
        sharding_asked_for()


def test_zero_without_deepspeed_says_what_to_install(launcher, monkeypatch):
    launcher(LOCAL_RANK="0", ACCELERATE_USE_DEEPSPEED="true")
    monkeypatch.setattr(launch, "is_deepspeed_available", lambda: False)
    with pytest.raises(ValueError, match=re.escape("pip install -e '.[deepspeed]'")):
        sharding_asked_for()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"fsdp_version": 1}, "fsdp_version=1 must be 2"),
        ({"cpu_ram_efficient_loading": True}, "fsdp_cpu_ram_efficient_loading=True must be False"),
        ({"activation_checkpointing": True}, "fsdp_activation_checkpointing=True must be False"),
    ],
)
def test_settings_of_fsdp_that_do_not_fit_are_refused(changed, problem):
    check_fsdp(SimpleNamespace(**FSDP))
    with pytest.raises(ValueError, match=problem):
        check_fsdp(SimpleNamespace(**FSDP | changed))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"zero_optimization": {"stage": 0}}, "zero_stage=0 shards nothing"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer must have"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param must have"),
        ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, "bf16 must be off"),
    ],
)
def test_settings_of_deepspeed_that_do_not_fit_are_refused(settings, problem):
    check_settings({"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}})
    with pytest.raises(ValueError, match=problem):
        check_settings(settings)
