"""Additive attention masks: packed documents for training, draft trees for decoding.

A mask entry is 0 where query may look at key and the dtype's lowest number where not; "additive" because every
attention backend of transformers understands it, whereas boolean masks are silently wrong under eager attention.

    tree, 2 cached rows        keys:  c0 c1 | r  a  b  a0        parents: a->r, b->r, a0->a
    query r   (depth 0)               0  0  | 0  .  .  .         position = cached + depth
    query a   (depth 1)               0  0  | 0  0  .  .
    query b   (depth 1)               0  0  | 0  .  0  .
    query a0  (depth 2)               0  0  | 0  0  .  0
"""

import torch
from torch import Tensor

# Shapes: B batch, T tokens, N tree nodes, C cached rows, S = C + N keys


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean [..., Q, S] mask into the additive form [..., Q, S] of the same shape."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def document_mask(documents_BT: Tensor, positions_BT: Tensor, window: int | None) -> Tensor:
    """Boolean [B, 1, T, T]: a token sees earlier tokens of its own document, at most `window` back.

    Padding carries document -1 and sees itself alone, which keeps its softmax finite.
    """
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    distance_BTT = positions_BT[:, :, None] - positions_BT[:, None, :]
    T = documents_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=documents_BT.device).tril()
    visible_BTT = same_BTT & causal_TT & (documents_BT >= 0)[:, :, None]
    if window is not None:
        visible_BTT = visible_BTT & (distance_BTT < window)
    visible_BTT = visible_BTT | torch.eye(T, dtype=torch.bool, device=documents_BT.device)
    return visible_BTT[:, None]


def one_document_rows(documents_BT: Tensor) -> bool:
    """Whether each row is one document, numbered 0, and padding behind it: then causal order is the whole mask."""
    return bool((documents_BT <= 0).all())


def tree_mask(ancestors_NN: Tensor, depths_N: Tensor, cached: int, window: int | None) -> Tensor:
    """Boolean [1, 1, N, C + N]: a node sees its ancestors, itself, and every cached row inside `window`."""
    N = len(depths_N)
    cached_NC = torch.ones(N, cached, dtype=torch.bool, device=depths_N.device)
    tree_NN = ancestors_NN
    if window is not None:
        rows_C = torch.arange(cached, device=depths_N.device)
        cached_NC = (cached + depths_N)[:, None] - rows_C < window
        tree_NN = tree_NN & (depths_N[:, None] - depths_N < window)
    return torch.cat([cached_NC, tree_NN], dim=1)[None, None]
