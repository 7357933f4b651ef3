"""EAGLE-3 heads that start as a linear forecast."""

import pytest
import torch
import torch.nn.functional as F

from heads.eagle3 import Eagle3Config, Eagle3Heads
from heads.eagle3_start import self_gap
from heads.eagle_layer import LayerShape
from heads.target import FINAL_NORM, TargetConfig, load_target
from heads.warm_start import LinearForecast, ridge


@pytest.fixture(scope="module")
def target():
    """A target whose embeddings share a direction, as trained ones do."""
    target = load_target(TargetConfig(name="llama", path="random:llama"), "cpu")
    target.embedding.weight.data += 1.0
    return target


@pytest.fixture(scope="module")
def batch(target):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 256, (8, 60), generator=generator)
    documents, positions = torch.zeros_like(ids), torch.arange(60).expand(8, 60)
    supervised = torch.ones_like(ids, dtype=torch.bool)
    config = Eagle3Config(num_steps=2, init="regression")
    heads = Eagle3Heads(
        Eagle3Heads.resolve(config, target), target.hidden_size, target.vocab_size, torch.arange(target.vocab_size)
    )
    heads.bind(target).initialise()
    features = target.features(ids, positions, documents, heads.training_taps)
    forecast = LinearForecast(heads.forecasts, heads.forecast_size, heads.hidden_size, target.device)
    forecast.add(heads.forecast_inputs(features, ids), features[FINAL_NORM], ids, supervised, documents)
    heads.start_from(forecast)
    return heads, forecast, features, ids, documents, positions


@torch.no_grad()
def unrolled(batch, places):
    heads, _, features, ids, documents, positions = batch
    return heads.unroll(heads.fuse(features), ids, documents, positions, places.expand(len(ids), -1))


def linear_update(heads):
    """What the layer adds, as one map of its inputs: the first query head of each group reads its own value."""
    d, G = heads.layer.head_dim, heads.layer.num_kv_heads
    per_group = heads.layer.num_heads // G
    out = [heads.layer.o_proj.weight[:, g * per_group * d :][:, :d] for g in range(G)]
    return torch.cat(out, 1) @ heads.layer.v_proj.weight


def test_every_step_is_the_linear_map_of_its_own_inputs(batch):
    """Though the layer attends to all positions before, and whatever they hold."""
    heads, _, features, ids, *_ = batch
    places = torch.tensor([[7, 20, 50]])
    feature = heads.fuse(features)[:, places[0]]
    for step, state in enumerate(unrolled(batch, places)):
        tokens = ids[:, places[0] + 1 + step]
        inputs = torch.cat([heads.input_layernorm(heads.embed(tokens, feature)), heads.hidden_norm(feature)], -1)
        expected = feature + F.linear(inputs, linear_update(heads))
        # Attention is 1 - e^-6 sharp where the shared direction is exact, and near it here.
        assert (state - expected).norm() < 0.1 * (expected - feature).norm()
        feature = state


def test_the_first_state_forecasts_the_next_feature(batch):
    heads, forecast, features, *_ = batch
    places = torch.arange(40)[None]
    truth = features[FINAL_NORM][:, 1:41]
    guess = F.cosine_similarity(heads.read(unrolled(batch, places)[0]), truth, dim=-1).mean()
    repeated = F.cosine_similarity(features[FINAL_NORM][:, :40], truth, dim=-1).mean()
    best = forecast.gram_KEE[0][:-1, :-1], forecast.cross_KED[0][:-1]
    inputs = heads.forecast_inputs(features, batch[3])[:, :40].double()
    bound = F.cosine_similarity((inputs @ ridge(*best)).float(), truth, dim=-1).mean()
    assert guess > 0.8 * bound > 0.8 * repeated
    assert bound - guess < 0.3 * (bound - repeated)


def test_a_position_outscores_all_others_by_the_gap(batch):
    layer = batch[0].layer
    frequencies = layer.rotary.inv_freq[:4]
    distances = torch.arange(1, 4096)
    expected = 4 - torch.cos(distances[:, None] * frequencies).sum(-1).max()
    assert self_gap(layer, 4) == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{"norm_before_residual": True}, {"norm_output": True}, {"fc_norm": True}, {"layer": LayerShape(qk_norm=True)}],
)
def test_other_norms_are_refused(settings):
    with pytest.raises(ValueError, match=r"heads\.init=regression is for the default norms; use init=target"):
        Eagle3Config(init="regression", **settings)


def test_an_unknown_start_is_refused():
    with pytest.raises(ValueError, match=r"heads\.init=random must be target or regression"):
        Eagle3Config(init="random")
