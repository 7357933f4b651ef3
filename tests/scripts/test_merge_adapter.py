"""A merged target is a model directory like any other, and says the same as the target with its adapter."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from eval.config import from_hydra
from heads.target import Target, TargetConfig, load_target
from scripts import merge_adapter
from scripts.merge_adapter import MergeConfig, merge, probe
from train.adapter import Adapter, AdapterConfig


def write_adapter(directory: Path, target: Target) -> torch.Tensor:
    """An adapter that changes the target, as training writes it; returns the adapted target's logits."""
    adapter = Adapter(target, AdapterConfig(r=4, alpha=8), seed=0)
    torch.manual_seed(1)
    for parameter in adapter.parameters.values():
        parameter.data += 0.05 * torch.randn_like(parameter)
    directory.mkdir()
    adapter.save(directory)
    adapter.sign()
    return probe(target.model)


def merged(tmp_path: Path, family: str, **settings) -> str:
    text = StringIO()
    model = TargetConfig("tiny", f"random:{family}", licence="MIT", **settings)
    merge(MergeConfig(model, str(tmp_path / "adapter"), str(tmp_path / "target")), Console(file=text, soft_wrap=True))
    return text.getvalue()


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_the_merged_target_says_what_the_adapted_one_says(tmp_path, family):
    target = load_target(TargetConfig("tiny", f"random:{family}"), "cpu", pack=False)
    original = probe(target.model)
    adapted = write_adapter(tmp_path / "adapter", target)
    (tmp_path / "adapter" / "drift.json").write_text('{"sentence": "It differs by 0.1 nats."}')
    assert "It differs by 0.1 nats." in merged(tmp_path, family)
    loaded = load_target(TargetConfig("tiny", str(tmp_path / "target"), dtype="float32"), "cpu", pack=False)
    assert (probe(loaded.model) - adapted).abs().max() < 1e-4
    assert (probe(loaded.model) - original).abs().max() > 1e-2
    assert loaded.adapter_sha256 == target.adapter_sha256 != ""  # heads of the run belong to it
    tied = loaded.lm_head.weight.data_ptr() == loaded.embedding.weight.data_ptr()
    assert tied == (family == "llama-tied")
    card = (tmp_path / "target" / "README.md").read_text()
    assert "It is another model than tiny" in card
    assert "It differs by 0.1 nats." in card
    assert loaded.tokenizer.chat_template


def test_a_merge_that_says_something_else_is_not_written(tmp_path, monkeypatch):
    write_adapter(tmp_path / "adapter", load_target(TargetConfig("tiny", "random:llama"), "cpu", pack=False))
    monkeypatch.setattr(merge_adapter, "merge_adapter", lambda adapted: adapted.unload())  # drops the adapter
    with pytest.raises(ValueError, match=r"logits differ from those with the adapter.*merge with model\.dtype=float32"):
        merged(tmp_path, "llama")
    assert not (tmp_path / "target").exists()


def test_what_cannot_be_merged_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.quantization=bitsandbytes-8bit: weights are merged unquantised"):
        merged(tmp_path, "llama", quantization="bitsandbytes-8bit")
    with pytest.raises(ValueError, match=r"adapter has no value; give it on the command line"):
        from_hydra(MergeConfig, {"model": {"name": "a", "path": "b"}, "adapter": "???", "output": "c"})
    write_adapter(tmp_path / "adapter", load_target(TargetConfig("tiny", "random:llama"), "cpu", pack=False))
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"target holds notes\.txt, which would be lost"):
        merged(tmp_path, "llama")
