"""What makes our training step cheap, one saving at a time: the step without it computes the same loss.

To undo a saving rebinds names for the whole process, so it is for a process of one's own.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import heads.eagle
import heads.hydra
import heads.medusa
import heads.target
import heads.tiling
import train.step_cost
from heads.divergences import Teacher
from heads.eagle import EagleHeads
from train.naive_losses import NaiveEagle, every_position

# Shapes: B rows, T tokens, A most anchors of a row, C anchors of a chunk, K heads, S steps, D hidden

ALL, EAGLE = ("medusa", "hydra", "eagle", "eagle3"), ("eagle", "eagle3")


class Saving(NamedTuple):
    """families: those that it concerns. undo: from here on, this process does without."""

    families: tuple[str, ...]
    undo: Callable[[], None]


def _compute_every_position() -> None:
    heads.medusa.find_anchors = heads.hydra.find_anchors = heads.eagle.find_anchors = every_position


def _work_on_whole_blocks() -> None:
    heads.tiling.TILE_LOGITS = sys.maxsize


def _teach_each_head_apart() -> None:
    def distinct(rows_KC: Tensor) -> tuple[Tensor, Tensor]:
        return rows_KC.flatten(), torch.arange(rows_KC.numel(), device=rows_KC.device).view_as(rows_KC)

    Teacher.distinct = staticmethod(distinct)


def _attend_under_dense_masks() -> None:
    def unroll(self, fused_BTD, ids_BT, documents_BT, positions_BT, places_BA):
        states_SBTD = NaiveEagle.unroll_densely(self, fused_BTD, ids_BT, documents_BT, positions_BT)
        S, _, _, D = states_SBTD.shape
        return states_SBTD.gather(2, places_BA[None, :, :, None].expand(S, -1, -1, D))

    EagleHeads.unroll = unroll


def _mask_the_target() -> None:
    heads.target.one_document_rows = lambda documents_BT: False


def _update_tensor_by_tensor() -> None:
    build_optimizer = train.step_cost.build_optimizer

    def build(*arguments):
        optimizer = build_optimizer(*arguments)
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = False, False
        return optimizer

    train.step_cost.build_optimizer = build


SAVINGS = {
    "supervised positions alone": Saving(ALL, _compute_every_position),
    "logits in tiles": Saving(ALL, _work_on_whole_blocks),
    "one target row for all heads": Saving(EAGLE, _teach_each_head_apart),
    "own keys as single scores": Saving(EAGLE, _attend_under_dense_masks),
    "target without a mask": Saving(ALL, _mask_the_target),
    "fused AdamW": Saving(ALL, _update_tensor_by_tensor),
}
