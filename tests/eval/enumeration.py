"""Every way that the random choices of a program can fall, with its probability, and the laws that follow from it.

A `ScriptedCoin` stands in for the source of randomness: `outcomes` runs a program once for every path through its
choices. Laws are compared over one length of tokens, in fp64: what a cycle emits is completed with the target's own
draws.
"""

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
from eval.tree import Topology, Tree

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
        if not any(weights):
            weights = [1.0] * len(weights)  # may be any token, and must not matter
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
    """A draft tree with its tokens; `proposal` if the drafter itself says how they were drawn."""

    tree: Topology
    tokens_N: Tensor
    prefixes: list[Tokens]  # the tokens from the root to each node, the root's left out
    proposal: Proposal | None = None

    def rows(self, model: Model) -> Tensor:
        return torch.stack([model(prefix) for prefix in self.prefixes])


Verifier = Callable[[Drafted, Coin], Accepted]


def emitted_law(draft: Callable[[Coin], Drafted], verify: Verifier) -> Law:
    """The law of the tokens that one cycle emits."""
    law: Law = defaultdict(float)
    for drafted_probability, drafted in outcomes(draft):
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


def assert_lossless(law: Law, target: Model, length: int) -> None:
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert max(map(len, law)) <= length
    assert total_variation(law, target, length) < 1e-12


def assert_only_the_first_is_lossless(rightly: Law, wrongly: Law, target: Model, length: int) -> None:
    assert_lossless(rightly, target, length)
    assert sum(wrongly.values()) == pytest.approx(1, abs=1e-12)
    assert total_variation(wrongly, target, length) > 1e-3


# Drafts from a table: (the drafter's law [V], the siblings' ranks, coin) -> one token per sibling, in node order.
Siblings = Callable[[Tensor, list[int], Coin], list[int]]


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


def draft(tree: Tree, drafter: Model, siblings: Siblings, coin: Coin) -> Drafted:
    tokens = [0] * tree.size
    prefixes: list[Tokens] = [()] * tree.size
    for node, children in enumerate(tree.children):
        ranks = [tree.nodes[child][-1] for child in children]
        drawn = siblings(drafter(prefixes[node]), ranks, coin) if children else []
        for child, token in zip(children, drawn, strict=True):
            tokens[child], prefixes[child] = token, (*prefixes[node], token)
    return Drafted(tree, torch.tensor(tokens), prefixes)


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


RELATIONS = ["positive", "zeros", "tied", "filtered", "equal", "disjoint"]


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


def at_temperatures(*temperatures: float) -> list[Model]:
    """One random table of logits over 3 tokens, read at each temperature."""
    generator = torch.Generator().manual_seed(0)
    logits = memory(lambda: torch.randn(3, dtype=torch.float64, generator=generator))

    def at(config: SamplingConfig) -> Model:
        return cache(lambda prefix: probabilities(logits(prefix), config))

    return [at(SamplingConfig(temperature)) for temperature in temperatures]
