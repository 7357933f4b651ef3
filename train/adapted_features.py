"""The features of a target that is trained itself, and its loss: how far it is from the original.

Heads' losses reach the adapter through the features that heads read. Their teacher is the adapted target, since that
is what verifies their drafts once it is served; it is a constant to the gradient, or else the target could please the
heads by making its own answers easier to guess. What holds it to its answers is the distance to the original.
"""

import torch
from torch import Tensor

from data.batches import Batch, Step
from heads.alignment import run_lengths
from heads.divergences import Teacher
from heads.objectives import Objective, Statistics, chunked_loss
from heads.target import FINAL_NORM, Target
from train.adapter import Adapter
from train.features import FeatureSource

# Shapes: B rows, T tokens, R = B * T, N rows that predict a supervised token, D hidden, V vocabulary

DISTANCE = Objective(ce_weight=0.0, kl_weight=1.0, decay=1.0)  # KL(original || adapted)


class AdaptedFeatures(FeatureSource):
    """Features with gradients to the adapter, once it moves."""

    def __init__(self, target: Target, taps: tuple[str, ...], dtype: torch.dtype, adapter: Adapter):
        super().__init__(target, tuple(dict.fromkeys((*taps, FINAL_NORM))), dtype)
        self.adapter = adapter
        self.step, self.kl, self.tokens = -1, 0.0, 0.0  # of the latest step, in this process

    def begin(self, fraction: float) -> None:
        self.adapter.let_move(fraction >= self.adapter.config.warmup_share)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        if not self.adapter.moving:
            return super().__call__(batch)
        with self.adapter.dropping():
            return self.run(batch)

    def own_loss(self, batch: Batch, features: dict[str, Tensor], step: Step) -> Tensor:
        if not self.adapter.moving:
            return super().own_loss(batch, features, step)
        with torch.no_grad(), self.adapter.off():
            original_BTD = self.run(batch)[FINAL_NORM]
        rows_N = predicting_rows(batch)
        labels_1N = batch.ids_BT.flatten()[rows_N + 1][None]
        count = (run_lengths(step.whole.supervised_BT, step.whole.documents_BT) >= 1).sum().clamp_min(1)
        scale_1 = (self.adapter.config.lm_weight / count)[None].to(rows_N.device)
        weight_VD = self.target.lm_head.weight
        teacher = Teacher(original_BTD.flatten(0, 1), rows_N[None], weight_VD.to(self.dtype), None)
        states_1ND = features[FINAL_NORM].flatten(0, 1)[rows_N][None]
        loss, statistics_S1 = chunked_loss(states_1ND, weight_VD, labels_1N, labels_1N, scale_1, DISTANCE, teacher)
        self._count(step, Statistics(*statistics_S1))
        return loss

    def metrics(self) -> dict[str, float]:
        return {"train/target_kl": self.kl / self.tokens} if self.tokens else {}

    def _count(self, step: Step, sums: Statistics) -> None:
        if step.number != self.step:
            self.step, self.kl, self.tokens = step.number, 0.0, 0.0
        self.kl += sums.kl.item()
        self.tokens += sums.labels.item()


def predicting_rows(batch: Batch) -> Tensor:
    """Rows [N] of the flattened batch whose next token is supervised: where the target itself speaks."""
    return (run_lengths(batch.supervised_BT, batch.documents_BT).flatten() >= 1).nonzero().squeeze(1)
