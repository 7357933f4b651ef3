"""How the processes of a run hold one set of heads and update it: whole in each of them, or sharded with FSDP2.

DeepSpeed's ZeRO is in `train/zero.py`. Files know nothing of it: what is saved is gathered, whole and by name, so that
a run goes on with another number of processes or another engine.
"""

import contextlib
from abc import ABC, abstractmethod

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from heads import fresh_copy
from heads.family import DraftHeads
from train.compiling import compile_heads
from train.config import TrainerConfig
from train.optimizer import build_optimizer, optimizer_tensors, restore_optimizer


class Parallel(ABC):
    """Heads in training, one part of which this process may hold. All methods are called by all processes.

    model: the heads as their engine wraps them, to be called for the loss.
    optimizer: has the groups whose learning rate is set before `update`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, heads: DraftHeads, config: TrainerConfig, accelerator: Accelerator):
        self.heads, self.accelerator, self.clip_norm = heads, accelerator, config.clip_norm
        heads.gradient_checkpointing = config.gradient_checkpointing
        if config.compile:
            compile_heads(heads)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, as this process holds them."""
        return {name: parameter for name, parameter in self.heads.named_parameters() if parameter.requires_grad}

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Where the forward and backward of one micro-batch belong; processes exchange gradients in the last."""
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, of which the mean over the processes counts."""
        self.accelerator.backward(loss)

    def update(self) -> Tensor:
        """Clip the gradients, step and forget them; returns their norm before. If it is not finite, nothing moves."""
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip_norm))
        if norm.isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @abstractmethod
    def gather_heads(self, everywhere: bool = False) -> DraftHeads:
        """Whole heads on the main process, or everywhere; the others get theirs as they are."""

    @abstractmethod
    def gather_moments(self) -> dict[str, Tensor]:
        """The optimiser's whole state on the main process, as `optimizer_tensors` names it."""

    @abstractmethod
    def restore(self, moments: dict[str, Tensor]) -> None:
        """Go on from what `gather_moments` gave, in any number of processes."""

    def close(self) -> None:
        """Let go of the engine, which must be gone before the process group is."""
        # A reducer of DDP that frees a gloo group holds the GIL that gloo's threads need.
        self.model = self.heads
        self.accelerator.free_memory()


class Replicated(Parallel):
    """Whole heads in each process: one process, or several under DDP."""

    def __init__(self, heads: DraftHeads, config: TrainerConfig, accelerator: Accelerator):
        super().__init__(heads, config, accelerator)
        self.optimizer = build_optimizer(self.parameters, config)
        self.model = accelerator.prepare(heads)

    def gather_heads(self, everywhere: bool = False) -> DraftHeads:
        return self.heads

    def gather_moments(self) -> dict[str, Tensor]:
        return optimizer_tensors(self.optimizer, self.parameters)

    def restore(self, moments: dict[str, Tensor]) -> None:
        restore_optimizer(self.optimizer, self.parameters, moments)


class Sharded(Parallel):
    """Each process holds a part; the main one puts whole heads together to measure and save them."""

    @abstractmethod
    def whole_parameter(self, parameter: nn.Parameter) -> Tensor:
        """A whole parameter, on every process."""

    @abstractmethod
    def whole_moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The optimiser's whole state of a parameter, on every process."""

    @torch.no_grad()
    def gather_heads(self, everywhere: bool = False) -> DraftHeads:
        here = everywhere or self.accelerator.is_main_process
        copy = fresh_copy(self.heads) if here else self.heads
        for name, parameter in self.parameters.items():
            value = self.whole_parameter(parameter)
            if here:
                copy.get_parameter(name).copy_(value)
        return copy

    def gather_moments(self) -> dict[str, Tensor]:
        gathered = {}
        for name, parameter in self.parameters.items():
            state = self.whole_moments(parameter)
            if self.accelerator.is_main_process:
                gathered |= {f"{name}/{key}": value.cpu() for key, value in state.items()}
        return gathered


class FullySharded(Sharded):
    """FSDP2: parameters, gradients and moments are DTensors, sharded along their first dimension."""

    def __init__(self, heads: DraftHeads, config: TrainerConfig, accelerator: Accelerator):
        super().__init__(heads, config, accelerator)
        self.model, self.optimizer = accelerator.prepare(heads, build_optimizer(self.parameters, config))

    def whole_parameter(self, parameter: nn.Parameter) -> Tensor:
        return whole(parameter)

    def whole_moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {key: whole(value) for key, value in self.optimizer.state[parameter].items()}

    def restore(self, moments: dict[str, Tensor]) -> None:
        parameters = self.parameters
        restore_optimizer(self.optimizer, parameters, moments)
        for parameter in parameters.values():
            assert isinstance(parameter, DTensor)
            state = self.optimizer.state[parameter]
            for key, value in state.items():
                if value.shape == parameter.shape:  # not the count of steps
                    state[key] = distribute_tensor(value, parameter.device_mesh, parameter.placements)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
