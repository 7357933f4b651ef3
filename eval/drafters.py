"""Drafters: what proposes the next draft tree. Every family decodes through this one small interface."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eval.accept import Proposal
from eval.sampling import Coin, SamplingConfig, probabilities
from eval.tree import Topology, Tree
from heads.medusa import MedusaHeads
from heads.target import FINAL_NORM

# Shapes: N tree nodes, K heads, W candidates of a head, V vocabulary, Vd draft vocabulary, T tokens, D hidden


@dataclass(frozen=True)
class Draft:
    """Tokens for the nodes of a tree; node 0 is the root. `proposal` is None unless the tokens were sampled.

    order_N: place of each node by likelihood, 1 for the likeliest; only of a dynamic tree.
    """

    tree: Topology
    tokens_N: Tensor
    proposal: Proposal | None = None
    order_N: Tensor | None = None


class Drafter(Protocol):
    """`reset` after a prefill, then `propose` and `observe` in turn."""

    taps: tuple[str, ...]
    depth: int  # levels of the deepest tree that it proposes
    tree_size: int  # nodes of the largest one, root included

    def reset(self, prompt_T: Tensor, features: dict[str, Tensor]) -> None:
        """Start a sequence from the tokens of its prompt and their features {tap: [1, T, D]}."""
        ...

    def propose(self, root: Tensor, max_depth: int) -> Draft:
        """Draft at most `max_depth` tokens behind the certain token `root` (a scalar tensor)."""
        ...

    def observe(self, features: dict[str, Tensor], path_P: Tensor) -> None:
        """Learn what was committed: the tree's features {tap: [1, N, D]} and the node ids that stand, root first."""
        ...


class MedusaDrafter:
    """Medusa heads over a static tree: every node at depth d takes a candidate of head d - 1.

    With `sampling` the candidates are drawn without replacement from the heads' own distributions, under the same
    temperature, top-k and top-p as the target's; otherwise they are the most likely ones.
    """

    taps: tuple[str, ...] = (FINAL_NORM,)

    def __init__(
        self, heads: MedusaHeads, tree: Tree, sampling: SamplingConfig | None = None, coin: Coin | None = None
    ):
        tree.check(num_heads=heads.depth, top_k=len(heads.d2t))
        self.heads = heads
        self.tree = tree.to(heads.d2t.device)
        self.depth, self.tree_size = tree.depth, tree.size
        self.draft_ids = heads.draft_ids
        self.sampling, self.coin = sampling, coin
        self._pruned = {depth: self.tree.pruned(depth) for depth in range(tree.depth + 1)}
        self._hidden_D: Tensor

    def reset(self, prompt_T: Tensor, features: dict[str, Tensor]) -> None:
        self._hidden_D = features[FINAL_NORM][0, -1]

    def observe(self, features: dict[str, Tensor], path_P: Tensor) -> None:
        # A slice, since a scalar tensor as an index would be read on the host.
        self._hidden_D = features[FINAL_NORM][0, path_P[-1:]].squeeze(0)

    def propose(self, root: Tensor, max_depth: int) -> Draft:
        tree = self._pruned[min(max_depth, self.tree.depth)]
        if not tree.depth:
            return Draft(tree, root[None])
        logits_KV = self.heads.draft_logits(self._hidden_D)[: tree.depth]
        if self.sampling is not None:
            return self._sampled(tree, root, logits_KV, self.sampling)
        candidates_KW = self.draft_ids[logits_KV.topk(tree.width, dim=-1).indices]
        return Draft(tree, torch.cat([root[None], candidates_KW[tree.depths_N[1:] - 1, tree.ranks_N[1:]]]))

    def _sampled(self, tree: Tree, root: Tensor, logits_KV: Tensor, sampling: SamplingConfig) -> Draft:
        assert self.coin is not None
        laws_KV = torch.zeros(len(logits_KV), self.heads.vocab_size, device=logits_KV.device)
        laws_KV[:, self.draft_ids] = probabilities(logits_KV, sampling)
        laws_NV = laws_KV[tree.depths_N.clamp_max(tree.depth - 1)]  # the children of a node at depth d come from head d
        tokens_N = root.repeat(tree.size)
        for children in filter(None, tree.children):
            law_V = laws_KV[len(tree.nodes[children[0]]) - 1].clone()
            for child in children:
                # With more siblings than tokens of positive probability the rest are of law 0 and never stand.
                token = self.coin.draw(law_V)
                tokens_N[child] = token
                law_V[token] = 0
        return Draft(tree, tokens_N, Proposal(laws_NV, replacement=False))
