"""The naive losses equal ours in value and gradients, on packed documents with several answers and padding."""

import pytest
import torch

import train.naive_losses
from heads import HEADS
from heads.alignment import IGNORE, find_anchors, label_counts
from heads.eagle3 import Eagle3Config
from heads.hydra import HydraConfig
from heads.medusa import MedusaConfig
from heads.objectives import Objective
from train.naive_losses import NAIVE, every_position
from train.step_cost import DEPTH
from train.throughput import largest_difference

CASES = {
    **{kind: (kind, HEADS[kind].config_class(**{size: 5})) for kind, size in DEPTH.items()},
    "medusa, two layers, shared, kl": (
        "medusa",
        MedusaConfig(num_heads=3, num_layers=2, lm_head="shared", objective=Objective(0.5, kl_weight=0.7)),
    ),
    "hydra++": ("hydra", HydraConfig(num_heads=3, init="target", prefix_attention=True)),
}


def batch():
    """Two rows: two packed documents, one of them with two answers; and one document with padding."""
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 13 + [1] * 11, [0] * 17 + [-1] * 7])
    positions = torch.tensor([[*range(13), *range(11)], [*range(17), *[0] * 7]])
    supervised = torch.zeros(2, 24, dtype=torch.bool)
    supervised[0, 1:5] = supervised[0, 7:13] = supervised[0, 13:24] = supervised[1, 4:17] = True
    return ids, supervised, documents, positions


def both(target, kind, config, draft_ids=None):
    """Heads of both forms with the same disturbed parameters."""
    forms = []
    for form in (HEADS[kind], NAIVE[kind]):
        torch.manual_seed(0)
        ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
        heads = form(form.resolve(config, target), target.hidden_size, target.vocab_size, ids).bind(target)
        for parameter in heads.initialise().parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        forms.append(heads)
    forms[1].split()
    return forms


def difference(target, kind, config, draft_ids=None):
    ids, supervised, documents, positions = batch()
    forms = both(target, kind, config, draft_ids)
    features = target.features(ids, positions, documents, forms[0].training_taps)
    counts = label_counts(supervised, documents, forms[0].depth)
    return largest_difference(*forms, features, (ids, supervised, documents, positions, counts))


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_naive_is_ours(tiny_target, name, reduced):
    draft_ids = torch.arange(0, 320, 3) if reduced else None
    assert max(difference(tiny_target("llama"), *CASES[name], draft_ids)) < 1e-5


def test_soft_capped_logits_too(tiny_target):
    target = tiny_target("gemma2")
    assert target.softcap is not None
    assert max(difference(target, *CASES["eagle3"])) < 1e-5


def test_every_position_has_the_labels_of_the_anchors():
    ids, supervised, documents, _ = batch()
    anchors, everywhere = find_anchors(ids, supervised, documents, 4), every_position(ids, supervised, documents, 4)
    assert torch.equal(everywhere.labels_KN[:, anchors.rows_N], anchors.labels_KN)
    assert (everywhere.labels_KN != IGNORE).sum() == (anchors.labels_KN != IGNORE).sum()


FAULTS = {
    "attention across documents": ("document_mask", lambda documents, positions, window: causal(documents)),
    "labels of another document": (
        "every_position",
        lambda ids, supervised, documents, count: every_position(ids, supervised, documents * 0, count),
    ),
    "labels one too early": (
        "every_position",
        lambda ids, supervised, documents, count: every_position(ids.roll(1, 1), supervised, documents, count),
    ),
}


def causal(documents):
    T = documents.shape[1]
    return torch.ones(T, T, dtype=torch.bool).tril().expand(len(documents), 1, T, T)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(tiny_target, monkeypatch, fault):
    monkeypatch.setattr(train.naive_losses, *FAULTS[fault])
    config = Eagle3Config(num_steps=3, objective=Objective(ce_weight=1.0, kl_weight=1.0))
    assert max(difference(tiny_target("llama"), "eagle3", config)) > 1e-3
