"""EAGLE heads: the unrolled training forward against a naive roll-out, position by position."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import heads.eagle as heads_eagle
from heads.eagle import Eagle1Heads, EagleConfig, anchor_table
from heads.eagle3 import Eagle3Config, Eagle3Heads
from heads.eagle_layer import LayerShape
from heads.objectives import Objective
from heads.target import FINAL_NORM
from heads.warm_start import LinearForecast

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
OPTIONS = {
    "eagle3": Eagle3Config(num_steps=7),
    "normed residual": Eagle3Config(num_steps=7, norm_before_residual=True, norm_output=True),
    "fc_norm": Eagle3Config(num_steps=7, fc_norm=True, taps=[0, 3]),
    "norm_before_fc": Eagle3Config(num_steps=7, norm_before_fc=True),
    "qk_norm, biases": Eagle3Config(num_steps=7, layer=LayerShape(qk_norm=True, attention_bias=True)),
    "window": Eagle3Config(num_steps=7, layer=LayerShape(sliding_window=4)),
    "other shape": Eagle3Config(
        num_steps=7, layer=LayerShape(num_attention_heads=6, num_key_value_heads=1, head_dim=4)
    ),
    "scaled rope": Eagle3Config(num_steps=7, layer=LayerShape(rope_parameters=LLAMA3)),
    "eagle1": EagleConfig(num_steps=3, bias=True, noise=0.0),
}


def make(target, config, seed=0, draft_ids=None):
    """Heads with every parameter disturbed, so that no norm or bias is invisible."""
    family = Eagle1Heads if isinstance(config, EagleConfig) else Eagle3Heads
    ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
    torch.manual_seed(seed)
    heads = family(family.resolve(config, target), target.hidden_size, target.vocab_size, ids).bind(target).initialise()
    for parameter in heads.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return heads


def packed_batch(target):
    """Two rows: two packed documents, and one document with padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (2, 24), generator=generator)
    documents = torch.tensor([[0] * 13 + [1] * 11, [0] * 17 + [-1] * 7])
    positions = torch.tensor([[*range(13), *range(11)], [*range(17), *[0] * 7]])
    supervised = torch.zeros(2, 24, dtype=torch.bool)
    supervised[0, 3:12] = supervised[0, 15:22] = supervised[1, 4:17] = True
    return ids, supervised, documents, positions


def rotate(vector_Hd, position, heads):
    cos, sin = heads.layer.rotary(vector_Hd, torch.tensor([[position]]))
    half = vector_Hd.shape[-1] // 2
    turned = torch.cat([-vector_Hd[:, half:], vector_Hd[:, :half]], -1)
    return vector_Hd * cos[0, 0] + turned * sin[0, 0]


def naive_states(heads, fused_TD, ids_T, t, steps):
    """Roll out from the prefix 0 .. t of one document, one position after the other."""
    layer, d = heads.layer, heads.layer.head_dim
    keys, values = [], []

    def one(feature_D, token, position, sees_from):
        inputs, residual = heads.enter(heads.target.embed(token), feature_D)
        query, key, value = (proj(inputs).view(-1, d) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
        if layer.shape.qk_norm:
            query, key = layer.q_norm(query), layer.k_norm(key)
        keys.append(rotate(key, position, heads))
        values.append(value)
        query, group = rotate(query, position, heads), layer.num_heads // layer.num_kv_heads
        outputs = []
        for head in range(layer.num_heads):
            seen = range(sees_from, len(keys))
            scores = torch.stack([query[head] @ keys[i][head // group] for i in seen]) / math.sqrt(d)
            outputs.append(sum(w * values[i][head // group] for w, i in zip(scores.softmax(0), seen, strict=True)))
        hidden = residual + layer.o_proj(torch.cat(outputs))
        normed = layer.post_attention_layernorm(hidden)
        return hidden + layer.down_proj(F.silu(layer.gate_proj(normed)) * layer.up_proj(normed))

    window = layer.shape.sliding_window
    first = lambda position: 0 if window is None else max(0, position - window + 1)  # noqa: E731
    for i in range(t + 1):
        state = one(fused_TD[i], ids_T[i + 1], i, first(i))
    states = [state]
    for step in range(1, steps):
        states.append(one(heads.feed(states[-1]), ids_T[t + 1 + step], t + step, first(t + step)))
    return torch.stack(states)


def deviation(heads, unroll=None):
    """Largest difference between unrolled and naive states, relative to the largest state, packed and padded."""
    target = heads.target
    ids, _, documents, positions = packed_batch(target)
    features = target.features(ids, positions, documents, heads.training_taps)
    anchors = torch.tensor([3, 8, 14, 24 + 3, 24 + 9])
    places, valid = anchor_table(anchors, 2, 24)
    with torch.no_grad():
        fused = heads.fuse(features)
        states = (unroll or heads.unroll)(fused, ids, documents, positions, places)[:, valid]
        worst = 0.0
        for n, row in enumerate(anchors.tolist()):
            b, t = divmod(row, 24)
            mine = documents[b] == documents[b, t]
            t -= int(mine.nonzero()[0])
            steps = min(heads.depth, int(mine.sum()) - t - 1)
            naive = naive_states(heads, fused[b][mine], ids[b][mine], t, steps)
            worst = max(worst, ((states[:steps, n] - naive).abs().max() / naive.abs().max()).item())
    return worst


@pytest.mark.parametrize("name", OPTIONS)
def test_unrolled_training_equals_a_naive_roll_out(name, tiny_target):
    assert deviation(make(tiny_target("llama"), OPTIONS[name])) < 1e-5


FAULTS = {
    "mask": "a query sees the key behind its anchor too",
    "diagonal": "a later step does not see its own keys",
    "position": "the rotary position stays at t",
    "shift": "a step reads the token before its own",
    "norm": "the state is fed back through the norm",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_unrolled_forward_is_seen(fault, tiny_target, monkeypatch):
    heads = make(tiny_target("llama"), Eagle3Config(num_steps=4))
    if fault == "mask":
        right = heads_eagle.causal_visibility
        monkeypatch.setattr(heads_eagle, "causal_visibility", lambda places, *rest: right(places + 1, *rest))
    elif fault == "diagonal":
        right = heads_eagle.unrolled_attention
        monkeypatch.setattr(heads_eagle, "unrolled_attention", lambda *given: right(*given[:4], []))
    elif fault == "position":
        queries = heads.layer.queries
        heads.layer.queries = lambda inputs, positions: queries(inputs, positions.clamp_max(8))
    elif fault == "shift":
        embed = heads.embed
        heads.embed = lambda ids, like: embed(ids, like).roll(1, 1)
    else:
        feed = heads.feed
        monkeypatch.setattr(
            heads, "feed", lambda state: heads.final_norm(feed(state)) if state.ndim == 3 else feed(state)
        )
    assert deviation(heads) > 1e-3


@pytest.mark.parametrize("config", [Eagle3Config(num_steps=3), EagleConfig(num_steps=2)], ids=["eagle3", "eagle"])
def test_only_the_heads_get_gradients_and_company_changes_nothing(config, tiny_target):
    target = tiny_target("llama")
    heads = make(target, replace(config, **({"noise": 0.0} if isinstance(config, EagleConfig) else {})),
                 draft_ids=torch.arange(10, 200))  # fmt: skip
    ids, supervised, documents, positions = packed_batch(target)
    counts = torch.full((heads.depth,), 20)

    def loss_of(rows):
        features = target.features(ids[rows], positions[rows], documents[rows], heads.training_taps)
        return heads(features, ids[rows], supervised[rows], documents[rows], positions[rows], counts)

    together, statistics = loss_of([0, 1])
    together.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in heads.parameters())
    assert all(parameter.grad is None for parameter in target.model.parameters())
    (first, one), (second, two) = loss_of([0]), loss_of([1])
    torch.testing.assert_close(together, first + second)
    torch.testing.assert_close(statistics, one + two)


def test_eagle1_regresses_to_the_next_feature(tiny_target):
    """With states equal to the target's next features the regression loss is zero, and only then."""
    target = tiny_target("llama")
    heads = make(target, EagleConfig(noise=0.0, objective=Objective(ce_weight=0.0, kl_weight=1e-9)))
    ids, supervised, documents, positions = packed_batch(target)
    features = target.features(ids, positions, documents)
    next_BTD = features[FINAL_NORM].roll(-1, 1)
    for shift, least in ((0.0, 0.0), (0.5, 0.1)):
        heads.unroll = lambda fused, i, d, p, places, shift=shift: torch.stack(
            [next_BTD.gather(1, places[..., None].expand(-1, -1, 32)) + shift]
        )
        loss, _ = heads(features, ids, supervised, documents, positions, torch.tensor([30]))
        assert loss.item() >= least * 0.9 - 1e-15  # the KL of equal laws is 0 but for rounding, and weighs 1e-9
        assert loss.item() < least + 1e-2


def test_eagle1_trains_a_target_as_what_it_reads_and_never_as_what_it_must_guess(tiny_target):
    """Features with gradients are those of an adapted target: the states follow from them, the labels are constants."""
    target = tiny_target("llama")
    heads = make(target, EagleConfig(noise=0.0, objective=Objective(ce_weight=0.0, kl_weight=1e-9)))
    ids, supervised, documents, positions = packed_batch(target)
    hidden = target.features(ids, positions, documents)[FINAL_NORM].clone().requires_grad_()
    unroll = heads.unroll
    for cut in (False, True):
        if cut:
            heads.unroll = lambda fused, *rest: unroll(fused.detach(), *rest)
        loss, _ = heads({FINAL_NORM: hidden}, ids, supervised, documents, positions, torch.tensor([30]))
        (gradient,) = torch.autograd.grad(loss, hidden, allow_unused=True)
        assert (gradient is None) == cut


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 0}, "num_steps=0 must be at least 1"),
        ({"taps": [2, 1]}, "must be ascending"),
        ({"taps": [1, 9]}, "must be below 4"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
    ],
)
def test_wrong_settings_are_named(settings, message, tiny_target):
    with pytest.raises(ValueError, match=message):
        Eagle3Heads.resolve(Eagle3Config(**settings), tiny_target("llama"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "llama3-rope"])
def test_the_layer_follows_the_target(family, tiny_target):
    target = tiny_target(family)
    shape = Eagle3Heads.resolve(Eagle3Config(), target).layer
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.intermediate_size) == (
        4,
        2,
        8,
        64,
    )
    rope = target.text_config.rope_parameters
    assert shape.rope_parameters == rope.get("full_attention", rope)


@pytest.mark.parametrize("config", [Eagle3Config(num_steps=3), EagleConfig(noise=0.0)], ids=["eagle3", "eagle"])
def test_float32_masters_train_on_bfloat16_features(config, tiny_target):
    target = tiny_target("llama")
    heads = make(target, config)
    ids, supervised, documents, positions = packed_batch(target)
    features = target.features(ids, positions, documents, heads.training_taps)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        given = {tap: feature.to(dtype) for tap, feature in features.items()}
        counts = torch.full((heads.depth,), 20)
        losses.append(heads(given, ids, supervised, documents, positions, counts)[0])
    losses[1].backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in heads.parameters())
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0.05)


def test_served_in_bfloat16_the_positions_are_those_of_training(tiny_target):
    heads = make(tiny_target("llama"), Eagle3Config())
    position = torch.tensor([[3000]])
    exact, _ = heads.layer.rotary(torch.zeros(1), position)
    rounded, _ = heads.to(torch.bfloat16).layer.rotary(torch.zeros(1), position)
    assert torch.equal(exact, rounded)


def test_eagle1_starts_from_the_forecast_of_the_next_feature(tiny_target):
    """Before any step the state is the ridge regression of f[t+1] on (e(x[t+1]), f[t])."""
    target = tiny_target("llama")
    heads = make(target, EagleConfig(init="regression", noise=0.0))
    ids, supervised, documents, positions = packed_batch(target)
    features = target.features(ids, positions, documents)
    forecast = LinearForecast(heads.forecasts, heads.forecast_size, heads.hidden_size, target.device)
    forecast.add(heads.forecast_inputs(features, ids), features[FINAL_NORM], ids, supervised, documents)
    heads.start_from(forecast)
    states_S1AD = heads.unroll(features[FINAL_NORM][:1], ids[:1], documents[:1], positions[:1], torch.tensor([[5]]))
    inputs_I = torch.cat([target.embed(ids[0, 6]), features[FINAL_NORM][0, 5]])
    torch.testing.assert_close(states_S1AD[0, 0, 0], forecast.solve()[0].float() @ inputs_I, rtol=1e-4, atol=1e-4)
