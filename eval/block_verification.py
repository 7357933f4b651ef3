"""Block verification: lossless acceptance of a sampled chain that judges its drafts together, not one by one.

Sun et al., "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), Algorithm 2. A prefix that
the drafter offers too often on its own may stand for the sake of what follows it. After every token let the
target's law be p = (1/3, 2/3) and the drafter's q = (2/3, 1/3) over the tokens a, b; the chain drew "a b":

    node n                        0      1      2
    token                       root     a      b
    w_n = min(1, w p(x) / q(x))   1     1/2     1      w and x: w_{n-1} and the token of node n
    S_n = sum of (w_n p - q)+    1/3     0      1      q after the last draft: zeros
    h_n = S_n / (S_n + 1 - w_n)   1      0      1      each node passes with probability h_n

The deepest node that passes ends the path: here always "a b", while `accept_sampling` rejects a half the time.

Shape suffixes: N nodes including the root, D = N - 1 draft tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.accept import Accepted, Proposal
from eval.sampling import Coin
from eval.tree import Topology


def accept_block(tree: Topology, tokens_N: Tensor, probs_NV: Tensor, proposal: Proposal, coin: Coin) -> Accepted:
    """The emitted tokens have the target's law, and are in expectation never fewer than with `accept_sampling`.

    tree: a chain; on any other tree the rule is not defined. Its ranks do not matter.
    tokens_N: the drafts; the root's is not read.
    probs_NV: the target's distribution after each node, from `probabilities`.
    proposal: the law that each node's child was drawn from; `replacement` does not matter to an only child.
        A draft that the context determines was drawn from the law that gives it 1.

    Computes in the dtype of probs_NV. No host synchronisation. Raises `ValueError` if a node has two children.
    """
    if tree.size != tree.depth + 1:
        raise ValueError(
            f"block verification needs a chain, but this tree has {tree.size - 1} draft tokens at depth {tree.depth}; "
            "use a tree of width one or the token-wise rule, sampling"
        )
    assert proposal.laws_NV.shape == probs_NV.shape, "one law per node, over the target's vocabulary"
    # A law of zeros after the last draft makes h_D = w_D and the residual there p, which Algorithm 2 states apart.
    laws_NV = F.pad(proposal.laws_NV[:-1], (0, 0, 0, 1))
    weights_N = _weights(tokens_N, probs_NV, laws_NV)
    surplus_NV = (weights_N[:, None] * probs_NV - laws_NV).clamp_min(0)
    passed_N = _draw_passed(weights_N, surplus_NV.sum(-1), coin)
    last_1 = (passed_N * tree.depths_N).amax(0, keepdim=True)  # the node at depth d of a chain is node d
    residual_1V = surplus_NV[last_1]
    # Without a surplus the laws are equal, and only rounding can have let no deeper node pass.
    residual_1V = torch.where(residual_1V.sum() > 0, residual_1V, probs_NV[last_1])
    return Accepted(path_D=tree.paths_NP[last_1, 1:].squeeze(0), token=coin.draw(residual_1V).squeeze(0))


def _weights(tokens_N: Tensor, probs_NV: Tensor, laws_NV: Tensor) -> Tensor:
    """w_n: the probability that the drafts up to node n stand, given that they were drawn."""
    drafts_D1 = tokens_N[1:, None]
    target_D = probs_NV[:-1].gather(-1, drafts_D1).squeeze(-1)
    drafter_D = laws_NV[:-1].gather(-1, drafts_D1).squeeze(-1)
    weight = probs_NV.new_ones(())
    weights = [weight]
    for target, drafter in zip(target_D, drafter_D, strict=True):
        # A draft of law 0 was not drawn and never stands. The product comes first: 0 * (target / drafter)
        # is not a number where the quotient overflows.
        weight = torch.where(drafter > 0, weight * target / drafter, 0.0).clamp_max(1)
        weights.append(weight)
    return torch.stack(weights)


def _draw_passed(weights_N: Tensor, surplus_N: Tensor, coin: Coin) -> Tensor:
    """int64 [N]: 1 with probability h_n, else 0, each node on its own; always 1 at the root."""
    rejected_N = 1 - weights_N
    # 0 / 0 is a certain pass: the laws are equal there.
    surplus_N = torch.where(surplus_N + rejected_N > 0, surplus_N, 1.0)
    return coin.draw(torch.stack((rejected_N, surplus_N), -1))
