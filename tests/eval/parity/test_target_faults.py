"""Another target, tokenizer or template than the certificate's: each is caught, and the first line names it."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval.parity.verify import verify
from heads.target import Target
from heads.tiny import SHAPE, tiny_tokenizer
from tests.eval.parity.conftest import disturbed, faults
from tests.heads.test_eagle_import import deep_target


@pytest.fixture
def other():
    """The same target in another object, which may be changed."""
    return disturbed(deep_target())


def revision(target: Target) -> Target:
    return disturbed(deep_target(seed=1))


def revision_of_a_block(target: Target) -> Target:
    """A fine-tune that left the final norm and the LM head alone, of which the identity is made."""
    target.decoder.get_parameter("layers.3.mlp.up_proj.weight").data.mul_(1.1)
    return target


def embedding_rows(target: Target) -> Target:
    target.embedding.weight.data[200:] = target.embedding.weight.data[200:].flip(0)
    return target


def lm_head_rows(target: Target) -> Target:
    target.lm_head.weight.data[100:] = target.lm_head.weight.data[100:].flip(0)
    return target


def template(target: Target) -> Target:
    target.tokenizer.chat_template = target.tokenizer.chat_template.replace("assistant", "model")
    return target


def template_without_hash(target: Target) -> Target:
    """A template that reads something besides its own text."""
    return Target(target.model, target.tokenizer, replace(target.config, template_kwargs={"enable_thinking": False}))


def tokenizer(target: Target) -> Target:
    fresh = tiny_tokenizer()
    fresh.add_tokens(["<tool>"])
    return Target(target.model, fresh, target.config)


def depth(target: Target) -> Target:
    return deep_target(layers=7)


def width(target: Target) -> Target:
    return Target(narrow_model(), target.tokenizer, target.config)


def narrow_model():
    config = AutoConfig.for_model(**{**SHAPE, "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 16})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


FAULTS = {
    "another revision": (revision, "target's weights: wrong weights: another revision, or a fine-tune"),
    "a fine-tune of some blocks": (revision_of_a_block, "features post_block.3.: .*no state of this target"),
    "embedding of another row order": (embedding_rows, "target's embedding: .*has its rows in another order"),
    "LM head of another row order": (lm_head_rows, "target's LM head: .*has its rows in another order"),
    "wrong template": (template, "chat template: wrong chat template"),
    "other template settings": (template_without_hash, r"prompts: model.template_kwargs=\{'enable_thinking': False\}"),
    "wrong tokenizer": (tokenizer, "tokenizer: wrong tokenizer"),
    "another number of blocks": (depth, "target: another target: num_layers=7, not 8"),
    "another width": (width, "config: hidden_size=32, the target has 16"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_target_is_caught_and_named_first(pristine, other, name):
    change, message = FAULTS[name]
    first = faults(pristine("vllm"), change(other))[0]
    assert re.search(message, first), first


def test_of_a_target_of_another_width_all_is_named_that_differs(pristine, other):
    findings = verify(pristine("speculators"), width(other))
    named = {finding.check: finding.cause for finding in findings if finding.cause}
    assert named["embed_tokens.weight"] == "embed_tokens.weight is not the target's"
    assert named["target"] == "another target: hidden_size=16, not 32"
    assert [finding.check for finding in findings if not finding.ran] == ["features, drafts"]


def test_a_wrong_template_changes_the_prompts_too(pristine, other):
    named = faults(pristine("vllm"), template(other))
    assert any("renders ['Describe a rainy day.'] to other token ids" in fault for fault in named)


def test_the_embedding_that_engines_share_decides_what_is_drafted(pristine, other):
    named = faults(pristine("eagle vllm"), embedding_rows(other))
    assert any(fault.startswith("logits of drafting") for fault in named)


def test_the_lm_head_that_engines_share_is_named_by_its_rows(pristine, other):
    named = faults(pristine("eagle vllm"), lm_head_rows(other))
    assert any("the rows of the LM head are in another order" in fault for fault in named)
    assert any(fault.startswith("continuation: the target would not say") for fault in named)


@torch.no_grad()
def test_the_same_target_in_bfloat16_is_within_the_rounding(pristine, other):
    other.model.bfloat16()
    assert faults(pristine("vllm"), other) == []
