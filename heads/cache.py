"""A preallocated key/value cache whose uncommitted rows are a draft tree.

One verify writes the tree's rows behind the committed ones; commit keeps the accepted path and forgets the rest:

    committed rows        rows of the draft tree
    0 1 2 ... length-1  | root  a  b  a0  b0 ...      verify:  attention sees all of them, under the tree mask
    0 1 2 ... length-1 length length+1                commit:  root and b moved down, length += 2

Nothing is concatenated or cropped while decoding, and a layer with a sliding window keeps all its rows: the window
is in the mask (heads/masks.py), so a roll-back can never lose a key that a later position needs.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# Shapes: B batch, H key/value heads, S slots, T new tokens, D head size, P kept rows


class TreeLayer(CacheLayerMixin):
    """Keys and values of one decoder layer in [B, H, S, D] buffers, allocated at the first update."""

    is_sliding = False
    is_croppable = False

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def buffer(like: Tensor) -> Tensor:
            B, H, _, D = like.shape
            return torch.zeros(B, H, self.capacity, D, dtype=like.dtype, device=like.device)

        self.keys, self.values = buffer(key_states), buffer(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write [B, H, T, D] rows behind the committed ones and return all rows so far as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.length + key_states.shape[-2]
        assert end <= self.capacity, f"cache of {self.capacity} rows cannot hold {end}"
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, rows_P: Tensor) -> None:
        """Move the uncommitted rows `rows_P` (ascending, counted from the first uncommitted one) down."""
        assert self.keys is not None
        assert self.values is not None
        source_P = rows_P + self.length
        destination = slice(self.length, self.length + len(rows_P))
        self.keys[:, :, destination] = self.keys[:, :, source_P]
        self.values[:, :, destination] = self.values[:, :, source_P]

    def select(self, sequences_B: Tensor) -> None:
        """Make a batch of these sequences: those left out are dropped, one named twice is there twice."""
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = self.keys[sequences_B], self.values[sequences_B]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class TreeCache(Cache):
    """The target's cache: `capacity` must hold the longest sequence plus one draft tree."""

    def __init__(self, num_layers: int, capacity: int):
        self.capacity = capacity
        self.tree_layers = [TreeLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.tree_layers))

    @property
    def length(self) -> int:
        """Number of committed rows, the same for every layer."""
        return self.tree_layers[0].length

    def advance(self, count: int) -> None:
        """Commit the first `count` uncommitted rows as they lie: a prefill, a plain step or a chain."""
        for layer in self.tree_layers:
            layer.length += count

    def commit(self, rows_P: Tensor) -> None:
        """Commit the uncommitted rows `rows_P` (ascending node ids of a root-to-node path) and drop the rest."""
        for layer in self.tree_layers:
            layer.keep(rows_P.to(layer.keys.device) if layer.keys is not None else rows_P)
            layer.length += len(rows_P)

    def select(self, sequences_B: Tensor) -> None:
        """Make a batch of these sequences: those left out are dropped, one named twice is there twice."""
        for layer in self.tree_layers:
            layer.select(sequences_B)

    def clear(self) -> None:
        """Forget every row and keep the buffers, for the next prompt."""
        for layer in self.tree_layers:
            layer.length = 0
