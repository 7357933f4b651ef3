"""Faults planted in the trained module, in its drafting or in its features: the files are right, and it is named."""

import re

import pytest
import torch

import eval.parity.golden as golden
import heads.eagle
import heads.target
from eval.eagle_stepper import EagleStepper
from heads.eagle import Eagle1Heads, EagleConfig
from heads.eagle3 import Eagle3Config, Eagle3Heads
from heads.export import eagle_formats, eagle_outline
from heads.family import DraftHeads
from heads.medusa import MedusaConfig, MedusaHeads
from heads.target import FINAL_NORM
from tests.eval.parity.conftest import EVERY_ID, SOME_IDS, faults, write_certified

PLAIN, EAGLE1, MEDUSA = Eagle3Config(num_steps=3), EagleConfig(), MedusaConfig(num_heads=3, lm_head="shared")


def wrapped(owner, name, change):
    """Replace a function by `change(original)`."""
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


def mask_shift(original):
    def shifted(places, documents, positions, step, window):
        visible = original(places, documents, positions, step, window)
        return visible & (torch.arange(documents.shape[1]) <= places[..., None] - step)

    return shifted


def own_position(original):
    def step(self, tokens, parents):
        self._position_1 = self._position_1 - 1
        return original(self, tokens, parents)

    return step


def one_too_far(original):
    def begin(self, root):
        logits = original(self, root)
        self._position_1 = self._position_1 + 1
        return logits

    return begin


def unshifted_prompt(original):
    def reset(self, prompt, features):
        original(self, prompt, features)
        self._tokens_P = prompt[:-1]

    return reset


def twice(original):
    return lambda self, state: original(self, original(self, state))


def swapped_halves(original):
    def enter(self, embedding, feature):
        joined = self.fc(torch.cat([feature, embedding], -1))
        return joined, joined

    return enter


def normed_residual(original):
    def enter(self, embedding, feature):
        inputs, _ = original(self, embedding, feature)
        return inputs, self.hidden_norm(feature)

    return enter


def reversed_taps(original):
    return lambda self, features: original(self, dict(zip(features, reversed(list(features.values())), strict=True)))


def features_through(change):
    """Change the `final_norm` features on their way to the heads."""

    def follow(original):
        def followed(target, *given):
            ids, features = original(target, *given)
            return ids, {**features, FINAL_NORM: change(target, features[FINAL_NORM])}

        return followed

    return wrapped(golden, "follow", follow)


def other_base(original):
    def bind(self, target):
        d = self.config.layer.head_dim
        self.layer.rotary.inv_freq = 5e5 ** (-torch.arange(0, d, 2) / d)
        return original(self, target)

    return bind


def head_before(original):
    return lambda self, hidden: original(self, hidden).roll(1, 0)


def without_rules(patch):
    """Let format=vllm take EAGLE-1 heads with a bias, which its engine drops."""
    form = next(form for form in eagle_formats.FORMATS if (form.kind, form.name) == ("eagle", "vllm"))
    patch.setattr(type(form), "check", lambda self, outline: None)
    assert eagle_outline.no_fc_bias in form.rules


FAULTS = {
    "mask shift": (
        "vllm", PLAIN, wrapped(heads.eagle, "causal_visibility", mask_shift),
        "logits of training.*mask shift: each draft step loses sight of one more position",
    ),
    "RoPE position of draft steps": (
        "vllm", PLAIN, wrapped(EagleStepper, "step", own_position),
        "logits of drafting.*RoPE position: all draft steps stand at the same one",
    ),
    "RoPE position of the first draft step": (
        "sglang", PLAIN, wrapped(EagleStepper, "begin", one_too_far), "RoPE position: the first draft step is one too",
    ),
    "RoPE base of the module": (
        "vllm", PLAIN, wrapped(DraftHeads, "bind", other_base), "RoPE base or scaling: trained with rope_theta=500000",
    ),
    "first position after prefill": (
        "safeailab", PLAIN, wrapped(EagleStepper, "reset", unshifted_prompt),
        "logits of drafting.*tokens of the prompt are not shifted: the first position after the prefill is wrong",
    ),
    "final norm doubled": (
        "vllm", PLAIN, wrapped(Eagle3Heads, "read", twice), "training.*the final norm was applied twice",
    ),
    "final norm left out": (
        "modelopt", PLAIN, wrapped(Eagle3Heads, "read", lambda original: lambda self, state: state),
        "logits of training.*the final norm was left out in training",
    ),
    "norm after instead of before": (
        "speculators", PLAIN, wrapped(Eagle3Heads, "enter", normed_residual),
        "norm_before_residual was True in training, config.json says False",
    ),
    "normed state fed back": (
        "vllm", PLAIN, wrapped(Eagle3Heads, "feed", lambda original: lambda self, state: self.final_norm(state)),
        "norm_output was True in training, config.json says False",
    ),
    "halves of fc": (
        "vllm", EAGLE1, wrapped(Eagle1Heads, "enter", swapped_halves), "training.*the halves of fc.weight are swapped",
    ),
    "order of the taps": (
        "vllm", PLAIN, wrapped(Eagle3Heads, "fuse", reversed_taps), "training.*the blocks of fc.weight are swapped",
    ),
    "features doubly normed": (
        "vllm", EAGLE1, features_through(lambda target, hidden: target.final_norm(hidden)),
        "features final_norm: the recorded ones went through the final norm twice",
    ),
    "features of another position": (
        "vllm", MEDUSA, features_through(lambda target, hidden: hidden.roll(1, 0)),
        "features final_norm: the recorded ones are one position early",
    ),
    "fc bias that the engine drops": ("vllm", EagleConfig(bias=True), without_rules, "tensors: .*vLLM drops fc.bias"),
    "order of Medusa heads": (
        "vllm", MEDUSA, wrapped(MedusaHeads, "states", head_before),
        "logits of training.*the heads are in another order: head k drafts as head k -1",
    ),
    "Medusa heads without their biases": (
        "fasterdecoding", MEDUSA, lambda patch: patch.setattr(MedusaHeads, "states", _unbiased),
        "logits of training.*the biases are not part of the trained heads",
    ),
}  # fmt: skip


def _unbiased(self, hidden_ND):
    state_KND = hidden_ND.expand(self.config.num_heads, -1, -1)
    return state_KND + torch.nn.functional.silu(state_KND @ self.block_weight[0].mT)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_trained_module_is_caught_and_named_first(make_heads, target, tmp_path, monkeypatch, name):
    format_name, config, plant, message = FAULTS[name]
    trained = make_heads(config, SOME_IDS if isinstance(config, Eagle3Config) else EVERY_ID)
    with monkeypatch.context() as patch:
        plant(patch)
        directory = write_certified(tmp_path, trained.bind(target), target, format_name)
    first = faults(directory, target)[0]
    assert re.search(message, first), first


def test_taps_captured_one_block_late(make_heads, target, tmp_path, monkeypatch):
    original = heads.target.capture_blocks

    def late(decoder, taps):
        return original(torch.nn.ModuleDict({"layers": decoder.layers[1:]}), taps)

    monkeypatch.setattr(heads.target, "capture_blocks", late)
    directory = write_certified(tmp_path, make_heads(PLAIN, SOME_IDS), target, "vllm")
    monkeypatch.undo()
    first = faults(directory, target)[0]
    assert first == ("features post_block[1]: the recorded ones are outputs of block 2")
