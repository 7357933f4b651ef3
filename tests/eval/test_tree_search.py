import itertools
import math

import pytest
import torch
from torch import Tensor

from eval.tree import Node, Tree
from eval.tree_search import best_tree, expected_tokens, search_tree


def random_accuracy(heads: int, ranks: int, seed: int, *, decreasing: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    accuracy_KW = torch.rand(heads, ranks + 1, dtype=torch.float64, generator=generator)
    accuracy_KW = (accuracy_KW / accuracy_KW.sum(-1, keepdim=True))[:, :ranks]
    return accuracy_KW.sort(-1, descending=True).values if decreasing else accuracy_KW


def best_by_enumeration(accuracy_KW: Tensor, num_nodes: int, max_depth: int) -> float:
    rows = accuracy_KW.tolist()
    every_node: list[Node] = [
        node for depth in range(1, max_depth + 1) for node in itertools.product(range(len(rows[0])), repeat=depth)
    ]
    return max(
        1 + sum(math.prod(rows[k][rank] for k, rank in enumerate(node)) for node in nodes)
        for nodes in itertools.combinations(every_node, num_nodes)
        if all(len(node) == 1 or node[:-1] in nodes for node in nodes)
    )


@pytest.mark.parametrize("decreasing", [True, False])
@pytest.mark.parametrize(
    ("heads", "ranks", "num_nodes", "max_depth"), [(3, 2, 5, 3), (3, 2, 4, 2), (2, 3, 5, 2), (2, 3, 3, 1)]
)
def test_greedy_growth_finds_the_optimum_of_exhaustive_enumeration(
    heads: int, ranks: int, num_nodes: int, max_depth: int, decreasing: bool
):
    for seed in range(5):
        accuracy_KW = random_accuracy(heads, ranks, seed, decreasing=decreasing)
        tree = search_tree(accuracy_KW, num_nodes, max_depth)

        assert tree.size == num_nodes + 1
        assert tree.depth <= max_depth
        optimum = best_by_enumeration(accuracy_KW, num_nodes, max_depth)
        assert expected_tokens(tree, accuracy_KW) == pytest.approx(optimum, abs=1e-12)


def test_ties_go_to_the_shallower_node_then_to_the_earlier_entry():
    accuracy_KW = torch.tensor([[0.5, 0.25], [0.5, 0.5]])  # [1], [0,0] and [0,1] are all worth 0.25

    assert search_tree(accuracy_KW, 2).choices() == [[0], [1]]
    assert search_tree(accuracy_KW, 3).choices() == [[0], [1], [0, 0]]
    assert search_tree(accuracy_KW, 4).choices() == [[0], [1], [0, 0], [0, 1]]


def test_growth_stops_at_worthless_nodes_and_at_the_end_of_the_table():
    assert search_tree(torch.tensor([[0.5, 0.0], [0.0, 0.0]]), 10) == Tree.chain(1)
    assert search_tree(torch.zeros(2, 3), 10) == Tree.chain(0)
    assert search_tree(torch.tensor([[0.5, 0.1]]), 10).choices() == [[0], [1]]
    assert search_tree(torch.tensor([[0.5, 0.1]]), 0) == Tree.chain(0)


def test_a_rank_may_be_taken_without_the_ranks_before_it():
    assert search_tree(torch.tensor([[0.1, 0.8], [0.1, 0.8]]), 2).choices() == [[1], [1, 1]]


def test_expected_tokens_of_a_chain_is_the_geometric_sum():
    accuracy_KW = torch.full((4, 1), 0.7, dtype=torch.float64)

    assert expected_tokens(Tree.chain(4), accuracy_KW) == pytest.approx((1 - 0.7**5) / 0.3)
    assert expected_tokens(Tree.chain(0), accuracy_KW) == 1.0
    with pytest.raises(ValueError, match=r"tree node \[0,0,0,0,0\] is at depth 5 but the heads draft 4"):
        expected_tokens(Tree.chain(5), accuracy_KW)


def test_best_tree_weighs_tokens_against_time():
    accuracy_KW = torch.tensor([[0.6, 0.2], [0.5, 0.2]], dtype=torch.float64)
    # sizes 1, 2, 3, 6 are expected to yield 1.6, 1.9, 2.1, 2.36 tokens
    flat, steep = dict.fromkeys(range(1, 10), 1.0), {n: 1 + 0.5 * (n - 1) for n in range(1, 10)}

    tree, speedup = best_tree(accuracy_KW, flat, draft_cost=0.1, sizes=[1, 2, 6, 3])
    assert (tree.size, speedup) == (7, pytest.approx(2.36 / 1.1))
    tree, speedup = best_tree(accuracy_KW, steep, draft_cost=0.1, sizes=[1, 2, 6, 3])
    assert (tree, speedup) == (Tree.chain(1), pytest.approx(1.6 / 1.6))
    tree, speedup = best_tree(accuracy_KW, flat, draft_cost=0.0, sizes=[1, 2, 3], max_depth=1)
    assert (tree.choices(), speedup) == ([[0], [1]], pytest.approx(1.8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": []}, "sizes is empty"),
        ({"sizes": [1, 4]}, r"cost of 5 tokens \(the root \+ 4\) must be given and > 0"),
        ({"cost": {2: 0.0}}, "cost of 2 tokens"),
        ({"draft_cost": -0.1}, "draft_cost=-0.1 must be >= 0"),
    ],
)
def test_best_tree_names_the_number_that_is_wrong(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        best_tree(torch.tensor([[0.5]]), **{"cost": {2: 1.1}, "draft_cost": 0.0, "sizes": [1], **arguments})


@pytest.mark.parametrize(
    ("accuracy_KW", "num_nodes", "max_depth", "message"),
    [
        (torch.tensor([0.5]), 1, None, "must be a table"),
        (torch.tensor([[0.5], [-0.1]]), 1, None, r"accuracy\[1\].* must hold probabilities"),
        (torch.tensor([[math.nan]]), 1, None, r"accuracy\[0\].* must hold probabilities"),
        (
            torch.tensor([[0.6, 0.8]]),
            1,
            None,
            "sums to 1.4000, must be <= 1; give the rate of each exact rank",
        ),
        (torch.tensor([[0.5]]), -1, None, "num_nodes=-1 must be >= 0"),
        (torch.tensor([[0.5]]), 1, 2, r"max_depth=2 must be in \[0, 1\]"),
    ],
)
def test_search_names_the_number_that_is_wrong(
    accuracy_KW: Tensor, num_nodes: int, max_depth: int | None, message: str
):
    with pytest.raises(ValueError, match=message):
        search_tree(accuracy_KW, num_nodes, max_depth)
