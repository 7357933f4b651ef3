"""AdamW on what is trained, and a learning rate that is a pure function of how much of the run is done."""

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heads.target import Target
from train.config import TrainerConfig
from train.sharded_target import held_part

logger = logging.getLogger(__name__)


def trainable_parameters(heads: nn.Module, target: Target) -> dict[str, nn.Parameter]:
    """The parameters to train, by name: those of the heads that require a gradient, none of the target's."""
    trainable = {name: parameter for name, parameter in heads.named_parameters() if parameter.requires_grad}
    frozen = {held_part(parameter).untyped_storage().data_ptr() for parameter in target.model.parameters()}
    assert trainable, "the heads have nothing to train"
    assert not any(parameter.requires_grad for parameter in target.model.parameters()), "the target is not frozen"
    for name, parameter in trainable.items():
        assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}: a small update would round away"
        assert parameter.untyped_storage().data_ptr() not in frozen, f"{name} shares its memory with the target"
    return trainable


def build_optimizer(trainable: dict[str, nn.Parameter], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW with float32 moments. Biases and norms are not decayed."""
    plain = [name for name in trainable if "bias" in name or "norm" in name]
    groups = [
        trained_group([trainable[name] for name in trainable if name not in plain], config.weight_decay),
        trained_group([trainable[name] for name in plain], 0.0),
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, betas=betas, fused=True)


def trained_group(
    parameters: Sequence[nn.Parameter], weight_decay: float, lr_ratio: float = 1.0, starts: float = 0.0
) -> dict[str, Any]:
    """Parameters that learn at `lr_ratio` times the learning rate, from the share `starts` of the run on."""
    return {"params": list(parameters), "weight_decay": weight_decay, "lr_ratio": lr_ratio, "starts": starts}


def optimizer_tensors(optimizer: torch.optim.Optimizer, trainable: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimiser's state as {"<parameter name>/<moment>": tensor}."""
    return {
        f"{name}/{key}": tensor
        for name, parameter in trainable.items()
        for key, tensor in optimizer.state[parameter].items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, trainable: dict[str, nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    """Fill the state from `optimizer_tensors` by name; parameters without one start afresh, with a warning."""
    for name, parameter in trainable.items():
        if state := stored_state(name, parameter.shape, tensors):
            optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}


def stored_state(name: str, shape: torch.Size, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state {moment: tensor} of one parameter among `optimizer_tensors`; empty, with a warning, without one."""
    state = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.rpartition("/")[0] == name}
    if not state:
        logger.warning("%s has no optimiser state in the checkpoint: its moments start afresh", name)
        return {}
    assert state["exp_avg"].shape == shape, f"{name}: the stored moments have another shape"
    return state


def learning_rate(fraction: float, config: TrainerConfig) -> float:
    """Linear warm-up, then a cosine down to `lr * min_lr_ratio`; `fraction` of the run is done."""
    if fraction < config.warmup_ratio:
        return config.lr * fraction / config.warmup_ratio
    falling = (min(fraction, 1.0) - config.warmup_ratio) / max(1.0 - config.warmup_ratio, 1e-12)
    cosine = 0.5 * (1.0 + math.cos(math.pi * falling))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, fraction: float, config: TrainerConfig) -> float:
    """Set the learning rates of the coming step and return that of the heads."""
    for group in optimizer.param_groups:
        own_fraction = (fraction - group["starts"]) / (1.0 - group["starts"])
        group["lr"] = group["lr_ratio"] * learning_rate(max(own_fraction, 0.0), config)
    return learning_rate(fraction, config)


class Clock:
    """How much of the run is done, in steps or in seconds, whichever is further."""

    def __init__(self, num_steps: int, max_seconds: float | None, seconds_before: float):
        self.num_steps, self.max_seconds = num_steps, max_seconds
        self.start = time.monotonic() - seconds_before

    @property
    def seconds(self) -> float:
        """Seconds of this run, those before a resume included."""
        return time.monotonic() - self.start

    def fraction(self, step: int, seconds: float) -> float:
        """The share that is done in the middle of `step` (from 0): 1 or more when the run is over.

        The middle, since the first step would learn nothing at 0 and the last one nothing at 1.
        """
        by_time = 0.0 if self.max_seconds is None else seconds / self.max_seconds
        return max((step + 0.5) / self.num_steps, by_time)
