"""The draft vocabulary: the token ids that heads can propose.

Most of a large vocabulary is almost never said. Heads over the tokens that cover the supervised data cost a fraction
of the memory and time; a token outside merely ends a draft early. Engines read the map as two tensors:
`d2t` [Vd] int64, the offset from draft index to token id, and `t2d` [V] bool, membership.
"""

from collections.abc import Collection

import torch
from torch import Tensor


def most_frequent(counts_V: Tensor, size: int, always: Collection[int]) -> Tensor:
    """Choose `size` ids, ascending int64: `always` (end-of-text ids), then by falling count, ties to the lower id.

    Raises:
        ValueError: if `size` does not fit between the number of `always` ids and the vocabulary.
    """
    vocab_size = len(counts_V)
    if not len(always) < size <= vocab_size:
        raise ValueError(
            f"heads.draft_vocab_size={size} must be above {len(always)} (end-of-text ids) and at most the target's "
            f"vocabulary of {vocab_size}; leave it null for the full vocabulary"
        )
    priority_V = counts_V.double()
    priority_V[list(always)] = float("inf")
    return priority_V.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(counts_V: Tensor, ids: Tensor) -> float:
    """Return the share of counted tokens that the ids cover: an upper bound of what a first draft can get right."""
    return (counts_V[ids].sum() / counts_V.sum().clamp_min(1)).item()


def to_offsets(ids: Tensor) -> Tensor:
    """`d2t`: token id minus draft index, for ascending ids."""
    return ids - torch.arange(len(ids), device=ids.device)


def from_offsets(d2t: Tensor) -> Tensor:
    """Recover the token ids [Vd] from offsets."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def membership(ids: Tensor, vocab_size: int) -> Tensor:
    """`t2d`: True [V] at each token id in the draft vocabulary."""
    return torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill(0, ids, True)


def draft_index(ids: Tensor, vocab_size: int) -> Tensor:
    """Map token ids to draft indices: int64 [V], -1 outside the draft vocabulary."""
    index_V = torch.full((vocab_size,), -1, dtype=torch.long, device=ids.device)
    index_V[ids] = torch.arange(len(ids), device=ids.device)
    return index_V


def check_offsets(d2t: Tensor, vocab_size: int) -> None:
    """Check a map that came from a file.

    Raises:
        ValueError: if it is not ascending, repeats an id or leaves the target's vocabulary.
    """
    ids = from_offsets(d2t)
    if len(falling := (ids[1:] <= ids[:-1]).nonzero()):
        raise ValueError(
            f"d2t does not give strictly ascending token ids (draft index {falling[0].item() + 1} gives "
            f"{ids[falling[0] + 1].item()}); it must hold offsets, not the ids themselves"
        )
    if len(outside := ((ids < 0) | (ids >= vocab_size)).nonzero()):
        raise ValueError(
            f"d2t gives token ids outside the target's vocabulary of {vocab_size} (draft index "
            f"{outside[0].item()} gives {ids[outside[0]].item()}); it holds the ids themselves, not "
            "offsets, or is another model's"
        )
