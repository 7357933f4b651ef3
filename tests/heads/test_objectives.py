"""The chunked loss against the same formula written naively, forward and backward, in float32."""

import pytest
import torch
import torch.nn.functional as F

from heads.alignment import IGNORE
from heads.objectives import Objective, Statistics, Teacher, chunked_loss

K, N, D, V, FULL = 3, 23, 8, 17, 40


def problem(own: bool, seed: int = 0):
    torch.manual_seed(seed)
    hidden = torch.randn(K, N, D, requires_grad=True)
    weight = torch.randn(*((K,) if own else ()), V, D, requires_grad=own)
    labels = torch.randint(0, FULL, (K, N))
    labels[:, -4:] = IGNORE
    labels[2, :5] = IGNORE
    draft = torch.where(labels < V, labels, IGNORE)
    teacher = Teacher(torch.randn(N + 5, D), torch.randint(0, N + 5, (K, N)), torch.randn(V, D), 5.0)
    scale = torch.tensor([1.0, 0.8, 0.64]) / torch.tensor([19, 19, 14])
    return hidden, weight, labels, draft, scale, teacher


def naive(hidden, weight, labels, draft, scale, teacher, objective):
    logits = hidden @ weight.mT
    ce = F.cross_entropy(logits.flatten(0, 1), draft.flatten(), ignore_index=IGNORE, reduction="none").view(K, N)
    teacher_logits = torch.tanh(teacher.hidden_RD[teacher.rows_KN] @ teacher.weight_VD.T / 5.0) * 5.0
    kl = F.kl_div(logits.log_softmax(-1), teacher_logits.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    kl = kl * (labels != IGNORE)
    return ((objective.ce_weight * ce + objective.kl_weight * kl).sum(1) * scale).sum()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.3, 0.7)])
def test_value_and_gradients_equal_the_naive_form(own, chunk_rows, weights):
    objective = Objective(ce_weight=weights[0], kl_weight=weights[1])
    *inputs, teacher = problem(own)
    expected = naive(*inputs, teacher, objective)
    wanted = torch.autograd.grad(2 * expected, inputs[:2] if own else inputs[:1])
    loss, _ = chunked_loss(*inputs, objective, teacher, chunk_rows)
    got = torch.autograd.grad(2 * loss, inputs[:2] if own else inputs[:1])
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for found, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_statistics_count_by_hand():
    hidden, weight, labels, draft, scale, teacher = problem(own=True, seed=1)
    _, raw = chunked_loss(hidden, weight, labels, draft, scale, Objective(), teacher, 5)
    stats = Statistics(*raw)
    guess = (hidden @ weight.mT).topk(10).indices
    right = (guess[..., 0] == draft) & (draft != IGNORE)
    assert stats.labels.tolist() == [19, 19, 14]
    assert stats.in_vocab.tolist() == (draft != IGNORE).sum(1).tolist()
    assert stats.top1.tolist() == right.sum(1).tolist()
    for top, name in ((5, "top5"), (10, "top10")):
        hits = (guess[..., :top] == draft[..., None]).any(-1) & (draft != IGNORE)
        assert getattr(stats, name).tolist() == hits.sum(1).tolist()
    assert stats.offered[0] == 19
    assert stats.offered[1] == right[0].sum()
    assert stats.chain[1] == (right[0] & right[1]).sum()


def test_no_label_gives_a_finite_zero():
    hidden, weight, labels, _, scale, teacher = problem(own=True)
    nothing = torch.full_like(labels, IGNORE)
    loss, _ = chunked_loss(hidden, weight, nothing, nothing, scale, Objective(kl_weight=1.0), teacher)
    (grad,) = torch.autograd.grad(loss, [hidden])
    assert loss == 0
    assert not grad.any()


def test_weights_are_checked():
    with pytest.raises(ValueError, match="not both 0"):
        Objective(ce_weight=0.0, kl_weight=0.0)
    with pytest.raises(ValueError, match=r"decay=1\.5 must be in"):
        Objective(decay=1.5)
