r"""A static draft tree: which of the heads' candidates are verified together, and which token sees which.

A node is named by its path of ranks: [0, 1] is the second-best candidate of head 1 below the best candidate
of head 0. The root, path [], is the last certain token. Nodes are sorted by depth, then by path. The tree of
[0], [1], [0,0], [0,1], [1,0] and its mask (row n marks what node n attends to inside the tree):

               0 []                   0 1 2 3 4 5
              /    \                0 x . . . . .
         1 [0]      2 [1]           1 x x . . . .
         /   \         \            2 x . x . . .
    3 [0,0] 4 [0,1]  5 [1,0]        3 x x . x . .
                                    4 x x . . x .
                                    5 x . x . . x

Shape suffixes: N nodes including the root, P = depth of the tree + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

Node = tuple[int, ...]


def _show(node: Node) -> str:
    return f"[{','.join(map(str, node))}]"


@dataclass(frozen=True)
class Topology:
    """Which node of a draft tree hangs below which, as tensors on one device; node 0 is the root.

    parents_N: int64, -1 at the root. A parent comes before its children.
    depths_N: int64, 0 at the root.
    ancestors_NN: bool, [n, m] is true iff m lies on the path from the root to n, both ends included.
    paths_NP: int64, row n lists the nodes from the root to n, padded with -1.
    """

    parents_N: Tensor = field(compare=False, repr=False)
    depths_N: Tensor = field(compare=False, repr=False)
    ancestors_NN: Tensor = field(compare=False, repr=False)
    paths_NP: Tensor = field(compare=False, repr=False)

    @classmethod
    def from_parents(cls, parents_N: Tensor, depths_N: Tensor, depth: int) -> "Topology":
        """The tree of these parents, none deeper than `depth`; no host synchronisation."""
        nodes_N = torch.arange(len(parents_N), device=parents_N.device)
        paths_NP = torch.full((len(parents_N), depth + 2), -1, device=parents_N.device)
        above_N = nodes_N
        for _ in range(depth + 1):
            # Past the root there is nothing to note: such writes go to a last column that is dropped.
            column_N = torch.where(above_N < 0, depth + 1, depths_N[above_N])
            paths_NP[nodes_N, column_N] = above_N
            above_N = torch.where(above_N < 0, -1, parents_N[above_N])
        paths_NP = paths_NP[:, : depth + 1]
        return cls(parents_N, depths_N, (paths_NP[:, :, None] == nodes_N).any(1), paths_NP)

    @property
    def size(self) -> int:
        """Number of tokens that one verification reads: the nodes, root included."""
        return len(self.parents_N)

    @property
    def depth(self) -> int:
        """Number of draft tokens on the longest path."""
        return self.paths_NP.shape[1] - 1

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The ids of each node's children, in increasing order, on the host."""
        children: list[list[int]] = [[] for _ in range(self.size)]
        for node, parent in enumerate(self.parents_N.tolist()):
            if parent >= 0:
                children[parent].append(node)
        return tuple(map(tuple, children))

    def to(self, device: torch.device | str) -> Self:
        """The same tree with its tensors on `device`."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class Tree(Topology):
    """A static tree, whose nodes are named by their ranks.

    nodes: the path of ranks of each node; nodes[0] = () is the root. Equal nodes make equal trees.
    ranks_N: int64, the node's rank among its head's candidates; -1 at the root.
    """

    nodes: tuple[Node, ...]
    ranks_N: Tensor = field(compare=False, repr=False)

    @classmethod
    def from_choices(cls, choices: Sequence[Sequence[int]]) -> Self:
        """The tree of these rank paths, given in any order and without the root; none give the root alone.

        A rank may be present without the ranks before it. `ValueError` names an empty path, a rank that is
        not an integer >= 0, a node listed twice and a node without its parent.
        """
        nodes = [tuple(choice) for choice in choices]
        for node in nodes:
            if not node:
                raise ValueError("tree node [] is the root, which every tree has; leave it out")
            if not all(isinstance(rank, int) and rank >= 0 for rank in node):
                raise ValueError(f"tree node {_show(node)} has a rank that is not an integer >= 0")
        nodes = [(), *sorted(nodes, key=lambda node: (len(node), node))]
        for before, node in pairwise(nodes):
            if node == before:
                raise ValueError(f"tree node {_show(node)} is listed twice; list it once")
            if node[:-1] not in nodes:
                raise ValueError(f"tree node {_show(node)} has no parent; add {_show(node[:-1])} or drop it")
        return cls._from_nodes(nodes)

    @classmethod
    def _from_nodes(cls, nodes: Sequence[Node]) -> Self:
        ids = {node: n for n, node in enumerate(nodes)}
        paths = [[ids[node[:d]] for d in range(len(node) + 1)] for node in nodes]
        paths_NP = torch.tensor([path + [-1] * (len(paths[-1]) - len(path)) for path in paths])
        return cls(
            nodes=tuple(nodes),
            parents_N=torch.tensor([ids[node[:-1]] if node else -1 for node in nodes]),
            depths_N=torch.tensor([len(node) for node in nodes]),
            ranks_N=torch.tensor([node[-1] if node else -1 for node in nodes]),
            ancestors_NN=(paths_NP[:, :, None] == torch.arange(len(nodes))).any(1),
            paths_NP=paths_NP,
        )

    @classmethod
    def chain(cls, depth: int) -> Self:
        """The tree of width one that drafts `depth` tokens; 0 gives the root alone."""
        return cls._from_nodes([(0,) * d for d in range(depth + 1)])

    def choices(self) -> list[list[int]]:
        """The rank paths without the root, in node order: `Tree.from_choices(tree.choices()) == tree`."""
        return [list(node) for node in self.nodes[1:]]

    @property
    def width(self) -> int:
        """Number of candidates that the heads must offer: the largest rank + 1."""
        return max((node[-1] + 1 for node in self.nodes[1:]), default=0)

    def check(self, *, num_heads: int, top_k: int) -> None:
        """`ValueError` naming the first node that `num_heads` heads with `top_k` candidates cannot fill."""
        for node in self.nodes[1:]:
            if len(node) > num_heads:
                raise ValueError(
                    f"tree node {_show(node)} is at depth {len(node)} but the heads draft {num_heads} "
                    f"tokens; use a tree of depth <= {num_heads} or train more heads"
                )
            if node[-1] >= top_k:
                raise ValueError(
                    f"tree node {_show(node)} takes rank {node[-1]} but the heads offer {top_k} candidates; "
                    f"use ranks < {top_k} or raise top_k"
                )

    def pruned(self, max_depth: int) -> Self:
        """The tree without the nodes deeper than `max_depth` >= 0. The nodes that stay keep their ids."""
        assert max_depth >= 0
        kept = sum(len(node) <= max_depth for node in self.nodes)
        return replace(
            self,
            nodes=self.nodes[:kept],
            parents_N=self.parents_N[:kept],
            depths_N=self.depths_N[:kept],
            ranks_N=self.ranks_N[:kept],
            ancestors_NN=self.ancestors_NN[:kept, :kept],
            paths_NP=self.paths_NP[:kept, : max_depth + 1],
        )
