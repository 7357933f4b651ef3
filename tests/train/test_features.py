"""Features from the target, from memory and from disk: the same numbers, and the same heads."""

import itertools
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.batches import Batch, BatchLoader
from data.features import INDEX_FILE, FeatureStore
from data.shards import prepare
from heads.alignment import label_counts
from heads.target import load_target
from heads.warm_start import LinearForecast
from train import run
from train.config import TrainConfig, from_hydra
from train.features import FeatureSource, document_spans
from train.first_heads import first_heads
from train.loop import train
from train.start import load_frozen_target
from train.stored_features import fill_store, naive_bytes, open_store, plan_store, store_directory

FEW = "data.limit=10"
TAPS = ("final_norm", "post_block[1]")
CE, KL = {"ce_weight": 1.0, "kl_weight": 0.0}, {"ce_weight": 0.5, "kl_weight": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa", "num_heads": 3},
    "medusa-kl": {"kind": "medusa", "num_heads": 3, "objective": KL},
    "medusa-regression": {"kind": "medusa", "num_heads": 2, "init": "regression"},
    "hydra-tv": {"kind": "hydra", "num_heads": 2, "objective": {"tv_weight": 1.0}},
    "hydra-prefix": {"kind": "hydra", "num_heads": 2, "prefix_attention": True},
    "eagle": {"kind": "eagle", "num_steps": 2, "objective": KL},
    "eagle3": {"kind": "eagle3", "num_steps": 3, "objective": KL},
    "eagle3-ce": {"kind": "eagle3", "num_steps": 2, "objective": CE},
    "eagle3-regression": {"kind": "eagle3", "num_steps": 2, "init": "regression", "objective": CE},
}


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


class Made:
    """A run's target, data and heads without the run, and a store for them."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self.target = load_target(config.model, "cpu")
        self.prepared = prepare(config.data.train, config.data, self.target.tokenizer, self.target.eos_ids)
        self.heads = first_heads(config, self.target, self.prepared)

    def store(self, root: Path, precision: str = "float32") -> Path:
        plan = plan_store(self.target, self.heads, self.prepared, precision, shard_bytes=100_000)
        directory = store_directory(root, plan.index)
        fill_store(directory, plan, self.target)
        return directory

    def source(self, store: FeatureStore | None, keep: bool = False) -> FeatureSource:
        return FeatureSource(self.target, self.heads.training_taps, torch.float32, keep, store)

    def loader(self) -> BatchLoader:
        return BatchLoader(self.prepared, batch_size=2, micro_batch_size=1, max_length=192, packing=True, pad_id=256)


@pytest.fixture
def make_case(make_values):
    """make_case("eagle3", "trainer.steps=2", ...) -> the config of a run with those heads."""

    def make(case: str, *overrides: str) -> TrainConfig:
        return from_hydra({**make_values(*overrides), "heads": CASES[case]})

    return make


def test_kept_features_are_those_of_the_target_and_cost_one_run_of_a_document(tiny_target, monkeypatch):
    target = tiny_target()
    first, second = make_batch([[1, 2, 3, 4, 5], [6, 7, 8]]), make_batch([[6, 7, 8], [1, 2, 9, 9]])
    kept, plain = FeatureSource(target, TAPS, torch.float32, keep=True), FeatureSource(target, TAPS, torch.float32)
    runs = []
    original = target.features
    for batch in (first, second, first):
        expected = plain(batch)
        with monkeypatch.context() as patch:
            patch.setattr(target, "features", lambda *args: runs.append(args[0].tolist()[0]) or original(*args))
            found = kept(batch)
        real = batch.documents_BT >= 0
        for tap in TAPS:
            torch.testing.assert_close(found[tap][real], expected[tap][real])
            assert not found[tap][~real].any()
    assert runs == [[1, 2], [3, 4, 5], [6], [7, 8], [9, 9]]


def test_documents_are_found_in_their_rows():
    batch = make_batch([[1, 2, 3, 4, 5], [6, 7]])
    assert list(document_spans(batch.documents_BT)) == [
        (0, slice(0, 2)), (0, slice(2, 5)), (1, slice(0, 1)), (1, slice(1, 2)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "packing"),
    [("eagle3-regression", True), ("medusa-kl", False), pytest.param("eagle", True, marks=pytest.mark.slow)],
)
def test_training_from_disk_is_training_from_memory_bit_for_bit(make_case, tmp_path, monkeypatch, case, packing):
    settings = (f"data.packing={str(packing).lower()}", "trainer.steps=3", "trainer.init_tokens=200")
    kept = make_case(case, *settings, "trainer.keep_features=true", f"output_dir={tmp_path}/kept")
    features = Made(kept).store(tmp_path / "features")
    stored = make_case(case, *settings, f"trainer.features={features}", f"output_dir={tmp_path}/stored")
    train(kept)

    def with_an_idle_decoder(config, accelerator):
        target = load_frozen_target(config, accelerator)
        target.features = None  # type: ignore[assignment]
        return target

    monkeypatch.setattr(run.start, "load_frozen_target", with_an_idle_decoder)
    train(stored)
    one, other = (load_file(tmp_path / name / "heads" / "model.safetensors") for name in ("kept", "stored"))
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


def loss_and_gradients(made: Made, source: FeatureSource) -> list[torch.Tensor]:
    """Of a packed batch, and what a warm start would be fitted on."""
    heads, (batch, *_) = made.heads, made.loader().step(0).micro_batches
    features, counts_K = source(batch), label_counts(batch.supervised_BT, batch.documents_BT, made.heads.depth)
    heads.zero_grad()
    torch.manual_seed(0)  # EAGLE-1's noise
    loss, statistics_SK = heads(
        features, batch.ids_BT, batch.supervised_BT, batch.documents_BT, batch.positions_BT, counts_K
    )
    loss.backward()
    found = [loss.detach(), statistics_SK, *(one.grad for one in heads.parameters() if one.grad is not None)]
    if heads.forecasts:
        forecast = LinearForecast(heads.forecasts, heads.forecast_size, heads.hidden_size, made.target.device)
        inputs_BTI = heads.forecast_inputs(features, batch.ids_BT).detach()
        forecast.add(inputs_BTI, features["final_norm"], batch.ids_BT, batch.supervised_BT, batch.documents_BT)
        found += [forecast.gram_KEE, forecast.cross_KED]
    return found


@pytest.mark.parametrize("case", CASES)
def test_nothing_reads_what_is_not_stored(make_case, tmp_path, monkeypatch, case):
    made = Made(make_case(case, FEW))
    store = FeatureStore(made.store(tmp_path))
    expected = loss_and_gradients(made, made.source(None, keep=True))
    monkeypatch.setattr(FeatureStore, "fill", float("nan"))
    found = loss_and_gradients(made, made.source(store))
    batch = made.loader().step(0).micro_batches[0]
    unread = sum(int(feature.isnan().sum()) for feature in made.source(store)(batch).values())
    whole = len(store.index.layout.whole) == len(store.index.layout.taps)
    assert (unread == 0) == whole
    assert all(one.equal(other) for one, other in zip(expected, found, strict=True))


def test_the_next_batch_is_read_ahead_and_another_one_is_read_all_the_same(make_case, tmp_path):
    made = Made(make_case("medusa-kl", FEW))
    store = FeatureStore(made.store(tmp_path))
    source, plain = made.source(store), made.source(store)
    steps = source.ahead(made.loader().steps(1))
    for step in itertools.islice(steps, 3):
        for batch in step.micro_batches:
            assert source.started is not None
            assert source.started[0].ids_BT.equal(batch.ids_BT)
            found, expected = source(batch), plain(batch)
            assert all(found[tap].equal(expected[tap]) for tap in expected)
    other = made.loader().step(0).micro_batches[0]
    assert source(other)["final_norm"].equal(plain(other)["final_norm"])


def test_a_damaged_shard_stops_the_run_by_name(make_case, tmp_path):
    made = Made(make_case("medusa", FEW))
    directory = made.store(tmp_path)
    for shard in directory.glob("*.safetensors"):
        damaged = bytearray(shard.read_bytes())
        damaged[-1] ^= 1
        shard.write_bytes(damaged)
    source = made.source(FeatureStore(directory))
    steps = source.ahead(made.loader().steps(0))
    with pytest.raises(ValueError, match=r"shard-0000\d\.safetensors is damaged.*extract_features.py again"):
        source(next(steps).micro_batches[0])


OTHERS = {
    "target.dtype=float32, this run has bfloat16": ("eagle3", ["model.dtype=bfloat16"]),
    "target.model_type=llama, this run has qwen3": ("eagle3", ["model.path=random:qwen3"]),
    "target.revision=None, this run has other": ("eagle3", ["model.revision=other"]),
    "final_norm at positions ['future'], this run reads ['document']": ("eagle", []),
    "final_norm at positions ['future'], this run reads ['anchors', 'future']": ("medusa-kl", []),
}


@pytest.mark.parametrize("said", OTHERS)
def test_features_of_something_else_are_refused_by_name(make_case, tmp_path, said):
    directory = Made(make_case("eagle3", FEW)).store(tmp_path)
    case, overrides = OTHERS[said]
    other = Made(make_case(case, FEW, *overrides))
    with pytest.raises(ValueError, match=re.escape(f"trainer.features={directory} was made for {said}")):
        open_store(directory, other.target, other.heads, other.prepared)


def test_heads_that_read_less_take_the_same_features_and_others_do_not(make_case, tmp_path):
    made = Made(make_case("eagle3", FEW))
    directory = made.store(tmp_path)
    less = Made(make_case("eagle3-ce", FEW))
    open_store(directory, less.target, less.heads, less.prepared)
    for settings, said in ({"num_steps": 4}, "depth=3, this run has 4"), ({"taps": [0, 3]}, "taps=.*reads post_block"):
        config = make_case("eagle3", FEW)
        other = Made(replace(config, heads=replace(config.heads, **settings)))
        with pytest.raises(ValueError, match=f"was made for {said}"):
            open_store(directory, other.target, other.heads, other.prepared)


@pytest.mark.parametrize("case", ["eagle3", "medusa-kl"])
def test_a_store_of_more_documents_serves_a_run_with_fewer_and_not_the_reverse(make_case, tmp_path, case):
    more, fewer = Made(make_case(case, FEW)), Made(make_case(case, "data.limit=4"))
    store = open_store(more.store(tmp_path), fewer.target, fewer.heads, fewer.prepared)
    expected = loss_and_gradients(fewer, fewer.source(None, keep=True))
    assert all(
        one.equal(other) for one, other in zip(expected, loss_and_gradients(fewer, fewer.source(store)), strict=True)
    )
    directory = fewer.store(tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"features={directory} was made from other data: it lacks what 6")):
        open_store(directory, more.target, more.heads, more.prepared)


def test_rows_that_other_supervision_reads_are_missed(make_case, tmp_path):
    made = Made(make_case("medusa", FEW))
    directory = made.store(tmp_path)
    supervised_N = torch.ones_like(made.prepared.supervised_N)
    other = replace(made.prepared, supervised_N=supervised_N, digest="other")
    with pytest.raises(ValueError, match="it lacks what 10 of this run's 10 documents need"):
        open_store(directory, made.target, made.heads, other)


def test_a_fine_tune_of_the_blocks_alone_is_another_target(make_case, tmp_path):
    made = Made(make_case("medusa", FEW))
    directory = made.store(tmp_path)
    made.target.decoder.get_parameter("layers.2.mlp.up_proj.weight").data[0, 0] += 1
    with pytest.raises(ValueError, match=r"was made for target\.blocks_sha256="):
        open_store(directory, made.target, made.heads, made.prepared)


def test_a_store_and_features_in_memory_exclude_each_other(make_config):
    with pytest.raises(ValueError, match=r"trainer\.features=some replaces the target; set trainer\.keep_features=fal"):
        make_config("trainer.features=some", "trainer.keep_features=true")


@pytest.mark.parametrize("case", ["medusa", "medusa-kl", "hydra-tv", "eagle", "eagle3"])
def test_what_eight_bits_take_beside_the_usual_dump(make_case, case):
    """Rows of 576 numbers as SmolLM2 has them, over the chats of these tests: how much is supervised decides."""
    made = Made(make_case(case))
    plan = plan_store(made.target, made.heads, made.prepared, "int8", shard_bytes=1e9)
    wide = replace(plan, index=replace(plan.index, layout=replace(plan.index.layout, width=576)))
    size = sum(wide.document_bytes(document) for shard in wide.shards for document in shard)
    supervised, share = made.prepared.supervised_tokens, size / naive_bytes(wide)
    layout, part = wide.index.layout, supervised / wide.tokens
    logging.info(
        "%s: %.0f%% supervised; int8 takes %.0f bytes for each, a dump in 16 bits %.0f: %.1f%%",
        case, 100 * part, size / supervised, naive_bytes(wide) / supervised, 100 * share,
    )  # fmt: skip
    if layout.whole:  # what a layer attends to is needed at every position: there int8 halves and no more
        rows = len(layout.whole) + part * (len(layout.taps) - len(layout.whole))
        assert share == pytest.approx(rows / (2 * len(layout.taps)), abs=0.02)
    else:
        assert share <= 0.3


def test_the_index_says_what_it_is_of(make_case, tmp_path):
    index = json.loads((Made(make_case("eagle3", FEW)).store(tmp_path) / INDEX_FILE).read_text())
    assert index["made_for"]["reads"]["final_norm"] == ["future"]
    assert index["layout"]["precision"] == "float32"
    assert index["documents"] == 10
