"""Which positions of which of the target's features training reads: the one place that says what must be stored.

    document   every position: a layer that attends reads the features of all tokens before the one that drafts
    anchors    where something supervised is drafted (heads/alignment.py)
    future     where the target is asked for its own next tokens or its next feature, 1 .. depth behind an anchor

    heads                             taps of decoder blocks   final_norm
    Medusa, Hydra                     -                        anchors
    Hydra with prefix attention       -                        document
    EAGLE-1                           -                        document
    EAGLE-3                           document                 nothing
    + a loss against the target                                and future (all losses but cross-entropy)
    + a linear forecast to start from                          and anchors, future

For the drawing of heads/alignment.py and two heads:

    t          0  1  2  3  4  5  6  7
    x          U  U  a  b  c  #  U  U
    anchors       ^  ^  ^
    future           ^  ^  ^                 (t = 3 stands in for itself where head 1 has no label)
"""

import torch
from torch import Tensor

from heads.alignment import find_anchors
from heads.eagle3 import Eagle3Heads
from heads.family import DraftHeads
from heads.hydra import HydraHeads
from heads.medusa import MedusaHeads
from heads.target import FINAL_NORM

# Shapes: T tokens of a document

DOCUMENT, ANCHORS, FUTURE = "document", "anchors", "future"
Reads = dict[str, frozenset[str]]  # by tap, in the order of `training_taps`


def training_reads(heads: DraftHeads) -> Reads:
    """The positions of each of `heads.training_taps` that a training step or the warm start reads."""
    final: set[str] = set()
    if isinstance(heads, MedusaHeads) or (isinstance(heads, HydraHeads) and heads.prefix is None):
        final = {ANCHORS}
    elif not isinstance(heads, Eagle3Heads):
        final = {DOCUMENT}
    if heads.forecasts:
        final |= {ANCHORS, FUTURE}
    if heads.config.objective.needs_teacher:
        final |= {FUTURE}
    if DOCUMENT in final:
        final = {DOCUMENT}
    return {tap: frozenset(final if tap == FINAL_NORM else {DOCUMENT}) for tap in heads.training_taps}


def positions_read(kinds: frozenset[str], ids_T: Tensor, supervised_T: Tensor, depth: int) -> Tensor:
    """Whether each position of one document is read: bool [T], for heads that draft `depth` tokens."""
    if DOCUMENT in kinds:
        return torch.ones_like(supervised_T)
    one_document = torch.zeros_like(ids_T)[None]
    anchors = find_anchors(ids_T[None], supervised_T[None], one_document, depth)
    read_T = torch.zeros_like(supervised_T)
    if ANCHORS in kinds:
        read_T[anchors.rows_N] = True
    if FUTURE in kinds:
        read_T[anchors.future_rows().flatten()] = True
    return read_T


def holds(stored: frozenset[str], needed: frozenset[str]) -> bool:
    """Whether features at `stored` positions hold those at `needed` ones, for the same depth or a smaller one."""
    return DOCUMENT in stored or needed <= stored
