"""How a benchmark builds its drafter."""

import pytest
import torch

from eval.benchmark import BenchmarkConfig, _coin, drafter_for
from eval.decode import AcceptanceConfig
from eval.drafters import MedusaDrafter
from eval.level_drafter import StaticDrafter
from eval.sampling import SamplingConfig, TorchCoin
from eval.tree import Tree
from heads.eagle3 import Eagle3Config
from tests.heads.test_eagle import make

WARM = SamplingConfig(temperature=0.7, top_k=5)
SAMPLED = AcceptanceConfig(rule="block", sampling=WARM, drafts="sampled")


@pytest.mark.parametrize("seed", [0, 1, 1_000_003])
def test_drawn_drafts_have_a_stream_that_no_prompt_has(seed, tiny_target):
    """One stream for both would let the coins of acceptance know the drafts: the law of the tokens is then another."""
    config = BenchmarkConfig(acceptance=SAMPLED, seed=seed)
    drafter = drafter_for(make(tiny_target(), Eagle3Config()), Tree.chain(2), config)
    assert isinstance(drafter, StaticDrafter)
    assert isinstance(drafter.coin, TorchCoin)
    draws = drafter.coin.draw(torch.ones(64, 100))
    for number in range(50):
        assert not draws.equal(_coin(config, torch.device("cpu"), number).draw(torch.ones(64, 100)))


@pytest.mark.parametrize("family", ["medusa", "eagle3"])
def test_drafts_are_drawn_only_where_the_acceptance_asks_for_it(family, tiny_target, random_heads):
    target = tiny_target()
    heads = random_heads(target) if family == "medusa" else make(target, Eagle3Config())
    for acceptance, sampling in ((AcceptanceConfig(), None), (SAMPLED, WARM)):
        drafter = drafter_for(heads, Tree.chain(2), BenchmarkConfig(acceptance=acceptance))
        assert isinstance(drafter, MedusaDrafter | StaticDrafter)
        assert drafter.sampling == sampling
