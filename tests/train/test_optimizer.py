"""The learning rate is a function of progress; optimiser state goes by name; only heads are trained."""

import pytest
import torch
from torch import nn

from heads.target import TargetConfig, load_target
from train.config import TrainerConfig
from train.optimizer import (
    Clock,
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
    trainable_parameters,
)

CONFIG = TrainerConfig(lr=1.0, warmup_ratio=0.25, min_lr_ratio=0.1)


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig("tiny", "random:llama"))


def parameters(*names: str) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(4, 3, generator=generator)) for name in names}


def step(optimizer: torch.optim.Optimizer, trainable: dict[str, nn.Parameter]) -> None:
    for number, name in enumerate(sorted(trainable)):
        trainable[name].grad = torch.full_like(trainable[name], 1.0 + number)
    optimizer.step()


def test_learning_rate_by_hand():
    expected = {0.0: 0.0, 0.125: 0.5, 0.25: 1.0, 0.625: 0.55, 1.0: 0.1, 1.5: 0.1}
    assert {fraction: learning_rate(fraction, CONFIG) for fraction in expected} == pytest.approx(expected)


@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_learning_rate_at_the_edges_of_the_warm_up(warmup):
    config = TrainerConfig(lr=1.0, warmup_ratio=warmup)
    assert learning_rate(warmup, config) == pytest.approx(1.0)
    assert all(0 <= learning_rate(i / 10, config) <= 1 for i in range(11))


def test_every_step_learns_and_the_last_is_annealed():
    clock = Clock(100, None, 0.0)
    rates = [learning_rate(clock.fraction(step, 1e9), TrainerConfig(lr=1.0)) for step in range(100)]
    assert min(rates) > 0
    assert rates[-1] < 1e-3
    assert clock.fraction(99, 0.0) < 1 <= clock.fraction(100, 0.0)


def test_a_time_budget_anneals_and_ends_the_run_early():
    clock = Clock(1000, 60.0, 30.0)
    assert clock.seconds >= 30
    assert clock.fraction(0, 45.0) == 0.75
    assert clock.fraction(900, 45.0) == pytest.approx(0.9005)
    assert clock.fraction(0, 60.0) >= 1


def test_biases_and_norms_do_not_decay():
    trainable = parameters("weight", "block_bias", "norm.weight")
    optimizer = build_optimizer(trainable, TrainerConfig(weight_decay=0.1))
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decayed[id(trainable[name])] for name in trainable} == {
        "weight": 0.1,
        "block_bias": 0.0,
        "norm.weight": 0.0,
    }


def test_state_is_matched_by_name_not_by_order(caplog):
    config = TrainerConfig(lr=0.1)
    straight, stopped = parameters("a", "b", "c_bias"), parameters("a", "b", "c_bias")
    first, second = build_optimizer(straight, config), build_optimizer(stopped, config)
    for optimizer, trainable in ((first, straight), (second, stopped)):
        step(optimizer, trainable)
    tensors = optimizer_tensors(second, stopped)
    assert {"a/exp_avg", "a/exp_avg_sq", "a/step"} <= tensors.keys()

    reordered = {name: stopped[name] for name in ("c_bias", "b", "a")}
    resumed = build_optimizer(reordered, config)
    restore_optimizer(resumed, reordered, tensors)
    step(first, straight)
    step(resumed, reordered)
    assert all(torch.equal(straight[name], reordered[name]) for name in straight)
    assert not caplog.records


def test_a_parameter_without_stored_state_starts_afresh_with_a_warning(caplog):
    old = parameters("a")
    optimizer = build_optimizer(old, CONFIG)
    step(optimizer, old)
    new = parameters("a", "b")
    resumed = build_optimizer(new, CONFIG)
    restore_optimizer(resumed, new, optimizer_tensors(optimizer, old))
    assert "b has no optimiser state" in caplog.text
    assert new["b"] not in resumed.state


def test_only_the_heads_are_trained(target):
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    assert list(trainable_parameters(module, target)) == ["weight"]
    module.weight = nn.Parameter(target.lm_head.weight.detach())
    with pytest.raises(AssertionError, match="weight shares its memory with the target"):
        trainable_parameters(module, target)
    with pytest.raises(AssertionError, match=r"weight is torch\.bfloat16"):
        trainable_parameters(nn.Linear(3, 2, dtype=torch.bfloat16), target)


def test_small_updates_move_the_masters(target):
    """A step of 1e-4 at 1.0 is lost in bfloat16; masters are float32."""
    trainable = {"norm": nn.Parameter(torch.ones(64))}
    optimizer = build_optimizer(trainable, TrainerConfig(lr=1e-4))
    step(optimizer, trainable)
    assert (trainable["norm"] != 1).all()
