"""What heads are trained on: cross-entropy on tokens and KL divergence to the target, without the logits in memory.

Logits over a vocabulary dwarf everything else: 5 heads, 2048 tokens and 128k ids are 5 GB in fp32, several times
over in a naive backward. Here they exist for one chunk of anchors at a time, all heads in one batched product; the
forward already computes the gradients of the chunk (softmax minus what it should be) and keeps only those.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads.alignment import IGNORE

# Shapes: K heads, N anchors, C anchors of a chunk, D hidden, V draft vocabulary, U distinct teacher rows of a chunk

# Rows of logits alive at once (K * C): enough to keep the hardware busy, 0.5 GB at a vocabulary of 128k.
CHUNK_ROWS = 1024
TOP = (1, 5, 10)


@dataclass(frozen=True)
class Objective:
    """Weights of the losses. Head k counts `decay ** k`; its loss is a mean over its labels."""

    ce_weight: float = 1.0
    kl_weight: float = 0.0
    decay: float = 0.8

    def __post_init__(self):
        if self.ce_weight < 0 or self.kl_weight < 0 or self.ce_weight + self.kl_weight == 0:
            raise ValueError(
                f"heads.objective: ce_weight={self.ce_weight} and kl_weight={self.kl_weight} must be >= 0 and not "
                "both 0; give one of them a positive weight"
            )
        if not 0 < self.decay <= 1:
            raise ValueError(f"heads.objective.decay={self.decay} must be in (0, 1]; 0.8 is customary")


@dataclass(frozen=True)
class Teacher:
    """The target's distributions, computed from its features when they are needed.

    `hidden_RD` are the batch's features, `rows_KN` index them for each head and anchor, `weight_VD` are the rows of
    the target's LM head that the draft vocabulary keeps.
    """

    hidden_RD: Tensor
    rows_KN: Tensor
    weight_VD: Tensor
    softcap: float | None

    def probabilities(self, chunk: slice) -> Tensor:
        """The target's distributions [K, C, V] over the draft vocabulary; each row is computed once."""
        distinct_U, where_KC = self.rows_KN[:, chunk].unique(return_inverse=True)
        logits_UV = (self.hidden_RD[distinct_U] @ self.weight_VD.T).float()
        if self.softcap is not None:
            logits_UV = torch.tanh(logits_UV / self.softcap) * self.softcap
        return logits_UV.softmax(-1)[where_KC]


class Statistics(NamedTuple):
    """Sums [K] over the labels of each head, to be added over batches and processes before they are divided."""

    labels: Tensor
    in_vocab: Tensor  # labels inside the draft vocabulary
    ce: Tensor
    kl: Tensor
    top1: Tensor  # label is the first guess
    top5: Tensor
    top10: Tensor
    offered: Tensor  # labels where all heads before were right with their first guess
    chain: Tensor  # of these, where this head was right too: alpha_k = chain / offered


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
    """Return the summed loss and the statistics [9, K] of all heads.

    weight: LM head [V, D] for all heads or [K, V, D] for each, trained if it requires a gradient.
    labels_KN: token ids, IGNORE where there is none; draft_labels_KN: draft indices, IGNORE outside the vocabulary.
    scale_K: what a label's loss of head k is multiplied with: its weight over the number of its labels in the step.
    """
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
                teacher.probabilities(chunk) if teacher is not None and objective.kl_weight else None,
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
        grad_hidden_KND, grad_weight = ctx.saved_tensors
        grad_weight = None if grad_weight is None else grad_weight * grad_loss
        return grad_hidden_KND * grad_loss.to(grad_hidden_KND.dtype), grad_weight, None, None, None, None, None, None


def _loss_and_gradient(
    logits_KCV: Tensor,
    labels_KC: Tensor,
    draft_labels_KC: Tensor,
    scale_K: Tensor,
    objective: Objective,
    teacher_KCV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, its gradient with respect to the logits, and statistics [9, K] of one chunk."""
    log_q_KCV = logits_KCV.log_softmax(-1)
    q_KCV = log_q_KCV.exp()
    counts_KC, inside_KC = labels_KC != IGNORE, draft_labels_KC != IGNORE
    index_KC1 = draft_labels_KC.clamp_min(0)[..., None]
    ce_KC = -log_q_KCV.gather(-1, index_KC1).squeeze(-1) * inside_KC
    ranks_KC = (logits_KCV > logits_KCV.gather(-1, index_KC1)).sum(-1)
    top1_KC, top5_KC, top10_KC = [(ranks_KC < top) & inside_KC for top in TOP]
    chain_KC = top1_KC.cumprod(0)
    offered_KC = counts_KC & torch.cat([torch.ones_like(chain_KC[:1]), chain_KC[:-1]]).bool()

    row_scale_KC1 = scale_K[:, None, None]
    ce_scale_KC1 = objective.ce_weight * row_scale_KC1 * inside_KC[..., None]
    grad_KCV = q_KCV * ce_scale_KC1
    grad_KCV.scatter_add_(-1, index_KC1, -ce_scale_KC1.expand_as(index_KC1))
    loss_KC = objective.ce_weight * ce_KC
    kl_KC = torch.zeros_like(ce_KC)
    if teacher_KCV is not None:
        kl_KC = (teacher_KCV * (teacher_KCV.clamp_min(1e-30).log() - log_q_KCV)).sum(-1) * counts_KC
        kl_scale_KC1 = objective.kl_weight * row_scale_KC1 * counts_KC[..., None]
        grad_KCV += (q_KCV - teacher_KCV) * kl_scale_KC1
        loss_KC = loss_KC + objective.kl_weight * kl_KC
    sums = Statistics(counts_KC, inside_KC, ce_KC, kl_KC, top1_KC, top5_KC, top10_KC, offered_KC, chain_KC)
    return (loss_KC * scale_K[:, None]).sum(), grad_KCV, torch.stack([each.sum(1).float() for each in sums])


def _add_weight_gradient(grad_weight: Tensor, grad_logits_KCV: Tensor, hidden_KCD: Tensor) -> None:
    if grad_weight.ndim == 3:
        grad_weight += grad_logits_KCV.mT @ hidden_KCD
    else:
        grad_weight += grad_logits_KCV.flatten(0, 1).T @ hidden_KCD.flatten(0, 1)
