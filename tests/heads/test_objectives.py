"""The chunked loss against the same formulas written naively, forward and backward, in float32."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import heads.tiling
from heads.alignment import IGNORE
from heads.divergences import Teacher
from heads.objectives import CHUNK_ROWS, WEIGHTS, Objective, Statistics, chunked_loss

K, N, D, V, FULL, ROWS = 3, 23, 8, 17, 40, 28
OBJECTIVES = {
    "ce": {},
    "kl": {"ce_weight": 0.0, "kl_weight": 1.0},
    "reverse kl": {"ce_weight": 0.0, "reverse_kl_weight": 1.0},
    "tv": {"ce_weight": 0.0, "tv_weight": 1.0},
    "hybrid": {"ce_weight": 0.0, "hybrid_weight": 1.0},
    "prefix": {"prefix_weighting": True},
    "all": {
        **{name: 0.2 + 0.1 * i for i, name in enumerate(WEIGHTS)},
        "hybrid_decay": 2.0,
        "prefix_weighting": True,
    },
}


def problem(own: bool = True, reduced: bool = True, softcap: float | None = 5.0, seed: int = 0):
    torch.manual_seed(seed)
    hidden = torch.randn(K, N, D, requires_grad=True)
    weight = torch.randn(*((K,) if own else ()), V, D, requires_grad=own)
    labels = torch.randint(0, FULL, (K, N))
    labels[:, -4:] = IGNORE
    labels[2, :5] = IGNORE
    draft = torch.where(labels < V, labels, IGNORE)
    full_weight = torch.randn(FULL, D)
    teacher = Teacher(
        torch.randn(ROWS, D), torch.randint(0, ROWS, (K, N)), full_weight[:V], softcap, full_weight if reduced else None
    )
    scale = torch.tensor([1.0, 0.8, 0.64]) / torch.tensor([19, 19, 14])
    return hidden, weight, labels, draft, scale, teacher


def chunked(inputs, objective, chunk_rows=CHUNK_ROWS):
    hidden, weight, labels, draft, scale, teacher = inputs
    return chunked_loss(hidden, weight, labels, draft, scale, objective, teacher, chunk_rows)


def target_logits(teacher, weight):
    logits = teacher.hidden_RD[teacher.rows_KN] @ weight.T
    return logits if teacher.softcap is None else torch.tanh(logits / teacher.softcap) * teacher.softcap


def target_distributions(teacher):
    """Log-probabilities given the draft vocabulary, and probabilities in the full one: [K, N, V] each."""
    full_weight = teacher.weight_VD if teacher.full_weight_VD is None else teacher.full_weight_VD
    return (
        target_logits(teacher, teacher.weight_VD).log_softmax(-1),
        target_logits(teacher, full_weight).softmax(-1)[..., :V],
    )


def naive(hidden, weight, labels, draft, scale, teacher, objective):
    """The loss and the acceptances [K, N], all logits at once and differentiated by autograd."""
    log_q = (hidden @ weight.mT).log_softmax(-1)
    log_p, true_p = target_distributions(teacher)
    accepted = torch.minimum(true_p, log_q.exp()).sum(-1)
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    share = torch.exp(-objective.hybrid_decay * accepted.detach())
    ce = F.nll_loss(log_q.flatten(0, 1), draft.flatten(), ignore_index=IGNORE, reduction="none").view(K, N)
    loss = objective.kl_weight * kl + objective.tv_weight * (1 - accepted)
    loss = loss + objective.reverse_kl_weight * (log_q.exp() * (log_q - log_p)).sum(-1)
    loss = loss + objective.hybrid_weight * (share * kl + (1 - share) * (1 - accepted))
    loss = objective.ce_weight * ce + loss * (labels != IGNORE)
    if objective.prefix_weighting:
        a = accepted.detach()
        loss = torch.stack([loss[0], loss[1] * a[0], loss[2] * a[0] * a[1]])
    return (loss.sum(1) * scale).sum(), accepted


@pytest.mark.parametrize("softcap", [5.0, None])
@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradients_equal_the_naive_form_whatever_the_chunks(monkeypatch, name, own, reduced, softcap):
    monkeypatch.setattr(heads.tiling, "TILE_LOGITS", 4 * V)
    objective = Objective(**OBJECTIVES[name])
    inputs = problem(own, reduced, softcap)
    trained = inputs[:2] if own else inputs[:1]
    expected, _ = naive(*inputs, objective)
    wanted = torch.autograd.grad(2 * expected, trained)
    for chunk_rows in (1, 7, 1000):
        loss, _ = chunked(inputs, objective, chunk_rows)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for found, right in zip(torch.autograd.grad(2 * loss, trained), wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_a_second_backward_is_refused():
    loss, _ = chunked(problem(), Objective())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # the first one scaled the gradients in place


def test_acceptance_is_that_of_the_full_vocabulary():
    inputs = problem()
    objective = Objective(**OBJECTIVES["tv"])
    honest, _ = naive(*inputs, objective)
    fault, _ = chunked((*inputs[:-1], replace(inputs[-1], full_weight_VD=None)), objective)
    torch.testing.assert_close(chunked(inputs, objective)[0], honest, rtol=1e-5, atol=1e-6)
    assert fault < honest - 0.1  # p that is renormalised over the draft vocabulary promises too much


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_statistics_count_by_hand(chunk_rows):
    inputs = problem(seed=1)
    hidden, weight, labels, draft, _, teacher = inputs
    objective = Objective(hybrid_weight=1.0)
    stats = Statistics(*chunked(inputs, objective, chunk_rows)[1])
    guess = (hidden @ weight.mT).topk(10).indices
    right = (guess[..., 0] == draft) & (draft != IGNORE)
    assert stats.labels.tolist() == [19, 19, 14]
    assert stats.in_vocab.tolist() == (draft != IGNORE).sum(1).tolist()
    assert stats.top1.tolist() == right.sum(1).tolist()
    for top, name in ((5, "top5"), (10, "top10")):
        hits = (guess[..., :top] == draft[..., None]).any(-1) & (draft != IGNORE)
        assert getattr(stats, name).tolist() == hits.sum(1).tolist()
    assert stats.offered.tolist() == [19, right[0, :19].sum(), (right[0] & right[1])[5:19].sum()]
    assert stats.chain[1] == (right[0] & right[1]).sum()

    counts = labels != IGNORE
    log_p, true_p = target_distributions(teacher)
    kl = F.kl_div((hidden @ weight.mT).log_softmax(-1), log_p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(stats.kl, (kl * counts).sum(1))
    torch.testing.assert_close(stats.acceptance, (naive(*inputs, objective)[1] * counts).sum(1))
    torch.testing.assert_close(stats.lost_mass, ((1 - true_p.sum(-1)) * counts).sum(1))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_no_loss_needs_is_not_computed(name):
    objective = Objective(**OBJECTIVES[name])
    stats = Statistics(*chunked(problem(), objective)[1])
    assert stats.kl.any() == (name in ("kl", "hybrid", "all"))
    assert stats.acceptance.any() == stats.lost_mass.any() == (name in ("tv", "hybrid", "prefix", "all"))
    assert not Statistics(*chunked(problem(reduced=False), objective)[1]).lost_mass.any()


class Made(TorchDispatchMode):
    """Collects the operations that make tensors, and the shapes of these."""

    def __init__(self):
        super().__init__()
        self.shapes: list[tuple[Any, torch.Size]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.shapes += [(func, leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result


aten = torch.ops.aten
BLOCKS = {aten.mm.default, aten.mm.out, aten.new_empty.default, aten.empty_like.default}


@pytest.mark.parametrize("name", ["kl", "all"])
def test_vocabulary_sized_tensors_hold_one_chunk_and_each_target_row_once(monkeypatch, name):
    inputs = problem()
    rows_KN, anchors, tile = inputs[-1].rows_KN, 5, 2
    monkeypatch.setattr(heads.tiling, "TILE_LOGITS", tile * V)
    with Made() as made:
        chunked(inputs, Objective(**OBJECTIVES[name]), chunk_rows=anchors)
    distinct = [len(rows_KN[:, start : start + anchors].unique()) for start in range(0, N, anchors)]
    blocks = [shape for func, shape in made.shapes if shape[-1:] == (V,) and func in BLOCKS]
    assert max(shape.numel() for shape in blocks) == max(*distinct, anchors) * V
    passed_over = [shape for func, shape in made.shapes if shape[-1:] == (V,) and func not in BLOCKS]
    assert max(shape.numel() for shape in passed_over) == tile * V
    products = [shape for func, shape in made.shapes if func is aten.mm.default]
    assert [rows for rows, size in products if size == V] == distinct
    assert [rows for rows, size in products if size == FULL] == (distinct if name == "all" else [])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_label_gives_a_finite_zero(name):
    hidden, weight, labels, _, scale, teacher = problem()
    nothing = torch.full_like(labels, IGNORE)
    loss, _ = chunked_loss(hidden, weight, nothing, nothing, scale, Objective(**OBJECTIVES[name]), teacher)
    (grad,) = torch.autograd.grad(loss, [hidden])
    assert loss == 0
    assert not grad.any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_extreme_logits_stay_finite(name):
    hidden, *_, teacher = inputs = problem(softcap=None)
    sharp = replace(teacher, hidden_RD=teacher.hidden_RD * 1e3)
    loss, statistics = chunked((hidden * 1e3, *inputs[1:-1], sharp), Objective(**OBJECTIVES[name]))
    assert loss.isfinite()
    assert statistics.isfinite().all()
    assert torch.autograd.grad(loss, [hidden])[0].isfinite().all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ce_weight": 0.0}, "are all 0; give one of them"),
        ({"tv_weight": -0.1}, r"tv_weight=-0\.1 must be finite and >= 0"),
        ({"reverse_kl_weight": float("nan")}, "reverse_kl_weight=nan must be finite"),
        ({"hybrid_decay": 0.0}, r"hybrid_decay=0\.0 must be finite and > 0"),
        ({"decay": 1.5}, r"decay=1\.5 must be in"),
    ],
)
def test_weights_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        Objective(**wrong)
