"""Which draft tree an evaluation uses: the configured one, or the one that pays best on this machine."""

import logging
from dataclasses import dataclass, field, replace

from eval.calibrate import measure_accuracy, measure_dynamic
from eval.cost import SIZES, interpolated, measure_costs, relative_costs
from eval.drafting import build_drafter, deepest_draft
from eval.level_drafter import DynamicDrafter, DynamicTree
from eval.prompts import load_prompts
from eval.published_trees import published_tree
from eval.tree import Tree
from eval.tree_search import best_dynamic, best_tree, search_tree
from heads.family import DraftHeads
from heads.medusa import MedusaHeads
from heads.target import Target

logger = logging.getLogger(__name__)

AUTO, CHOICES, DYNAMIC = "auto", "choices", "dynamic"


@dataclass(frozen=True)
class TreeConfig:
    """The draft tree.

    source: "choices", the name of a published tree, "dynamic" (EAGLE-2, with `nodes`, `depth` and `expand`), or
        "auto": searched on calibration prompts, a static tree for Medusa heads and the sizes of a dynamic one for
        heads that draft level by level.
    """

    source: str = AUTO
    choices: list[list[int]] = field(default_factory=list)
    nodes: int | None = None  # draft nodes; None: as many as pay on this machine
    max_nodes: int = 15
    width: int = 8  # candidates of a Medusa head that the search considers
    depth: int = 5  # levels of a dynamic tree, at most; of those that the search considers
    expand: int = 8  # nodes of each level that a dynamic tree expands, and children of each
    calibration: list[str] = field(default_factory=list)  # sources of calibration prompts, never those evaluated
    calibration_prompts: int = 24
    calibration_tokens: int = 48

    def __post_init__(self):
        if self.source == CHOICES and not self.choices:
            raise ValueError("tree.source=choices needs tree.choices, e.g. tree.choices=[[0],[1],[0,0]]")
        for name in ("nodes", "max_nodes", "width", "depth", "expand"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"tree.{name}={value} must be at least 1")

    def largest(self, heads: DraftHeads) -> Tree | DynamicTree:
        """The largest tree that the search considers, for measuring what drafting costs.

        Raises:
            ValueError: if `nodes` is more than the search of a dynamic tree measures.
        """
        if isinstance(heads, MedusaHeads):
            return Tree.from_choices([[0] * (k + 1) for k in range(heads.depth)])
        if self.source == AUTO and self.nodes is not None and self.nodes > self.max_nodes:
            raise ValueError(
                f"tree.nodes={self.nodes} must be at most tree.max_nodes={self.max_nodes}, up to which the search "
                "measures; raise tree.max_nodes, or use tree.source=dynamic for a tree without a search"
            )
        deepest = deepest_draft(heads)
        depth = self.depth if deepest is None else min(self.depth, deepest)
        return DynamicTree(self.nodes or self.max_nodes, depth, min(self.expand, len(heads.d2t)))


def measure_and_choose(
    config: TreeConfig, target: Target, heads: DraftHeads
) -> tuple[Tree | DynamicTree, dict[str, float]]:
    """Measure the step costs on this machine and choose by them: the tree, and the costs in milliseconds.

    Raises:
        ValueError: if the heads cannot fill the tree.
    """
    largest = config.max_nodes + 1
    sizes = [*(size for size in SIZES if size < largest), largest]
    costs = measure_costs(target, build_drafter(heads, config.largest(heads)), sizes)
    return choose_tree(config, target, heads, costs), costs


def given_tree(config: TreeConfig, heads: DraftHeads) -> Tree | DynamicTree | None:
    """The tree that the settings name, None if it is to be searched.

    Raises:
        ValueError: if the heads cannot fill the tree.
    """
    if config.source == AUTO:
        return None
    if config.source == DYNAMIC:
        tree = config.largest(heads)
    else:
        tree = Tree.from_choices(config.choices) if config.source == CHOICES else published_tree(config.source)
    build_drafter(heads, tree)  # refuses what these heads cannot draft
    return tree


def choose_tree(config: TreeConfig, target: Target, heads: DraftHeads, costs: dict[str, float]) -> Tree | DynamicTree:
    """Return the given tree, or search the one that pays best at the measured costs.

    Raises:
        ValueError: if the heads cannot fill the tree.
    """
    tree = given_tree(config, heads)
    if tree is not None:
        return tree
    prompts = [prompt.ids for prompt in load_prompts(config.calibration, target, config.calibration_prompts)]
    verify, draft, level = relative_costs(costs)
    cost = {size: interpolated(verify, size) for size in range(2, max(verify) + 1)}
    if isinstance(heads, MedusaHeads):
        accuracy_KW = measure_accuracy(target, heads, prompts, config.calibration_tokens, config.width)
        if config.nodes is not None:
            return search_tree(accuracy_KW, config.nodes)
        tree, predicted = best_tree(accuracy_KW, cost, draft, [size - 1 for size in cost])
        logger.info("calibration predicts a speedup of %.2f", predicted)
        return tree
    drafter = build_drafter(heads, config.largest(heads))
    assert isinstance(drafter, DynamicDrafter)
    expected_DM = measure_dynamic(target, drafter, prompts, config.calibration_tokens)
    first = 0 if config.nodes is None else config.nodes - 1
    nodes, depth, predicted = best_dynamic(expected_DM[:, first : max(cost) - 1], cost, draft, level, first)
    logger.info("calibration predicts tau %.2f, a speedup of %.2f", expected_DM[depth - 1, nodes - 1], predicted)
    return replace(drafter.size, nodes=nodes, depth=depth)
