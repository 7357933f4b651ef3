"""What heads are trained on: cross-entropy on tokens and distances to the target, without the logits in memory.

Logits over a vocabulary dwarf everything else: 5 heads, 2048 tokens and 128k ids are 5 GB in fp32, several times
over in a naive backward. Here they exist for one head and one chunk of anchors at a time; the forward already computes
the gradients of the chunk (heads/divergences.py derives them) and keeps only those. The target's distributions are
computed once for a chunk and shared by all heads. Products of matrices run on whole chunks, all else on tiles of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads.alignment import IGNORE
from heads.divergences import (
    Divergence,
    Teacher,
    TeacherTile,
    acceptance,
    forward_kl,
    normalise,
    reverse_kl,
    total_variation,
)
from heads.tiling import tiles

# Shapes: K heads, N anchors, C anchors of a chunk or of a tile, D hidden, V draft vocabulary

# Rows of logits alive at once: enough to keep the hardware busy, 0.5 GB at a vocabulary of 128k.
CHUNK_ROWS = 1024
TOP = (1, 5, 10)
WEIGHTS = ("ce_weight", "kl_weight", "reverse_kl_weight", "tv_weight", "hybrid_weight")


@dataclass(frozen=True)
class Objective:
    """Weights of the losses. Head k counts `decay ** k`; its loss is a mean over its labels.

    Cross-entropy counts the labels inside the draft vocabulary, all other losses count every label.

    ce_weight: cross-entropy on the data's tokens.
    kl_weight, reverse_kl_weight: KL(p || q) and KL(q || p), target p and heads q over the draft vocabulary.
    tv_weight: total variation, which is one minus the acceptance sum min(p, q) (p over the full vocabulary).
    hybrid_weight: w * KL(p || q) + (1 - w) * total variation with w = exp(-hybrid_decay * acceptance), a constant to
        the gradient: KL leads while the heads are far off, where total variation hardly has a gradient. This is the
        LK loss of arXiv 2602.23881, but for w: SpecForge takes it from the mean acceptance of a batch, which depends
        on how positions are cut into chunks and micro-batches; here each position has its own.
    prefix_weighting: multiply the losses of head k at an anchor with the chance that all drafts before it are
        accepted, the product of the acceptances of heads 0..k-1 there, a constant to the gradient. The mean stays
        over all labels.
    """

    ce_weight: float = 1.0
    kl_weight: float = 0.0
    reverse_kl_weight: float = 0.0
    tv_weight: float = 0.0
    hybrid_weight: float = 0.0
    hybrid_decay: float = 3.0
    prefix_weighting: bool = False
    decay: float = 0.8

    def __post_init__(self):
        weights = {name: getattr(self, name) for name in WEIGHTS}
        for name, value in weights.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"heads.objective.{name}={value} must be finite and >= 0; 0 leaves the loss out")
        if not any(weights.values()):
            raise ValueError(f"heads.objective: {', '.join(WEIGHTS)} are all 0; give one of them a positive weight")
        if not 0 < self.hybrid_decay < math.inf:
            raise ValueError(
                f"heads.objective.hybrid_decay={self.hybrid_decay} must be finite and > 0; 3.0 is customary, "
                "for KL alone use kl_weight"
            )
        if not 0 < self.decay <= 1:
            raise ValueError(f"heads.objective.decay={self.decay} must be in (0, 1]; 0.8 is customary")

    @property
    def needs_acceptance(self) -> bool:
        """Whether the target's probabilities in the full vocabulary matter."""
        return self.tv_weight > 0 or self.hybrid_weight > 0 or self.prefix_weighting

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's distributions matter."""
        return self.kl_weight > 0 or self.reverse_kl_weight > 0 or self.needs_acceptance

    def kl_and_tv_weights(self, acceptance_C: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """The weights of forward KL and total variation at each position, the hybrid's shares included."""
        if not self.hybrid_weight:
            return self.kl_weight, self.tv_weight
        share_C = torch.exp(-self.hybrid_decay * acceptance_C)
        return self.kl_weight + self.hybrid_weight * share_C, self.tv_weight + self.hybrid_weight * (1 - share_C)


class Statistics(NamedTuple):
    """Sums [K] over the labels of each head, to be added over batches and processes before they are divided."""

    labels: Tensor
    in_vocab: Tensor  # labels inside the draft vocabulary
    ce: Tensor
    kl: Tensor  # this and the last two: 0 if the objective does not need it
    top1: Tensor  # label is the first guess
    top5: Tensor
    top10: Tensor
    offered: Tensor  # labels where all heads before were right with their first guess
    chain: Tensor  # of these, where this head was right too: alpha_k = chain / offered
    acceptance: Tensor  # sum min(p, q): the chance that speculative sampling accepts the draft
    lost_mass: Tensor  # what the target gives to tokens outside the draft vocabulary


def chunked_loss(
    hidden_KND: Tensor,
    weight: Tensor,
    labels_KN: Tensor,
    draft_labels_KN: Tensor,
    scale_K: Tensor,
    objective: Objective,
    teacher: Teacher | None,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss and the statistics [S, K] of all heads (see `Statistics`).

    weight: LM head [V, D] for all heads or [K, V, D] for each, trained if it requires a gradient.
    labels_KN: token ids, IGNORE where there is none; draft_labels_KN: draft indices, IGNORE outside the vocabulary.
    scale_K: what a label's loss of head k is multiplied with: its weight over the number of its labels in the step.
    teacher: may be None if the objective is cross-entropy alone.
    """
    assert teacher is not None or not objective.needs_teacher
    loss, statistics = _ChunkedLoss.apply(
        hidden_KND, weight, labels_KN, draft_labels_KN, scale_K, objective, teacher, chunk_rows
    )  # type: ignore[misc]
    return loss, statistics


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_KND, weight, labels_KN, draft_labels_KN, scale_K, objective, teacher, chunk_rows
    ) -> tuple[Tensor, Tensor]:
        K, N, _ = hidden_KND.shape
        grad_hidden_KND = torch.zeros_like(hidden_KND)
        trains_weight = ctx.needs_input_grad[1]
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if trains_weight else None
        weight = weight.to(hidden_KND.dtype)
        weight_KVD = weight if weight.ndim == 3 else weight.expand(K, -1, -1)
        counts_KN = labels_KN != IGNORE
        found = _Found(*torch.zeros(len(_Found._fields), K, N, device=hidden_KND.device))
        # One block for all chunks: the memory of a new one would come page by page, at the cost of a pass over it.
        block_CV = hidden_KND.new_empty(min(chunk_rows, N), weight.shape[-2])
        for start in range(0, N, chunk_rows):
            chunk = slice(start, min(start + chunk_rows, N))
            shared = teacher.chunk(chunk, objective.needs_acceptance) if objective.needs_teacher else None
            for k, (hidden_CD, weight_VD) in enumerate(zip(hidden_KND[:, chunk], weight_KVD, strict=True)):
                logits_CV = torch.mm(hidden_CD, weight_VD.T, out=block_CV[: len(hidden_CD)])
                scale_C = scale_K[k] * counts_KN[k, chunk]
                if objective.prefix_weighting:
                    scale_C = scale_C * found.acceptance[:k, chunk].prod(0)
                found_C = _Found(*(each_KN[k, chunk] for each_KN in found))
                teach = None if shared is None else partial(shared.tile, k)
                _differentiate(logits_CV, draft_labels_KN[k, chunk], scale_C, objective, teach, found_C)
                grad_hidden_KND[k, chunk] = logits_CV @ weight_VD
                if grad_weight is not None:
                    _add_product(grad_weight if weight.ndim == 2 else grad_weight[k], logits_CV.T, hidden_CD)
        statistics = _statistics(found, counts_KN, draft_labels_KN != IGNORE)
        ctx.save_for_backward(grad_hidden_KND, grad_weight)
        ctx.mark_non_differentiable(statistics)
        return found.loss.sum(), statistics

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_loss = grad_outputs[0]
        # In place, as own LM heads have gradients of gigabytes. Autograd refuses a second backward through them.
        grad_hidden_KND, grad_weight = ctx.saved_tensors
        grad_hidden_KND.mul_(grad_loss)
        if grad_weight is not None:
            grad_weight.mul_(grad_loss)
        return grad_hidden_KND, grad_weight, None, None, None, None, None, None


class _Found(NamedTuple):
    """What is found of heads at anchors, [K, N] or of one head [C]; what the objective does not need is 0."""

    loss: Tensor
    ce: Tensor
    rank: Tensor  # how many tokens the head prefers to the label
    kl: Tensor
    acceptance: Tensor
    lost_mass: Tensor


def _differentiate(
    block_CV: Tensor,
    draft_labels_C: Tensor,
    scale_C: Tensor,
    objective: Objective,
    teach: Callable[[slice], TeacherTile] | None,
    found: _Found,
) -> None:
    """Turn a head's logits into the gradient of its loss, in place, and fill in what is `found` on the way."""
    for tile in tiles(block_CV):
        logits_CV = block_CV[tile].float()
        values = _loss_and_gradient(
            logits_CV, draft_labels_C[tile], scale_C[tile], objective, None if teach is None else teach(tile)
        )
        for name, value_C in values.items():
            getattr(found, name)[tile] = value_C
        if block_CV.dtype != torch.float32:  # else they are one memory
            block_CV[tile] = logits_CV


def _loss_and_gradient(
    logits_CV: Tensor, draft_labels_C: Tensor, scale_C: Tensor, objective: Objective, teacher: TeacherTile | None
) -> dict[str, Tensor]:
    """Some of `_Found` of one head on one tile; turns the logits into the gradient of the loss."""
    inside_C, index_C1 = draft_labels_C != IGNORE, draft_labels_C.clamp_min(0)[:, None]
    scratch_CV = torch.empty_like(logits_CV)
    # As ones in float32, exact in sums up to 2 ** 24: sums of booleans take three times as long.
    rank_C = torch.gt(logits_CV, logits_CV.gather(-1, index_C1), out=scratch_CV).sum(-1)
    normalise(logits_CV, scratch_CV)
    log_q_CV, q_CV = logits_CV, scratch_CV
    ce_C = -log_q_CV.gather(-1, index_C1).squeeze(-1)
    values, weighted = _compare(objective, teacher, q_CV, log_q_CV)

    ce_scale_C = objective.ce_weight * scale_C * inside_C
    loss_C, total_C = ce_scale_C * ce_C, ce_scale_C
    pulls = []
    for weight, divergence in weighted:
        divergence_scale_C = weight * scale_C
        loss_C = loss_C + divergence_scale_C * divergence.value_C
        total_C = total_C + divergence_scale_C * divergence.total_C
        pulls.append((divergence.pull_CV, divergence_scale_C[:, None]))
    grad_CV = torch.mul(q_CV, total_C[:, None], out=logits_CV)  # no pull is log q
    grad_CV.scatter_add_(-1, index_C1, -ce_scale_C[:, None])
    for pull_CV, scale_C1 in pulls:
        grad_CV.addcmul_(pull_CV, scale_C1, value=-1)
    return {"loss": loss_C, "ce": ce_C, "rank": rank_C, **values}


def _compare(
    objective: Objective, teacher: TeacherTile | None, q_CV: Tensor, log_q_CV: Tensor
) -> tuple[dict[str, Tensor], list[tuple[Tensor | float, Divergence]]]:
    """What `_Found` says of a head beside the target, and the divergences with their weights, numbers or [C]."""
    values: dict[str, Tensor] = {}
    weighted: list[tuple[Tensor | float, Divergence]] = []
    if teacher is None:
        return values, weighted
    acceptance_C = q_CV.new_zeros(len(q_CV))
    if objective.needs_acceptance:
        acceptance_C = acceptance(teacher, q_CV)
        values = {"acceptance": acceptance_C, "lost_mass": teacher.lost_mass()}
    kl_weight, tv_weight = objective.kl_and_tv_weights(acceptance_C)
    if objective.kl_weight or objective.hybrid_weight:
        kl = forward_kl(teacher, log_q_CV)
        values["kl"] = kl.value_C
        weighted.append((kl_weight, kl))
    if objective.reverse_kl_weight:
        weighted.append((objective.reverse_kl_weight, reverse_kl(teacher, q_CV, log_q_CV)))
    if objective.tv_weight or objective.hybrid_weight:
        weighted.append((tv_weight, total_variation(teacher, q_CV, acceptance_C)))
    return values, weighted


def _statistics(found: _Found, counts_KN: Tensor, inside_KN: Tensor) -> Tensor:
    """The statistics [S, K] (see `Statistics`)."""
    top1_KN, top5_KN, top10_KN = [(found.rank < top) & inside_KN for top in TOP]
    chain_KN = top1_KN.cumprod(0)
    offered_KN = counts_KN & torch.cat([torch.ones_like(chain_KN[:1]), chain_KN[:-1]]).bool()
    sums = Statistics(
        counts_KN, inside_KN, found.ce * inside_KN, found.kl * counts_KN, top1_KN, top5_KN, top10_KN,
        offered_KN, chain_KN, found.acceptance * counts_KN, found.lost_mass * counts_KN,
    )  # fmt: skip
    return torch.stack([each_KN.sum(1).float() for each_KN in sums])


def _add_product(sum_VD: Tensor, left_VC: Tensor, right_CD: Tensor) -> None:
    if left_VC.dtype == sum_VD.dtype:
        sum_VD.addmm_(left_VC, right_CD)  # without a product as large as the LM head
    else:
        sum_VD += left_VC @ right_CD
