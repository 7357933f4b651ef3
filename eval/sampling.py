"""From logits to a distribution, and from a distribution to tokens.

`probabilities` is the one place where temperature, top-k and top-p are applied: the target's and the
drafter's logits must pass through it with the same configuration, or sampling is not lossless.

Shape suffixes: N rows (tree nodes), V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen. Raises `ValueError` outside these ranges.

    temperature: 0 (greedy; top_k and top_p then change nothing) or a finite number >= 1e-5.
    top_k: the number of tokens kept; 0 turns it off.
    top_p: the probability mass kept, in (0, 1]; 1 turns it off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 1e-5 <= self.temperature < math.inf):
            rule = "must be 0 or a finite number >= 1e-5"
            raise ValueError(f"sampling.temperature={self.temperature} {rule}; use 0 for greedy decoding")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k={self.top_k} must be >= 0; use 0 to turn it off")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p={self.top_p} must be in (0, 1]; use 1.0 to turn it off")


def probabilities(logits_NV: Tensor, config: SamplingConfig) -> Tensor:
    """The distribution probs_NV that each row is sampled from: fp32, or fp64 for fp64 logits.

    Greedy: one-hot at the argmax, the first of equals. Else temperature, then top-k (tokens that tie with the
    k-th are kept), then top-p (the smallest set of likeliest tokens whose mass is >= top_p), as transformers
    applies them.
    """
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    if config.temperature == 0:
        one_hot_NV = torch.zeros_like(logits_NV, dtype=dtype)
        return one_hot_NV.scatter_(-1, logits_NV.argmax(-1, keepdim=True), 1.0)
    logits_NV = logits_NV.to(dtype) / config.temperature
    if config.top_k:
        kth_N1 = logits_NV.topk(min(config.top_k, logits_NV.shape[-1])).values[..., -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, -math.inf)
    if config.top_p < 1:
        ascending_NV, order_NV = logits_NV.sort()
        dropped_NV = ascending_NV.softmax(-1).cumsum(-1) <= 1 - config.top_p
        dropped_NV[..., -1] = False  # rounding must not drop the likeliest token
        logits_NV = logits_NV.masked_fill(dropped_NV.scatter(-1, order_NV, dropped_NV), -math.inf)
    return logits_NV.softmax(-1)


class Coin(Protocol):
    """The source of randomness, injected so that a test can enumerate every outcome."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def draw(self, weights_NV: Tensor) -> Tensor:
        """One token per row, independently, in proportion to weights >= 0: int64 [N].

        Any leading dimensions: one row [V] gives a scalar. A row of zeros gives any token.
        """
        ...


@dataclass(frozen=True)
class TorchCoin:
    """A `Coin` on a torch generator, which must live on the device of the weights."""

    generator: torch.Generator

    def _uniform(self, *shape: int) -> Tensor:
        device = self.generator.device
        return torch.rand(shape, dtype=torch.float64, device=device, generator=self.generator)

    def accept(self, probability: float) -> bool:
        return self._uniform().item() < probability

    def draw(self, weights_NV: Tensor) -> Tensor:
        # Inverts the distribution function; torch.multinomial would wait for the device to check its weights.
        mass_NV = weights_NV.double().cumsum(-1)
        points_N1 = self._uniform(*weights_NV.shape[:-1], 1) * mass_NV[..., -1:]
        drawn_N = torch.searchsorted(mass_NV, points_N1, right=True).squeeze(-1)
        return drawn_N.clamp_max(weights_NV.shape[-1] - 1)  # the product can round up to the whole mass
