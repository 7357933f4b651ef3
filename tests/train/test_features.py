import torch

from data.batches import Batch
from train.features import FeatureSource

TAPS = ("final_norm", "post_block[1]")


def make_batch(rows: list[list[int]]) -> Batch:
    T = max(map(len, rows))
    ids = torch.tensor([row + [256] * (T - len(row)) for row in rows])
    documents = torch.tensor(
        [[0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2) + [-1] * (T - len(row)) for row in rows]
    )
    places = torch.tensor(
        [[*range(len(row) // 2), *range(len(row) - len(row) // 2), *[0] * (T - len(row))] for row in rows]
    )
    return Batch(ids_BT=ids, supervised_BT=documents >= 0, documents_BT=documents, positions_BT=places)


def test_kept_features_are_those_of_the_target_and_cost_one_run(tiny_target, monkeypatch):
    target = tiny_target()
    first, second = make_batch([[1, 2, 3, 4, 5], [6, 7, 8]]), make_batch([[6, 7, 8], [9] * 7])
    kept, plain = FeatureSource(target, TAPS, torch.float32, True), FeatureSource(target, TAPS, torch.float32, False)
    runs = []
    run = target.features
    for batch in (first, second, first):
        expected = plain(batch)
        with monkeypatch.context() as patch:
            patch.setattr(target, "features", lambda *args: runs.append(1) or run(*args))
            found = kept(batch)
        real = batch.documents_BT >= 0
        for tap in TAPS:
            torch.testing.assert_close(found[tap][real], expected[tap][real])
    assert len(runs) == 3  # three different rows in six


def test_the_same_ids_in_other_documents_are_another_row(tiny_target):
    batch = make_batch([[1, 2, 3, 4]])
    whole = Batch(batch.ids_BT, batch.supervised_BT, torch.zeros(1, 4, dtype=torch.long), torch.arange(4)[None])
    source = FeatureSource(tiny_target(), TAPS, torch.float32, True)
    assert not source(batch)["final_norm"].equal(source(whole)["final_norm"])
