"""Hydra heads against a naive loop over positions, and what they owe every family."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import heads.hydra
from heads.alignment import IGNORE, find_anchors, label_counts
from heads.hydra import HydraConfig, HydraHeads, following_ids
from heads.identity import identify
from heads.layout import load_heads, save_heads
from heads.objectives import Objective, Statistics
from heads.warm_start import LinearForecast

# Three documents in two rows: two packed ones (the second answers twice), and a short one with padding behind it.
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 15, [2] * 14 + [-1] * 10])
MARKS = ("000111111" + "011100111111000", "00000111111111" + "0" * 10)
SUPERVISED = torch.tensor([[mark == "1" for mark in row] for row in MARKS])


def make_heads(target, seed=0, noise=0.1, draft_ids=None, **settings) -> HydraHeads:
    ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
    config = HydraHeads.resolve(HydraConfig(**settings), target)
    made = HydraHeads(config, target.hidden_size, target.vocab_size, ids).bind(target).initialise()
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    return made


@pytest.fixture
def batch(tiny_target):
    """What `forward` takes: features, ids, supervised, documents, positions, label counts of three heads."""
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[*range(9), *range(15)], [*range(14), *range(10)]])
    features = tiny_target().features(ids, positions, DOCUMENTS)
    return features, ids, SUPERVISED, DOCUMENTS, positions, label_counts(SUPERVISED, DOCUMENTS, 3)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_fresh_heads_are_exactly_the_target(lm_head, prefix, tiny_target, batch):
    target = tiny_target()
    fresh = make_heads(target, noise=0.0, lm_head=lm_head, num_layers=2, prefix_attention=prefix)
    hidden_BTD = batch[0]["final_norm"]
    if fresh.prefix is not None:
        assert fresh.prefix(hidden_BTD, *batch[3:5]).equal(hidden_BTD)
    hidden_ND, ids_NK = hidden_BTD[0, :5], torch.randint(0, 256, (5, 4))
    for k in range(4):
        embeddings = fresh.embed(ids_NK[:, : k + 1])
        torch.testing.assert_close(fresh.draft_logits(k, hidden_ND, embeddings), target.logits(hidden_ND))


def test_following_ids_are_those_drawn():
    """The drawing of `following_ids`: U a b c # U."""
    found = following_ids(torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([0, 2, 4]), 3)
    assert found.tolist() == [[1, 2, 3], [3, 4, 0], [0, 0, 0]]


def reference_prefix(model, hidden_TD):
    """The prefix layer as transformers computes a Llama layer, on one document alone."""
    shape, names = model.config.layer, dict(model.prefix.layer.named_parameters())
    config = LlamaConfig(
        hidden_size=32, intermediate_size=shape.intermediate_size, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim, rms_norm_eps=shape.rms_norm_eps,
        rope_parameters=shape.rope_parameters, attn_implementation="eager",
    )  # fmt: skip
    layer = LlamaDecoderLayer(config, 0)
    weights = {"input_layernorm.weight": model.prefix.norm.weight}
    for known in dict(layer.named_parameters()):
        if known not in weights:
            weights[known] = names[known.removeprefix("self_attn.").removeprefix("mlp.")]
    T = len(hidden_TD)
    mask_TT = torch.full((T, T), float("-inf")).triu(1)
    rotary = LlamaRotaryEmbedding(config)(hidden_TD, torch.arange(T)[None])
    options = {"attention_mask": mask_TT[None, None], "position_embeddings": rotary}
    return torch.func.functional_call(layer, weights, (hidden_TD[None],), options)[0]


def naive_labels_and_logits(model, hidden_TD, ids, supervised, k):
    """Head k over one document, position by position: its labels and logits where it may draft."""
    target, found = model.target, []
    head, D = model.heads[k], model.hidden_size
    for t in range(len(ids) - 2 - k):
        if not all(supervised[i] for i in range(t + 1, t + 3 + k)):
            continue
        inputs = [hidden_TD[t]]
        for i in range(t + 1, t + 2 + k):
            embedding = target.embed(ids[i])
            inputs.append(embedding / embedding.pow(2).mean().sqrt())
        joined = torch.cat(inputs)
        assert joined.shape == ((k + 2) * D,)
        state = head.skip.weight @ joined + head.skip.bias + F.silu(head.first.weight @ joined + head.first.bias)
        for layer in head.others:
            state = state + F.silu(layer.weight @ state + layer.bias)
        rows_VD = model.lm_head_weight[k] if model.config.lm_head == "own" else target.lm_head.weight
        found.append((ids[t + 2 + k], rows_VD @ state))
    return found


def naive_loss(model, batch) -> tuple[torch.Tensor, list[int]]:
    features, ids_BT, supervised_BT, documents_BT, _, counts_K = batch
    loss, labels = torch.zeros(()), []
    for k in range(model.depth):
        found = []
        for document in range(3):
            inside_BT = documents_BT == document
            hidden_TD = features["final_norm"][inside_BT]
            if model.prefix is not None:
                hidden_TD = reference_prefix(model, hidden_TD)
            found += naive_labels_and_logits(model, hidden_TD, ids_BT[inside_BT], supervised_BT[inside_BT], k)
        labels.append(len(found))
        for label, logits_V in found:
            loss = loss + model.config.objective.decay**k / counts_K[k] * F.cross_entropy(logits_V, label)
    return loss, labels


@pytest.mark.parametrize(
    "settings",
    [{}, {"lm_head": "shared"}, {"num_layers": 3}, {"prefix_attention": True}],
    ids=lambda settings: " ".join(settings) or "default",
)
def test_the_parallel_loss_is_a_loop_over_positions(settings, tiny_target, batch):
    model = make_heads(tiny_target(), num_heads=3, **settings)
    loss, statistics = model(*batch)
    expected, labels = naive_loss(model, batch)
    torch.testing.assert_close(loss, expected)
    assert Statistics(*statistics).labels.tolist() == labels == batch[-1].tolist()
    assert min(labels) > 0
    expected.backward()
    naive = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, naive[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_embedding_would_be_noticed(shift, tiny_target, batch, monkeypatch):
    model = make_heads(tiny_target(), num_heads=3)
    monkeypatch.setattr(
        heads.hydra, "following_ids", lambda ids_BT, rows_N, count: following_ids(ids_BT, rows_N + shift, count)
    )
    loss, _ = model(*batch)
    assert not torch.isclose(loss, naive_loss(model, batch)[0], rtol=1e-3)


def test_heads_run_at_anchors_alone(tiny_target, batch, monkeypatch):
    model = make_heads(tiny_target(), num_heads=3)
    rows = []
    inner = model.head_states
    monkeypatch.setattr(model, "head_states", lambda k, *inputs: (rows.append(len(inputs[0])), inner(k, *inputs))[1])
    model(*batch)
    assert rows == [batch[-1][0]] * 3


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, {"heads", "lm_head_weight"}),
        ({"lm_head": "shared"}, {"heads"}),
        ({"prefix_attention": True}, {"heads", "lm_head_weight", "prefix"}),
    ],
)
def test_only_the_heads_get_gradients(settings, parts, tiny_target, batch):
    target = tiny_target()
    model = make_heads(target, num_heads=3, draft_ids=torch.arange(10, 200), **settings)
    model(*batch)[0].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == parts


def test_fresh_heads_can_learn_everywhere(tiny_target, batch):
    """A zero start has no gradient if two factors of a product are zero."""
    model = make_heads(tiny_target(), num_heads=3, num_layers=2, noise=0.0)
    model(*batch)[0].backward()
    assert all(parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("prefix", [False, True])
def test_padding_does_not_change_the_loss(prefix, tiny_target, batch):
    model = make_heads(tiny_target(), num_heads=3, prefix_attention=prefix)
    features, *tensors, counts = batch
    longer = {"final_norm": F.pad(features["final_norm"], (0, 0, 0, 7), value=9.0)}
    padded = [F.pad(tensor, (0, 7), value=pad) for tensor, pad in zip(tensors, (258, False, -1, 0), strict=True)]
    torch.testing.assert_close(model(longer, *padded, counts)[0], model(*batch)[0])


def test_a_batch_without_labels_costs_nothing(tiny_target, batch):
    model = make_heads(tiny_target(), num_heads=3)
    features, ids, _, documents, positions, counts = batch
    loss, statistics = model(features, ids, torch.zeros_like(SUPERVISED), documents, positions, counts)
    loss.backward()
    assert loss == 0
    assert not statistics.any()
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_the_target_as_a_teacher(tiny_target, batch):
    """Pure distillation of fresh heads: KL(p[t+1+k] || p[t]), as they repeat the target's guess."""
    target = tiny_target()
    model = make_heads(target, noise=0.0, num_heads=1, objective=Objective(ce_weight=0.0, kl_weight=1.0))
    features, ids, supervised, documents, positions, counts = batch
    loss, _ = model(features, ids, supervised, documents, positions, counts[:1])
    anchors = find_anchors(ids, supervised, documents, 1)
    assert (anchors.labels_KN != IGNORE).all()
    logits = target.logits(features["final_norm"].flatten(0, 1))
    guess, truth = (logits[rows].log_softmax(-1) for rows in (anchors.rows_N, anchors.rows_N + 1))
    torch.testing.assert_close(loss, F.kl_div(guess, truth, log_target=True, reduction="batchmean"))


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_heads_start_from_a_linear_forecast(lm_head, tiny_target, batch):
    target = tiny_target()
    model = make_heads(target, noise=0.0, num_heads=3, lm_head=lm_head, init="regression")
    assert model.forecasts
    features, ids, supervised, documents, *_ = batch
    forecast = LinearForecast(3, 32, 32, torch.device("cpu"))
    forecast.add(features["final_norm"], features["final_norm"], ids, supervised, documents)
    model.start_from(forecast)
    maps = forecast.solve()
    hidden_ND = torch.randn(5, 32)
    for k in range(3):
        embeddings = model.embed(torch.randint(0, 256, (5, k + 1)))
        expected = target.logits(hidden_ND @ maps[k].float().T)
        torch.testing.assert_close(model.draft_logits(k, hidden_ND, embeddings), expected, rtol=1e-4, atol=1e-4)


def test_embeddings_have_unit_scale_whatever_the_targets(tiny_target):
    for family in ("llama", "gemma2"):
        embeddings = make_heads(tiny_target(family)).embed(torch.arange(256))
        torch.testing.assert_close(embeddings.pow(2).mean(-1), torch.ones(256))


@pytest.mark.parametrize("prefix", [False, True])
def test_float32_masters_train_on_bfloat16_features(prefix, tiny_target, batch):
    model = make_heads(tiny_target(), num_heads=3, prefix_attention=prefix)
    loss, _ = model({"final_norm": batch[0]["final_norm"].bfloat16()}, *batch[1:])
    loss.backward()
    torch.testing.assert_close(loss, model(*batch)[0], rtol=0.02, atol=0.0)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"lm_head": "shared"}, {"prefix_attention": True}], ids=str)
def test_round_trip_is_exact(settings, dtype, tiny_target, tmp_path):
    target = tiny_target()
    settings = {"num_heads": 3, "num_layers": 2, "objective": Objective(decay=1.0), **settings}
    model = make_heads(target, draft_ids=torch.tensor([3, 5, 90, 258]), draft_vocab_size=4, **settings)
    model = model.to(dtype).bind(target)
    save_heads(model, tmp_path / "heads", identify(target))
    loaded = load_heads(tmp_path / "heads", target)
    assert isinstance(loaded, HydraHeads)
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].equal(tensor), name
    inputs = 2, torch.randn(4, 32), model.embed(torch.randint(0, 256, (4, 3)))
    assert loaded.draft_logits(*inputs).equal(model.draft_logits(*inputs))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 0}, r"heads\.num_heads=0 must be at least 1"),
        ({"num_layers": 0}, r"heads\.num_layers=0 must be at least 1"),
        ({"lm_head": "tied"}, r"heads\.lm_head=tied must be one of own, shared"),
        ({"init": "random"}, r"heads\.init=random must be one of target, regression"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        HydraConfig(**settings)
