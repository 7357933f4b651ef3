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


@pytest.mark.parametrize("of", ["inputs", "features"])
def test_what_is_not_finite_is_left_out_and_nothing_else(of):
    """The sums are those of the other pairs, whatever stands on positions that nobody reads.

    t                   0  1  2  3  4  5  6  7
    supervised          .  .  x  x  x  x  x  .
    not finite          x        x           x
    head 0 at t reads      1  2  3  4              and the features of t + 1
    head 1 at t reads      1  2  3                 and the features of t + 2
    """
    torch.manual_seed(0)
    ids, documents = torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)
    supervised = (torch.arange(8) >= 2) & (torch.arange(8) < 7)
    values = {"inputs": torch.randn(1, 8, 3), "features": torch.randn(1, 8, 4)}
    spoilt = {name: tensor.clone() for name, tensor in values.items()}
    for place, value in ((0, torch.nan), (3, torch.inf), (7, torch.nan)):
        spoilt[of][0, place, 1] = value
    forecast = LinearForecast(2, 3, 4, torch.device("cpu"))
    left_out_BT = forecast.add(*spoilt.values(), ids, supervised[None], documents)
    reached = {"inputs": ([3], [3]), "features": ([2], [1])}[of]  # at which t head 0 and head 1 lose a pair
    assert left_out_BT[0].nonzero().flatten().tolist() == sorted({*reached[0], *reached[1]})
    for k, (anchors, lost) in enumerate(zip(([1, 2, 3, 4], [1, 2, 3]), reached, strict=True)):
        places = torch.tensor([t for t in anchors if t not in lost])
        inputs = torch.cat([values["inputs"][0, places], torch.ones(len(places), 1)], 1)
        future = values["features"][0, places + 1 + k]
        torch.testing.assert_close(forecast.gram_KEE[k].float(), inputs.T @ inputs)
        torch.testing.assert_close(forecast.cross_KED[k].float(), inputs.T @ future)
    assert forecast.solve().isfinite().all()


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"heads\.init=random must be one of target, regression"):
        MedusaConfig(init="random")
    with pytest.raises(ValueError, match=r"with heads\.lm_head=shared use init=target"):
        MedusaConfig(init="regression", lm_head="shared")
