"""The tree that an evaluation uses: within what the heads can draft and what the search measures."""

import json

import pytest
import torch

from eval.config import from_hydra
from eval.drafting import build_drafter
from eval.level_drafter import DynamicTree
from eval.tree_choice import TreeConfig, measure_and_choose
from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.eagle_layer import LayerShape
from tests.heads.test_eagle import make
from tests.heads.test_hydra import make_heads

WINDOW = LayerShape(sliding_window=3)


@pytest.mark.parametrize(
    ("config", "depth"),
    [(EagleConfig(), 5), (Eagle3Config(), 5), (Eagle3Config(layer=WINDOW), 3), (EagleConfig(layer=WINDOW), 3)],
    ids=["eagle", "eagle3", "eagle3 with a window", "eagle with a window"],
)
def test_the_largest_tree_is_as_deep_as_eagle_heads_draft(config, depth, tiny_target):
    heads = make(tiny_target(), config)
    largest = TreeConfig(depth=5).largest(heads)
    assert largest.depth == depth
    assert build_drafter(heads, largest).depth == depth, "a tree that is offered is not refused"


def test_the_largest_tree_has_one_level_for_each_hydra_head(tiny_target):
    heads = make_heads(tiny_target(), num_heads=2, draft_ids=torch.arange(3))
    assert TreeConfig(depth=5, expand=4).largest(heads) == DynamicTree(nodes=15, depth=2, width=3)


def test_the_search_goes_up_to_max_nodes_for_heads_with_a_window(tiny_target, tmp_path):
    target, prompts = tiny_target(), tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "p", "prompt": "say one"}) + "\n")
    config = TreeConfig(nodes=6, max_nodes=6, depth=5, expand=2, calibration=[str(prompts)], calibration_tokens=12)
    tree, costs = measure_and_choose(config, target, make(target, Eagle3Config(layer=WINDOW)))
    assert [name for name in costs if name.startswith("verify")] == ["verify 2", "verify 4", "verify 7"]
    assert isinstance(tree, DynamicTree)
    assert tree.nodes == 6
    assert tree.depth <= 3


def test_more_nodes_than_are_measured_are_refused(tiny_target):
    target = tiny_target()
    heads = make(target, Eagle3Config())
    with pytest.raises(ValueError, match=r"tree.nodes=16 must be at most tree.max_nodes=15, .* raise tree.max_nodes"):
        measure_and_choose(TreeConfig(nodes=16, calibration=["p.jsonl"]), target, heads)
    assert TreeConfig(source="dynamic", nodes=16, expand=4).largest(heads) == DynamicTree(nodes=16, depth=5, width=4)


@pytest.mark.parametrize("name", ["nodes", "max_nodes", "width", "depth", "expand"])
def test_sizes_start_at_one(name):
    with pytest.raises(ValueError, match=f"tree.{name}=0 must be at least 1"):
        from_hydra(TreeConfig, {name: 0})
