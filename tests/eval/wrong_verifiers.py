"""Verifiers that look right and are not, for tests of losslessness that must tell them from the right ones."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.accept import Accepted
from eval.sampling import Coin
from tests.eval.enumeration import Drafted, Model, Verifier


@dataclass
class SharedUniformCoin:
    """Tests all siblings against one uniform number, of which a rejection says that it is at least `low`."""

    coin: Coin
    low: float = 0.0

    def accept(self, probability: float) -> bool:
        accepted = self.coin.accept(max(0.0, probability - self.low) / (1 - self.low))
        self.low = 0.0 if accepted else max(self.low, probability)
        return accepted

    def draw(self, weights_NV: Tensor) -> Tensor:
        return self.coin.draw(weights_NV)


def with_one_uniform(verify: Verifier) -> Verifier:
    return lambda drafted, coin: verify(drafted, SharedUniformCoin(coin))


def at_leaves(target: Model, other: Model, drafted: Drafted) -> Model:
    """The target, but `other` after the leaves of this tree: the wrong law of the bonus token."""
    is_leaf_N = torch.tensor([not children for children in drafted.tree.children])
    rows = torch.where(is_leaf_N[:, None], drafted.rows(other), drafted.rows(target))
    swapped = dict(zip(drafted.prefixes, rows, strict=True))
    return lambda prefix: swapped[prefix]


def row_by_row(target: Model) -> Verifier:
    """Medusa's `fast=False`: rows contradict each other where they share nodes; the longest match wins."""

    def verify(drafted: Drafted, coin: Coin) -> Accepted:
        tree, rows, tokens = drafted.tree, drafted.rows(target), drafted.tokens_N.tolist()
        best = (-1, -1, -1)  # (accepted length, node, its draw)
        for leaf in (n for n, children in enumerate(tree.children) if not children):
            path = [node for node in tree.paths_NP[leaf].tolist() if node >= 0]
            drawn = coin.draw(rows[path]).tolist()
            matches = [tokens[node] == choice for node, choice in zip(path[1:], drawn, strict=False)]
            length = len(list(itertools.takewhile(bool, matches)))
            best = max(best, (length, path[length], drawn[length]), key=lambda row: row[0])
        _, node, token = best
        return Accepted(tree.paths_NP[node, 1:], torch.tensor(token))

    return verify


def child_by_child(target: Model, mistake: str = "") -> Verifier:
    """Deterministic drafts tested one after the other, with one mistake planted in what a rejection leaves."""

    def verify(drafted: Drafted, coin: Coin) -> Accepted:
        tree, node = drafted.tree, 0
        while True:
            residual_V = target(drafted.prefixes[node]).clone()
            for child in tree.children[node]:
                token = drafted.tokens_N[child]
                if coin.accept(float(residual_V[token])):
                    node = child
                    break
                if mistake != "the rejected token stays":
                    residual_V[token] = 0
                if mistake != "no renormalising":
                    residual_V /= residual_V.sum()
            else:
                return Accepted(tree.paths_NP[node, 1:], coin.draw(residual_V))

    return verify
