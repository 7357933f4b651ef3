"""What heads are trained on: cross-entropy on tokens and distances to the target, without the logits in memory.

Logits over a vocabulary dwarf everything else: 5 heads, 2048 tokens and 128k ids are 5 GB in fp32, several times
over in a naive backward. Here they exist for one chunk of anchors at a time, all heads in one batched product; the
forward already computes the gradients of the chunk (heads/divergences.py derives them) and keeps only those.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads.alignment import IGNORE
from heads.divergences import Divergence, Teacher, TeacherChunk, acceptance, forward_kl, reverse_kl, total_variation

# Shapes: K heads, N anchors, C anchors of a chunk, D hidden, V draft vocabulary

# Rows of logits alive at once (K * C): enough to keep the hardware busy, 0.5 GB at a vocabulary of 128k.
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

    def kl_and_tv_weights(self, acceptance_KC: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """The weights of forward KL and total variation at each position, the hybrid's shares included."""
        if not self.hybrid_weight:
            return self.kl_weight, self.tv_weight
        share_KC = torch.exp(-self.hybrid_decay * acceptance_KC)
        return self.kl_weight + self.hybrid_weight * share_KC, self.tv_weight + self.hybrid_weight * (1 - share_KC)


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
        loss = torch.zeros((), device=hidden_KND.device)
        statistics = torch.zeros(len(Statistics._fields), K, device=hidden_KND.device)
        step = max(1, chunk_rows // K)
        for start in range(0, N, step):
            chunk = slice(start, min(start + step, N))
            hidden_KCD = hidden_KND[:, chunk]
            logits_KCV = (hidden_KCD @ weight.mT).float()
            chunk_loss, grad_logits_KCV, chunk_statistics = _loss_and_gradient(
                logits_KCV, labels_KN[:, chunk], draft_labels_KN[:, chunk], scale_K, objective,
                teacher.chunk(chunk, objective.needs_acceptance) if objective.needs_teacher else None,
            )  # fmt: skip
            loss += chunk_loss
            statistics += chunk_statistics
            grad_logits_KCV = grad_logits_KCV.to(hidden_KND.dtype)
            grad_hidden_KND[:, chunk] = grad_logits_KCV @ weight
            if grad_weight is not None:
                _add_weight_gradient(grad_weight, grad_logits_KCV, hidden_KCD)
        ctx.save_for_backward(grad_hidden_KND, grad_weight)
        ctx.mark_non_differentiable(statistics)
        return loss, statistics

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_loss = grad_outputs[0]
        # In place, as own LM heads have gradients of gigabytes. Autograd refuses a second backward through them.
        grad_hidden_KND, grad_weight = ctx.saved_tensors
        grad_hidden_KND.mul_(grad_loss)
        if grad_weight is not None:
            grad_weight.mul_(grad_loss)
        return grad_hidden_KND, grad_weight, None, None, None, None, None, None


def _loss_and_gradient(
    logits_KCV: Tensor,
    labels_KC: Tensor,
    draft_labels_KC: Tensor,
    scale_K: Tensor,
    objective: Objective,
    teacher: TeacherChunk | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, its gradient with respect to the logits, and statistics [S, K] of one chunk; overwrites the logits."""
    counts_KC, inside_KC = labels_KC != IGNORE, draft_labels_KC != IGNORE
    index_KC1 = draft_labels_KC.clamp_min(0)[..., None]
    log_q_KCV = logits_KCV.log_softmax(-1)
    guesses = _guesses(logits_KCV, index_KC1, counts_KC, inside_KC)
    # A new tensor of this size costs a CPU more than the exponentials: its memory arrives page by page.
    q_KCV = torch.exp(log_q_KCV, out=logits_KCV)
    ce_KC = -log_q_KCV.gather(-1, index_KC1).squeeze(-1) * inside_KC
    compared = _compare(objective, teacher, q_KCV, log_q_KCV)

    scale_KC = scale_K[:, None]
    if objective.prefix_weighting:
        scale_KC = scale_KC * _product_before(compared.acceptance_KC)
    ce_scale_KC = objective.ce_weight * scale_KC * inside_KC
    loss, total_KC = (ce_scale_KC * ce_KC).sum(), ce_scale_KC
    pulls = []
    for weight, divergence in compared.weighted:
        divergence_scale_KC = weight * scale_KC * counts_KC
        loss = loss + (divergence_scale_KC * divergence.value_KC).sum()
        total_KC = total_KC + divergence_scale_KC * divergence.total_KC
        pulls.append((divergence.pull_KCV, divergence_scale_KC[..., None]))
    grad_KCV = q_KCV.mul_(total_KC[..., None])  # the last use of q, and no pull is q itself
    grad_KCV.scatter_add_(-1, index_KC1, -ce_scale_KC[..., None])
    for pull_KCV, scale_KC1 in pulls:
        grad_KCV.addcmul_(pull_KCV, scale_KC1, value=-1)

    sums = Statistics(
        counts_KC, inside_KC, ce_KC, compared.kl_KC * counts_KC, *guesses,
        compared.acceptance_KC * counts_KC, compared.lost_mass_KC * counts_KC,
    )  # fmt: skip
    return loss, grad_KCV, torch.stack([each.sum(1).float() for each in sums])


class _Compared(NamedTuple):
    """The heads against the target in one chunk; what the objective does not need is 0."""

    weighted: list[tuple[Tensor | float, Divergence]]  # each with its weight, a number or [K, C]
    kl_KC: Tensor
    acceptance_KC: Tensor
    lost_mass_KC: Tensor


def _compare(objective: Objective, teacher: TeacherChunk | None, q_KCV: Tensor, log_q_KCV: Tensor) -> _Compared:
    kl_KC = acceptance_KC = lost_mass_KC = q_KCV.new_zeros(q_KCV.shape[:2])
    weighted: list[tuple[Tensor | float, Divergence]] = []
    if teacher is None:
        return _Compared(weighted, kl_KC, acceptance_KC, lost_mass_KC)
    if objective.needs_acceptance:
        acceptance_KC, lost_mass_KC = acceptance(teacher, q_KCV), teacher.lost_mass()
    kl_weight, tv_weight = objective.kl_and_tv_weights(acceptance_KC)
    if objective.kl_weight or objective.hybrid_weight:
        kl = forward_kl(teacher, log_q_KCV)
        kl_KC = kl.value_KC
        weighted.append((kl_weight, kl))
    if objective.reverse_kl_weight:
        weighted.append((objective.reverse_kl_weight, reverse_kl(teacher, q_KCV, log_q_KCV)))
    if objective.tv_weight or objective.hybrid_weight:
        weighted.append((tv_weight, total_variation(teacher, q_KCV, acceptance_KC)))
    return _Compared(weighted, kl_KC, acceptance_KC, lost_mass_KC)


def _product_before(factor_KC: Tensor) -> Tensor:
    """For head k the product of the factors of heads 0..k-1."""
    return torch.cat([torch.ones_like(factor_KC[:1]), factor_KC[:-1]]).cumprod(0)


def _guesses(
    logits_KCV: Tensor, index_KC1: Tensor, counts_KC: Tensor, inside_KC: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the first guesses are worth [K, C]: top1, top5, top10, offered, chain of `Statistics`.

    Overwrites the logits: comparing in place leaves ones in float32, exact in sums up to 2 ** 24, where booleans would
    be copied to int64 first.
    """
    ranks_KC = logits_KCV.gt_(logits_KCV.gather(-1, index_KC1)).sum(-1)
    top1_KC, top5_KC, top10_KC = [(ranks_KC < top) & inside_KC for top in TOP]
    offered_KC = counts_KC & _product_before(top1_KC).bool()
    return top1_KC, top5_KC, top10_KC, offered_KC, top1_KC.cumprod(0)


def _add_weight_gradient(grad_weight: Tensor, grad_logits_KCV: Tensor, hidden_KCD: Tensor) -> None:
    if grad_weight.ndim == 2:
        grad_weight = grad_weight[None]
        grad_logits_KCV, hidden_KCD = grad_logits_KCV.flatten(0, 1)[None], hidden_KCD.flatten(0, 1)[None]
    if grad_logits_KCV.dtype == grad_weight.dtype:
        grad_weight.baddbmm_(grad_logits_KCV.mT, hidden_KCD)  # without a product as large as the LM heads
    else:
        grad_weight += grad_logits_KCV.mT @ hidden_KCD
