"""The feature store without a model: what comes back, and what a kill, a full disk or a flipped bit does to it."""

import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from data import disk
from data.feature_plan import HEADER_BYTES, Plan, make_plan
from data.feature_precision import decode, encode
from data.feature_writer import StoreWriter
from data.features import FeatureStore, Layout, checksum_path, shard_path
from data.prepared import PreparedData, Summary

TAPS, WIDTH = ("post_block[1]", "final_norm"), 16


def make_prepared(samples: list[tuple[list[int], list[int]]]) -> PreparedData:
    lengths = [len(ids) for ids, _ in samples]
    supervised = [mark for _, marks in samples for mark in marks]
    summary = Summary(len(samples), len(samples), sum(lengths), sum(supervised), 0, 0, 0, 0, {})
    return PreparedData(
        ids_N=torch.tensor([token for ids, _ in samples for token in ids], dtype=torch.int32),
        supervised_N=torch.tensor(supervised, dtype=torch.uint8),
        offsets_S1=torch.tensor([0, *lengths]).cumsum(0),
        category_S=torch.zeros(len(samples), dtype=torch.int32),
        category_names=[""],
        summary=summary,
        digest="of this test",
    )


def some_samples(count: int = 12) -> list[tuple[list[int], list[int]]]:
    draw, samples = random.Random(0), []
    for _ in range(count):
        prompt, answer = draw.randint(2, 9), draw.randint(2, 9)
        ids = [draw.randrange(1000) for _ in range(prompt + answer)]
        samples.append((ids, [0] * prompt + [1] * answer))
    return samples


def supervised_ones(ids_T: Tensor, supervised_T: Tensor) -> dict[str, Tensor]:
    return {"final_norm": supervised_T}


def make_store_plan(precision: str, samples=None, shard_bytes: float = 1500) -> Plan:
    prepared = make_prepared(some_samples() if samples is None else samples)
    layout = Layout(TAPS, TAPS[:1], WIDTH, precision)
    return make_plan(prepared, layout, supervised_ones, {"target": "none"}, shard_bytes)


def features_of(ids_T: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(int(ids_T.sum()))
    scales = {TAPS[0]: 30.0, TAPS[1]: 0.1}
    return {tap: torch.randn(len(ids_T), WIDTH, generator=generator) * scales[tap] for tap in TAPS}


def fill(directory: Path, plan: Plan) -> None:
    with StoreWriter(directory, plan).open() as writer:
        for number in writer.missing:
            writer.write(number, (features_of(plan.ids(document)) for document in plan.shards[number]))


def content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def scale_of(rows_ND: Tensor) -> Tensor:
    return rows_ND.abs().amax(1, keepdim=True) / 127


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_what_is_stored_comes_back_and_the_rest_is_zero(tmp_path, precision):
    plan = make_store_plan(precision)
    fill(tmp_path / "store", plan)
    store = FeatureStore(tmp_path / "store")
    assert len(store.shards) > 2
    for ids, marks in some_samples():
        ids_T, stored_T = torch.tensor(ids), torch.tensor(marks).bool()
        found, expected = store.read(ids_T, TAPS, torch.float32), features_of(ids_T)
        assert not found["final_norm"][~stored_T].any()
        for tap, places_T in ((TAPS[0], torch.ones_like(stored_T)), ("final_norm", stored_T)):
            rows_ND, expected_ND = found[tap][places_T], expected[tap][places_T]
            if precision == "int8":
                assert ((rows_ND - expected_ND).abs() <= scale_of(expected_ND) * (0.5 + 1e-4)).all()
            else:
                assert rows_ND.equal(expected_ND.to(getattr(torch, precision)).float())
        assert store.read(ids_T, TAPS, torch.bfloat16)["final_norm"].dtype == torch.bfloat16


def test_eight_bits_miss_by_half_a_step_of_each_row():
    rows_ND = torch.randn(64, 32) * torch.logspace(-4, 4, 64)[:, None]
    rows_ND[7] = 0
    found_ND = decode(encode(rows_ND, "int8"), torch.float32)
    assert ((found_ND - rows_ND).abs() <= scale_of(rows_ND) * (0.5 + 1e-4)).all()
    assert (found_ND - rows_ND).abs().max() > 0
    assert not found_ND[7].any()


def test_samples_of_the_same_ids_share_a_document_that_holds_what_either_reads(tmp_path):
    ids = [5, 6, 7, 8]
    plan = make_store_plan("float32", [(ids, [0, 1, 0, 0]), (ids, [0, 0, 0, 1]), ([9, 9], [0, 1])])
    assert plan.index.documents == 2
    fill(tmp_path / "store", plan)
    found = FeatureStore(tmp_path / "store").read(torch.tensor(ids), TAPS, torch.float32)["final_norm"]
    assert found.any(1).tolist() == [False, True, False, True]


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_the_room_is_known_beforehand(tmp_path, precision):
    plan = make_store_plan(precision, shard_bytes=4000)
    fill(tmp_path / "store", plan)
    for number in range(plan.index.shards):
        taken = shard_path(tmp_path / "store", number).stat().st_size
        assert taken <= plan.shard_bytes(number) <= taken + HEADER_BYTES


def test_a_full_disk_is_refused_before_the_first_byte(tmp_path, monkeypatch):
    plan = make_store_plan("float32")
    need = sum(plan.shard_bytes(number) for number in range(plan.index.shards))
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=need - 1))
    with pytest.raises(ValueError, match=r"the features need 0\.00 GB in .*store, 0\.00 GB are free; free some"):
        fill(tmp_path / "deep" / "store", plan)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=need))
    fill(tmp_path / "deep" / "store", plan)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    fill(tmp_path / "deep" / "store", plan)  # nothing is missing, so nothing is needed


def flip_a_byte(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)


DAMAGES = {
    "is damaged: its bytes": flip_a_byte,
    "is damaged (": lambda path: os.truncate(path, 40),
    "is missing": lambda path: path.unlink(),
    "has lost its checksum": lambda path: checksum_path(path).unlink(),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_damaged_shard_is_named_and_written_again(tmp_path, said):
    plan = make_store_plan("float32")
    fill(tmp_path / "store", plan)
    before, shard = content(tmp_path / "store"), shard_path(tmp_path / "store", 1)
    DAMAGES[said](shard)
    with pytest.raises(ValueError, match=re.escape(f"{shard.name} {said}") + ".*extract_features.py again"):
        FeatureStore(tmp_path / "store").read(plan.ids(plan.shards[1][0]), TAPS, torch.float32)
    writer = StoreWriter(tmp_path / "store", plan)
    assert writer.missing == [1]
    fill(tmp_path / "store", plan)
    assert content(tmp_path / "store") == before


def test_a_document_hidden_by_damage_is_not_called_missing(tmp_path):
    plan = make_store_plan("float32")
    fill(tmp_path / "store", plan)
    shard, key = shard_path(tmp_path / "store", 0), plan.shards[0][0].key
    damaged = shard.read_bytes().replace(key, bytes(32))
    shard.write_bytes(damaged)
    store = FeatureStore(tmp_path / "store")
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors is damaged"):
        store.read(plan.ids(plan.shards[0][0]), TAPS, torch.float32)


def test_an_unknown_document_is_named(tmp_path):
    fill(tmp_path / "store", make_store_plan("float32"))
    with pytest.raises(
        ValueError, match=r"no features of a document of 3 tokens that begins with \[1, 2, 3\]; extract"
    ):
        FeatureStore(tmp_path / "store").read(torch.tensor([1, 2, 3]), TAPS, torch.float32)
    with pytest.raises(ValueError, match=r"holds no features that can be read \(index.json: .*No such file"):
        FeatureStore(tmp_path)


def test_features_that_are_not_finite_are_refused(tmp_path):
    plan = make_store_plan("float32")
    with StoreWriter(tmp_path / "store", plan).open() as writer:
        broken = ({tap: rows / 0 for tap, rows in features_of(plan.ids(one)).items()} for one in plan.shards[0])
        with pytest.raises(ValueError, match=r"the target's post_block\[1\] is not finite in sample 0"):
            writer.write(0, broken)


def test_two_writers_do_not_meet(tmp_path):
    plan = make_store_plan("float32")
    with (
        StoreWriter(tmp_path / "store", plan).open(),
        pytest.raises(ValueError, match="another process writes to"),
        StoreWriter(tmp_path / "store", plan).open(),
    ):
        pass
