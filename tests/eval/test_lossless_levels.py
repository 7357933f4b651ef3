"""Losslessness of the level drafters (EAGLE, Hydra) by exact enumeration: the real drafters over a table of laws.

As in `test_lossless.py`, but the drafts come from `StaticDrafter` and `DynamicDrafter`, whose law behind each node
depends on the node's path; their draws are enumerated as well.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import eval.level_drafter as level_drafter
from eval.accept import Accepted, Proposal, accept_sampling
from eval.block_verification import accept_block
from eval.level_drafter import DynamicDrafter, DynamicTree, StaticDrafter
from eval.sampling import Coin, SamplingConfig
from eval.tree import Tree
from tests.eval.enumeration import (
    RELATIONS,
    Drafted,
    Model,
    Tokens,
    Verifier,
    assert_lossless,
    assert_only_the_first_is_lossless,
    at_temperatures,
    emitted_law,
    outcomes,
    pair,
)
from tests.eval.table_models import TableStepper, after, drafted
from tests.eval.test_block_verification import MISTAKES, SKEWED, naive
from tests.eval.wrong_verifiers import at_leaves, child_by_child, row_by_row, with_one_uniform

ROOT: Tokens = (0,)  # the certain token
AS_IT_IS = SamplingConfig(temperature=1.0)
Drafting = Callable[[Coin], Drafted]

DYNAMIC = [  # (vocabulary, size)
    (2, DynamicTree(nodes=6, depth=3, width=2)),
    (3, DynamicTree(nodes=4, depth=3, width=2)),
    (4, DynamicTree(nodes=3, depth=2, width=3)),
    (5, DynamicTree(nodes=2, depth=3, width=1)),
]
BUSHY = Tree.from_choices([[0], [1], [0, 0], [1, 0]])
STATIC = [  # (vocabulary, tree)
    (5, Tree.chain(1)),
    (2, Tree.chain(3)),
    (4, Tree.from_choices([[0], [1], [2]])),
    (3, Tree.from_choices([[0], [2], [2, 1]])),
    (3, BUSHY),
    (2, Tree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0]])),
]
CHAINS = [(2, 3), (3, 2), (5, 1)]  # (vocabulary, drafts)


def proposals(drafter: StaticDrafter | DynamicDrafter) -> Drafting:
    """The draft of a fresh sequence behind the root, by the draws of a coin."""

    def propose(coin: Coin) -> Drafted:
        if isinstance(drafter, StaticDrafter):
            drafter.coin = coin
        drafter.reset(torch.tensor([], dtype=torch.long), {})
        return drafted(drafter.propose(torch.tensor(ROOT[0]), drafter.depth))

    return propose


def dynamic(model: Model, vocabulary: int, size: DynamicTree) -> Drafting:
    return proposals(DynamicDrafter(TableStepper(model, vocabulary), size))


def likeliest(model: Model, vocabulary: int, tree: Tree) -> Drafting:
    return proposals(StaticDrafter(TableStepper(model, vocabulary), tree))


def sampled(model: Model, vocabulary: int, tree: Tree) -> Drafting:
    return proposals(StaticDrafter(TableStepper(model, vocabulary), tree, AS_IT_IS))


def by_sampling(target: Model) -> Verifier:
    def verify(drafted: Drafted, coin: Coin) -> Accepted:
        return accept_sampling(drafted.tree, drafted.tokens_N, drafted.rows(target), drafted.proposal, coin)

    return verify


def by_block(target: Model) -> Verifier:
    def verify(drafted: Drafted, coin: Coin) -> Accepted:
        assert drafted.proposal is not None
        return accept_block(drafted.tree, drafted.tokens_N, drafted.rows(target), drafted.proposal, coin)

    return verify


def models(relation: str, vocabulary: int, seed: int) -> tuple[Model, Model]:
    """(target after the root, drafter of whole sequences)"""
    target, drafter = pair(relation, vocabulary, seed)
    return after(target, ROOT), drafter


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("drafting", "cases"), [(dynamic, DYNAMIC), (likeliest, STATIC), (sampled, STATIC)])
def test_emitted_tokens_have_the_law_of_the_target(drafting, cases, relation: str):
    longest = 0
    for seed, (vocabulary, shape) in enumerate(cases):
        target, drafter = models(relation, vocabulary, seed)
        law = emitted_law(drafting(drafter, vocabulary, shape), by_sampling(target))

        assert_lossless(law, target, shape.depth + 1)
        longest = max(longest, *map(len, law))
    assert longest > 2 or relation == "disjoint", "drafts that never stand are lossless too"


@pytest.mark.parametrize("relation", RELATIONS)
def test_block_verification_of_drafted_chains(relation: str):
    longest = 0
    for seed, (vocabulary, drafts) in enumerate(CHAINS):
        target, drafter = models(relation, vocabulary, seed)
        law = emitted_law(sampled(drafter, vocabulary, Tree.chain(drafts)), by_block(target))

        assert_lossless(law, target, drafts + 1)
        longest = max(longest, *map(len, law))
    assert longest > 2 or relation == "disjoint", "drafts that never stand are lossless too"


def test_dynamic_trees_differ_in_shape_and_order():
    """Else the enumeration would not see what follows from the drafter's probabilities."""
    found = [drafts for seed in range(8) for _, drafts in outcomes(dynamic(pair("positive", 3, seed)[1], *DYNAMIC[1]))]

    assert len(found) == 8, "nothing is drawn"
    assert len({tuple(drafts.tree.parents_N.tolist()) for drafts in found}) > 2
    assert len({tuple(drafts.tokens_N.tolist()) for drafts in found}) > 4


# Wrong verifiers of drafts that the context determines.


def as_if_drawn(target: Model, drafter: Model, replacement: bool) -> Verifier:
    def verify(drafted: Drafted, coin: Coin) -> Accepted:
        proposal = Proposal(drafted.rows(after(drafter, ROOT)), replacement)
        return by_sampling(target)(replace(drafted, proposal=proposal), coin)

    return verify


@pytest.mark.parametrize(("drafting", "shape"), [(dynamic, DynamicTree(3, 2, 2)), (likeliest, BUSHY)])
@pytest.mark.parametrize(
    "mistake",
    [
        "as if drawn",
        "as if drawn without replacement",
        "a draw for every row",
        "no renormalising",
        "the rejected token stays",
    ],
)
def test_wrong_verifiers_of_likeliest_drafts(mistake: str, drafting, shape):
    target, drafter = models("positive", 3, seed=0)
    draft, wrong = (
        drafting(drafter, 3, shape),
        {
            "as if drawn": as_if_drawn(target, drafter, replacement=True),
            "as if drawn without replacement": as_if_drawn(target, drafter, replacement=False),
            "a draw for every row": row_by_row(target),
            "no renormalising": child_by_child(target, mistake),
            "the rejected token stays": child_by_child(target, mistake),
        }[mistake],
    )

    rightly, wrongly = emitted_law(draft, by_sampling(target)), emitted_law(draft, wrong)
    assert_only_the_first_is_lossless(rightly, wrongly, target, shape.depth + 1)


@pytest.mark.parametrize(("drafting", "shape"), [(dynamic, DynamicTree(2, 2, 1)), (likeliest, Tree.chain(2))])
def test_the_better_of_two_verifications(drafting, shape):
    """A choice that looks at the coins of acceptance."""
    target, drafter = models("positive", 2, seed=0)
    draft = drafting(drafter, 2, shape)

    def wrong(drafted: Drafted, coin: Coin) -> Accepted:
        tries = [by_sampling(target)(drafted, coin) for _ in range(2)]
        return max(tries, key=lambda accepted: int((accepted.path_D >= 0).sum()))

    rightly, wrongly = emitted_law(draft, by_sampling(target)), emitted_law(draft, wrong)
    assert_only_the_first_is_lossless(rightly, wrongly, target, shape.depth + 1)


# Wrong verifiers and drafters of drafts that are drawn.


def with_laws(target: Model, mistaken: Callable[[Drafted], Tensor], *, replacement: bool = False) -> Verifier:
    """The right verifier, told other laws than those of the draws."""

    def verify(drafted: Drafted, coin: Coin) -> Accepted:
        proposal = Proposal(mistaken(drafted), replacement)
        return by_sampling(target)(replace(drafted, proposal=proposal), coin)

    return verify


def drawn_laws(drafted: Drafted) -> Tensor:
    assert drafted.proposal is not None
    return drafted.proposal.laws_NV


def laws_of_the_level(drafted: Drafted) -> Tensor:
    """One law for each depth, as of heads that do not see the path: that of the level's first node."""
    first_N = (drafted.tree.depths_N[:, None] == drafted.tree.depths_N).int().argmax(-1)
    return drawn_laws(drafted)[first_N]


@pytest.mark.parametrize("mistake", ["drawn with replacement", "laws of the level", "laws one node off", "one uniform"])
def test_wrong_verifiers_of_drawn_drafts(mistake: str):
    target, drafter = models("positive", 3, seed=2)
    draft, wrong = (
        sampled(drafter, 3, BUSHY),
        {
            "drawn with replacement": with_laws(target, drawn_laws, replacement=True),
            "laws of the level": with_laws(target, laws_of_the_level),
            "laws one node off": with_laws(target, lambda drafted: drawn_laws(drafted).roll(-1, 0)),
            "one uniform": with_one_uniform(by_sampling(target)),
        }[mistake],
    )

    rightly, wrongly = emitted_law(draft, by_sampling(target)), emitted_law(draft, wrong)
    assert_only_the_first_is_lossless(rightly, wrongly, target, BUSHY.depth + 1)


def test_temperature_applied_to_one_side_only():
    target, raw_target = (after(model, ROOT) for model in at_temperatures(0.5, 1.0))
    drafter, raw_drafter = at_temperatures(0.7, 1.4)
    draft = sampled(drafter, 3, BUSHY)

    rightly = emitted_law(draft, by_sampling(target))
    for wrong in (by_sampling(raw_target), with_laws(target, lambda drafted: drafted.rows(after(raw_drafter, ROOT)))):
        assert_only_the_first_is_lossless(rightly, emitted_law(draft, wrong), target, BUSHY.depth + 1)


@pytest.mark.parametrize(("drafting", "shape"), [(dynamic, DynamicTree(3, 2, 2)), (likeliest, BUSHY), (sampled, BUSHY)])
def test_bonus_token_from_unprocessed_logits(drafting, shape):
    target, unprocessed = (after(model, ROOT) for model in at_temperatures(0.5, 1.0))
    draft = drafting(pair("positive", 3, seed=0)[1], 3, shape)

    def wrong(drafted: Drafted, coin: Coin) -> Accepted:
        return by_sampling(at_leaves(target, unprocessed, drafted))(drafted, coin)

    rightly, wrongly = emitted_law(draft, by_sampling(target)), emitted_law(draft, wrong)
    assert_only_the_first_is_lossless(rightly, wrongly, target, shape.depth + 1)


@pytest.mark.parametrize("verify", [by_sampling, by_block])
def test_drafts_from_a_part_of_the_vocabulary(verify):
    tree = Tree.chain(2) if verify is by_block else BUSHY
    target, drafter = after(pair("positive", 4, seed=1)[0], ROOT), pair("positive", 2, seed=2)[1]
    draft = proposals(StaticDrafter(TableStepper(drafter, 4, draft_ids=[1, 3]), tree, AS_IT_IS))

    def wrong(drafted: Drafted, coin: Coin) -> Accepted:
        """The laws in the order of the draft vocabulary."""
        laws_NV = drawn_laws(drafted)[:, [1, 3, 0, 2]]
        return verify(target)(replace(drafted, proposal=Proposal(laws_NV, replacement=False)), coin)

    rightly, wrongly = emitted_law(draft, verify(target)), emitted_law(draft, wrong)
    assert_only_the_first_is_lossless(rightly, wrongly, target, tree.depth + 1)


def test_siblings_reordered_after_they_were_drawn(monkeypatch: pytest.MonkeyPatch):
    target, drafter = models("positive", 3, seed=0)
    rightly = emitted_law(sampled(drafter, 3, BUSHY), by_sampling(target))
    drawn = StaticDrafter._drawn

    def likeliest_first(self: StaticDrafter, law_PV: Tensor, siblings: int) -> Tensor:
        drawn_PW = drawn(self, law_PV, siblings)
        return drawn_PW.gather(1, law_PV.gather(1, drawn_PW).argsort(descending=True, stable=True))

    monkeypatch.setattr(StaticDrafter, "_drawn", likeliest_first)
    wrongly = emitted_law(sampled(drafter, 3, BUSHY), by_sampling(target))
    assert_only_the_first_is_lossless(rightly, wrongly, target, BUSHY.depth + 1)


def test_siblings_placed_by_rank_where_they_were_drawn(monkeypatch: pytest.MonkeyPatch):
    """The child of rank 2 is the second to be drawn, not the third."""
    target, drafter = models("positive", 4, seed=4)
    tree = Tree.from_choices([[0], [2]])
    rightly = emitted_law(sampled(drafter, 4, tree), by_sampling(target))

    def by_rank(tree: Tree) -> list[level_drafter._Level]:
        levels = right_levels(tree)
        return [replace(level, orders_N=tree.ranks_N[level.children_N], siblings=level.width) for level in levels]

    right_levels = level_drafter._levels
    monkeypatch.setattr(level_drafter, "_levels", by_rank)
    wrongly = emitted_law(sampled(drafter, 4, tree), by_sampling(target))
    assert_only_the_first_is_lossless(rightly, wrongly, target, tree.depth + 1)


def test_drawn_drafts_pruned_by_what_was_drawn():
    target, drafter = models("positive", 3, seed=0)
    draft = sampled(drafter, 3, Tree.from_choices([[0], [1]]))

    def likelier_one(coin: Coin) -> Drafted:
        both = draft(coin)
        laws_NV = drawn_laws(both)
        keep = torch.tensor([0, 1 + int(laws_NV[0, both.tokens_N[1:]].argmax())])
        prefixes = [both.prefixes[node] for node in keep.tolist()]
        return Drafted(Tree.chain(1), both.tokens_N[keep], prefixes, Proposal(laws_NV[keep], replacement=False))

    rightly, wrongly = (emitted_law(drafting, by_sampling(target)) for drafting in (draft, likelier_one))
    assert_only_the_first_is_lossless(rightly, wrongly, target, 2)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_block_verification_of_drafted_chains(mistake: str):
    target, drafter = SKEWED
    draft = sampled(drafter, 3, Tree.chain(2))

    rightly = emitted_law(draft, by_block(target))
    wrongly = emitted_law(draft, naive(target, drafter, mistake))
    assert_only_the_first_is_lossless(rightly, wrongly, target, 3)
