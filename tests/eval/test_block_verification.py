"""Block verification by exact enumeration, as in `test_lossless.py`: its law, its worth, wrong variants that fail."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from eval.accept import Accepted, Proposal
from eval.block_verification import accept_block
from eval.sampling import Coin, TorchCoin
from eval.tree import Tree
from tests.eval.enumeration import (
    Drafted,
    Law,
    Model,
    Tokens,
    Verifier,
    completed,
    draft,
    emitted_law,
    independent,
    lossless,
    pair,
    total_variation,
)

SIZES = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3)]  # (vocabulary, drafts)


def constant(*law: float) -> Model:
    law_V = torch.tensor(law, dtype=torch.float64)
    return lambda prefix: law_V


TOY = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)  # (target, drafter)
SKEWED = constant(0.5, 0.2, 0.3), constant(0.05, 0.15, 0.8)  # a draft of token 2 weighs 3/8 and may yet stand alone


def nearly_equal(vocabulary: int, seed: int) -> tuple[Model, Model]:
    """Laws that differ by rounding only: no more than the last bits."""
    target, _ = pair("positive", vocabulary, seed)
    return target, lambda prefix: (third := target(prefix) / 3) / third.sum()


def certain_drafts(vocabulary: int, seed: int) -> tuple[Model, Model]:
    target, drafter = pair("positive", vocabulary, seed)
    return target, lambda prefix: torch.eye(vocabulary, dtype=torch.float64)[drafter(prefix).argmax()]


def models(relation: str, vocabulary: int, seed: int) -> tuple[Model, Model]:
    makers = {"nearly equal": nearly_equal, "certain drafts": certain_drafts}
    return makers[relation](vocabulary, seed) if relation in makers else pair(relation, vocabulary, seed)


RELATIONS = ["positive", "zeros", "tied", "filtered", "equal", "disjoint", "nearly equal", "certain drafts"]


def block(target: Model, drafter: Model) -> Verifier:
    def verify(drafted: Drafted, coin: Coin) -> Accepted:
        proposal = Proposal(drafted.rows(drafter), replacement=False)
        return accept_block(drafted.tree, drafted.tokens_N, drafted.rows(target), proposal, coin)

    return verify


def law_of(verify: Verifier, drafter: Model, drafts: int) -> Law:
    return emitted_law(partial(draft, Tree.chain(drafts), drafter, independent), verify)


def expected_drafts_accepted(law: Law) -> float:
    return sum(probability * (len(tokens) - 1) for tokens, probability in law.items())


@pytest.mark.parametrize("relation", RELATIONS)
def test_emitted_tokens_have_the_law_of_the_target(relation: str):
    for seed, (vocabulary, drafts) in enumerate([(4, 0), *SIZES]):
        target, drafter = models(relation, vocabulary, seed)
        law = law_of(block(target, drafter), drafter, drafts)

        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        assert max(map(len, law)) <= drafts + 1
        assert total_variation(law, target, drafts + 1) < 1e-12, (vocabulary, drafts)


def test_the_toy_of_the_paper_accepts_eleven_ninths_where_token_wise_accepts_ten():
    target, drafter = TOY

    by_block = law_of(block(target, drafter), drafter, drafts=2)
    token_wise = law_of(lossless(target, drafter, independent), drafter, drafts=2)

    assert expected_drafts_accepted(by_block) == pytest.approx(11 / 9, abs=1e-12)
    assert expected_drafts_accepted(token_wise) == pytest.approx(10 / 9, abs=1e-12)
    assert total_variation(by_block, target, 3) < 1e-12
    assert total_variation(token_wise, target, 3) < 1e-12


@pytest.mark.parametrize("relation", RELATIONS)
def test_never_fewer_tokens_than_token_wise(relation: str):
    gains = []
    for seed, (vocabulary, drafts) in itertools.product(range(2), SIZES):
        target, drafter = models(relation, vocabulary, seed)
        by_block = law_of(block(target, drafter), drafter, drafts)
        token_wise = law_of(lossless(target, drafter, independent), drafter, drafts)

        gains.append(expected_drafts_accepted(by_block) - expected_drafts_accepted(token_wise))
        assert gains[-1] > -1e-12, (vocabulary, drafts, seed)
        assert drafts > 1 or gains[-1] < 1e-12, "on one draft the rules are the same"
    # The rules differ where a weight below 1 can rise again: where no p / q is above 1, it cannot.
    same = relation in ("equal", "nearly equal", "disjoint", "certain drafts")
    assert max(gains) < 1e-12 if same else max(gains) > 1e-2


def prefix_weights(target: Model, drafter: Model, tokens: Tokens) -> list[float]:
    weights = [1.0]
    for n, token in enumerate(tokens):
        weights.append(min(1.0, weights[-1] * float(target(tokens[:n])[token] / drafter(tokens[:n])[token])))
    return weights


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_drafted_prefix_stands_with_the_probability_of_its_weight(relation: str):
    for seed, (vocabulary, drafts) in enumerate(SIZES):
        target, drafter = models(relation, vocabulary, seed)
        drafted = completed({(): 1.0}, drafter, drafts)
        standing = [
            sum(q * prefix_weights(target, drafter, tokens)[depth] for tokens, q in drafted.items() if q > 0)
            for depth in range(1, drafts + 1)
        ]
        law = law_of(block(target, drafter), drafter, drafts)

        for depth, expected in enumerate(standing, start=1):
            longer = sum(probability for tokens, probability in law.items() if len(tokens) > depth)
            assert longer == pytest.approx(expected, abs=1e-12)


def weights_capped_at_the_end(target: Model, drafter: Model, tokens: Tokens) -> list[float]:
    ratios = [float(target(tokens[:n])[token] / drafter(tokens[:n])[token]) for n, token in enumerate(tokens)]
    return [min(1.0, math.prod(ratios[:n])) for n in range(len(ratios) + 1)]


MISTAKES = (
    "a stop at the first rejection",
    "an unweighted residual",
    "the weight in place of h",
    "the product capped at the end",
)


def naive(target: Model, drafter: Model, mistake: str = "") -> Verifier:
    """Algorithm 2 token by token in floats, with one mistake planted."""

    weigh = weights_capped_at_the_end if mistake == "the product capped at the end" else prefix_weights

    def chance(weight: float, p_V: Tensor, q_V: Tensor) -> float:
        surplus = float((weight * p_V - q_V).clamp_min(0).sum())
        if mistake == "the weight in place of h":
            return weight
        return surplus / (surplus + 1 - weight)

    def passing(weights: list[float], rows: list[tuple[Tensor, Tensor]], coin: Coin) -> Iterator[int]:
        yield 0
        for n in range(1, len(weights)):
            last = n == len(weights) - 1
            if coin.accept(weights[n] if last else chance(weights[n], *rows[n])):
                yield n
            elif mistake == "a stop at the first rejection":
                return

    def verify(drafted: Drafted, coin: Coin) -> Accepted:
        tree = drafted.tree
        rows = list(zip(drafted.rows(target), drafted.rows(drafter), strict=True))
        weights = weigh(target, drafter, tuple(drafted.tokens_N[1:].tolist()))
        node = max(passing(weights, rows, coin))
        p_V, q_V = rows[node]
        weight = 1.0 if mistake == "an unweighted residual" else weights[node]
        residual_V = (weight * p_V - q_V).clamp_min(0)
        if node == tree.depth or not residual_V.any():  # only a mistake stops where nothing is owed
            residual_V = p_V
        return Accepted(tree.paths_NP[node, 1:], coin.draw(residual_V))

    return verify


@pytest.mark.parametrize("drafts", [2, 3])
def test_equals_the_algorithm_token_by_token(drafts: int):
    target, drafter = SKEWED

    ours, theirs = (law_of(rule(target, drafter), drafter, drafts) for rule in (block, naive))
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[tokens] - theirs[tokens]) for tokens in ours) < 1e-12


@pytest.mark.parametrize("drafts", [2, 3])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_variants_fail_the_same_check(mistake: str, drafts: int):
    target, drafter = SKEWED

    rightly = law_of(block(target, drafter), drafter, drafts)
    wrongly = law_of(naive(target, drafter, mistake), drafter, drafts)

    assert total_variation(rightly, target, drafts + 1) < 1e-12
    assert sum(wrongly.values()) == pytest.approx(1, abs=1e-12)
    assert total_variation(wrongly, target, drafts + 1) > 1e-3


@dataclass
class LikeliestCoin:
    """Draws the likeliest token, the first of equals, and keeps the weights that it was shown."""

    seen: list[Tensor] = field(default_factory=list)

    def accept(self, probability: float) -> bool:
        raise AssertionError("block verification draws; it asks for no single coin")

    def draw(self, weights_NV: Tensor) -> Tensor:
        self.seen.append(weights_NV)
        return weights_NV.argmax(-1)


def test_the_chain_drawn_in_the_module():
    probs_NV, laws_NV = (model(()).expand(3, 2) for model in TOY)
    tokens_N, coin = torch.tensor([9, 0, 1]), LikeliestCoin()

    accepted = accept_block(Tree.chain(2), tokens_N, probs_NV, Proposal(laws_NV, replacement=False), coin)

    odds_N2, residual_1V = coin.seen  # [1 - w, S], and what follows the last draft
    torch.testing.assert_close(odds_N2, torch.tensor([[0, 1 / 3], [1 / 2, 0], [0, 1]], dtype=torch.float64))
    torch.testing.assert_close(residual_1V, probs_NV[:1])
    assert accepted.to_host(tokens_N) == ([1, 2], [0, 1, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_laws_accept_every_draft(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    for drafts in range(6):
        probs_NV = torch.rand(drafts + 1, 50, generator=generator, dtype=dtype).softmax(-1)
        tokens_N = torch.randint(50, (drafts + 1,), generator=generator)

        accepted = accept_block(
            Tree.chain(drafts), tokens_N, probs_NV, Proposal(probs_NV, replacement=True), TorchCoin(generator)
        )
        assert accepted.path_D.tolist() == list(range(1, drafts + 1))


def test_a_draft_of_law_zero_never_stands():
    probs_NV = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    laws_NV = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    coin = TorchCoin(torch.Generator().manual_seed(0))

    for undrawn in (0, 2):  # the target may or may not know the token
        accepted = accept_block(
            Tree.chain(2), torch.tensor([0, undrawn, 0]), probs_NV, Proposal(laws_NV, replacement=False), coin
        )
        assert accepted.path_D.tolist() == [-1, -1]
        assert accepted.token == 0


class FirstCoin(LikeliestCoin):
    """Draws 0 wherever there is a choice of two, even what is certain not to come, as rounding can."""

    def draw(self, weights_NV: Tensor) -> Tensor:
        return super().draw(weights_NV) * (weights_NV.shape[-1] > 2)


def test_a_zero_residual_falls_back_on_the_target():
    probs_NV = torch.tensor([0.2, 0.7, 0.1]).expand(3, 3)

    accepted = accept_block(Tree.chain(2), torch.tensor([0, 1, 1]), probs_NV, Proposal(probs_NV, False), FirstCoin())
    assert accepted.path_D.tolist() == [-1, -1]
    assert accepted.token == 1


def test_an_overflowing_ratio_gives_no_nan():
    # p / q overflows in float32 at the second draft; the first has already made the weight 0.
    probs_NV = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    laws_NV = torch.tensor([[1.0, 0.0], [1e-40, 1.0], [0.5, 0.5]])

    coin = LikeliestCoin()

    accepted = accept_block(Tree.chain(2), torch.tensor([0, 0, 0]), probs_NV, Proposal(laws_NV, False), coin)
    assert all(weights.isfinite().all() for weights in coin.seen)
    assert accepted.path_D.tolist() == [-1, -1]
    assert accepted.token == 1


def test_refuses_a_tree_that_branches():
    tree = Tree.from_choices([[0], [1], [0, 0]])
    probs_NV = torch.full((4, 3), 1 / 3)

    with pytest.raises(ValueError, match=r"needs a chain, .* 3 draft tokens at depth 2; use a tree of width one"):
        accept_block(tree, torch.zeros(4).long(), probs_NV, Proposal(probs_NV, False), LikeliestCoin())


def test_a_chain_of_any_ranks_will_do():
    tree, tokens_N = Tree.from_choices([[2], [2, 1]]), torch.tensor([0, 1, 2])
    probs_NV = torch.eye(3)[[1, 2, 0]]

    accepted = accept_block(tree, tokens_N, probs_NV, Proposal(probs_NV, False), LikeliestCoin())
    assert accepted.to_host(tokens_N) == ([1, 2], [1, 2, 0])


class MetaCoin(TorchCoin):
    """`TorchCoin.draw` on the meta device, which has no generators."""

    def __init__(self) -> None:
        super().__init__(torch.Generator())

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, device="meta")


def test_reads_nothing_on_the_host():
    # A meta tensor has no values: whatever would wait for the device raises.
    probs_NV = torch.zeros(4, 9, device="meta")
    tokens_N = torch.zeros(4, dtype=torch.long, device="meta")

    accepted = accept_block(Tree.chain(3).to("meta"), tokens_N, probs_NV, Proposal(probs_NV, False), MetaCoin())
    assert accepted.path_D.shape == (3,)
    assert accepted.token.shape == ()
