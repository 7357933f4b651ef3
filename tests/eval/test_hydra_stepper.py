"""Hydra heads while decoding: the same guesses as in training, and greedy decoding that stays plain greedy."""

import random
from itertools import product

import pytest
import torch

from eval.decode import AcceptanceConfig, Generation, cache_capacity, plain_generate, speculative_generate
from eval.hydra_stepper import HydraStepper
from eval.level_drafter import DynamicDrafter, DynamicTree, StaticDrafter
from eval.sampling import SamplingConfig, TorchCoin
from eval.stopping import StopConditions
from eval.tree import Tree
from heads.alignment import label_counts
from heads.eagle_layer import LayerShape
from heads.hydra import HydraConfig, HydraHeads
from heads.target import FINAL_NORM

GREEDY = AcceptanceConfig()
SAMPLING = SamplingConfig(temperature=1.2, top_k=8)


def make_heads(target, seed=0, noise=0.1, draft_ids=None, **settings) -> HydraHeads:
    ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
    config = HydraHeads.resolve(HydraConfig(**settings), target)
    made = HydraHeads(config, target.hidden_size, target.vocab_size, ids).bind(target).initialise()
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    return made


def plain(target, prompt, conditions) -> Generation:
    cache = target.new_cache(cache_capacity(len(prompt), conditions, 1))
    return plain_generate(target, prompt, conditions, SamplingConfig(), cache)


def speculative(target, drafter, prompt, conditions, acceptance=GREEDY, coin=None) -> Generation:
    cache = target.new_cache(cache_capacity(len(prompt), conditions, drafter.tree_size))
    return speculative_generate(target, drafter, prompt, conditions, acceptance, cache, coin)


def random_tree(rng: random.Random, depth: int, top_k: int) -> Tree:
    nodes: set[tuple[int, ...]] = set()
    for _ in range(rng.randint(1, 12)):
        parent = rng.choice([(), *nodes])
        if len(parent) < depth:
            nodes.add((*parent, rng.randrange(top_k)))
    return Tree.from_choices(sorted(nodes))


def training_logits(heads, ids_BT, monkeypatch) -> list[torch.Tensor]:
    """What the heads say [T - 4, Vd] at the anchors 0 ... T - 5 of one sequence, as their training computes it."""
    states = []
    inner = heads.head_states
    with monkeypatch.context() as patch:
        patch.setattr(heads, "head_states", lambda *inputs: (states.append(inner(*inputs)), states[-1])[1])
        documents_BT, positions_BT = torch.zeros_like(ids_BT), torch.arange(ids_BT.shape[1])[None]
        features = heads.target.features(ids_BT, positions_BT, documents_BT)
        supervised_BT = torch.ones_like(ids_BT).bool()
        heads(features, ids_BT, supervised_BT, documents_BT, positions_BT, label_counts(supervised_BT, documents_BT, 3))
    rows = heads.lm_head().expand(3, -1, -1)
    return [states_ND @ rows_VD.T for states_ND, rows_VD in zip(states, rows, strict=True)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lm_head": "shared"},
        {"prefix_attention": True},
        {"prefix_attention": True, "layer": LayerShape(sliding_window=4)},
    ],
    ids=["own", "shared", "prefix", "prefix with a window"],
)
@torch.no_grad()
def test_drafting_is_what_was_trained(settings, tiny_target, monkeypatch):
    """Drafting a sequence's own tokens behind each of its positions gives the logits that training computes there."""
    target = tiny_target()
    heads = make_heads(target, num_heads=3, num_layers=2, draft_ids=torch.arange(5, 300), **settings)
    ids = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(0))
    trained = training_logits(heads, ids[None], monkeypatch)
    stepper = HydraStepper(heads, capacity=8)
    cache = target.new_cache(40)
    stepper.reset(ids[:5], target.prefill(ids[None, :5], cache))
    t = 4
    for chunk in (1, 3, 2, 4, 1):  # as if so many tokens were committed by a cycle
        found = [stepper.begin(ids[t + 1])]
        found += [stepper.step(ids[t + 2 + d][None], torch.tensor([0])) for d in range(2)]
        for k in range(3):
            torch.testing.assert_close(found[k][0], trained[k][t], rtol=1e-5, atol=1e-5)
        # The tree of this cycle holds the chain that stands and, before its last node, another one that does not.
        tokens = ids[t + 1 : t + 1 + chunk]
        depths = torch.tensor([*range(chunk - 1), chunk - 1, chunk - 1])
        ancestors = torch.ones(chunk + 1, chunk + 1).tril().bool()
        ancestors[chunk, chunk - 1] = False
        path = torch.tensor([*range(chunk - 1), chunk])
        verified = torch.cat([tokens[:-1], torch.tensor([7]), tokens[-1:]])
        stepper.observe(target.forward(verified, ancestors, depths, cache), tokens, path)
        cache.commit(path)
        t += chunk


def test_every_node_continues_its_own_path(tiny_target):
    target = tiny_target()
    heads = make_heads(target, num_heads=3)
    stepper = HydraStepper(heads)
    hidden = torch.randn(1, 4, 32)
    stepper.reset(torch.tensor([1, 2, 3, 4]), {FINAL_NORM: hidden})
    stepper.begin(torch.tensor(9))
    stepper.step(torch.tensor([10, 11, 12]), torch.tensor([0, 0, 0]))
    found = stepper.step(torch.tensor([20, 21, 22]), torch.tensor([2, 0, 2]))
    paths = torch.tensor([[9, 12, 20], [9, 10, 21], [9, 12, 22]])
    for n, path in enumerate(paths):
        alone = heads.draft_logits(2, hidden[0, -1:], heads.embed(path[None]))
        torch.testing.assert_close(found[n], alone[0])


@pytest.mark.parametrize(
    "family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow), pytest.param("mistral", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("shape", ["static", "dynamic"])
def test_greedy_equals_plain_greedy(shape, family, tiny_target):
    target = tiny_target(family)
    rng = random.Random(f"{family} {shape}")
    accepted = 0
    for case, (prefix, noise) in enumerate(product([False, True], [0.0, 0.0, 0.02, 0.3])):
        stepper = HydraStepper(make_heads(target, seed=case, noise=noise, num_heads=3, prefix_attention=prefix))
        if shape == "static":
            drafter = StaticDrafter(stepper, random_tree(rng, 3, 6))
        else:
            drafter = DynamicDrafter(stepper, DynamicTree(rng.randint(1, 12), rng.randint(1, 3), rng.randint(1, 4)))
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 5, 14, 30]))]
        conditions = StopConditions(max_new_tokens=rng.choice([1, 5, 40, 40]))
        found = speculative(target, drafter, prompt, conditions)
        assert found.tokens == plain(target, prompt, conditions).tokens
        accepted += sum(cycle.accepted for cycle in found.cycles)
    assert accepted > 0, "no draft was ever accepted: the test would not see a wrong commit"


@pytest.mark.parametrize("drafts", ["top", "sampled"])
def test_sampled_decoding_runs(drafts, tiny_target):
    target = tiny_target()
    coin = TorchCoin(torch.Generator().manual_seed(0))
    tree = Tree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    stepper = HydraStepper(make_heads(target, noise=0.05, num_heads=3, draft_ids=torch.arange(0, 320, 2)))
    drafter = StaticDrafter(stepper, tree, SAMPLING if drafts == "sampled" else None, coin)
    acceptance = AcceptanceConfig(rule="sampling", sampling=SAMPLING, drafts=drafts)
    found = speculative(target, drafter, [5, 6, 7], StopConditions(max_new_tokens=60), acceptance, coin)
    assert len(found.tokens) == 60
    assert sum(cycle.accepted for cycle in found.cycles) > 0


def test_a_tree_deeper_than_the_heads_is_refused(tiny_target):
    stepper = HydraStepper(make_heads(tiny_target(), num_heads=2))
    with pytest.raises(ValueError, match=r"tree node \[0,0,0\] is at depth 3 but the heads draft 2"):
        StaticDrafter(stepper, Tree.chain(3))
    with pytest.raises(ValueError, match=r"tree\.depth=3 must be at most 2"):
        DynamicDrafter(stepper, DynamicTree(4, 3, 2))


@pytest.mark.parametrize("prefix", [False, True])
def test_heads_that_know_the_answer_emit_almost_depth_plus_one(prefix, tiny_target):
    target = tiny_target()
    prompt, conditions = list(b"user: say 7. assistant: "), StopConditions(max_new_tokens=49)
    answer = plain(target, prompt, conditions).tokens
    ids = torch.tensor([[*prompt, *answer]])
    documents, positions = torch.zeros_like(ids), torch.arange(ids.shape[1])[None]
    supervised = positions >= len(prompt)
    features = target.features(ids, positions, documents)
    heads = make_heads(target, noise=0.0, num_heads=3, prefix_attention=prefix)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-2)
    counts = label_counts(supervised, documents, 3)
    for _ in range(120):
        loss, _ = heads(features, ids, supervised, documents, positions, counts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = speculative(target, StaticDrafter(HydraStepper(heads), Tree.chain(3)), prompt, conditions)
    assert found.tokens == answer
    assert sum(cycle.emitted for cycle in found.cycles) >= 0.95 * 4 * len(found.cycles)
