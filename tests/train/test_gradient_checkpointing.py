"""Runs with trainer.gradient_checkpointing train what they train without it; an adapted target keeps less."""

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

from heads.target import Target, TargetConfig, load_target
from train.adapted_features import AdaptedFeatures
from train.adapter import Adapter, AdapterConfig
from train.agreement import disturbed_heads, packed_batch
from train.config import from_hydra
from train.joint import recompute_blocks
from train.loop import train


def adapted(dropout: float, family: str = "llama") -> tuple[Target, Adapter]:
    """A target with an adapter that does something and is trained."""
    target = load_target(TargetConfig("tiny", f"random:{family}"), "cpu", pack=False)
    adapter = Adapter(target, AdapterConfig(r=4, alpha=8, dropout=dropout), seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter.parameters.values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    adapter.let_move(True)
    return target, adapter


def gradients(target: Target, adapter: Adapter) -> tuple[list[torch.Tensor], int]:
    """The gradients of some features, and the bytes of the activations that autograd keeps for them."""
    heads = disturbed_heads("eagle3", target)
    source = AdaptedFeatures(target, heads.training_taps, torch.float32, adapter)
    known = {parameter.untyped_storage().data_ptr() for parameter in target.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    torch.manual_seed(0)  # of dropout
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = source(packed_batch(256))
    size = sum(storage.nbytes() for storage in kept.values())
    sum(feature.square().mean() for feature in features.values()).backward()
    return [parameter.grad.clone() for parameter in adapter.parameters.values()], size


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_an_adapted_target_computes_its_blocks_again(dropout, family):
    expected, size = gradients(*adapted(dropout, family))
    target, adapter = adapted(dropout, family)
    recompute_blocks(adapter)
    found, less = gradients(target, adapter)
    assert all(one.any() and torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert less < size / 4


@pytest.fixture
def checkpoints(monkeypatch) -> list[str]:
    """Which modules ran something with gradients that a backward computes again."""
    called: list[str] = []

    def noting(module):
        def noted(*inputs, **options):
            if torch.is_grad_enabled():
                called.append(module)
            return checkpoint(*inputs, **options)

        return noted

    for module in ("heads.family", "train.joint"):
        monkeypatch.setattr(f"{module}.checkpoint", noting(module))
    return called


@pytest.mark.parametrize("kind", ["medusa", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_a_run_trains_the_same_heads(kind, make_config, tmp_path, checkpoints):
    for name, checkpointing in (("kept", False), ("recomputed", True)):
        config = make_config(
            "trainer.steps=3", f"trainer.gradient_checkpointing={checkpointing}", f"output_dir={tmp_path}/{name}"
        )
        train(from_hydra({**config.resolved(), "heads": {"kind": kind}}))
        assert set(checkpoints) == ({"heads.family"} if checkpointing else set())
    one, other = (load_file(tmp_path / name / "heads" / "model.safetensors") for name in ("kept", "recomputed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_joint_run_trains_the_same_adapter(make_config, tmp_path, checkpoints):
    joint = ("adapter.r=4", "adapter.dropout=0.2", "adapter.warmup_share=0.34", "adapter.lm_weight=1.0")
    more = ("trainer.steps=3", "trainer.eval_prompts=2", "trainer.save_every=3")
    for name, checkpointing in (("kept", False), ("recomputed", True)):
        option = f"trainer.gradient_checkpointing={checkpointing}"
        train(make_config(*joint, *more, option, f"output_dir={tmp_path}/{name}"))
        assert set(checkpoints) == ({"heads.family", "train.joint"} if checkpointing else set())
    for file in ("model", "adapter_model"):
        one, other = (
            load_file(tmp_path / name / "checkpoints" / "step-000003" / f"{file}.safetensors")
            for name in ("kept", "recomputed")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)
