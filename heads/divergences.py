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

from heads.tiling import tiles

# Shapes: K heads, N anchors, C anchors of a chunk or of a tile, R rows of features, U distinct rows of a chunk,
# D hidden, V draft vocabulary

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
        distinct_U, where_KC = self.distinct(self.rows_KN[:, anchors])
        hidden_UD = self.hidden_RD[distinct_U]
        log_p_UV, p_UV, logsumexp_U = self._distributions(hidden_UD, self.weight_VD)
        entropy_U = torch.empty_like(logsumexp_U)
        for tile in tiles(log_p_UV):
            log_p_UV[tile].clamp_min_(MIN_LOG_P)
            entropy_U[tile] = -(p_UV[tile] * log_p_UV[tile]).sum(-1)
        log_mass_U = None
        if needs_mass and self.full_weight_VD is not None:
            log_mass_U = (logsumexp_U - self._distributions(hidden_UD, self.full_weight_VD)[2]).clamp_max(0.0)
        return TeacherChunk(where_KC, log_p_UV, p_UV, entropy_U, log_mass_U)

    @staticmethod
    def distinct(rows_KC: Tensor) -> tuple[Tensor, Tensor]:
        """The rows [U] that are computed, and which of them each head and anchor reads [K, C]."""
        return rows_KC.unique(return_inverse=True)

    def _distributions(self, hidden_UD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and probabilities [U, V], and the logarithms of their normalisers [U]."""
        logits_UV = (hidden_UD @ weight_VD.T).float()
        p_UV, logsumexp_U = torch.empty_like(logits_UV), logits_UV.new_empty(len(logits_UV))
        for tile in tiles(logits_UV):
            if self.softcap is not None:
                logits_UV[tile].div_(self.softcap).tanh_().mul_(self.softcap)
            logsumexp_U[tile] = normalise(logits_UV[tile], p_UV[tile])
        return logits_UV, p_UV, logsumexp_U


def normalise(logits_CV: Tensor, p_CV: Tensor) -> Tensor:
    """Turn logits into log-probabilities, in place, and fill in the probabilities; returns the log-normalisers [C]."""
    torch.softmax(logits_CV, -1, out=p_CV)
    # The largest probability is never 0 and tells the normaliser, without another pass of exponentials.
    logsumexp_C = logits_CV.amax(-1) - p_CV.amax(-1).log_()
    logits_CV.sub_(logsumexp_C[:, None])
    return logsumexp_C


@dataclass(frozen=True)
class TeacherChunk:
    """The target's distributions at the anchors of one chunk, for all heads.

    `log_p_UV`, `p_UV` and `entropy_U` are of distributions over the draft vocabulary that sum to 1, `where_KC` says
    which one each head and anchor has, `log_mass_U` is what the draft vocabulary holds of the full one: None means 1.
    """

    where_KC: Tensor
    log_p_UV: Tensor
    p_UV: Tensor
    entropy_U: Tensor
    log_mass_U: Tensor | None

    def tile(self, head: int, anchors: slice) -> "TeacherTile":
        """The distributions that one head has at some anchors of the chunk."""
        return TeacherTile(self, self.where_KC[head, anchors])


@dataclass(frozen=True)
class TeacherTile:
    """The target's distributions for one head at the anchors of a tile."""

    chunk: TeacherChunk
    where_C: Tensor

    @cached_property
    def p(self) -> Tensor:
        """Probabilities [C, V] given that the token is in the draft vocabulary."""
        return self.chunk.p_UV.index_select(0, self.where_C)  # [where_C] takes twice the time

    @cached_property
    def true_p(self) -> Tensor:
        """Probabilities [C, V] in the full vocabulary."""
        log_mass_U = self.chunk.log_mass_U
        return self.p if log_mass_U is None else self.p * log_mass_U[self.where_C, None].exp()

    def log_p(self) -> Tensor:
        """The logarithms [C, V] of `p`."""
        return self.chunk.log_p_UV.index_select(0, self.where_C)

    def entropy(self) -> Tensor:
        """Entropies [C] of `p`."""
        return self.chunk.entropy_U[self.where_C]

    def lost_mass(self) -> Tensor:
        """Probabilities [C] of the tokens outside the draft vocabulary."""
        if self.chunk.log_mass_U is None:
            return self.chunk.entropy_U.new_zeros(self.where_C.shape)
        return -self.chunk.log_mass_U.expm1()[self.where_C]


class Divergence(NamedTuple):
    """Values, their pulls on the logits, and the sums of these over the draft vocabulary."""

    value_C: Tensor
    pull_CV: Tensor
    total_C: Tensor | float


def forward_kl(teacher: TeacherTile, log_q_CV: Tensor) -> Divergence:
    """KL(p || q), p over the draft vocabulary: q covers all that the target may say."""
    return Divergence(-(teacher.p * log_q_CV).sum(-1) - teacher.entropy(), teacher.p, 1.0)


def reverse_kl(teacher: TeacherTile, q_CV: Tensor, log_q_CV: Tensor) -> Divergence:
    """KL(q || p), p over the draft vocabulary: q avoids what the target would not say.

    With p in the full vocabulary the values would grow by -log(mass), the pulls' effect would stay.
    """
    pull_CV = (teacher.log_p() - log_q_CV).mul_(q_CV)
    total_C = pull_CV.sum(-1)
    return Divergence(-total_C, pull_CV, total_C)


def acceptance(teacher: TeacherTile, q_CV: Tensor) -> Tensor:
    """The chance [C] that speculative sampling accepts a draft from q: sum min(p, q), p in the full vocabulary."""
    return torch.minimum(teacher.true_p, q_CV).sum(-1)


def total_variation(teacher: TeacherTile, q_CV: Tensor, acceptance_C: Tensor) -> Divergence:
    """One minus the acceptance, p in the full vocabulary."""
    pull_CV = q_CV * (q_CV < teacher.true_p)
    return Divergence(1 - acceptance_C, pull_CV, pull_CV.sum(-1))
