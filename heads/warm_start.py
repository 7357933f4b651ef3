"""A linear forecast of the target's next features: where heads start instead of from chance or the target's own guess.

Head k must say x[t+2+k] from what it reads at t, i[t]. The target itself says it from its feature f[t+1+k], through
its LM head W. So fit f[t+1+k] ~ M_k i[t] by ridge regression, which needs one pass and no gradients, and start head k
as W M_k. Heads that read the feature alone guess 16 % of SmolLM2's unseen greedy answers from such a start; EAGLE-1,
which also reads the next token, 25 %, before any step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from heads.alignment import IGNORE, find_anchors

# Shapes: B batch, T tokens, N anchors, K heads, D hidden, I inputs, E = I + 1 (a constant catches the mean)

RIDGE = 1e-2  # of the mean square of each input: features and embeddings differ in scale by orders of magnitude


class LinearForecast:
    """Accumulates the normal equations of K regressions in float64; the products of a batch are float32."""

    def __init__(self, num_heads: int, input_size: int, hidden_size: int, device: torch.device):
        size = {"dtype": torch.float64, "device": device}
        self.gram_KEE = torch.zeros(num_heads, input_size + 1, input_size + 1, **size)
        self.cross_KED = torch.zeros(num_heads, input_size + 1, hidden_size, **size)

    def add(
        self, inputs_BTI: Tensor, hidden_BTD: Tensor, ids_BT: Tensor, supervised_BT: Tensor, documents_BT: Tensor
    ) -> Tensor:
        """Add the pairs (i[t], f[t+1+k]) of every supervised label of head k, but for those that are not finite.

        Returns the positions t [B, T] of which a pair is left out.
        """
        anchors = find_anchors(ids_BT, supervised_BT, documents_BT, len(self.gram_KEE))
        inputs_RI, hidden_RD = inputs_BTI.flatten(0, 1).float(), hidden_BTD.flatten(0, 1).float()
        # What nobody reads, padding above all, may be anything: only pairs are judged.
        inputs_finite_R, hidden_finite_R = inputs_RI.isfinite().all(1), hidden_RD.isfinite().all(1)
        left_out_R = torch.zeros_like(hidden_finite_R)
        future_KN = anchors.future_rows()
        for k, labels_N in enumerate(anchors.labels_KN):
            labelled_N = labels_N != IGNORE
            rows_N, future_N = anchors.rows_N[labelled_N], future_KN[k][labelled_N]
            finite_N = inputs_finite_R[rows_N] & hidden_finite_R[future_N]
            left_out_R[rows_N[~finite_N]] = True
            inputs_NI = inputs_RI[rows_N[finite_N]]
            inputs_NE = torch.cat([inputs_NI, torch.ones_like(inputs_NI[:, :1])], dim=1)
            self.gram_KEE[k] += inputs_NE.T @ inputs_NE
            self.cross_KED[k] += inputs_NE.T @ hidden_RD[future_N[finite_N]]
        return left_out_R.view_as(ids_BT)

    def combine(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums of this process by those of all processes."""
        self.gram_KEE, self.cross_KED = reduce(self.gram_KEE), reduce(self.cross_KED)

    def input_rms(self) -> Tensor:
        """The root mean square [I] of what the first head reads."""
        sums_E = self.gram_KEE[0].diagonal()
        return (sums_E[:-1] / sums_E[-1].clamp_min(1.0)).sqrt().float()

    def solve(self) -> Tensor:
        """Return the maps M_k [K, D, I], to be applied as M_k i; the constant is dropped, LM heads have no bias."""
        pairs = zip(self.gram_KEE, self.cross_KED, strict=True)
        return torch.stack([ridge(gram_EE, cross_ED)[:-1].T for gram_EE, cross_ED in pairs])


def ridge(gram_EE: Tensor, cross_ED: Tensor) -> Tensor:
    """The regression [E, D] that these sums of products ask for, damped by `RIDGE`."""
    damped_EE = gram_EE + torch.diag(RIDGE * gram_EE.diagonal().clamp_min(1e-12))
    return torch.cholesky_solve(cross_ED, torch.linalg.cholesky(damped_EE))
