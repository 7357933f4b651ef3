"""Heads and the adapter of their target, updated together: whole in each process, one or several (DDP)."""

import contextlib
import functools

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heads.family import DraftHeads
from train.adapter import Adapter
from train.config import TrainerConfig
from train.optimizer import build_optimizer, optimizer_tensors, restore_optimizer, trained_group
from train.parallel import Parallel

PREFIX = "adapter."  # of the adapter's parameters beside those of the heads


class Joint(Parallel):
    """Heads as DDP wraps them; the adapter is small, so its gradients are averaged in one go before the step."""

    def __init__(self, heads: DraftHeads, adapter: Adapter, config: TrainerConfig, accelerator: Accelerator):
        super().__init__(heads, config, accelerator)
        self.adapter = {PREFIX + name: parameter for name, parameter in adapter.parameters.items()}
        self.optimizer = build_optimizer(super().parameters, config)
        settings = adapter.config
        self.optimizer.add_param_group(
            trained_group(list(self.adapter.values()), 0.0, settings.lr_ratio, settings.warmup_share)
        )
        if config.gradient_checkpointing:
            recompute_blocks(adapter)
        self.model = accelerator.prepare(heads)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {**super().parameters, **self.adapter}

    def update(self) -> Tensor:
        if self.accelerator.num_processes > 1:
            self._average()
        return super().update()

    @torch.no_grad()
    def _average(self) -> None:
        gradients = [parameter.grad for parameter in self.adapter.values() if parameter.grad is not None]
        if not gradients:  # the heads learn alone
            return
        mean = self.accelerator.reduce(torch.cat([gradient.flatten() for gradient in gradients]), "mean")
        assert isinstance(mean, Tensor)
        for gradient, part in zip(gradients, mean.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def gather_heads(self, everywhere: bool = False) -> DraftHeads:
        return self.heads

    def gather_moments(self) -> dict[str, Tensor]:
        return optimizer_tensors(self.optimizer, self.parameters)

    def restore(self, moments: dict[str, Tensor]) -> None:
        moved = any(name.startswith(PREFIX) for name in moments)
        restore_optimizer(self.optimizer, self.parameters if moved else super().parameters, moments)


def recompute_blocks(adapter: Adapter) -> None:
    """From here on, a backward through the target computes the activations of each decoder block again.

    The switch of transformers would do so for models in training mode alone, and the target is never in it.
    """
    dropout = adapter.config.dropout > 0
    for block in adapter.target.decoder.get_submodule("layers").children():
        block.forward = functools.partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=dropout,
            # Dropout is off again when the backward comes.
            context_fn=lambda: (contextlib.nullcontext(), adapter.dropping() if dropout else contextlib.nullcontext()),
        )
