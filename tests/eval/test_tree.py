import re

import pytest
import torch

import eval.tree
from eval.published_trees import PUBLISHED_TREES, published_tree
from eval.tree import Tree

DRAWN = [[0], [1], [0, 0], [0, 1], [1, 0]]


def test_tree_is_the_one_drawn_in_the_module():
    tree = Tree.from_choices([[1, 0], [0, 1], [1], [0], [0, 0]])
    drawn_mask = re.findall(r"([0-5])((?: [x.]){6})$", eval.tree.__doc__ or "", re.MULTILINE)

    assert tree.choices() == DRAWN
    assert [int(node) for node, _ in drawn_mask] == list(range(6))
    assert tree.ancestors_NN.tolist() == [[mark == "x" for mark in row.split()] for _, row in drawn_mask]
    assert tree.parents_N.tolist() == [-1, 0, 0, 1, 1, 2]
    assert tree.depths_N.tolist() == [0, 1, 1, 2, 2, 2]
    assert tree.ranks_N.tolist() == [-1, 0, 1, 0, 1, 0]
    assert tree.paths_NP.tolist() == [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3], [0, 1, 4], [0, 2, 5]]
    assert tree.children == ((1, 2), (3, 4), (5,), (), (), ())
    assert (tree.size, tree.depth, tree.width) == (6, 2, 2)


@pytest.mark.parametrize("choices", [[], [[0]], [[7]], [[3], [1], [3, 5], [3, 5, 0]], DRAWN])
def test_choices_round_trip_whatever_ranks_are_left_out(choices: list[list[int]]):
    tree = Tree.from_choices(choices)

    assert sorted(tree.choices()) == sorted(choices)
    assert Tree.from_choices(tree.choices()) == tree
    assert tree.width == max([rank + 1 for choice in choices for rank in choice], default=0)


def test_chain_sees_everything_before_it():
    tree = Tree.chain(3)

    assert tree == Tree.from_choices([[0], [0, 0], [0, 0, 0]])
    assert tree.ancestors_NN.equal(torch.ones(4, 4).tril().bool())
    assert Tree.chain(0) == Tree.from_choices([])


@pytest.mark.parametrize("max_depth", [0, 1, 2, 3])
def test_pruned_tree_is_built_from_the_shallow_choices_and_keeps_the_ids(max_depth: int):
    tree = Tree.from_choices(DRAWN)
    pruned = tree.pruned(max_depth)
    rebuilt = Tree.from_choices([choice for choice in DRAWN if len(choice) <= max_depth])

    assert pruned == rebuilt
    assert pruned.nodes == tree.nodes[: pruned.size]
    for name in ("parents_N", "depths_N", "ranks_N", "ancestors_NN", "paths_NP"):
        assert getattr(pruned, name).equal(getattr(rebuilt, name))


def test_to_moves_every_tensor():
    moved = Tree.from_choices(DRAWN).to("meta")

    assert {value.device.type for value in vars(moved).values() if isinstance(value, torch.Tensor)} == {"meta"}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [1, 0]], r"tree node \[1,0\] has no parent; add \[1\]"),
        ([[0], [0, 0, 0]], r"tree node \[0,0,0\] has no parent; add \[0,0\]"),
        ([[0], [1], [0]], r"tree node \[0\] is listed twice"),
        ([[0], [0, -1]], r"tree node \[0,-1\] has a rank that is not an integer >= 0"),
        ([[0], [0.5]], r"tree node \[0.5\] has a rank that is not an integer >= 0"),
        ([[], [0]], r"tree node \[\] is the root"),
    ],
)
def test_a_bad_choice_is_named(choices: list[list[int]], message: str):
    with pytest.raises(ValueError, match=message):
        Tree.from_choices(choices)


def test_check_names_the_node_that_the_heads_cannot_fill():
    tree = published_tree("mc_sim_7b_63")

    tree.check(num_heads=4, top_k=10)
    with pytest.raises(
        ValueError,
        match=r"tree node \[0,0,0,0\] is at depth 4 but the heads draft 3 tokens; "
        r"use a tree of depth <= 3 or train more heads",
    ):
        tree.check(num_heads=3, top_k=10)
    with pytest.raises(ValueError, match=r"tree node \[9\] takes rank 9 but the heads offer 9 candidates"):
        tree.check(num_heads=4, top_k=9)


@pytest.mark.parametrize(
    ("name", "by_depth", "leaves"),
    [
        ("mc_sim_7b_63", [10, 28, 23, 2], 42),
        ("vicuna_7b_stage1", [10, 32, 20, 1], 44),
        ("vicuna_7b_stage1_ablation", [10, 21, 25, 7], 42),
        ("vicuna_7b_stage2", [10, 23, 23, 7], 42),
        ("vicuna_13b_stage1", [10, 29, 23, 1], 44),
        ("vicuna_13b_stage2", [10, 19, 25, 9], 42),
        ("vicuna_33b_stage1", [10, 34, 19], 46),
        ("vicuna_33b_stage2", [10, 24, 24, 5], 43),
        ("zephyr_stage2", [10, 27, 23, 3], 44),
    ],
)
def test_published_trees_have_the_published_shape(name: str, by_depth: list[int], leaves: int):
    tree = published_tree(name)

    assert tree.depths_N.bincount().tolist() == [1, *by_depth]
    assert sum(not children for children in tree.children) == leaves
    assert tree.width == 10
    for node in tree.nodes[1:]:
        assert node[-1] == 0 or (*node[:-1], node[-1] - 1) in tree.nodes


def test_an_unknown_published_tree_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"tree 'mc_sim_7b' is not a published tree.*mc_sim_7b_63.*zephyr_stage2"):
        published_tree("mc_sim_7b")
    assert len(PUBLISHED_TREES) == 9
