"""Drafting level by level: the cache against none, dynamic trees against the definition, and what is decoded."""

import itertools

import pytest
import torch

from eval.accept import accept_greedy
from eval.decode import AcceptanceConfig, cache_capacity, plain_generate, speculative_generate
from eval.drafting import build_drafter
from eval.eagle_stepper import EagleStepper
from eval.level_drafter import DynamicDrafter, DynamicTree
from eval.sampling import SamplingConfig, TorchCoin
from eval.stopping import StopConditions
from eval.tree import Topology, Tree
from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.eagle_layer import LayerShape
from tests.heads.test_eagle import make

CONFIGS = {
    "eagle3": Eagle3Config(),
    "eagle3.1": Eagle3Config(fc_norm=True, norm_output=True, norm_before_residual=True),
    "window": Eagle3Config(layer=LayerShape(sliding_window=4)),
    "eagle": EagleConfig(),
}
TREE = Tree.from_choices([[0], [1], [3], [0, 0], [0, 2], [1, 1], [0, 2, 0], [1, 1, 0], [1, 1, 1]])


def one_by_one(heads, ids_T, features):
    """The logits behind a sequence without a cache: everything is entered anew."""
    stepper = EagleStepper(heads)
    stepper.reset(ids_T[:-1], {tap: feature[:, : len(ids_T) - 1] for tap, feature in features.items()})
    return stepper, stepper.begin(ids_T[-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_drafting_with_the_cache_equals_drafting_without(name, tiny_target):
    """After any sequence of partial acceptances, at the root and down a branch."""
    target = tiny_target("llama")
    heads = make(target, CONFIGS[name])
    generator = torch.Generator().manual_seed(2)
    ids_T = torch.randint(0, 256, (40,), generator=generator)
    places_T = torch.arange(40)
    features = target.features(ids_T[None], places_T[None], torch.zeros(1, 40, dtype=torch.long), heads.taps)
    stepper, place = EagleStepper(heads, capacity=8), 7
    stepper.reset(ids_T[:place], {tap: feature[:, :place] for tap, feature in features.items()})
    for accepted in (0, 2, 1, 0, 3, 3, 1):
        fresh, expected = one_by_one(heads, ids_T[: place + 1], features)
        torch.testing.assert_close(stepper.begin(ids_T[place]), expected, rtol=1e-4, atol=1e-4)
        # Two levels of a tree: the second node of the first level is the parent of both nodes of the second.
        for each in (stepper, fresh):
            each.step(torch.tensor([5, 6, 7]), torch.zeros(3, dtype=torch.long))
        below = [each.step(torch.tensor([8, 9]), torch.tensor([1, 1])) for each in (stepper, fresh)]
        torch.testing.assert_close(*below, rtol=1e-4, atol=1e-4)
        path_P = torch.arange(accepted + 1)
        rows = {tap: feature[:, place : place + accepted + 1] for tap, feature in features.items()}
        stepper.observe(rows, ids_T[place : place + accepted + 1], path_P)
        place += accepted + 1


@pytest.mark.parametrize("name", ["eagle3", "eagle3.1", "eagle"])
def test_drafting_computes_what_training_taught(name, tiny_target):
    """The states of steps 0 .. 2 while drafting the data's own tokens are those of the unrolled forward."""
    target = tiny_target("llama")
    heads = make(target, CONFIGS[name])
    ids_T = torch.randint(0, 256, (14,), generator=torch.Generator().manual_seed(3))
    places_T, document_T = torch.arange(14), torch.zeros(14, dtype=torch.long)
    features = target.features(ids_T[None], places_T[None], document_T[None], heads.taps)
    t = 9
    stepper = EagleStepper(heads)
    stepper.reset(ids_T[: t + 1], {tap: feature[:, : t + 1] for tap, feature in features.items()})
    drafted = [stepper.begin(ids_T[t + 1])]
    drafted += [stepper.step(ids_T[t + 1 + s, None], torch.zeros(1, dtype=torch.long)) for s in range(1, heads.depth)]
    with torch.no_grad():
        states_S1AD = heads.unroll(
            heads.fuse(features), ids_T[None], document_T[None], places_T[None], torch.tensor([[t]])
        )
        trained = heads.draft_logits(states_S1AD[:, 0, 0])
    torch.testing.assert_close(torch.cat(drafted), trained, rtol=1e-4, atol=1e-4)


class _Table:
    """A stepper whose logits behind a path are a random function of the path."""

    taps, vocab_size, max_depth = (), 6, None
    draft_ids = torch.arange(6)

    def begin(self, root):
        self.paths = [()]
        return self._logits()

    def step(self, tokens_N, parents_N):
        self.paths = [(*self.paths[p], t) for t, p in zip(tokens_N.tolist(), parents_N.tolist(), strict=True)]
        return self._logits()

    def _logits(self):
        return torch.stack([self.law(path).log() for path in self.paths])

    @staticmethod
    def law(path):
        generator = torch.Generator().manual_seed(hash(path) % 2**31)
        return torch.rand(6, generator=generator).pow(2).softmax(-1)


@pytest.mark.parametrize(("nodes", "depth", "width"), [(1, 1, 1), (4, 2, 2), (7, 3, 2), (15, 4, 3), (99, 3, 3)])
def test_a_dynamic_tree_is_the_definition(nodes, depth, width):
    """Expand the likeliest of each level, keep the likeliest of all: by dictionaries of paths."""
    draft = DynamicDrafter(_Table(), DynamicTree(nodes, depth, width)).propose(torch.tensor(0), depth)
    pool, frontier = {}, [((), 1.0)]
    for _ in range(depth):
        level = {}
        for path, value in frontier:
            law = _Table.law(path)
            for token in law.topk(width).indices.tolist():
                level[(*path, token)] = value * law[token].item()
        pool.update(level)
        frontier = sorted(level.items(), key=lambda item: -item[1])[:width]
    kept = sorted(pool.items(), key=lambda item: (-item[1], len(item[0])))[:nodes]
    tokens = draft.tokens_N.tolist()
    paths = [tuple(tokens[n] for n in row[1:] if n >= 0) for row in draft.tree.paths_NP.tolist()]
    assert paths[0] == ()
    assert set(paths[1:]) == {path for path, _ in kept}
    assert len(paths) == len(kept) + 1
    by_likelihood = sorted(range(1, len(paths)), key=lambda n: draft.order_N[n])
    assert [paths[n] for n in by_likelihood] == [path for path, _ in kept]
    assert draft.tree.depths_N.tolist() == [len(path) for path in paths]


def test_a_child_as_likely_as_its_parent_does_not_come_without_it():
    """Ties go to the shallower node: with certain drafts every value is 1."""

    class Certain(_Table):
        @staticmethod
        def law(path):
            return torch.eye(6)[len(path)].clamp_min(1e-30)

    draft = DynamicDrafter(Certain(), DynamicTree(2, 4, 2)).propose(torch.tensor(0), 4)
    assert draft.tree.parents_N.tolist() == [-1, 0, 1]
    assert draft.tokens_N.tolist() == [0, 0, 1]


def test_a_topology_of_parents_is_the_static_tree():
    built = Topology.from_parents(TREE.parents_N, TREE.depths_N, TREE.depth)
    assert torch.equal(built.ancestors_NN, TREE.ancestors_NN)
    assert torch.equal(built.paths_NP, TREE.paths_NP)
    assert built.children == TREE.children


@pytest.mark.parametrize(
    "family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow), pytest.param("gemma3", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["eagle3", "eagle"])
@pytest.mark.parametrize("tree", [TREE, Tree.chain(3), DynamicTree(9, 4, 3)], ids=["static", "chain", "dynamic"])
def test_greedy_output_is_plain_greedy(family, name, tree, tiny_target):
    target = tiny_target(family)
    drafter = build_drafter(make(target, CONFIGS[name], draft_ids=torch.arange(20, 300)), tree)
    for seed in range(3):
        prompt = torch.randint(0, 256, (5 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        conditions = StopConditions(target.eos_ids, (), 24, target.max_context)
        cache = target.new_cache(cache_capacity(len(prompt), conditions, drafter.tree_size))
        plain = plain_generate(target, prompt, conditions, SamplingConfig(), cache)
        found = speculative_generate(target, drafter, prompt, conditions, AcceptanceConfig(), cache)
        assert found.tokens == plain.tokens


def test_sampled_static_trees_decode_and_dynamic_ones_are_refused(tiny_target):
    target = tiny_target("llama")
    heads, sampling = make(target, CONFIGS["eagle3"]), SamplingConfig(temperature=0.8, top_k=5)
    coin = TorchCoin(torch.Generator().manual_seed(0))
    drafter = build_drafter(heads, TREE, sampling, coin)
    conditions = StopConditions(target.eos_ids, (), 20, target.max_context)
    cache = target.new_cache(cache_capacity(4, conditions, drafter.tree_size))
    acceptance = AcceptanceConfig(rule="sampling", sampling=sampling, drafts="sampled")
    found = speculative_generate(target, drafter, [1, 2, 3, 4], conditions, acceptance, cache, coin)
    assert len(found.tokens) == 20 or found.reason != "length"
    with pytest.raises(ValueError, match="a dynamic tree chooses among its drafts"):
        build_drafter(heads, DynamicTree(4, 2, 2), sampling, coin)


def test_verification_reads_a_dynamic_tree(tiny_target):
    """A draft that holds what the target says is accepted as a whole."""
    draft = DynamicDrafter(_Table(), DynamicTree(8, 3, 2)).propose(torch.tensor(0), 3)
    deepest = int(draft.tree.depths_N.argmax())
    path = [n for n in draft.tree.paths_NP[deepest].tolist() if n >= 0]
    logits_NV = torch.zeros(draft.tree.size, 6)
    for parent, child in itertools.pairwise(path):
        logits_NV[parent, draft.tokens_N[child]] = 9.0
    logits_NV[path[-1], 4] = 9.0
    accepted = accept_greedy(draft.tree, draft.tokens_N, logits_NV)
    nodes, tokens = accepted.to_host(draft.tokens_N)
    assert nodes == path[1:]
    assert tokens == [*draft.tokens_N[path[1:]].tolist(), 4]
