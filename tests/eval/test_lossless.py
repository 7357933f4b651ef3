"""Losslessness by exact enumeration, and known wrong verifiers that must fail the same check.

Every outcome of the draws and coins of one cycle is enumerated with its probability in fp64. The law of the
emitted tokens, completed with the target's own draws to one length, must equal the target's law of that many
tokens.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from eval.accept import Accepted, Proposal, accept_sampling
from eval.sampling import Coin, SamplingConfig, probabilities
from eval.tree import Tree

T = TypeVar("T")
Tokens = tuple[int, ...]
Law = dict[Tokens, float]
Model = Callable[[Tokens], Tensor]  # what follows a prefix: [V]


@dataclass
class ScriptedCoin:
    """Replays a script of choices, then takes the first possible one and notes the alternatives."""

    script: Tokens
    probability: float = 1.0
    taken: Tokens = ()
    alternatives: list[Tokens] = field(default_factory=list)

    def _choose(self, weights: list[float]) -> int:
        possible = [choice for choice, weight in enumerate(weights) if weight > 0]
        choice, *others = [self.script[len(self.taken)]] if len(self.taken) < len(self.script) else possible
        self.alternatives += [(*self.taken, other) for other in others]
        self.taken += (choice,)
        self.probability *= weights[choice] / sum(weights)
        return choice

    def accept(self, probability: float) -> bool:
        return self._choose([1 - probability, probability]) == 1

    def draw(self, weights_NV: Tensor) -> Tensor:
        rows = weights_NV.tolist()
        return torch.tensor(self._choose(rows) if weights_NV.ndim == 1 else [self._choose(row) for row in rows])


def outcomes(run: Callable[[Coin], T]) -> Iterator[tuple[float, T]]:
    """(probability, result) of every way that the random choices of `run` can fall."""
    scripts: list[Tokens] = [()]
    while scripts:
        coin = ScriptedCoin(scripts.pop())
        result = run(coin)
        yield coin.probability, result
        scripts += coin.alternatives


@dataclass(frozen=True)
class Drafted:
    tree: Tree
    tokens_N: Tensor
    prefixes: list[Tokens]  # the tokens from the root to each node, the root's left out

    def rows(self, model: Model) -> Tensor:
        return torch.stack([model(prefix) for prefix in self.prefixes])


# (the drafter's law [V], the siblings' ranks, coin) -> one token per sibling, in node order
Siblings = Callable[[Tensor, list[int], Coin], list[int]]
Verifier = Callable[[Drafted, Coin], Accepted]


def top_ranks(law_V: Tensor, ranks: list[int], coin: Coin) -> list[int]:
    order = law_V.argsort(descending=True, stable=True).tolist()
    return [order[rank % len(order)] for rank in ranks]


def independent(law_V: Tensor, ranks: list[int], coin: Coin) -> list[int]:
    return [int(coin.draw(law_V)) for _ in ranks]


def without_replacement(law_V: Tensor, ranks: list[int], coin: Coin) -> list[int]:
    law_V, tokens = law_V.clone(), []
    for _ in ranks:
        tokens.append(int(coin.draw(law_V)) if law_V.sum() > 0 else 0)
        law_V[tokens[-1]] = 0
    return tokens


def likeliest_first(law_V: Tensor, ranks: list[int], coin: Coin) -> list[int]:
    return sorted(without_replacement(law_V, ranks, coin), key=lambda token: -law_V[token])


def draft(tree: Tree, drafter: Model, siblings: Siblings, coin: Coin) -> Drafted:
    tokens = [0] * tree.size
    prefixes: list[Tokens] = [()] * tree.size
    for node, children in enumerate(tree.children):
        ranks = [tree.nodes[child][-1] for child in children]
        drawn = siblings(drafter(prefixes[node]), ranks, coin) if children else []
        for child, token in zip(children, drawn, strict=True):
            tokens[child], prefixes[child] = token, (*prefixes[node], token)
    return Drafted(tree, torch.tensor(tokens), prefixes)


def emitted_law(tree: Tree, drafter: Model, siblings: Siblings, verify: Verifier) -> Law:
    law: Law = defaultdict(float)
    for drafted_probability, drafted in outcomes(partial(draft, tree, drafter, siblings)):
        for probability, accepted in outcomes(partial(verify, drafted)):
            _, emitted = accepted.to_host(drafted.tokens_N)
            law[tuple(emitted)] += drafted_probability * probability
    return law


def completed(law: Law, target: Model, length: int) -> Law:
    whole: Law = defaultdict(float)
    for tokens, probability in law.items():
        if len(tokens) == length:
            whole[tokens] += probability
            continue
        longer = {(*tokens, x): probability * p for x, p in enumerate(target(tokens).tolist())}
        for more, mass in completed(longer, target, length).items():
            whole[more] += mass
    return whole


def total_variation(law: Law, target: Model, length: int) -> float:
    """Between the completed law of emitted tokens and the target's law of `length` tokens; 0 if lossless."""
    emitted, wanted = completed(law, target, length), completed({(): 1.0}, target, length)
    return sum(abs(emitted[tokens] - wanted[tokens]) for tokens in emitted.keys() | wanted.keys()) / 2


def lossless(target: Model, drafter: Model, siblings: Siblings) -> Verifier:
    def verify(drafted: Drafted, coin: Coin) -> Accepted:
        drawn = siblings in (independent, without_replacement)
        proposal = Proposal(drafted.rows(drafter), siblings is independent) if drawn else None
        return accept_sampling(drafted.tree, drafted.tokens_N, drafted.rows(target), proposal, coin)

    return verify


def memory(make_row: Callable[[], Tensor]) -> Model:
    rows: dict[Tokens, Tensor] = {}

    def model(prefix: Tokens) -> Tensor:
        if prefix not in rows:
            rows[prefix] = make_row()
        return rows[prefix]

    return model


def pair(relation: str, vocabulary: int, seed: int) -> tuple[Model, Model]:
    """(target, drafter): random distributions in fp64 after every prefix."""
    generator = torch.Generator().manual_seed(seed)

    def positive() -> Tensor:
        return torch.rand(vocabulary, dtype=torch.float64, generator=generator) + 0.01

    def with_zeros() -> Tensor:
        kept = torch.randperm(vocabulary, generator=generator) < 1 + vocabulary // 2
        return positive() * kept

    def tied() -> Tensor:
        return torch.randint(1, 3, (vocabulary,), generator=generator).double()

    def filtered() -> Tensor:
        logits_V = 2 * torch.randn(vocabulary, dtype=torch.float64, generator=generator)
        return probabilities(logits_V, SamplingConfig(temperature=0.7, top_k=3, top_p=0.8))

    def normalised(make_row: Callable[[], Tensor]) -> Model:
        return memory(lambda: (row := make_row()) / row.sum())

    if relation == "equal":
        return (model := normalised(positive)), model
    if relation == "disjoint":
        upper = torch.arange(vocabulary) >= vocabulary // 2
        return normalised(lambda: positive() * upper), normalised(lambda: positive() * ~upper)
    make_row = {"positive": positive, "zeros": with_zeros, "tied": tied, "filtered": filtered}[relation]
    return normalised(make_row), normalised(make_row)


def random_tree(seed: int, num_nodes: int) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    nodes: list[Tokens] = [()]
    while len(nodes) <= num_nodes:
        parent, rank = (int(torch.randint(bound, (), generator=generator)) for bound in (len(nodes), 3))
        node = (*nodes[parent], rank)
        if len(node) <= 3 and node not in nodes:
            nodes.append(node)
    return Tree.from_choices(nodes[1:])


CASES = [  # (vocabulary, tree)
    (2, Tree.chain(0)),
    (5, Tree.chain(1)),
    (3, Tree.chain(3)),
    (5, Tree.from_choices([[0], [1]])),
    (4, Tree.from_choices([[0], [1], [2]])),
    (3, Tree.from_choices([[0], [1], [0, 0], [1, 0]])),
    (3, Tree.from_choices([[1], [4], [4, 2], [4, 2, 1]])),  # of 3 tokens, ranks 1 and 4 are the same
    (2, Tree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0]])),
    *[(3, random_tree(seed, num_nodes=4)) for seed in range(2)],
]


@pytest.mark.parametrize("relation", ["positive", "zeros", "tied", "filtered", "equal", "disjoint"])
@pytest.mark.parametrize("siblings", [top_ranks, independent, without_replacement])
def test_emitted_tokens_have_the_law_of_the_target(siblings: Siblings, relation: str):
    for seed, (vocabulary, tree) in enumerate(CASES):
        target, drafter = pair(relation, vocabulary, seed)
        law = emitted_law(tree, drafter, siblings, lossless(target, drafter, siblings))

        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        assert max(map(len, law)) <= tree.depth + 1
        assert total_variation(law, target, tree.depth + 1) < 1e-12, (vocabulary, tree)


SIBLINGS = Tree.from_choices([[0], [1]])
BUSHY = Tree.from_choices([[0], [1], [0, 0], [1, 0]])


def at_temperatures(*temperatures: float) -> list[Model]:
    """One random table of logits over 3 tokens, read at each temperature."""
    generator = torch.Generator().manual_seed(0)
    logits = memory(lambda: torch.randn(3, dtype=torch.float64, generator=generator))

    def at(config: SamplingConfig) -> Model:
        return cache(lambda prefix: probabilities(logits(prefix), config))

    return [at(SamplingConfig(temperature)) for temperature in temperatures]


def assert_only_the_right_one_is_lossless(
    tree: Tree,
    target: Model,
    drafter: Model,
    siblings: Siblings,
    wrong: Verifier,
    wrong_siblings: Siblings | None = None,
) -> None:
    length = tree.depth + 1
    rightly = emitted_law(tree, drafter, siblings, lossless(target, drafter, siblings))
    wrongly = emitted_law(tree, drafter, wrong_siblings or siblings, wrong)

    assert total_variation(rightly, target, length) < 1e-12
    assert sum(wrongly.values()) == pytest.approx(1, abs=1e-12)
    assert total_variation(wrongly, target, length) > 1e-3


@pytest.mark.parametrize("tree", [Tree.chain(1), Tree.chain(2), SIBLINGS, BUSHY])
@pytest.mark.parametrize("believed", [independent, without_replacement])
def test_top_ranks_tested_as_if_they_were_drawn(tree: Tree, believed: Siblings):
    target, drafter = pair("positive", 3, seed=0)

    wrong = lossless(target, drafter, believed)
    assert_only_the_right_one_is_lossless(tree, target, drafter, top_ranks, wrong)


@pytest.mark.parametrize("siblings", [top_ranks, independent, without_replacement])
def test_bonus_token_from_unprocessed_logits(siblings: Siblings):
    target, unprocessed, drafter = *at_temperatures(0.5, 1.0), pair("positive", 3, seed=0)[1]

    def wrong(drafted: Drafted, coin: Coin) -> Accepted:
        is_leaf_N = torch.tensor([not children for children in drafted.tree.children])
        rows = torch.where(is_leaf_N[:, None], drafted.rows(unprocessed), drafted.rows(target))
        swapped = dict(zip(drafted.prefixes, rows, strict=True))
        return lossless(lambda prefix: swapped[prefix], drafter, siblings)(drafted, coin)

    assert_only_the_right_one_is_lossless(BUSHY, target, drafter, siblings, wrong)


@pytest.mark.parametrize("siblings", [independent, without_replacement])
def test_temperature_applied_to_one_side_only(siblings: Siblings):
    target, raw_target = at_temperatures(0.5, 1.0)
    drafter, raw_drafter = at_temperatures(0.7, 1.4)

    for wrong in (lossless(raw_target, drafter, siblings), lossless(target, raw_drafter, siblings)):
        assert_only_the_right_one_is_lossless(BUSHY, target, drafter, siblings, wrong)


@pytest.mark.parametrize("tree", [SIBLINGS, BUSHY])
def test_children_tested_in_another_order_than_drawn(tree: Tree):
    target, drafter = pair("positive", 3, seed=0)

    wrong = lossless(target, drafter, without_replacement)
    assert_only_the_right_one_is_lossless(
        tree, target, drafter, without_replacement, wrong, wrong_siblings=likeliest_first
    )


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


@pytest.mark.parametrize("siblings", [independent, without_replacement])
def test_one_uniform_number_for_all_siblings(siblings: Siblings):
    # Needs a residual over two tokens or more: the only token of a residual passes whatever the number is.
    target, drafter = pair("positive", 4, seed=5)

    def wrong(drafted: Drafted, coin: Coin) -> Accepted:
        return lossless(target, drafter, siblings)(drafted, SharedUniformCoin(coin))

    assert_only_the_right_one_is_lossless(SIBLINGS, target, drafter, siblings, wrong)


@pytest.mark.parametrize("tree", [SIBLINGS, BUSHY])
def test_independent_draws_for_every_leaf_row(tree: Tree):
    """Medusa's `fast=False`: rows contradict each other where they share nodes; the longest match wins."""
    target, drafter = pair("positive", 3, seed=0)

    def wrong(drafted: Drafted, coin: Coin) -> Accepted:
        rows, tokens = drafted.rows(target), drafted.tokens_N.tolist()
        best = (-1, -1, -1)  # (accepted length, node, its draw)
        for leaf in (n for n, children in enumerate(tree.children) if not children):
            path = [node for node in tree.paths_NP[leaf].tolist() if node >= 0]
            drawn = coin.draw(rows[path]).tolist()
            matches = [tokens[node] == choice for node, choice in zip(path[1:], drawn, strict=False)]
            length = len(list(itertools.takewhile(bool, matches)))
            best = max(best, (length, path[length], drawn[length]), key=lambda row: row[0])
        _, node, token = best
        return Accepted(tree.paths_NP[node, 1:], torch.tensor(token))

    assert_only_the_right_one_is_lossless(tree, target, drafter, top_ranks, wrong)


@pytest.mark.parametrize("tree", [SIBLINGS, BUSHY])
def test_rejected_token_zeroed_without_renormalising(tree: Tree):
    target, drafter = pair("positive", 3, seed=0)

    def zeroing(drafted: Drafted, coin: Coin, *, renormalise: bool) -> Accepted:
        node = 0
        while True:
            residual_V = target(drafted.prefixes[node]).clone()
            for child in tree.children[node]:
                token = drafted.tokens_N[child]
                if coin.accept(float(residual_V[token])):
                    node = child
                    break
                residual_V[token] = 0
                residual_V /= residual_V.sum() if renormalise else 1
            else:
                return Accepted(tree.paths_NP[node, 1:], coin.draw(residual_V))

    right_law = emitted_law(tree, drafter, top_ranks, lambda *drafted: zeroing(*drafted, renormalise=True))
    assert total_variation(right_law, target, tree.depth + 1) < 1e-12
    assert_only_the_right_one_is_lossless(
        tree, target, drafter, top_ranks, lambda *drafted: zeroing(*drafted, renormalise=False)
    )
