"""Gradient checkpointing of heads: the gradients without it, to the bit, from a fraction of the kept activations."""

from typing import Any

import pytest
import torch

from heads import HEADS
from heads.alignment import label_counts
from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.eagle_layer import LayerShape
from heads.hydra import HydraConfig
from heads.medusa import MedusaConfig
from heads.objectives import Objective
from train.agreement import packed_batch, relative
from train.step_cost import inputs_of

SHARED: dict[str, Any] = {"lm_head": "shared", "objective": Objective(kl_weight=0.5)}
CASES = {
    "medusa": MedusaConfig(num_heads=5, num_layers=2, **SHARED),
    "hydra": HydraConfig(num_heads=5, num_layers=2, **SHARED),
    "hydra++": HydraConfig(num_heads=5, prefix_attention=True, **SHARED),
    "eagle": EagleConfig(num_steps=5),  # with noise, which is drawn before the steps
    "eagle3": Eagle3Config(num_steps=5),
    "normed, windowed": Eagle3Config(num_steps=5, norm_output=True, layer=LayerShape(sliding_window=3, qk_norm=True)),
}


def make(target, config):
    family = next(family for family in HEADS.values() if family.config_class is type(config))
    torch.manual_seed(0)
    heads = family(family.resolve(config, target), target.hidden_size, target.vocab_size, torch.arange(300))
    heads.bind(target).initialise()
    for parameter in heads.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return heads


def step(heads, checkpointing, dtype=torch.float32):
    """Loss, gradients, and the bytes of the activations that autograd keeps between forward and backward."""
    target, batch = heads.target, packed_batch(256)
    features = target.features(batch.ids_BT, batch.positions_BT, batch.documents_BT, heads.training_taps)
    features = {tap: feature.detach().to(dtype) for tap, feature in features.items()}
    counts_K = label_counts(batch.supervised_BT, batch.documents_BT, heads.depth)
    heads.gradient_checkpointing = checkpointing
    given = [*heads.parameters(), *heads.buffers(), *target.model.parameters(), *features.values()]
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    torch.manual_seed(1)  # of EAGLE-1's noise
    heads.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = heads(features, *inputs_of(batch), counts_K)
        size = sum(storage.nbytes() for storage in kept.values())
        loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in heads.named_parameters()}, size


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_to_the_bit_and_less_is_kept(name, tiny_target):
    heads = make(tiny_target(), CASES[name])
    loss, expected, size = step(heads, False)
    again, found, less = step(heads, True)
    assert torch.equal(again, loss)
    assert all(gradient.any() and torch.equal(found[parameter], gradient) for parameter, gradient in expected.items())
    assert less < size / 2


@pytest.mark.parametrize("name", ["eagle", "eagle3", "hydra++"])
def test_in_bfloat16_gradients_differ_by_its_rounding_alone(name, tiny_target):
    """Autocast casts a weight once for all steps, and again for each that is computed again: sums round elsewhere."""
    heads = make(tiny_target(), CASES[name])
    _, exact, _ = step(heads, False)
    loss, expected, size = step(heads, False, torch.bfloat16)
    again, found, less = step(heads, True, torch.bfloat16)
    assert torch.equal(again, loss)
    for parameter, gradient in expected.items():
        assert relative(found[parameter], gradient) < 0.02, parameter
        assert relative(found[parameter], exact[parameter]) < 1.5 * relative(gradient, exact[parameter]) + 0.01
    assert less < size / 2


def test_without_gradients_it_changes_nothing(tiny_target):
    heads = make(tiny_target(), CASES["eagle3"])
    with torch.no_grad():
        assert torch.equal(*(heads(*_inputs(heads, checkpointing))[0] for checkpointing in (False, True)))


def _inputs(heads, checkpointing):
    heads.gradient_checkpointing = checkpointing
    batch = packed_batch(256)
    features = heads.target.features(batch.ids_BT, batch.positions_BT, batch.documents_BT, heads.training_taps)
    counts_K = label_counts(batch.supervised_BT, batch.documents_BT, heads.depth)
    return features, *inputs_of(batch), counts_K
