"""Which positions training reads: the drawing of heads/reads.py, its table, and stores that serve smaller heads."""

from itertools import pairwise

import pytest
import torch

from heads import HEADS
from heads.objectives import Objective
from heads.reads import ANCHORS, DOCUMENT, FUTURE, holds, positions_read, training_reads

CE, KL = Objective(), Objective(kl_weight=1.0)
FINAL, BLOCK = "final_norm", "post_block[1]"


def reads_of(target, kind, **settings):
    family = HEADS[kind]
    config = family.resolve(family.config_class(**settings), target)
    return training_reads(family(config, target.hidden_size, target.vocab_size, torch.arange(9)))


def test_the_drawing():
    ids_T, supervised_T = torch.arange(8), torch.tensor([0, 0, 1, 1, 1, 1, 0, 0]).bool()

    def places(*kinds: str) -> list[int]:
        return positions_read(frozenset(kinds), ids_T, supervised_T, depth=2).nonzero().squeeze(1).tolist()

    assert places(ANCHORS) == [1, 2, 3]
    assert places(FUTURE) == [2, 3, 4]
    assert places(ANCHORS, FUTURE) == [1, 2, 3, 4]
    assert places(DOCUMENT) == [*range(8)]
    assert places() == []


@pytest.mark.parametrize(
    ("kind", "settings", "final", "block"),
    [
        ("medusa", {"objective": CE}, {ANCHORS}, None),
        ("medusa", {"objective": KL}, {ANCHORS, FUTURE}, None),
        ("medusa", {"objective": CE, "init": "regression"}, {ANCHORS, FUTURE}, None),
        ("hydra", {"objective": CE}, {ANCHORS}, None),
        ("hydra", {"objective": KL, "prefix_attention": True}, {DOCUMENT}, None),
        ("eagle", {}, {DOCUMENT}, None),
        ("eagle3", {"objective": CE}, set(), {DOCUMENT}),
        ("eagle3", {"objective": KL}, {FUTURE}, {DOCUMENT}),
        ("eagle3", {"objective": CE, "init": "regression"}, {ANCHORS, FUTURE}, {DOCUMENT}),
    ],
)
def test_the_table(tiny_target, kind, settings, final, block):
    reads = reads_of(tiny_target(), kind, **settings)
    assert reads[FINAL] == final
    assert reads.get(BLOCK) == block


def test_fewer_heads_read_what_more_heads_read():
    ids_T, supervised_T = torch.arange(40), torch.rand(40, generator=torch.Generator().manual_seed(0)) < 0.8
    read = [positions_read(frozenset({FUTURE}), ids_T, supervised_T, depth) for depth in range(1, 7)]
    for fewer, more in pairwise(read):
        assert not (fewer & ~more).any()


def test_what_is_held():
    assert holds(frozenset({DOCUMENT}), frozenset({ANCHORS, FUTURE}))
    assert holds(frozenset({ANCHORS, FUTURE}), frozenset({ANCHORS}))
    assert not holds(frozenset({ANCHORS}), frozenset({ANCHORS, FUTURE}))
    assert not holds(frozenset({ANCHORS, FUTURE}), frozenset({DOCUMENT}))
