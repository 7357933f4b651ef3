"""How far the heads' distributions q are from the target's p, and what each distance does to the heads' logits.

Let q = softmax(z) and g = dL/dq. Then dL/dz = q * (g - sum(q * g)), which with pull = -q * g reads

    dL/dz = q * sum(pull) - pull

A loss pulls probability towards tokens, and the softmax takes it from all tokens in proportion to q. So a loss is
stated by its value and its pull; constants in g drop out.

    loss                                 pull
    cross-entropy     -log q[label]      1 at the label, 0 elsewhere
    forward KL        KL(p || q)         p
    reverse KL        KL(q || p)         q * (log p - log q)
    total variation   1 - sum min(p, q)  q where q < p, 0 elsewhere

The chance that speculative sampling accepts a draft is sum min(p, q) (arXiv 2211.17192), with p the target's
distribution over all tokens: of a reduced draft vocabulary, p holds less than 1.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

# Shapes: K heads, N anchors, C anchors of a chunk, R rows of features, U distinct rows of a chunk, D hidden,
# V draft vocabulary

# Below this the target's probabilities count as this: log p stays finite, and so does what reverse KL pulls.
MIN_LOG_P = -69.0  # about log(1e-30)


@dataclass(frozen=True)
class Teacher:
    """The target's distributions, computed from its features when they are needed.

    `hidden_RD` are the batch's features, `rows_KN` index them for each head and anchor, `weight_VD` are the rows of
    the target's LM head that the draft vocabulary keeps, `full_weight_VD` are all of its rows, or None if the draft
    vocabulary keeps all.
    """

    hidden_RD: Tensor
    rows_KN: Tensor
    weight_VD: Tensor
    softcap: float | None
    full_weight_VD: Tensor | None = None

    def chunk(self, anchors: slice, needs_mass: bool) -> "TeacherChunk":
        """The distributions at some anchors, each row computed once.

        needs_mass: whether what they lose to the tokens outside the draft vocabulary must be known, which costs the
        logits over the full vocabulary.
        """
        distinct_U, where_KC = self.rows_KN[:, anchors].unique(return_inverse=True)
        hidden_UD = self.hidden_RD[distinct_U]
        logits_UV = self._logits(hidden_UD, self.weight_VD)
        log_mass_U = None
        if needs_mass and self.full_weight_VD is not None:
            full_logsumexp_U = self._logits(hidden_UD, self.full_weight_VD).logsumexp(-1)
            log_mass_U = (logits_UV.logsumexp(-1) - full_logsumexp_U).clamp_max(0.0)
        return TeacherChunk(where_KC, logits_UV.log_softmax(-1).clamp_min(MIN_LOG_P), log_mass_U)

    def _logits(self, hidden_UD: Tensor, weight_VD: Tensor) -> Tensor:
        logits_UV = (hidden_UD @ weight_VD.T).float()
        return logits_UV if self.softcap is None else torch.tanh(logits_UV / self.softcap) * self.softcap


@dataclass(frozen=True)
class TeacherChunk:
    """The target's distributions at the anchors of one chunk.

    `log_p_UV` are distributions over the draft vocabulary that sum to 1, `where_KC` says which one each head and
    anchor has, `log_mass_U` is what the draft vocabulary holds of the full one: None means 1.
    """

    where_KC: Tensor
    log_p_UV: Tensor
    log_mass_U: Tensor | None

    @cached_property
    def p(self) -> Tensor:
        """Probabilities [K, C, V] given that the token is in the draft vocabulary."""
        return self._at_anchors(self.log_p_UV.exp())

    @cached_property
    def true_p(self) -> Tensor:
        """Probabilities [K, C, V] in the full vocabulary."""
        if self.log_mass_U is None:
            return self.p
        return self._at_anchors((self.log_p_UV + self.log_mass_U[:, None]).exp())

    def log_p(self) -> Tensor:
        """The logarithms [K, C, V] of `p`."""
        return self._at_anchors(self.log_p_UV)

    def _at_anchors(self, rows_UV: Tensor) -> Tensor:
        # Twice as fast as rows_UV[where_KC] on CPUs.
        return rows_UV.index_select(0, self.where_KC.flatten()).view(*self.where_KC.shape, -1)

    def entropy(self) -> Tensor:
        """Entropies [K, C] of `p`."""
        return -(self.log_p_UV.exp() * self.log_p_UV).sum(-1)[self.where_KC]

    def lost_mass(self) -> Tensor:
        """Probabilities [K, C] of the tokens outside the draft vocabulary."""
        if self.log_mass_U is None:
            return torch.zeros(self.where_KC.shape, device=self.where_KC.device)
        return -self.log_mass_U.expm1()[self.where_KC]


class Divergence(NamedTuple):
    """Values, their pulls on the logits, and the sums of these over the draft vocabulary."""

    value_KC: Tensor
    pull_KCV: Tensor
    total_KC: Tensor


def forward_kl(teacher: TeacherChunk, log_q_KCV: Tensor) -> Divergence:
    """KL(p || q), p over the draft vocabulary: q covers all that the target may say."""
    # As a product of matrices, which makes no tensor of the size of p.
    value_KC = -torch.einsum("kcv,kcv->kc", teacher.p, log_q_KCV) - teacher.entropy()
    return Divergence(value_KC, teacher.p, torch.ones_like(value_KC))


def reverse_kl(teacher: TeacherChunk, q_KCV: Tensor, log_q_KCV: Tensor) -> Divergence:
    """KL(q || p), p over the draft vocabulary: q avoids what the target would not say.

    With p in the full vocabulary the values would grow by -log(mass), the pulls' effect would stay.
    """
    pull_KCV = (teacher.log_p() - log_q_KCV).mul_(q_KCV)
    total_KC = pull_KCV.sum(-1)
    return Divergence(-total_KC, pull_KCV, total_KC)


def acceptance(teacher: TeacherChunk, q_KCV: Tensor) -> Tensor:
    """The chance [K, C] that speculative sampling accepts a draft from q: sum min(p, q), p in the full vocabulary."""
    return torch.minimum(teacher.true_p, q_KCV).sum(-1)


def total_variation(teacher: TeacherChunk, q_KCV: Tensor, acceptance_KC: Tensor) -> Divergence:
    """One minus the acceptance, p in the full vocabulary."""
    pull_KCV = q_KCV * (q_KCV < teacher.true_p)
    return Divergence(1 - acceptance_KC, pull_KCV, pull_KCV.sum(-1))
