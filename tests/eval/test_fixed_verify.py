"""The verify of fixed shapes gives the logits of `Target.forward`, at every length and behind every commit."""

import functools

import pytest
import torch

from eval.cost import FORMS, loop_overhead, measure_costs
from eval.drafters import MedusaDrafter
from eval.drafting import build_drafter, for_serving
from eval.fixed_verify import FixedVerify, captured
from eval.level_drafter import DynamicTree
from eval.tree import Tree
from heads.target import FINAL_NORM, TargetConfig, load_target
from heads.tiny import FAMILIES
from train.agreement import disturbed_heads
from train.agreement import tiny_target as target_on
from train.gpu_sections import unavailable

TREE = Tree.from_choices([[0], [1], [0, 0], [1, 0], [0, 0, 0]])
COMMITS = ([0], [0, 2, 4], [0, 1, 3, 5], [0, 1])


@torch.inference_mode()
def committed_logits(target, verify_with):
    """The logits of four verifies over one cache, each behind the commit of another path."""
    tree = TREE.to(target.device)
    cache = target.new_cache(40)
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 256, (1, 17), generator=draw).to(target.device)  # longer than the window of 12
    target.prefill(prompt, cache)
    verify, found = verify_with(target, cache, tree.size), []
    for path in COMMITS:
        tokens = torch.randint(0, 256, (tree.size,), generator=draw).to(target.device)
        found.append(verify(tokens, tree.ancestors_NN, tree.depths_N).clone())
        cache.commit(torch.tensor(path, device=target.device))
    return torch.stack(found)


def by_forward(target, cache, size):
    return lambda *tree: target.logits(target.forward(*tree, cache)[FINAL_NORM][0])


def by_fixed_verify(target, cache, size, form=lambda compute: compute):
    verify = FixedVerify(target, cache, size)
    verify.load(*(torch.zeros_like(part) for part in (verify.tokens_N, verify.ancestors_NN, verify.depths_N)))
    run = form(verify.compute)
    return lambda *tree: (verify.load(*tree), run())[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_verify_of_decoding(family, tiny_target):
    target = tiny_target(family)
    expected = committed_logits(target, by_forward)
    torch.testing.assert_close(committed_logits(target, by_fixed_verify), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_one_graph_serves_every_length():
    target = target_on(torch.device("cuda"))
    found = committed_logits(target, lambda *inputs: by_fixed_verify(*inputs, form=captured))
    torch.testing.assert_close(found, committed_logits(target, by_forward), rtol=1e-4, atol=1e-4)


def test_a_full_cache_is_refused(tiny_target):
    target = tiny_target()
    with torch.inference_mode():
        cache = target.new_cache(4)
        target.prefill(torch.tensor([[1, 2, 3]]), cache)
        verify = FixedVerify(target, cache, 2)
        with pytest.raises(AssertionError, match="cache of 4 rows cannot hold 5"):
            verify.load(verify.tokens_N, verify.ancestors_NN, verify.depths_N)


@pytest.mark.slow  # a compiler runs
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of the compiler's own modules
def test_one_compilation_serves_every_length():
    # In float16 no layer is packed for a CPU, which a compiler could not look into.
    target = load_target(TargetConfig("tiny", "random:llama", dtype="float16"), "cpu")
    compiled = functools.partial(torch.compile, dynamic=False, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = committed_logits(target, lambda *inputs: by_fixed_verify(*inputs, form=compiled))
    torch.testing.assert_close(found, committed_logits(target, by_forward), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(("family", "tree"), [("medusa", TREE), ("eagle3", DynamicTree(nodes=4, depth=3, width=2))])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_measured(form, family, tree):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (missing := unavailable(form, device)) is not None:
        pytest.skip(missing)
    target = target_on(device)
    drafter = build_drafter(for_serving(disturbed_heads(family, target), target), tree)
    costs = measure_costs(target, drafter, sizes=(2,), context=16, rounds=2, form=form)
    assert list(costs) == ["plain", "verify 2", "draft", "draft level"]
    assert all(costs[name] > 0 for name in ("plain", "verify 2", "draft"))


def test_the_overhead_is_what_is_neither_draft_nor_verify(tiny_target, random_heads, monkeypatch):
    target = tiny_target()
    drafter = MedusaDrafter(random_heads(target), Tree.chain(2))
    moments = iter(range(10_000))
    # Every look at the clock is a second later: draft and verify take one each, and between cycles passes another.
    monkeypatch.setattr("eval.cost.clock_for", lambda device: lambda: float(next(moments)))
    overhead = loop_overhead(target, drafter, context=16, new_tokens=8)
    assert overhead == pytest.approx(1000, rel=0.5)
