"""The promises on the device at hand: CUDA where there is one, as `scripts/gpu_check.sh` runs them, else the CPU."""

import pytest
import torch
import torch.nn.functional as F

from eval.accept import Accepted, accept_greedy
from eval.decode import AcceptanceConfig, cache_capacity, speculative_generate
from eval.drafting import build_drafter, for_serving
from eval.level_drafter import DynamicTree
from eval.stopping import StopConditions
from heads.target import FINAL_NORM, Target, TargetConfig
from heads.tiny import tiny_model_and_tokenizer
from train import agreement
from train.agreement import SETTINGS, TREES, compare, disturbed_heads, tiny_target, training

FAMILIES = list(SETTINGS)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_device_agrees_with_the_cpu_and_decodes_without_loss(family, device):
    found = compare(family, device)
    assert not [agreement for agreement in found if not agreement.holds]
    assert len(found) == len(agreement.LIMITS) + 1 + (1 if family == "medusa" else 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_run_can_equal_a_straight_one_to_the_bit(family, device):
    one, other = training(family, device), training(family, device)
    assert all(torch.equal(one[name], other[name]) for name in one)


PLANTED = {
    "loss": lambda loss: loss * 1.0001,
    "gradients": lambda numbers: numbers * 1.001,
    "features": lambda numbers: numbers.half().float(),  # the digits of TF32
    "moves of weights": lambda numbers: numbers * torch.nan,
}


@pytest.mark.parametrize("name", PLANTED)
def test_another_result_is_seen(name, monkeypatch, device):
    results = training("medusa", device)
    sides = iter([results, {**results, name: PLANTED[name](results[name])}])
    monkeypatch.setattr(agreement, "training", lambda *inputs: next(sides))
    monkeypatch.setattr(agreement, "decoding", lambda *inputs: [])
    assert [found.name for found in compare("medusa", device) if not found.holds] == [name]


def test_another_decoding_is_seen(monkeypatch, device):
    def off_by_one(*inputs, **options):
        run = speculative_generate(*inputs, **options)
        run.tokens[-1] += 1
        return run

    monkeypatch.setattr(agreement, "speculative_generate", off_by_one)
    assert [found.difference for found in agreement.decoding("medusa", device) if not found.holds] == [1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cycle_asks_the_host_for_nothing_but_its_tokens(family):
    """On the meta device tensors have no values: whatever a host would wait for raises, and so does a CPU tensor."""
    model, tokenizer = tiny_model_and_tokenizer("llama")
    target = Target(model.to("meta"), tokenizer, TargetConfig("tiny", "random:llama"))
    drafter = build_drafter(disturbed_heads(family, target), TREES["static" if family == "medusa" else "dynamic"])
    cache, prompt_T = target.new_cache(40), torch.arange(9, device="meta")
    with torch.inference_mode():
        drafter.reset(prompt_T, target.prefill(prompt_T[None], cache, drafter.taps))
        root = prompt_T[0]
        for accepted_tokens in (0, 2, 1):
            draft = drafter.propose(root, max_depth=3)
            tree = draft.tree
            features = target.forward(draft.tokens_N, tree.ancestors_NN, tree.depths_N, cache, drafter.taps)
            accepted = accept_greedy(tree, draft.tokens_N, target.logits(features[FINAL_NORM][0]))
            path_P = F.pad(accepted.path_D[:accepted_tokens], (1, 0))
            cache.commit(path_P)
            drafter.observe(features, path_P)
            root = accepted.token
    with pytest.raises((RuntimeError, NotImplementedError)):
        accepted.to_host(draft.tokens_N)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA tells which operations the host waits for")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_host_waits_for_the_accepted_tokens_and_nothing_else(family, tree, monkeypatch, device):
    if family == "medusa" and isinstance(TREES[tree], DynamicTree):
        pytest.skip("Medusa heads have no dynamic tree")
    target = tiny_target(device)
    drafter = build_drafter(for_serving(disturbed_heads(family, target), target), TREES[tree])
    prompt, conditions = list(range(1, 10)), StopConditions(max_new_tokens=24)
    cache = target.new_cache(cache_capacity(len(prompt), conditions, drafter.tree_size))
    propose, to_host = drafter.propose, Accepted.to_host

    def watched(root, max_depth):  # the first call comes behind the prefill and the token that it gives
        torch.cuda.set_sync_debug_mode("error")
        return propose(root, max_depth)

    def allowed(accepted, tokens_N):
        torch.cuda.set_sync_debug_mode("default")
        found = to_host(accepted, tokens_N)
        torch.cuda.set_sync_debug_mode("error")
        return found

    monkeypatch.setattr(drafter, "propose", watched)
    monkeypatch.setattr(Accepted, "to_host", allowed)
    try:
        speculative_generate(target, drafter, prompt, conditions, AcceptanceConfig(), cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
