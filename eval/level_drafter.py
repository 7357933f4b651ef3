"""Drafting level by level, for heads whose guess depends on the tokens drafted before (EAGLE, Hydra).

    begin(root)          -> logits behind the root          level 1:  a   b   c
    step([a, b], ...)    -> logits behind a and b           level 2:  aa ab   ba
    step([aa], ...)      -> logits behind aa                level 3:  aaa

A static tree says beforehand which ranks are expanded. A dynamic one (EAGLE-2, arXiv 2406.16858) expands the `width`
likeliest nodes of each level and verifies the `nodes` likeliest of all that it has seen; a node's likelihood is the
product of the drafter's probabilities along its path.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eval.accept import Proposal
from eval.drafters import Draft
from eval.sampling import Coin, SamplingConfig, probabilities
from eval.tree import Topology, Tree

# Shapes: N nodes, P parents of one level, W children of each, K kept nodes, V vocabulary, Vd draft vocabulary, D hidden


class Stepper(Protocol):
    """One family's drafting state: what the sequence so far and the nodes of the last level have left in it."""

    taps: tuple[str, ...]
    draft_ids: Tensor  # token ids [Vd]
    vocab_size: int
    max_depth: int | None  # levels that it can draft, None: any number

    def reset(self, prompt_T: Tensor, features: dict[str, Tensor]) -> None:
        """Start a sequence from its prompt and the prompt's features {tap: [1, T, D]}."""
        ...

    def observe(self, features: dict[str, Tensor], tokens_P: Tensor, path_P: Tensor) -> None:
        """Learn which nodes of the verified tree stand, root first: their tokens, and {tap: [1, N, D]} to index."""
        ...

    def begin(self, root: Tensor) -> Tensor:
        """Start a tree at the certain token `root` (a scalar tensor): logits [1, Vd] behind it."""
        ...

    def step(self, tokens_N: Tensor, parents_N: Tensor) -> Tensor:
        """Logits [N, Vd] behind N nodes of the next level; `parents_N` index the nodes of the call before."""
        ...


@dataclass(frozen=True)
class DynamicTree:
    """Size of a dynamic tree: `nodes` verified besides the root, at most `depth` deep; `width` expanded per level."""

    nodes: int
    depth: int
    width: int

    def __post_init__(self):
        for name in ("nodes", "depth", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"tree.{name}={getattr(self, name)} must be at least 1")

    def candidates(self, depth: int) -> int:
        """Nodes that a draft of `depth` levels chooses from."""
        return self.width + (depth - 1) * self.width**2


class _LevelDrafter:
    """What both kinds of tree share: a stepper, and the tokens of the draft that is being verified."""

    def __init__(self, stepper: Stepper, depth: int, tree_size: int):
        self.stepper, self.taps = stepper, stepper.taps
        self.depth, self.tree_size = depth, tree_size
        self._tokens_N: Tensor

    def reset(self, prompt_T: Tensor, features: dict[str, Tensor]) -> None:
        self.stepper.reset(prompt_T, features)

    def observe(self, features: dict[str, Tensor], path_P: Tensor) -> None:
        self.stepper.observe(features, self._tokens_N[path_P], path_P)


class DynamicDrafter(_LevelDrafter):
    """A dynamic tree over any stepper. The drafts follow from the context alone, so every acceptance rule is exact."""

    def __init__(self, stepper: Stepper, size: DynamicTree):
        if stepper.max_depth is not None and size.depth > stepper.max_depth:
            raise ValueError(f"tree.depth={size.depth} must be at most {stepper.max_depth}, what these heads draft")
        if size.width > len(stepper.draft_ids):
            raise ValueError(f"tree.width={size.width} is above the draft vocabulary of {len(stepper.draft_ids)} ids")
        super().__init__(stepper, size.depth, 1 + min(size.nodes, size.candidates(size.depth)))
        self.size = size

    def propose(self, root: Tensor, max_depth: int) -> Draft:
        depth, width = min(max_depth, self.size.depth), self.size.width
        if depth < 1:
            return self._draft(root, Tree.chain(0).to(root.device), root[None])
        # The pool of nodes without the root: tokens, values (log-probability of the path), parents and depths.
        values_W, tokens_W = self._children(self.stepper.begin(root))
        pool = [(tokens_W[0], values_W[0], torch.zeros_like(tokens_W[0]))]
        frontier_W = torch.arange(width, device=root.device)  # places in the last level's part of the pool
        first = 1  # node id of the first of that part
        came_from_W = torch.zeros_like(frontier_W)
        for _ in range(depth - 1):
            tokens_N, values_N, _ = pool[-1]
            log_q_WV = self.stepper.step(tokens_N[frontier_W], came_from_W)
            values_WW, tokens_WW = self._children(log_q_WV)
            values_WW = values_WW + values_N[frontier_W, None]
            parents_WW = (first + frontier_W)[:, None].expand(-1, width)
            first += len(tokens_N)
            pool.append((tokens_WW.flatten(), values_WW.flatten(), parents_WW.flatten()))
            frontier_W = pool[-1][1].topk(width).indices
            came_from_W = frontier_W // width
        return self._likeliest(root, pool, depth)

    def _children(self, logits_PV: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and token ids [P, W] of the likeliest children, best first."""
        best = logits_PV.float().log_softmax(-1).topk(self.size.width)
        return best.values, self.stepper.draft_ids[best.indices]

    def _likeliest(self, root: Tensor, pool: list[tuple[Tensor, Tensor, Tensor]], depth: int) -> Draft:
        """Keep the likeliest nodes; of equals the shallower, so that no node is kept without its parent."""
        tokens_N, values_N, parents_N = map(torch.cat, zip(*pool, strict=True))
        depths_N = torch.cat([torch.full_like(level[0], d) for d, level in enumerate(pool, 1)])
        best_K = values_N.sort(descending=True, stable=True).indices[: self.size.nodes]
        kept_K, order_K = best_K.sort()
        ids_N = torch.zeros(1 + len(tokens_N), dtype=torch.long, device=root.device)  # from places in the pool
        ids_N[1 + kept_K] = torch.arange(1, 1 + len(kept_K), device=root.device)
        zero_1 = torch.zeros(1, dtype=torch.long, device=root.device)
        tree = Topology.from_parents(
            torch.cat([zero_1 - 1, ids_N[parents_N[kept_K]]]), torch.cat([zero_1, depths_N[kept_K]]), depth
        )
        return self._draft(root, tree, torch.cat([root[None], tokens_N[kept_K]]), torch.cat([zero_1, 1 + order_K]))

    def _draft(self, root: Tensor, tree: Topology, tokens_N: Tensor, order_N: Tensor | None = None) -> Draft:
        self._tokens_N = tokens_N
        return Draft(tree, tokens_N, order_N=order_N)


class StaticDrafter(_LevelDrafter):
    """A static tree over any stepper: each node takes the candidate of its rank behind its parent.

    With `sampling` the children of a node are drawn without replacement from the drafter's law behind it, under the
    same temperature, top-k and top-p as the target's; otherwise they are the likeliest ones.
    """

    def __init__(self, stepper: Stepper, tree: Tree, sampling: SamplingConfig | None = None, coin: Coin | None = None):
        tree.check(num_heads=stepper.max_depth or tree.depth, top_k=len(stepper.draft_ids))
        super().__init__(stepper, tree.depth, tree.size)
        self.sampling, self.coin = sampling, coin
        self.tree = tree.to(stepper.draft_ids.device)
        self._pruned = {depth: self.tree.pruned(depth) for depth in range(tree.depth + 1)}
        self._levels = {depth: _levels(pruned) for depth, pruned in self._pruned.items()}

    def propose(self, root: Tensor, max_depth: int) -> Draft:
        depth = min(max_depth, self.tree.depth)
        tree, tokens_N = self._pruned[depth], root.repeat(self._pruned[depth].size)
        laws_NV = None
        for number, level in enumerate(self._levels[depth]):
            parents_P = level.parents_P
            logits_PV = (
                self.stepper.step(tokens_N[parents_P], level.came_from_P) if number else self.stepper.begin(root)
            )
            if self.sampling is None:
                choices_PW, ranks_N = logits_PV.topk(level.width).indices, tree.ranks_N[level.children_N]
            else:
                law_PV = probabilities(logits_PV, self.sampling)
                if laws_NV is None:
                    laws_NV = law_PV.new_zeros(tree.size, self.stepper.vocab_size)
                laws_NV[parents_P[:, None], self.stepper.draft_ids] = law_PV
                choices_PW, ranks_N = self._drawn(law_PV, level.siblings), level.orders_N
            tokens_N[level.children_N] = self.stepper.draft_ids[choices_PW[level.rows_N, ranks_N]]
        self._tokens_N = tokens_N
        return Draft(tree, tokens_N, None if laws_NV is None else Proposal(laws_NV, replacement=False))

    def _drawn(self, law_PV: Tensor, siblings: int) -> Tensor:
        """Draft indices [P, siblings] in drawing order, each draw excluding those before it.

        Where a law has fewer tokens than that the rest are of law 0 or drawn before, and never stand.
        """
        assert self.coin is not None
        law_PV, drawn = law_PV.clone(), []
        for _ in range(siblings):
            drawn.append(self.coin.draw(law_PV))
            law_PV.scatter_(1, drawn[-1][:, None], 0.0)
        return torch.stack(drawn, 1)


@dataclass(frozen=True)
class _Level:
    """The expansion of one level: which nodes have children (P), where they came from, and the children (N)."""

    parents_P: Tensor  # node ids
    came_from_P: Tensor  # places of their own parents among the `parents_P` of the level before
    children_N: Tensor  # node ids
    rows_N: Tensor  # place of each child's parent in parents_P
    orders_N: Tensor  # number of each child among its siblings
    width: int  # candidates that are needed behind each parent, by their ranks
    siblings: int  # children of the parent that has the most


def _levels(tree: Tree) -> list[_Level]:
    device = tree.parents_N.device
    levels, before = [], {0: 0}
    parents = [0] if tree.depth else []
    while parents:
        places = {node: place for place, node in enumerate(parents)}
        children = [(child, places[node], order) for node in parents for order, child in enumerate(tree.children[node])]
        ids_N, rows_N, orders_N = torch.tensor(children, device=device).T
        came_from = [before[tree.nodes.index(tree.nodes[node][:-1])] if node else 0 for node in parents]
        width = max(tree.nodes[child][-1] for child, _, _ in children) + 1
        siblings = max(order for _, _, order in children) + 1
        parents_P, came_from_P = torch.tensor(parents, device=device), torch.tensor(came_from, device=device)
        levels.append(_Level(parents_P, came_from_P, ids_N, rows_N, orders_N, width, siblings))
        before, parents = places, [child for child, _, _ in children if tree.children[child]]
    return levels
