"""The promise: whatever the heads, the tree and the stop condition, greedy decoding emits plain greedy's tokens."""

import random

import pytest
import torch

from eval.decode import (
    AcceptanceConfig,
    cache_capacity,
    plain_generate,
    speculative_generate,
)
from eval.drafters import Draft, MedusaDrafter
from eval.drafting import build_drafter
from eval.level_drafter import DynamicTree
from eval.sampling import SamplingConfig, TorchCoin, probabilities
from eval.stopping import StopConditions
from eval.tree import Tree
from heads.eagle3 import Eagle3Config
from heads.tiny import FAMILIES
from tests.heads.test_eagle import make

GREEDY = AcceptanceConfig()


class Oracle:
    """Drafts what plain greedy will emit (or, `right=False`, something else): its acceptance is known beforehand."""

    taps = ("final_norm",)

    def __init__(self, continuation: list[int], depth: int, right: bool = True):
        self.tree = Tree.chain(depth)
        self.depth, self.tree_size = depth, self.tree.size
        self.continuation, self.right = continuation, right
        self.emitted = 1

    def reset(self, prompt_T, features):
        self.emitted = 1

    def observe(self, features, path_P):
        self.emitted += len(path_P)

    def propose(self, root, max_depth):
        tree = self.tree.pruned(min(max_depth, self.tree.depth))
        coming = (self.continuation + [0] * tree.depth)[self.emitted : self.emitted + tree.depth]
        tokens = coming if self.right else [(token + 1) % 320 for token in coming]
        return Draft(tree, torch.tensor([int(root), *tokens]))


class Guesser(Oracle):
    """Drafts random tokens, but what plain greedy will emit on the path to one node of the tree."""

    def __init__(self, continuation: list[int], tree: Tree, rng: random.Random):
        super().__init__(continuation, tree.depth)
        self.tree, self.tree_size, self.rng = tree, tree.size, rng

    def propose(self, root, max_depth):
        tree = self.tree.pruned(min(max_depth, self.depth))
        coming = (self.continuation + [0] * tree.depth)[self.emitted : self.emitted + tree.depth]
        tokens = [int(root), *(self.rng.randrange(256) for _ in range(tree.size - 1))]
        node = self.rng.randrange(tree.size)
        while node:
            tokens[node] = coming[int(tree.depths_N[node]) - 1]
            node = int(tree.parents_N[node])
        return Draft(tree, torch.tensor(tokens))


def plain(target, prompt, conditions):
    cache = target.new_cache(cache_capacity(len(prompt), conditions, 1))
    return plain_generate(target, prompt, conditions, SamplingConfig(), cache)


def speculative(target, drafter, prompt, conditions, acceptance=GREEDY, coin=None):
    cache = target.new_cache(cache_capacity(len(prompt), conditions, drafter.tree_size))
    return speculative_generate(target, drafter, prompt, conditions, acceptance, cache, coin)


def random_tree(rng: random.Random, depth: int, top_k: int) -> Tree:
    nodes: set[tuple[int, ...]] = set()
    for _ in range(rng.randint(1, 12)):
        parent = rng.choice([(), *nodes])
        if len(parent) < depth:
            nodes.add((*parent, rng.randrange(top_k)))
    return Tree.from_choices(sorted(nodes))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_plain_greedy(family, tiny_target):
    rng = random.Random(family)
    accepted = 0
    for _ in range(6):
        accepted += accepted_of_equal_outputs(tiny_target(family), rng, lambda tree, free: Guesser(free, tree, rng))
    assert accepted >= 10


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_with_random_heads_equals_plain_greedy(family, tiny_target, random_heads):
    target, rng = tiny_target(family), random.Random(family)
    accepted = 0
    for case in range(30):
        heads = random_heads(target, seed=case, noise=rng.choice([0.0, 0.02, 0.3]), num_heads=3)
        accepted += accepted_of_equal_outputs(target, rng, lambda tree, _, heads=heads: MedusaDrafter(heads, tree))
    assert accepted > 0, "no draft was ever accepted: the test would not see a wrong commit"


def accepted_of_equal_outputs(target, rng: random.Random, make_drafter) -> int:
    """Decode one prompt both ways under one stop condition; how many draft tokens were accepted."""
    tree = random_tree(rng, 3, 6)
    prompt = [rng.randrange(256) for _ in range(rng.choice([1, 5, 14, 30]))]
    free = plain(target, prompt, StopConditions(max_new_tokens=40)).tokens
    middle = rng.randrange(1, 39)
    text = target.tokenizer.decode(free[middle : middle + 2])
    conditions = rng.choice([
        StopConditions(max_new_tokens=rng.choice([1, 2, 3, 5, 7, 40])),
        StopConditions(max_new_tokens=40, eos_ids=(free[middle],)),
        StopConditions(max_new_tokens=40, eos_ids=(free[middle], free[middle // 2])),
        StopConditions(max_new_tokens=40, stop_strings=(text,) if text else ()),
        StopConditions(max_new_tokens=40, max_context=len(prompt) + rng.randint(1, 20)),
    ])  # fmt: skip
    expected = plain(target, prompt, conditions)
    found = speculative(target, make_drafter(tree, free), prompt, conditions)
    assert found.tokens == expected.tokens
    assert found.reason == expected.reason
    assert sum(cycle.emitted for cycle in found.cycles) == len(found.tokens) - 1 == found.timing.tokens
    return sum(cycle.accepted for cycle in found.cycles)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_greedy_equals_transformers_generate(family, tiny_target):
    target = tiny_target(family)
    for seed in range(3):
        prompt = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(seed))
        reference = target.model.generate(
            prompt, max_new_tokens=30, do_sample=False, eos_token_id=7, attention_mask=torch.ones_like(prompt)
        )
        found = plain(target, prompt[0].tolist(), StopConditions(max_new_tokens=30, eos_ids=(7,)))
        assert found.tokens == reference[0, 9:].tolist()


@pytest.mark.parametrize("depth", [1, 4])
def test_an_oracle_reaches_depth_plus_one_and_a_liar_one(depth, tiny_target):
    target = tiny_target()
    prompt, conditions = [1, 2, 3], StopConditions(max_new_tokens=31)
    expected = plain(target, prompt, conditions).tokens
    right = speculative(target, Oracle(expected, depth), prompt, conditions)
    wrong = speculative(target, Oracle(expected, depth, right=False), prompt, conditions)
    assert right.tokens == wrong.tokens == expected
    assert len(right.cycles) == -(-30 // (depth + 1))
    assert len(wrong.cycles) == 30
    assert not any(cycle.accepted for cycle in wrong.cycles)


def test_a_prompt_longer_than_the_context_is_refused(tiny_target, random_heads):
    target = tiny_target()
    conditions = StopConditions(max_new_tokens=4, max_context=8)
    with pytest.raises(ValueError, match="the prompt has 9 tokens but the context holds 8"):
        plain(target, list(range(9)), conditions)


def test_block_verification_is_for_sampled_drafts():
    with pytest.raises(ValueError, match=r"acceptance.rule=block gains nothing .* set acceptance.drafts=sampled"):
        AcceptanceConfig(rule="block", sampling=SamplingConfig(temperature=1.0))


def test_a_tree_deeper_than_the_heads_is_refused(tiny_target, random_heads):
    heads = random_heads(tiny_target(), num_heads=2)
    with pytest.raises(ValueError, match=r"tree node \[0,0,0\] is at depth 3 but the heads draft 2"):
        MedusaDrafter(heads, Tree.chain(3))


BUSHY = Tree.from_choices([[0], [1], [0, 0], [1, 0]])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["medusa", "eagle3"])
@pytest.mark.parametrize(
    ("rule", "drafts", "tree"),
    [
        ("sampling", "top", BUSHY),
        ("sampling", "sampled", BUSHY),
        ("block", "sampled", Tree.chain(2)),
        ("sampling", "top", DynamicTree(nodes=4, depth=2, width=2)),
    ],
    ids=["top", "sampled", "block", "dynamic"],
)
def test_sampling_keeps_the_law_of_the_second_and_third_token(family, rule, drafts, tree, tiny_target, random_heads):
    """The law of (x2, x3) from many seeded runs against exact probabilities: the residual and the bonus path."""
    if family == "medusa" and isinstance(tree, DynamicTree):
        pytest.skip("Medusa heads have no dynamic tree")
    target = tiny_target()
    sampling = SamplingConfig(temperature=1.5, top_k=3)
    acceptance = AcceptanceConfig(rule=rule, sampling=sampling, drafts=drafts)
    heads = random_heads(target, noise=0.05, num_heads=2) if family == "medusa" else make(target, Eagle3Config())
    prompt, conditions, runs = [5, 6, 7], StopConditions(max_new_tokens=3), 1500
    counts: dict[tuple[int, ...], int] = {}
    coin = TorchCoin(torch.Generator().manual_seed(1))
    drafter = build_drafter(heads, tree, sampling if drafts == "sampled" else None, coin)
    for _ in range(runs):
        tokens = speculative(target, drafter, prompt, conditions, acceptance, coin).tokens
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    law = exact_law(target, prompt, sampling, 3)
    assert set(counts) <= set(law)
    statistic = sum((counts.get(key, 0) - runs * p) ** 2 / (runs * p) for key, p in law.items())
    degrees = len(law) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5  # four standard deviations of chi-squared


def exact_law(target, prompt, sampling, length):
    law = {(): 1.0}
    for _ in range(length):
        grown = {}
        for path, mass in law.items():
            ids = torch.tensor([[*prompt, *path]])
            with torch.inference_mode():
                probs = probabilities(target.model(ids, use_cache=False).logits[0, -1], sampling)
            for token in probs.nonzero().flatten().tolist():
                grown[(*path, token)] = mass * probs[token].item()
        law = grown
    return law
