"""Which drafted tokens stand, and which token follows them: pure functions of one verification.

Each rule takes the tree, the token at each node (tokens_N; the root's is not read) and the target's answer
after each node (logits_NV or probs_NV):

  accept_greedy    the tokens of plain greedy decoding
  accept_sampling  lossless: the tokens have the law of plain sampling
  accept_typical   lossy: Medusa's rule

Shape suffixes: N nodes including the root, D depth of the tree, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.sampling import Coin, SamplingConfig, probabilities
from eval.tree import Topology


@dataclass(frozen=True)
class Accepted:
    """The path that stands and the target's own token after it, still on the device.

    path_D: int64 node ids from the root's child to the deepest accepted node, padded with -1.
    token: int64 scalar.
    """

    path_D: Tensor
    token: Tensor

    def to_host(self, tokens_N: Tensor) -> tuple[list[int], list[int]]:
        """(accepted node ids [L], emitted tokens [L + 1]), 0 <= L <= D, in one host synchronisation."""
        D = len(self.path_D)
        *packed, token = torch.cat([self.path_D, tokens_N[self.path_D], self.token[None]]).tolist()
        path = [node for node in packed[:D] if node >= 0]
        return path, [*packed[D : D + len(path)], token]


@dataclass(frozen=True)
class Proposal:
    """How sampled drafts were drawn.

    laws_NV: row n is the distribution (from `probabilities`) that the children of node n were drawn from, in
        increasing node order; rows of childless nodes are not read.
    replacement: True for independent draws (SpecInfer), False if each excludes the earlier ones (Sequoia).
    """

    laws_NV: Tensor
    replacement: bool


def accept_greedy(tree: Topology, tokens_N: Tensor, logits_NV: Tensor) -> Accepted:
    """The deepest node whose whole path is the target's argmax, then the argmax there.

    The tokens are those of plain greedy decoding as far as the logits are. No host synchronisation.
    """
    choice_N = logits_NV.argmax(-1)
    reached_N = _reached(tree, tokens_N == _at_parent(tree, choice_N))
    return _accepted(tree, torch.where(reached_N, tree.depths_N, -1), choice_N)


def accept_typical(
    tree: Topology,
    tokens_N: Tensor,
    logits_NV: Tensor,
    temperature: float,
    epsilon: float = 0.09,
    delta: float = 0.3,
    coin: Coin | None = None,
) -> Accepted:
    """Medusa's typical acceptance (paper, section 2.3.1). Lossy: the tokens do not have the target's law.

    Draft token x stands if p(x) > min(epsilon, delta * exp(-H(p))), with p the target's distribution after
    its parent at this temperature and H its entropy in nats, and if its parent stands. The deepest node wins,
    ties by the sum of log p along the path. The token that follows is the argmax, as in Medusa, which makes
    the output deterministic at any temperature; with a `coin` it is drawn from p. Temperature 0 gives
    `accept_greedy`. No host synchronisation. Raises `ValueError` for epsilon outside (0, 1) or delta <= 0.
    """
    if not (0 < epsilon < 1 and delta > 0):
        raise ValueError(f"epsilon={epsilon} must be in (0, 1) and delta={delta} > 0; Medusa uses 0.09 and 0.3")
    probs_NV = probabilities(logits_NV, SamplingConfig(temperature))
    entropies_N = torch.special.entr(probs_NV).sum(-1)
    thresholds_N = (delta * (-entropies_N).exp()).clamp_max(epsilon)
    token_probs_N = _at_parent(tree, probs_NV).gather(-1, tokens_N[:, None]).squeeze(-1)
    reached_N = _reached(tree, token_probs_N > _at_parent(tree, thresholds_N))
    depths_N = torch.where(reached_N, tree.depths_N, -1)
    on_path_NN = tree.ancestors_NN & (tree.depths_N > 0)
    path_logprobs_N = torch.where(on_path_NN, token_probs_N.log(), 0.0).sum(-1)
    rating_N = torch.where(depths_N == depths_N.max(), path_logprobs_N, -math.inf)
    return _accepted(tree, rating_N, logits_NV.argmax(-1) if coin is None else coin.draw(probs_NV))


def accept_sampling(
    tree: Topology, tokens_N: Tensor, probs_NV: Tensor, proposal: Proposal | None, coin: Coin
) -> Accepted:
    """Lossless acceptance: whatever was drafted, the emitted tokens have the target's law.

    probs_NV: the target's distribution after each node, from `probabilities`.
    proposal: None if the context determines the drafts (top-k candidates, retrieval), else how they were
        drawn. Tokens, order and shape of a deterministic tree may depend on anything but the target's answer
        and the coin; no node of a sampled tree may be dropped or moved after it was drawn.

    Deterministic drafts need no host synchronisation; sampled drafts two per tested child.
    """
    if proposal is None:
        return _accept_drawn(tree, tokens_N, coin.draw(probs_NV))
    assert proposal.laws_NV.shape == probs_NV.shape, "one law per node, over the target's vocabulary"
    tokens = tokens_N.tolist()
    node = 0
    while True:
        children = [(child, tokens[child]) for child in tree.children[node]]
        child, residual_V = _test_children(children, probs_NV[node], proposal.laws_NV[node], proposal.replacement, coin)
        if child is None:
            return Accepted(path_D=tree.paths_NP[node, 1:], token=coin.draw(residual_V))
        node = child


def _at_parent(tree: Topology, values_N: Tensor) -> Tensor:
    """The value (or row) of each node's parent; of the root's parent, some value that is not to be read."""
    return values_N[tree.parents_N]


def _reached(tree: Topology, passed_N: Tensor) -> Tensor:
    """True at the nodes whose path passed as a whole; the root always does."""
    return (passed_N | (tree.depths_N == 0) | ~tree.ancestors_NN).all(-1)


def _accepted(tree: Topology, rating_N: Tensor, choice_N: Tensor) -> Accepted:
    """Accepts the path to the node of highest rating, the first of equals; emits the choice made there."""
    node_1 = rating_N.argmax(keepdim=True)  # a scalar tensor would be read on the host to index with it
    return Accepted(path_D=tree.paths_NP[node_1, 1:].squeeze(0), token=choice_N[node_1].squeeze(0))


def _accept_drawn(tree: Topology, tokens_N: Tensor, drawn_N: Tensor) -> Accepted:
    """Follows the target's own draw at each node for as long as it was drafted.

    The same law as to test child x with probability p(x) and after a rejection to zero x and renormalise:
    both descend into child x with probability p(x), and emit an undrafted y with p(y).
    """
    twins_NN = (tree.parents_N[:, None] == tree.parents_N) & (tokens_N[:, None] == tokens_N)
    # Of siblings with equal tokens only the first counts: preferring the deeper one would look at the draws.
    first_N = ~twins_NN.tril(-1).any(-1)
    reached_N = _reached(tree, first_N & (tokens_N == _at_parent(tree, drawn_N)))
    return _accepted(tree, torch.where(reached_N, tree.depths_N, -1), drawn_N)


def _test_children(
    children: list[tuple[int, int]], residual_V: Tensor, law_V: Tensor, replacement: bool, coin: Coin
) -> tuple[int | None, Tensor]:
    """The first child to pass, of (node, token) in drawing order, else None and what the target still owes.

    Multi-draft rejection as in SpecInfer, without replacement as in Sequoia.
    """
    for child, token in children:
        target, drafter = torch.stack((residual_V[token], law_V[token])).tolist()
        if drafter == 0:
            continue  # no draw: it repeats a sibling, or fills up a law of fewer tokens than children
        if coin.accept(min(1.0, target / drafter)):
            return child, residual_V
        surplus_V = (residual_V - law_V).clamp_min(0)
        # Without a surplus the laws are equal, and only rounding can have rejected.
        residual_V = torch.where(surplus_V.sum() > 0, surplus_V / surplus_V.sum(), residual_V)
        if not replacement:
            law_V = law_V.clone()
            law_V[token] = 0
            law_V = law_V / law_V.sum().clamp_min(torch.finfo(law_V.dtype).tiny)
    return None, residual_V
