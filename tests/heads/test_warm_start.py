import pytest
import torch

from heads.medusa import MedusaConfig, MedusaHeads
from heads.warm_start import RIDGE, LinearForecast


def test_a_linear_future_is_recovered(monkeypatch):
    """Features that follow f[t+1] = A f[t] exactly: the maps are powers of A."""
    monkeypatch.setattr("heads.warm_start.RIDGE", 1e-12)
    torch.manual_seed(0)
    A = torch.linalg.qr(torch.randn(6, 6)).Q
    features = [torch.randn(5, 6)]
    for _ in range(39):
        features.append(features[-1] @ A.T)
    hidden_BTD = torch.stack(features, dim=1)
    ids, documents = torch.zeros(5, 40, dtype=torch.long), torch.zeros(5, 40, dtype=torch.long)
    forecast = LinearForecast(3, 6, 6, torch.device("cpu"))
    forecast.add(hidden_BTD[:2], hidden_BTD[:2], ids[:2], torch.ones(2, 40).bool(), documents[:2])
    forecast.add(hidden_BTD[2:], hidden_BTD[2:], ids[2:], torch.ones(3, 40).bool(), documents[2:])
    for k, map_DD in enumerate(forecast.solve()):
        torch.testing.assert_close(map_DD.float(), torch.linalg.matrix_power(A, k + 1), rtol=1e-4, atol=1e-4)


def test_heads_start_as_the_targets_rows_after_the_map(tiny_target):
    target = tiny_target()
    ids = torch.arange(10, 100)
    heads = MedusaHeads(MedusaConfig(num_heads=2), 32, 320, ids).bind(target).initialise()
    forecast = LinearForecast(2, 32, 32, target.device)
    maps = torch.randn(2, 32, 32, dtype=torch.float64)
    forecast.gram_KEE += 1e6 * torch.eye(33, dtype=torch.float64)
    forecast.cross_KED[:, :-1] = 1e6 * (1 + RIDGE) * maps.mT
    heads.start_from(forecast)
    hidden = torch.randn(32)
    for k in range(2):
        expected = target.logits(maps[k].float() @ hidden)[ids]
        torch.testing.assert_close(heads.draft_logits(hidden)[k], expected, rtol=1e-4, atol=1e-4)


def test_no_label_gives_finite_maps():
    assert LinearForecast(2, 4, 4, torch.device("cpu")).solve().isfinite().all()


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"heads\.init=random must be one of target, regression"):
        MedusaConfig(init="random")
    with pytest.raises(ValueError, match=r"with heads\.lm_head=shared use init=target"):
        MedusaConfig(init="regression", lm_head="shared")
