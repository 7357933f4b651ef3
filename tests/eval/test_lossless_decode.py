"""Losslessness of whole generations by exact enumeration: the real decoding loop over a table of laws.

Every draw of the drafter and of the acceptance in all cycles is enumerated; what is generated must have the law of the
target's own sampling. A mistake that a single cycle cannot show fails here.
"""

import itertools
from collections import defaultdict
from typing import cast

import pytest
import torch

import eval.decode
from eval.accept import Proposal
from eval.decode import AcceptanceConfig, Generation, speculative_generate
from eval.drafters import Draft
from eval.level_drafter import DynamicDrafter, DynamicTree, StaticDrafter
from eval.sampling import Coin, SamplingConfig, probabilities
from eval.stopping import StopConditions
from eval.tree import Tree
from heads.cache import TreeCache
from heads.target import Target
from tests.eval.enumeration import (
    RELATIONS,
    Law,
    Model,
    assert_lossless,
    assert_only_the_first_is_lossless,
    outcomes,
    pair,
)
from tests.eval.table_models import TableCache, TableStepper, TableTarget, after

PROMPT = (1, 0)
SAMPLING = SamplingConfig(temperature=0.7, top_k=2)
TOP = AcceptanceConfig(rule="sampling", sampling=SAMPLING, drafts="top")
SAMPLED = AcceptanceConfig(rule="sampling", sampling=SAMPLING, drafts="sampled")
BLOCK = AcceptanceConfig(rule="block", sampling=SAMPLING, drafts="sampled")

CASES = {  # (vocabulary, rule, tree, new tokens)
    "dynamic chain": (2, TOP, DynamicTree(nodes=2, depth=2, width=1), 5),
    "dynamic": (2, TOP, DynamicTree(nodes=3, depth=2, width=2), 5),
    "likeliest": (2, TOP, Tree.from_choices([[0], [0, 0]]), 5),
    "sampled chain": (2, SAMPLED, Tree.chain(2), 5),
    "sampled": (2, SAMPLED, Tree.from_choices([[0], [0, 0], [0, 1]]), 6),
    "block": (2, BLOCK, Tree.chain(2), 5),
    "dynamic of three": (3, TOP, DynamicTree(nodes=2, depth=2, width=2), 4),
    "sampled of three": (3, SAMPLED, Tree.from_choices([[0], [1]]), 5),
    "block of three": (3, BLOCK, Tree.chain(2), 5),
}
FAST = [(case, "positive") for case in ("dynamic chain", "dynamic", "sampled chain", "block")]
SLOW = [pair for pair in itertools.product(CASES, RELATIONS) if pair not in FAST]
Generations = list[tuple[float, Generation]]


def build(drafter: Model, vocabulary: int, acceptance: AcceptanceConfig, tree: Tree | DynamicTree):
    stepper = TableStepper(drafter, vocabulary)
    if isinstance(tree, DynamicTree):
        return DynamicDrafter(stepper, tree)
    return StaticDrafter(stepper, tree, acceptance.sampling if acceptance.drafts == "sampled" else None)


def generations(
    target: Model,
    drafter: StaticDrafter | DynamicDrafter,
    acceptance: AcceptanceConfig,
    new_tokens: int,
    eos_ids: tuple[int, ...] = (),
    cache: TableCache | None = None,
) -> Generations:
    """Every generation that the random choices can lead to, with its probability."""
    conditions = StopConditions(eos_ids, max_new_tokens=new_tokens)
    table = cast(Target, TableTarget(target))
    tree_cache = cast(TreeCache, cache or TableCache())

    def generate(coin: Coin) -> Generation:
        if isinstance(drafter, StaticDrafter):
            drafter.coin = coin
        return speculative_generate(table, drafter, PROMPT, conditions, acceptance, tree_cache, coin)

    return list(outcomes(generate))


def law_of(found: Generations) -> Law:
    law: Law = defaultdict(float)
    for probability, generation in found:
        law[tuple(generation.tokens)] += probability
    return law


def plain(target: Model) -> Model:
    """The target's own sampling after the prompt."""
    return after(lambda tokens: probabilities(target(tokens).log(), SAMPLING), PROMPT)


@pytest.mark.parametrize(("case", "relation"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_what_is_generated_has_the_law_of_the_target(case: str, relation: str):
    vocabulary, acceptance, tree, new_tokens = CASES[case]
    target, drafter = pair(relation, vocabulary, seed=3)
    found = generations(target, build(drafter, vocabulary, acceptance, tree), acceptance, new_tokens)

    assert_lossless(law_of(found), plain(target), new_tokens)
    accepted = {tuple(cycle.accepted for cycle in generation.cycles[:2]) for _, generation in found}
    assert (case, relation) in SLOW or any(min(counts) > 0 for counts in accepted if len(counts) == 2)


@pytest.mark.parametrize("case", ["dynamic", "sampled", "block"])
def test_an_end_of_text_inside_an_accepted_block(case: str):
    """Completed with the target's own draws, what ends early has the law of what does not."""
    vocabulary, acceptance, tree, _ = CASES[case]
    target, drafter = pair("positive", vocabulary, seed=3)
    law = law_of(generations(target, build(drafter, vocabulary, acceptance, tree), acceptance, 4, eos_ids=(1,)))

    assert all(1 not in tokens[:-1] for tokens in law)
    assert_lossless(law, plain(target), 4)


class StaleLaws(StaticDrafter):
    """Tells the laws of its first draft for every later one."""

    def reset(self, prompt_T, features):
        super().reset(prompt_T, features)
        self.first_NV: torch.Tensor | None = None

    def propose(self, root, max_depth):
        draft = super().propose(root, max_depth)
        if draft.proposal is None:
            return draft
        self.first_NV = draft.proposal.laws_NV if self.first_NV is None else self.first_NV
        return Draft(draft.tree, draft.tokens_N, Proposal(self.first_NV[: draft.tree.size], replacement=False))


class ForgetfulCache(TableCache):
    """Commits the certain token and forgets the accepted drafts behind it."""

    def commit(self, path_P):
        super().commit(path_P[:1])


@pytest.mark.parametrize("acceptance", [SAMPLED, BLOCK])
def test_laws_of_an_earlier_cycle(acceptance: AcceptanceConfig):
    target, drafter = pair("positive", 2, seed=3)
    right, stale = (kind(TableStepper(drafter, 2), Tree.chain(1), SAMPLING) for kind in (StaticDrafter, StaleLaws))

    rightly, wrongly = (law_of(generations(target, each, acceptance, 5)) for each in (right, stale))
    assert_only_the_first_is_lossless(rightly, wrongly, plain(target), 5)


def test_accepted_drafts_that_are_not_committed():
    target, drafter = pair("positive", 2, seed=3)
    right = StaticDrafter(TableStepper(drafter, 2), Tree.chain(1), SAMPLING)

    caches = TableCache(), ForgetfulCache()
    rightly, wrongly = (law_of(generations(target, right, SAMPLED, 5, cache=cache)) for cache in caches)
    assert_only_the_first_is_lossless(rightly, wrongly, plain(target), 5)


def test_a_wrong_rule_in_the_loop(monkeypatch: pytest.MonkeyPatch):
    """Drafts that the context determines, judged as if they were drawn."""
    target, drafter = pair("positive", 2, seed=3)
    _, acceptance, tree, _ = CASES["dynamic chain"]
    rightly = law_of(generations(target, build(drafter, 2, acceptance, tree), acceptance, 4))
    accept = eval.decode.accept_sampling

    def wrong(tree, tokens_N, probs_NV, proposal, coin):
        return accept(tree, tokens_N, probs_NV, Proposal(torch.full_like(probs_NV, 0.5), replacement=False), coin)

    monkeypatch.setattr(eval.decode, "accept_sampling", wrong)
    wrongly = law_of(generations(target, build(drafter, 2, acceptance, tree), acceptance, 4))
    assert_only_the_first_is_lossless(rightly, wrongly, plain(target), 4)
