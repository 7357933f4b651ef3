import math

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eval.sampling import SamplingConfig, TorchCoin, probabilities


def warped_by_transformers(logits_NV: Tensor, config: SamplingConfig) -> Tensor:
    no_ids = torch.LongTensor(len(logits_NV), 0)
    logits_NV = TemperatureLogitsWarper(config.temperature)(no_ids, logits_NV)
    if config.top_k:
        logits_NV = TopKLogitsWarper(config.top_k)(no_ids, logits_NV)
    if config.top_p < 1:
        logits_NV = TopPLogitsWarper(config.top_p)(no_ids, logits_NV)
    return logits_NV.softmax(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-9])
@pytest.mark.parametrize("ties", [False, True])
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int, top_p: float, ties: bool):
    logits_NV = 3 * torch.randn(40, 17, generator=torch.Generator().manual_seed(0))
    logits_NV = logits_NV.round() if ties else logits_NV
    config = SamplingConfig(temperature, top_k, top_p)

    torch.testing.assert_close(
        probabilities(logits_NV, config), warped_by_transformers(logits_NV, config), rtol=0, atol=1e-7
    )


def test_top_k_keeps_ties_and_top_p_keeps_the_smallest_sufficient_set():
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    tied_V = torch.tensor([2.0, 1.0, 1.0, 0.0])

    assert (probabilities(tied_V, SamplingConfig(1.0, top_k=2)) > 0).tolist() == [True, True, True, False]
    kept = {p: int((probabilities(logits_V, SamplingConfig(1.0, top_p=p)) > 0).sum()) for p in (0.39, 0.41, 0.71)}
    assert kept == {0.39: 1, 0.41: 2, 0.71: 3}


def test_top_p_counts_mass_after_temperature_and_top_k():
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()

    # of the two tokens that top_k leaves, the first holds 4/7 at temperature 1 and 16/25 at 0.5
    assert probabilities(logits_V, SamplingConfig(1.0, top_k=2, top_p=0.6)).tolist() == pytest.approx(
        [4 / 7, 3 / 7, 0, 0]
    )
    assert probabilities(logits_V, SamplingConfig(0.5, top_k=2, top_p=0.6)).tolist() == [1, 0, 0, 0]


def test_greedy_is_one_hot_at_the_first_argmax_whatever_the_filters():
    logits_NV = torch.tensor([[0.0, 2.0, 2.0], [1.0, -1.0, 0.0]])

    for config in (SamplingConfig(), SamplingConfig(0.0, top_k=2, top_p=0.1)):
        assert probabilities(logits_NV, config).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_half_precision_is_raised_to_fp32_and_fp64_kept(temperature: float):
    logits_NV = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))

    for given, returned in [
        (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
        (torch.float32, torch.float32), (torch.float64, torch.float64),
    ]:  # fmt: skip
        probs_NV = probabilities(logits_NV.to(given), SamplingConfig(temperature, top_k=4, top_p=0.9))
        assert probs_NV.dtype == returned
        torch.testing.assert_close(probs_NV.sum(-1), torch.ones(3, dtype=returned))


def test_extreme_logits_give_no_nan():
    logits_NV = torch.tensor([[1e4, -1e4, 0.0], [-math.inf, 0.0, -math.inf]])

    for temperature in (0.0, 1e-5, 1e9):
        probs_NV = probabilities(logits_NV, SamplingConfig(temperature, top_k=2, top_p=0.9))
        torch.testing.assert_close(probs_NV.sum(-1), torch.ones(2))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -1.0}, r"sampling.temperature=-1.0 must be 0 or a finite number >= 1e-5; use 0"),
        ({"temperature": 1e-7}, r"sampling.temperature=1e-07 must be 0"),
        ({"temperature": math.inf}, r"sampling.temperature=inf must be 0"),
        ({"temperature": math.nan}, r"sampling.temperature=nan must be 0"),
        ({"top_k": -1}, r"sampling.top_k=-1 must be >= 0; use 0 to turn it off"),
        ({"top_p": 1.5}, r"sampling.top_p=1.5 must be in \(0, 1\]; use 1.0 to turn it off"),
        ({"top_p": 0.0}, r"sampling.top_p=0.0 must be in"),
        ({"top_p": math.nan}, r"sampling.top_p=nan must be in"),
    ],
)
def test_a_setting_out_of_range_is_named(setting: dict, message: str):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**setting)


def test_coin_draws_in_proportion_and_never_a_token_of_weight_zero():
    weights_V = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    drawn_N = TorchCoin(torch.Generator().manual_seed(0)).draw(weights_V.expand(100_000, 6))

    counts = drawn_N.bincount(minlength=6)
    expected = 100_000 * weights_V / 8
    assert counts[weights_V == 0].sum() == 0
    chi_square = ((counts - expected) ** 2 / expected.clamp_min(1)).sum()
    assert chi_square < 13.8  # 2 degrees of freedom, level 1e-3


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.374, 1), (0.375, 3), (1 - 2**-53, 4)])
def test_coin_inverts_the_distribution_function(uniform: float, token: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "rand", lambda shape, dtype, **_: torch.full(shape, uniform, dtype=dtype))

    coin = TorchCoin(torch.Generator())
    assert coin.draw(torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])) == token


def test_coin_is_reproducible_and_certain_where_the_probability_is():
    weights_NV = torch.ones(50, 7)
    first, second = (TorchCoin(torch.Generator().manual_seed(1)) for _ in range(2))

    assert first.draw(weights_NV).equal(second.draw(weights_NV))
    assert first.draw(weights_NV[0]).shape == ()
    assert all(first.accept(1.0) and not first.accept(0.0) for _ in range(100))
    assert 400 < sum(first.accept(0.5) for _ in range(1000)) < 600
