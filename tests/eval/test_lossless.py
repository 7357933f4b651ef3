"""Losslessness by exact enumeration, and known wrong verifiers that must fail the same check.

Every outcome of the draws and coins of one cycle is enumerated with its probability in fp64. The law of the
emitted tokens, completed with the target's own draws to one length, must equal the target's law of that many
tokens.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from eval.accept import Accepted
from eval.sampling import Coin
from eval.tree import Tree
from tests.eval.enumeration import (
    RELATIONS,
    Drafted,
    Law,
    Model,
    Siblings,
    Tokens,
    Verifier,
    assert_lossless,
    assert_only_the_first_is_lossless,
    at_temperatures,
    draft,
    emitted_law,
    independent,
    lossless,
    pair,
    top_ranks,
    without_replacement,
)
from tests.eval.wrong_verifiers import at_leaves, child_by_child, row_by_row, with_one_uniform


def law_of(tree: Tree, drafter: Model, siblings: Siblings, verify: Verifier) -> Law:
    return emitted_law(partial(draft, tree, drafter, siblings), verify)


def random_tree(seed: int, num_nodes: int) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    nodes: list[Tokens] = [()]
    while len(nodes) <= num_nodes:
        parent, rank = (int(torch.randint(bound, (), generator=generator)) for bound in (len(nodes), 3))
        node = (*nodes[parent], rank)
        if len(node) <= 3 and node not in nodes:
            nodes.append(node)
    return Tree.from_choices(nodes[1:])


CASES = [  # (vocabulary, tree)
    (2, Tree.chain(0)),
    (5, Tree.chain(1)),
    (3, Tree.chain(3)),
    (5, Tree.from_choices([[0], [1]])),
    (4, Tree.from_choices([[0], [1], [2]])),
    (3, Tree.from_choices([[0], [1], [0, 0], [1, 0]])),
    (3, Tree.from_choices([[1], [4], [4, 2], [4, 2, 1]])),  # of 3 tokens, ranks 1 and 4 are the same
    (2, Tree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0]])),
    *[(3, random_tree(seed, num_nodes=4)) for seed in range(2)],
]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("siblings", [top_ranks, independent, without_replacement])
def test_emitted_tokens_have_the_law_of_the_target(siblings: Siblings, relation: str):
    for seed, (vocabulary, tree) in enumerate(CASES):
        target, drafter = pair(relation, vocabulary, seed)
        law = law_of(tree, drafter, siblings, lossless(target, drafter, siblings))

        assert_lossless(law, target, tree.depth + 1)


SIBLINGS = Tree.from_choices([[0], [1]])
BUSHY = Tree.from_choices([[0], [1], [0, 0], [1, 0]])


def assert_only_the_right_one_is_lossless(
    tree: Tree,
    target: Model,
    drafter: Model,
    siblings: Siblings,
    wrong: Verifier,
    wrong_siblings: Siblings | None = None,
) -> None:
    rightly = law_of(tree, drafter, siblings, lossless(target, drafter, siblings))
    wrongly = law_of(tree, drafter, wrong_siblings or siblings, wrong)

    assert_only_the_first_is_lossless(rightly, wrongly, target, tree.depth + 1)


@pytest.mark.parametrize("tree", [Tree.chain(1), Tree.chain(2), SIBLINGS, BUSHY])
@pytest.mark.parametrize("believed", [independent, without_replacement])
def test_top_ranks_tested_as_if_they_were_drawn(tree: Tree, believed: Siblings):
    target, drafter = pair("positive", 3, seed=0)

    wrong = lossless(target, drafter, believed)
    assert_only_the_right_one_is_lossless(tree, target, drafter, top_ranks, wrong)


@pytest.mark.parametrize("siblings", [top_ranks, independent, without_replacement])
def test_bonus_token_from_unprocessed_logits(siblings: Siblings):
    target, unprocessed, drafter = *at_temperatures(0.5, 1.0), pair("positive", 3, seed=0)[1]

    def wrong(drafted: Drafted, coin: Coin) -> Accepted:
        return lossless(at_leaves(target, unprocessed, drafted), drafter, siblings)(drafted, coin)

    assert_only_the_right_one_is_lossless(BUSHY, target, drafter, siblings, wrong)


@pytest.mark.parametrize("siblings", [independent, without_replacement])
def test_temperature_applied_to_one_side_only(siblings: Siblings):
    target, raw_target = at_temperatures(0.5, 1.0)
    drafter, raw_drafter = at_temperatures(0.7, 1.4)

    for wrong in (lossless(raw_target, drafter, siblings), lossless(target, raw_drafter, siblings)):
        assert_only_the_right_one_is_lossless(BUSHY, target, drafter, siblings, wrong)


def likeliest_first(law_V: Tensor, ranks: list[int], coin: Coin) -> list[int]:
    return sorted(without_replacement(law_V, ranks, coin), key=lambda token: -law_V[token])


@pytest.mark.parametrize("tree", [SIBLINGS, BUSHY])
def test_children_tested_in_another_order_than_drawn(tree: Tree):
    target, drafter = pair("positive", 3, seed=0)

    wrong = lossless(target, drafter, without_replacement)
    assert_only_the_right_one_is_lossless(
        tree, target, drafter, without_replacement, wrong, wrong_siblings=likeliest_first
    )


@pytest.mark.parametrize("siblings", [independent, without_replacement])
def test_one_uniform_number_for_all_siblings(siblings: Siblings):
    # Needs a residual over two tokens or more: the only token of a residual passes whatever the number is.
    target, drafter = pair("positive", 4, seed=5)

    wrong = with_one_uniform(lossless(target, drafter, siblings))
    assert_only_the_right_one_is_lossless(SIBLINGS, target, drafter, siblings, wrong)


@pytest.mark.parametrize("tree", [SIBLINGS, BUSHY])
def test_independent_draws_for_every_leaf_row(tree: Tree):
    target, drafter = pair("positive", 3, seed=0)

    assert_only_the_right_one_is_lossless(tree, target, drafter, top_ranks, row_by_row(target))


@pytest.mark.parametrize("tree", [SIBLINGS, BUSHY])
@pytest.mark.parametrize("mistake", ["no renormalising", "the rejected token stays"])
def test_what_a_rejection_leaves(tree: Tree, mistake: str):
    target, drafter = pair("positive", 3, seed=0)

    rightly = law_of(tree, drafter, top_ranks, child_by_child(target))
    wrongly = law_of(tree, drafter, top_ranks, child_by_child(target, mistake))
    assert_only_the_first_is_lossless(rightly, wrongly, target, tree.depth + 1)
