"""A linear forecast of the target's next features: where own LM heads start instead of repeating the target.

Head k must say x[t+2+k] from f[t]. The target itself says it from f[t+1+k], through its LM head W. So fit
f[t+1+k] ~ M_k f[t] by ridge regression, which needs one pass and no gradients, and start head k as W M_k. On
SmolLM2-135M with 85 thousand tokens this start alone guesses 14 % of unseen greedy answers with head 0, and 18 %
after one epoch of training.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from heads.alignment import IGNORE, find_anchors

# Shapes: B batch, T tokens, N anchors, K heads, D hidden, E = D + 1 (a constant catches the mean)

RIDGE = 1e-2  # of the mean squared feature


class LinearForecast:
    """Accumulates the normal equations of K regressions in float64."""

    def __init__(self, num_heads: int, hidden_size: int, device: torch.device):
        size = {"dtype": torch.float64, "device": device}
        self.gram_KEE = torch.zeros(num_heads, hidden_size + 1, hidden_size + 1, **size)
        self.cross_KED = torch.zeros(num_heads, hidden_size + 1, hidden_size, **size)

    def add(self, hidden_BTD: Tensor, ids_BT: Tensor, supervised_BT: Tensor, documents_BT: Tensor) -> None:
        """Add the pairs (f[t], f[t+1+k]) of every supervised label of head k."""
        anchors = find_anchors(ids_BT, supervised_BT, documents_BT, len(self.gram_KEE))
        hidden_RD = hidden_BTD.flatten(0, 1).double()
        future_KN = anchors.future_rows()
        for k, labels_N in enumerate(anchors.labels_KN):
            labelled_N = labels_N != IGNORE
            inputs_ND = hidden_RD[anchors.rows_N[labelled_N]]
            inputs_NE = torch.cat([inputs_ND, torch.ones_like(inputs_ND[:, :1])], dim=1)
            self.gram_KEE[k] += inputs_NE.T @ inputs_NE
            self.cross_KED[k] += inputs_NE.T @ hidden_RD[future_KN[k][labelled_N]]

    def combine(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums of this process by those of all processes."""
        self.gram_KEE, self.cross_KED = reduce(self.gram_KEE), reduce(self.cross_KED)

    def solve(self) -> Tensor:
        """Return the maps M_k [K, D, D], to be applied as M_k f; the constant is dropped, LM heads have no bias."""
        maps = []
        for gram_EE, cross_ED in zip(self.gram_KEE, self.cross_KED, strict=True):
            ridge = RIDGE * gram_EE.diagonal().mean().clamp_min(1e-12)
            damped_EE = gram_EE + ridge * torch.eye(len(gram_EE), dtype=gram_EE.dtype, device=gram_EE.device)
            solution_ED = torch.cholesky_solve(cross_ED, torch.linalg.cholesky(damped_EE))
            maps.append(solution_ED[:-1].T)
        return torch.stack(maps)
