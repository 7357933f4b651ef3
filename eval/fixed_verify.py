"""A verify whose shapes and addresses never change: what a CUDA graph can replay and a compiler sees once.

`Target.forward` reads as many rows of the cache as are filled, so every length is another shape. Here attention reads
all rows of the buffers, and a mask hides those behind the draft tree. The length is a number on the device:

    rows of the cache   0 1 ... length-1 | length ... length+N-1 | ... capacity-1
    a node sees         all of them      | its path              | none

Why: a step of a large model takes a fast GPU a few milliseconds, and its kernels take Python longer to launch.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from heads.cache import TreeCache, TreeLayer
from heads.masks import additive
from heads.target import Target

# Shapes: N tree nodes, S rows of the buffers, V vocabulary, B batch, H key/value heads, D head size

WARM_UPS = 3  # calls before a capture: libraries choose kernels and allocate their workspaces in the first ones


class FixedVerify:
    """The verify of trees of `size` nodes over one cache, which stays the owner of its rows: commit there as ever.

    cache: one that has seen a prefill, which allocates its buffers.
    """

    def __init__(self, target: Target, cache: TreeCache, size: int):
        self.target, self.cache = target, cache
        self.tokens_N = torch.zeros(size, dtype=torch.long, device=target.device)
        self.depths_N = torch.zeros_like(self.tokens_N)
        self.ancestors_NN = torch.eye(size, dtype=torch.bool, device=target.device)
        self.rows_N = torch.arange(size, device=target.device)
        self.rows_S = torch.arange(cache.capacity, device=target.device)
        self.whole = Cache(layers=[_WholeLayer(layer, self.rows_N) for layer in cache.tree_layers])

    def load(self, tokens_N: Tensor, ancestors_NN: Tensor, depths_N: Tensor) -> None:
        """Put a tree, and the present length of the cache, where `compute` reads them; no host synchronisation."""
        size, length = len(self.tokens_N), self.cache.length
        assert length + size <= self.cache.capacity, (
            f"a cache of {self.cache.capacity} rows cannot hold {length + size}"
        )
        self.tokens_N.copy_(tokens_N)
        self.ancestors_NN.copy_(ancestors_NN)
        self.depths_N.copy_(depths_N)
        self.rows_N.copy_(self.rows_S[length : length + size])

    def compute(self) -> Tensor:
        """The logits [N, V] behind the nodes of the loaded tree, whose rows now lie behind the committed ones."""
        positions_N = self.rows_N[0] + self.depths_N
        masks = {
            kind: additive(self._visible(positions_N, window), self.target.dtype)
            for kind, window in self.target.windows.items()
        }
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        hidden_1ND = self.target.run_decoder(self.tokens_N[None], positions_N[None], mask, self.whole)
        return self.target.logits(hidden_1ND[0])

    def _visible(self, positions_N: Tensor, window: int | None) -> Tensor:
        """Boolean [1, 1, N, S]: what `heads.masks.tree_mask` shows, and nothing of the rows behind the tree."""
        visible_NS = (self.rows_S < self.rows_N[0]).repeat(len(positions_N), 1)
        visible_NS[:, self.rows_N] = self.ancestors_NN
        if window is not None:
            positions_S = self.rows_S.clone()
            positions_S[self.rows_N] = positions_N
            visible_NS &= positions_N[:, None] - positions_S < window
        return visible_NS[None, None]


class _WholeLayer(TreeLayer):
    """The buffers of another layer: N new rows go where `rows_N` says, and all rows are returned."""

    def __init__(self, layer: TreeLayer, rows_N: Tensor):
        super().__init__(layer.capacity)
        assert layer.keys is not None, "fill the cache first: a prefill allocates its buffers"
        self.keys, self.values, self.rows_N = layer.keys, layer.values, rows_N
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write [B, H, N, D] rows; returns [B, H, S, D]."""
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, self.rows_N] = key_states
        self.values[:, :, self.rows_N] = value_states
        return self.keys, self.values


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`step` as one CUDA graph: the kernels of one call, replayed over the same memory by a single launch.

    Whatever Python decides in `step` is decided once. Each call overwrites what the call before returned.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
