"""Tiny targets and heads, made on the spot; nothing is downloaded."""

import os

import pytest
import torch

from heads.medusa import MedusaConfig, MedusaHeads
from heads.target import Target, TargetConfig, load_target


@pytest.fixture(scope="session")
def tiny_target():
    """`tiny_target(family)`: a random float32 target, loaded once in a session."""
    loaded: dict[str, Target] = {}

    def load(family: str = "llama") -> Target:
        if family not in loaded:
            with torch.inference_mode(False):  # whoever asks first: others differentiate through its weights
                loaded[family] = load_target(TargetConfig(name=family, path=f"random:{family}"), "cpu")
        return loaded[family]

    return load


@pytest.fixture(scope="session")
def random_heads():
    """`random_heads(target, seed=0, noise=0.1, ...)`: Medusa heads, initialised from the target and disturbed."""

    def make(target: Target, seed: int = 0, noise: float = 0.1, draft_ids=None, **settings) -> MedusaHeads:
        ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
        heads = MedusaHeads(MedusaConfig(**settings), target.hidden_size, target.vocab_size, ids)
        heads.bind(target).initialise()
        generator = torch.Generator().manual_seed(seed)
        for parameter in heads.parameters():
            parameter.data += noise * torch.randn(parameter.shape, generator=generator)
        return heads

    return make


@pytest.fixture
def logged_out(monkeypatch, tmp_path):
    """No W&B settings and no login of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
