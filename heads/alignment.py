"""Which position trains which head on which label: the one place where index arithmetic of training lives.

Position t holds token x[t]; m[t] = 1 when x[t] is supervised. Head k at t predicts x[t+2+k], since the target's own
LM head already predicts x[t+1]. It counts where serving drafts: x[t+1] .. x[t+2+k] are all supervised, that is, one
answer holds the certain token, every token between, and the label.

    t                   0  1  2  3  4  5  6  7
    x                   U  U  a  b  c  #  U  U       # end of turn
    m                   0  0  1  1  1  1  0  0
    head 0 label        .  b  c  #  .  .  .  .       anchors t = 1, 2, 3
    head 1 label        .  c  #  .  .  .  .  .       the last prompt token drafts, nothing is drafted past #
    head 2 label        .  #  .  .  .  .  .  .
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Shapes: B batch, T tokens, N anchors, K heads

IGNORE = -1


@dataclass(frozen=True)
class Anchors:
    """The positions where some head is trained. `rows_N` index the flattened [B * T] batch."""

    rows_N: Tensor
    labels_KN: Tensor  # token ids, IGNORE where head k has no label at this anchor

    def future_rows(self) -> Tensor:
        """Rows [K, N] of the position whose target distribution head k imitates: p[t+1+k], the law of x[t+2+k]."""
        K = self.labels_KN.shape[0]
        steps_K1 = torch.arange(1, K + 1, device=self.rows_N.device)[:, None]
        # Past the end of a document there is no label; the anchor itself stands in and carries no weight.
        return torch.where(self.labels_KN == IGNORE, self.rows_N, self.rows_N + steps_K1)


def run_lengths(supervised_BT: Tensor, documents_BT: Tensor) -> Tensor:
    """Count [B, T] how many supervised tokens follow t without a gap, inside the document of t."""
    T = supervised_BT.shape[1]
    places_T = torch.arange(T, device=supervised_BT.device)
    goes_on_BT = supervised_BT.clone()
    goes_on_BT[:, 1:] &= documents_BT[:, 1:] == documents_BT[:, :-1]
    stops_BT = torch.where(goes_on_BT, T, places_T)
    next_stop_BT = stops_BT.flip(1).cummin(1).values.flip(1)  # at or after each place
    following_BT = torch.cat([next_stop_BT[:, 1:], torch.full_like(next_stop_BT[:, :1], T)], dim=1)
    return following_BT - places_T - 1


def find_anchors(ids_BT: Tensor, supervised_BT: Tensor, documents_BT: Tensor, num_heads: int) -> Anchors:
    """Return the anchors of `num_heads` heads, in row order."""
    runs_BT = run_lengths(supervised_BT, documents_BT)
    rows_N = (runs_BT.flatten() >= 2).nonzero().squeeze(1)
    steps_K1 = torch.arange(2, num_heads + 2, device=ids_BT.device)[:, None]
    inside_KN = runs_BT.flatten()[rows_N] >= steps_K1
    labels_KN = ids_BT.flatten()[torch.where(inside_KN, rows_N + steps_K1, 0)]
    return Anchors(rows_N, torch.where(inside_KN, labels_KN, IGNORE))


def label_counts(supervised_BT: Tensor, documents_BT: Tensor, num_heads: int) -> Tensor:
    """Count [K] the labels of each head in a batch: what its loss is divided by."""
    runs_BT = run_lengths(supervised_BT, documents_BT)
    return torch.stack([(runs_BT >= k + 2).sum() for k in range(num_heads)])
