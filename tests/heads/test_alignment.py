"""The index conventions against the drawing in heads/alignment.py and a naive loop over positions."""

import pytest
import torch

from heads.alignment import IGNORE, find_anchors, label_counts, run_lengths


def naive(ids_BT, supervised_BT, documents_BT, num_heads):
    """design.md, word for word: x[t+2+k] from t counts iff m[t+1] .. m[t+2+k] are all 1, in one document."""
    triples = set()
    B, T = ids_BT.shape
    for b in range(B):
        for t in range(T):
            for k in range(num_heads):
                places = range(t + 1, t + 3 + k)
                if t + 2 + k < T and all(
                    supervised_BT[b, s] and documents_BT[b, s] == documents_BT[b, t] for s in places
                ):
                    triples.add((b * T + t, k, int(ids_BT[b, t + 2 + k])))
    return triples


def found(ids_BT, supervised_BT, documents_BT, num_heads):
    anchors = find_anchors(ids_BT, supervised_BT, documents_BT, num_heads)
    return {
        (int(row), k, int(anchors.labels_KN[k, n]))
        for n, row in enumerate(anchors.rows_N)
        for k in range(num_heads)
        if anchors.labels_KN[k, n] != IGNORE
    }


def test_the_drawing():
    letters = "UUabc#UU"
    ids = torch.tensor([[ord(letter) for letter in letters]])
    supervised = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]]).bool()
    anchors = find_anchors(ids, supervised, torch.zeros_like(ids), 3)
    rows = [["." if i == IGNORE else chr(i) for i in row] for row in anchors.labels_KN.tolist()]
    assert anchors.rows_N.tolist() == [1, 2, 3]
    assert rows == [["b", "c", "#"], ["c", "#", "."], ["#", ".", "."]]


@pytest.mark.parametrize("seed", range(20))
def test_every_position_against_the_naive_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    B, T, K = 3, 17, 4
    ids = torch.randint(0, 50, (B, T), generator=generator)
    supervised = torch.rand(B, T, generator=generator) < 0.75
    documents = torch.randint(0, 3, (B, T), generator=generator).sort(1).values - (seed % 2)
    assert found(ids, supervised, documents, K) == naive(ids, supervised, documents, K)
    counts = label_counts(supervised, documents, K)
    assert counts.tolist() == [
        sum(1 for _, head, _ in naive(ids, supervised, documents, K) if head == k) for k in range(K)
    ]


def test_labels_do_not_wrap_around_the_end():
    ids = torch.arange(6)[None]
    assert found(ids, torch.ones(1, 6).bool(), torch.zeros(1, 6), 3) == {
        (t, k, t + 2 + k) for t in range(6) for k in range(3) if t + 2 + k < 6
    }


def test_runs_stop_at_documents():
    supervised, documents = torch.ones(1, 6).bool(), torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert run_lengths(supervised, documents).tolist() == [[2, 1, 0, 2, 1, 0]]


def test_teacher_rows_are_the_law_of_the_label():
    ids = torch.arange(8)[None]
    anchors = find_anchors(ids, torch.ones(1, 8).bool(), torch.zeros(1, 8), 3)
    has_label = anchors.labels_KN != IGNORE
    # The target's feature at t predicts x[t+1]: the row before the label.
    assert (anchors.future_rows()[has_label] == anchors.labels_KN[has_label] - 1).all()
