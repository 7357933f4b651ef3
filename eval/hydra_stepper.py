"""Hydra heads, drafting level by level: head d continues the paths that end at depth d.

    begin(r)      head 0 reads c, e(r)                  -> logits behind the root
    step([a, b])  head 1 reads c, e(r), e(a) / e(b)     -> logits behind both nodes

c is the feature in front of the certain token r, or what the prefix layer makes of it (Hydra++).
"""

import torch
from torch import Tensor

from heads.eagle_layer import EagleCache, cached_attention
from heads.hydra import HydraHeads, PrefixAttention
from heads.masks import additive
from heads.target import FINAL_NORM

# Shapes: N nodes, P newly committed positions, S committed ones, T tokens, E = d + 1 tokens of a path to depth d,
# D hidden, Vd draft vocabulary, H heads, G key/value heads and head size d of the prefix layer


class HydraStepper:
    """The drafting state of Hydra heads over one sequence (a `Stepper`)."""

    def __init__(self, heads: HydraHeads, capacity: int = 512):
        self.heads = heads
        self.taps = heads.taps
        self.draft_ids = heads.draft_ids
        self.vocab_size = heads.vocab_size
        self.max_depth: int | None = heads.depth
        self.memory = None if heads.prefix is None else PrefixMemory(heads.prefix, capacity)
        self._context_1D: Tensor
        self._paths_NED: Tensor

    def reset(self, prompt_T: Tensor, features: dict[str, Tensor]) -> None:
        if self.memory is not None:
            self.memory.clear()
        self._enter(features[FINAL_NORM][0])

    def observe(self, features: dict[str, Tensor], tokens_P: Tensor, path_P: Tensor) -> None:
        self._enter(features[FINAL_NORM][0, path_P])

    def begin(self, root: Tensor) -> Tensor:
        self._paths_NED = self.heads.embed(root[None, None])
        return self._logits()

    def step(self, tokens_N: Tensor, parents_N: Tensor) -> Tensor:
        self._paths_NED = torch.cat([self._paths_NED[parents_N], self.heads.embed(tokens_N[:, None])], dim=1)
        return self._logits()

    def _enter(self, hidden_PD: Tensor) -> None:
        """Take in the features of newly committed positions; the last one lies in front of the next root."""
        self._context_1D = hidden_PD[-1:] if self.memory is None else self.memory.extend(hidden_PD)

    def _logits(self) -> Tensor:
        N, E, _ = self._paths_NED.shape
        return self.heads.draft_logits(E - 1, self._context_1D.expand(N, -1), self._paths_NED)


class PrefixMemory:
    """The prefix layer at work on one sequence: its keys and values at all committed positions."""

    def __init__(self, prefix: PrefixAttention, capacity: int):
        self.prefix = prefix
        weight = prefix.norm.weight
        self.cache = EagleCache(prefix.layer, capacity, weight.device, weight.dtype)

    def clear(self) -> None:
        self.cache.length = 0

    def extend(self, hidden_PD: Tensor) -> Tensor:
        """Append the features of P positions; what the layer makes of the last one: [1, D]."""
        layer, start, end = self.prefix.layer, self.cache.length, self.cache.length + len(hidden_PD)
        positions_1S = torch.arange(end, device=hidden_PD.device)[None]
        inputs_1PD = self.prefix.norm(hidden_PD[None])
        key_1GPd, value_1GPd = layer.keys_values(inputs_1PD, positions_1S[:, start:])
        self.cache.write(start, key_1GPd[0], value_1GPd[0])
        self.cache.length = end
        query_1H1d = layer.queries(inputs_1PD[:, -1:], positions_1S[:, -1:])
        window = layer.shape.sliding_window
        # The last position sees all others that are inside the window.
        mask_1S = None if window is None else additive(end - 1 - positions_1S < window, query_1H1d.dtype)
        attended_1H1d = cached_attention(query_1H1d[0], self.cache, end, mask_1S)[None]
        return layer.finish(hidden_PD[None, -1:], attended_1H1d)[0].to(hidden_PD.dtype)
