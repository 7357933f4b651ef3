"""Certificates of right exports hold, in every format and dtype; what they count is what decoding counts."""

import json
from dataclasses import replace

import pytest
import torch

from eval.decode import AcceptanceConfig, cache_capacity, speculative_generate
from eval.drafting import build_drafter
from eval.parity import draft_checks
from eval.parity.certificate import GOLDEN_FILE, PARITY_FILE, GoldenPrompt, accepted_lengths, chain, read, tally
from eval.parity.exported import open_export
from eval.parity.golden import chain_length, draft, record
from eval.parity.verify import verify
from eval.stopping import StopConditions
from eval.tree import Tree
from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.eagle_layer import LayerShape
from heads.export import eagle_reader, medusa_reader
from tests.eval.parity.conftest import CASES, EVERY_ID, PLAIN, SOME_IDS, faults, write_certified
from tests.heads.test_eagle import make


@pytest.mark.parametrize("case", CASES)
def test_right_exports_verify_and_readers_take_them(pristine, target, case):
    directory = pristine(case)
    findings = verify(directory, target)
    assert [finding.cause for finding in findings if finding.cause] == []
    assert all(finding.ran for finding in findings)
    form, kind = CASES[case][0], read(directory)[0].kind
    if kind == "medusa":
        medusa_reader.import_heads(directory, target, form)
    else:
        eagle_reader.import_heads(directory, target, kind, form)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("speculators", "bfloat16"),
        ("sglang", "float16"),
        ("eagle vllm", "bfloat16"),
        ("medusa vllm", "float16"),
        ("medusa vllm, shared", "bfloat16"),  # whose file holds the target's LM head, rounded
    ],
)
def test_rounded_exports_verify_and_state_what_rounding_took(pristine, target, case, dtype):
    directory = pristine(case, dtype)
    findings = {finding.check: finding for finding in verify(directory, target)}
    assert not any(finding.cause for finding in findings.values())
    certificate, golden = read(directory)
    assert certificate.dtype == dtype
    assert all(1e-5 < moved < 0.06 for moved in certificate.rounding)
    # The truth stays that of the float32 module: it is recorded bit for bit as for a float32 export.
    exact = read(pristine(case))[1]
    assert torch.equal(golden.prompts[0].logits_RKC, exact.prompts[0].logits_RKC)
    stated = findings[f"rounding to {dtype}, by step"].found.split()
    replayed = findings["logits of drafting, by step"].found.split()
    assert [float(a) for a in replayed] == pytest.approx([float(b) for b in stated], rel=0.5)


@pytest.mark.parametrize("config", [PLAIN, EagleConfig()], ids=["eagle3", "eagle"])
def test_a_joining_map_trained_on_scaled_channels_verifies(target, make_heads, tmp_path, config):
    heads = make_heads(config, EVERY_ID)
    heads.fc.start(heads.fc.unscaled, torch.logspace(-2, 2, heads.fc.in_features))
    directory = write_certified(tmp_path, heads, target, "vllm", dtype="bfloat16")
    assert faults(directory, target) == []


def test_rounding_that_takes_too_much_is_a_fault(damaged, target):
    directory = damaged("vllm", lambda config, tensors: None, "bfloat16")
    certificate = json.loads((directory / PARITY_FILE).read_text())
    certificate["rounding"] = [0.01, 0.2, 0.01]
    (directory / PARITY_FILE).write_text(json.dumps(certificate))
    assert any(
        "rounding to bfloat16 moves logits by 2.0e-01 of the largest: export in float32" in f
        for f in faults(directory, target)
    )


@pytest.mark.parametrize("family", ["qwen3", "llama3-rope", "llama-tied", "gemma3"])
def test_other_targets(tiny_target, tmp_path, family):
    target = tiny_target(family)
    heads = make(target, replace(PLAIN, taps=[0, 1, 3]), draft_ids=SOME_IDS)
    directory = write_certified(tmp_path, heads, target, "vllm")
    assert faults(directory, target) == []
    assert json.loads((directory / PARITY_FILE).read_text())["taps"] == [
        "post_block[0]",
        "post_block[1]",
        "post_block[3]",
    ]


def taught(heads, target, anchors: int):
    """Heads whose LM head was solved for the target's own continuation, so that many drafts stand."""
    steps, width = chain_length(heads), heads.hidden_size
    golden = record(heads, target, ["Describe a rainy day."], anchors)
    prompt = golden.prompts[0]
    first = prompt.prompt_length + 1
    labels_AK = prompt.ids_T[first : first + anchors + steps - 1].unfold(0, steps, 1).clone()
    labels_AK[0, 1] = labels_AK[2, 0] = 7  # and some that do not
    heads.lm_head_weight.data.zero_()[:width] = torch.eye(width)  # logits are the states that the LM head reads
    states_AKV, _ = draft(heads, prompt.ids_T, prompt.prompt_length, prompt.features, steps, labels_AK)
    wanted_NV = torch.nn.functional.one_hot(labels_AK.flatten(), target.vocab_size).float()
    heads.lm_head_weight.data = torch.linalg.lstsq(states_AKV[..., :width].flatten(0, 1), wanted_NV).solution.T
    return heads


@torch.no_grad()
def test_accepted_lengths_are_those_of_decoding(target, tmp_path):
    heads = taught(make(target, PLAIN), target, anchors=10)
    directory = write_certified(tmp_path, heads, target, "vllm", anchors=10)
    certificate, golden = read(directory)
    prompt = golden.prompts[0]
    conditions = StopConditions((), max_new_tokens=14)
    cache = target.new_cache(cache_capacity(prompt.prompt_length, conditions, 4))
    drafter = build_drafter(heads, Tree.chain(3))
    ids = prompt.ids_T[: prompt.prompt_length].tolist()
    decoded = speculative_generate(target, drafter, ids, conditions, AcceptanceConfig(), cache)
    lengths = [cycle.accepted for cycle in decoded.cycles][: certificate.cycles]
    assert chain(accepted_lengths(prompt.proposals_AK, prompt.ids_T, prompt.prompt_length)) == lengths
    assert len(set(lengths)) > 1
    assert certificate.tau == 1 + sum(lengths) / len(lengths)
    assert certificate.accepted == [sum(length > k for length in lengths) for k in range(3)]
    assert faults(directory, target) == []


def test_counting_by_hand():
    """Four prompt tokens, then 20 21 22 ...: anchor 0 drafts behind x[4] = 20, so its labels are 21 22 23."""
    ids_T = torch.tensor([1, 2, 3, 4, 20, 21, 22, 23, 24, 25, 26, 27])
    proposals = torch.tensor([[21, 22, 9], [22, 9, 24], [9, 24, 25], [24, 25, 26], [25, 26, 27]])
    lengths = accepted_lengths(proposals, ids_T, 4)
    assert lengths == [2, 1, 0, 3, 3]
    assert chain(lengths) == [2, 3]  # the cycle from anchor 0 emits 21 22 23, so the next one starts at anchor 3
    assert tally([2, 3], 3) == ([2, 2, 1], 3.5)


def test_a_near_tie_is_excused_and_nothing_else(pristine, target, monkeypatch):
    exported = open_export(pristine("vllm"), target)
    proposals = exported.golden.prompts[0].proposals_AK.clone()
    proposals[1, 1] += 3
    monkeypatch.setattr(draft_checks, "propose", lambda exported, prompt: proposals)

    def checked(margin: float) -> dict[str, str]:
        prompt: GoldenPrompt = exported.golden.prompts[0]
        margins = torch.full_like(prompt.margins_AK, 5.0)
        margins[1, 1] = margin
        golden = replace(exported.golden, prompts=[replace(prompt, margins_AK=margins)])
        findings = draft_checks.check_proposals(replace(exported, golden=golden))
        return {finding.check: finding.cause or finding.found for finding in findings}

    limit = 2e-4 * exported.golden.scale
    assert checked(0.9 * limit)["proposals"] == "2 of 3, 1 differ at a near tie"
    assert checked(1.1 * limit)["proposals"] == "1 of 3 chains propose other tokens"


def test_an_export_over_an_older_one_has_a_new_certificate(target, tmp_path):
    tensors = []
    for seed in range(2):
        directory = write_certified(tmp_path, make(target, PLAIN, seed=seed), target, "vllm")
        assert faults(directory, target) == []
        tensors.append(read(directory)[0].tensors["fc.weight"])
    assert tensors[0] != tensors[1]


def test_windows_bound_the_chain(target):
    window = make(target, Eagle3Config(num_steps=4, layer=LayerShape(sliding_window=2)))
    assert chain_length(window) == 2
    assert record(window, target, ["Hi"], 2).prompts[0].trained_RSC.shape[1] == 2


def test_the_certificate_is_small_and_no_engine_takes_it_for_weights(pristine):
    for case in CASES:
        directory = pristine(case)
        assert len([*directory.glob("*.safetensors"), *directory.glob("*.bin"), *directory.glob("*.pt")]) == 1
        assert (directory / GOLDEN_FILE).stat().st_size < 60_000


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (PARITY_FILE, None, "was exported without a certificate; export it again"),
        (PARITY_FILE, '{"version": 2}', "version=2, this Headstart reads 1"),
        (PARITY_FILE, '{"version": 1}', "lacks .*accepted"),
        (GOLDEN_FILE, None, "parity.tensors does not exist"),
        (GOLDEN_FILE, "short", "truncated or damaged"),
        ("config.json", None, "config.json does not exist"),
        ("model.safetensors", None, "model.safetensors does not exist"),
    ],
)
def test_what_is_missing_or_damaged_is_named(damaged, target, file, content, message):
    directory = damaged("vllm", lambda config, tensors: None)
    (directory / file).unlink()
    if content is not None:
        (directory / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        verify(directory, target)
