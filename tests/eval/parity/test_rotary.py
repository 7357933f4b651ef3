"""Rotary embeddings of the replay against those of transformers, which trained heads use."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eval.parity.rotary import frequencies, rotate
from tests.heads.test_eagle import LLAMA3

YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {**LLAMA3, "rope_theta": 5e5},
    "yarn": YARN,
    "yarn, its own numbers": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False},
}


@pytest.mark.parametrize("name", ROPES)
def test_rotation_is_that_of_transformers(name):
    rope, positions = ROPES[name], torch.arange(40)
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=256, rope_parameters=dict(rope)
    )
    states = torch.randn(1, 4, 40, 16, generator=torch.Generator().manual_seed(0))
    expected, _ = apply_rotary_pos_emb(states, states, *LlamaRotaryEmbedding(config)(states, positions[None]))
    radians, gain = frequencies(rope, 16)
    torch.testing.assert_close(rotate(states[0], positions[:, None] * radians, gain), expected[0])


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match="rope_type=longrope cannot be replayed; known are default, linear, dynamic"):
        frequencies({"rope_type": "longrope", "rope_theta": 1e4}, 16)
