"""Heads made ready for serving guess what they guessed in training."""

from typing import Any

import pytest
import torch

from eval.drafting import for_serving
from heads.eagle import Eagle1Heads, EagleConfig
from heads.eagle3 import Eagle3Config, Eagle3Heads
from heads.hydra import HydraConfig, HydraHeads
from heads.medusa import MedusaConfig, MedusaHeads

HEADS: dict[str, tuple[Any, Any]] = {
    "eagle": (Eagle1Heads, EagleConfig()),
    "eagle3": (Eagle3Heads, Eagle3Config()),
    "hydra": (HydraHeads, HydraConfig(num_heads=2)),
    "hydra, shared": (HydraHeads, HydraConfig(num_heads=2, lm_head="shared")),
    "medusa": (MedusaHeads, MedusaConfig(num_heads=2)),
    "medusa, shared": (MedusaHeads, MedusaConfig(num_heads=2, lm_head="shared")),
}


@pytest.mark.parametrize("name", HEADS)
def test_packed_heads_guess_the_same(name, tiny_target):
    target = tiny_target("llama")
    family, config = HEADS[name]
    heads: Any = family(family.resolve(config, target), target.hidden_size, target.vocab_size, torch.arange(10, 200))
    heads.bind(target).initialise()
    for parameter in heads.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    inputs = inputs_of(heads)
    expected = heads.draft_logits(*inputs)
    shared = heads.lm_head().ndim == 2
    guesses = for_serving(heads, target).draft_logits(*inputs)
    assert (heads.packed_lm_head is not None) == shared
    torch.testing.assert_close(guesses, expected, rtol=1e-5, atol=1e-5)


def inputs_of(heads):
    """What `draft_logits` of each family reads."""
    hidden_ND = torch.randn(3, heads.hidden_size)
    if isinstance(heads, HydraHeads):
        return 1, hidden_ND, torch.randn(3, 2, heads.hidden_size)
    return (hidden_ND[0],) if isinstance(heads, MedusaHeads) else (hidden_ND,)
