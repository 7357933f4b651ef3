"""Which draft tree to verify: the one expected to yield the most tokens, given how often each rank is right.

The table accuracy_KW holds, per head k and rank r, the probability that the candidate of exactly rank r (not
of "the top r") is the accepted token; what a row lacks to 1 is the probability that no candidate is. If the
rates of head k are conditional on the drafts before it being accepted, a node's product is the probability
that the node is accepted, as far as that does not depend on the branch. Unconditional rates, which Medusa
uses, also treat the heads as independent.

Shape suffixes: K heads, W candidates per head.
"""

import heapq
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from eval.tree import Node, Tree


def _checked_rows(accuracy_KW: Tensor) -> list[list[float]]:
    if accuracy_KW.ndim != 2:
        raise ValueError(f"accuracy has shape {tuple(accuracy_KW.shape)} but must be a table [heads, ranks]")
    rows = accuracy_KW.tolist()
    for head, row in enumerate(rows):
        if not all(0 <= rate <= 1 for rate in row):
            raise ValueError(f"accuracy[{head}]={row} must hold probabilities in [0, 1]")
        if sum(row) > 1 + 1e-5:
            total = f"accuracy[{head}] sums to {sum(row):.4f}, must be <= 1"
            raise ValueError(f"{total}; give the rate of each exact rank, not of the top r")
    return rows


def search_tree(accuracy_KW: Tensor, num_nodes: int, max_depth: int | None = None) -> Tree:
    """The tree of `num_nodes` draft nodes (the root not counted) with the most expected tokens.

    A node's value is the product of accuracy[k][rank] over its path; the most valuable node is taken next. No
    node is worth more than its parent, so the best nodes always form a tree, and it is optimal: also for rows
    that increase, since a rank may be taken without the ranks before it. Ties go to the shallower node, then
    to the one that entered the heap first (its parent was taken earlier, or its rank is lower). Growth stops
    before a node of value 0, so the tree may be smaller than asked for.

    max_depth: at most K, which is the default. Raises `ValueError` for a table of anything but such
    probabilities, for num_nodes < 0 and for max_depth outside [0, K]. Source: Medusa, section 2.3.3.
    """
    rows = _checked_rows(accuracy_KW)
    max_depth = len(rows) if max_depth is None else max_depth
    if num_nodes < 0:
        raise ValueError(f"num_nodes={num_nodes} must be >= 0; 0 leaves the root alone")
    if not 0 <= max_depth <= len(rows):
        raise ValueError(f"max_depth={max_depth} must be in [0, {len(rows)}]; accuracy has {len(rows)} heads")
    taken: list[Node] = [()]
    heap: list[tuple[float, int, int, Node]] = []  # (-value, depth, order of entry, node)
    value, entries = 1.0, 0
    while len(taken) <= num_nodes:
        parent = taken[-1]
        if len(parent) < max_depth:
            for rank, rate in enumerate(rows[len(parent)]):
                heapq.heappush(heap, (-value * rate, len(parent) + 1, entries, (*parent, rank)))
                entries += 1
        if not heap or heap[0][0] == 0:
            break
        negative_value, _, _, node = heapq.heappop(heap)
        value = -negative_value
        taken.append(node)
    return Tree.from_choices(taken[1:])


def expected_tokens(tree: Tree, accuracy_KW: Tensor) -> float:
    """Tokens expected from one cycle: the target's own plus the value of each draft node.

    Raises `ValueError` if the tree is deeper or wider than the table.
    """
    rows = _checked_rows(accuracy_KW)
    tree.check(num_heads=accuracy_KW.shape[0], top_k=accuracy_KW.shape[1])
    return sum(math.prod(rows[k][rank] for k, rank in enumerate(node)) for node in tree.nodes)


def best_tree(
    accuracy_KW: Tensor,
    cost: Mapping[int, float],
    draft_cost: float,
    sizes: Sequence[int],
    max_depth: int | None = None,
) -> tuple[Tree, float]:
    """Of the optimal trees with `sizes` draft nodes, the one of highest predicted speedup, and that speedup.

    cost: time of one verification by the number of tokens in it, root included: `cost[size + 1]` for each
    size.
    draft_cost: time to draft one tree. Both are in units of one plain decoding step. A drafter that pays per
    level is compared over depths by one call per `max_depth`. Raises `ValueError` for no sizes and for a cost
    that is missing or not positive. Source: Sequoia's hardware-aware tree.
    """
    if not sizes:
        raise ValueError("sizes is empty; name at least one number of draft nodes")
    if not draft_cost >= 0:
        raise ValueError(f"draft_cost={draft_cost} must be >= 0, in units of one plain decoding step")
    for size in sizes:
        if not cost.get(size + 1, 0) > 0:
            raise ValueError(f"cost of {size + 1} tokens (the root + {size}) must be given and > 0; measure it")
    predicted = []
    for size in sorted(sizes):
        tree = search_tree(accuracy_KW, size, max_depth)
        predicted.append((tree, expected_tokens(tree, accuracy_KW) / (cost[size + 1] + draft_cost)))
    return max(predicted, key=lambda tree_and_speedup: tree_and_speedup[1])


def best_dynamic(
    expected_DM: Tensor, cost: Mapping[int, float], draft_cost: float, level_cost: float, skipped: int = 0
) -> tuple[int, int, float]:
    """Of dynamic trees, the (draft nodes, depth) of highest predicted speedup, and that speedup.

    expected_DM: tokens of a cycle at depth d + 1 and skipped + m + 1 draft nodes. cost: as in `best_tree`.
    draft_cost: of one level; level_cost: of each further one, in units of one plain decoding step.
    """
    predicted = [
        (expected / (cost[m + 1] + draft_cost + d * level_cost), m, d + 1)
        for d, row in enumerate(expected_DM.tolist())
        for m, expected in enumerate(row, skipped + 1)
    ]
    speedup, nodes, depth = max(predicted)
    return nodes, depth, speedup
