"""NaN in a batch: the step is skipped and counted, its samples are named, and above a share the run stops.

step            1   2   3   4   5   6
not finite              x       x          with one allowed, the run stops at step 5
checkpoint          2       4
"""

import json
import math
import re
from pathlib import Path

import pytest

from data.shards import prepare
from heads.target import FINAL_NORM
from heads.warm_start import LinearForecast
from tests.faults.launched import SPOIL, launch_with
from tests.train.test_distributed import as_overrides, assert_same_rows, launch
from tests.train.test_loop import metrics
from train import loop
from train.config import TrainerConfig
from train.features import FeatureSource, document_spans
from train.loop import train

LAUNCHERS = ["ddp", "zero1", "zero2", "zero3", "fsdp2"]


def nan_features(step, source, parallel, original):
    """The target says NaN."""

    def nan(heads, inputs):
        return {tap: value * math.nan for tap, value in inputs[0].items()}, *inputs[1:]

    with parallel.heads.register_forward_pre_hook(nan):
        return original(step, source, parallel)


def infinite_loss(step, source, parallel, original):
    """The loss overflows, its gradient does not."""
    with parallel.heads.register_forward_hook(lambda heads, inputs, output: (output[0] + math.inf, output[1])):
        return original(step, source, parallel)


def infinite_gradient(step, source, parallel, original):
    """One number of the gradient overflows, the loss does not."""
    result = original(step, source, parallel)
    next(iter(parallel.parameters.values())).grad.view(-1)[0] = math.inf
    return result


@pytest.fixture
def spoil(monkeypatch):
    """`spoil({2, 4}, nan_features)`: these steps, from 0, are not finite."""
    original = loop.accumulate_gradients

    def spoil(numbers, how=nan_features):
        def spoiled(step, source, parallel):
            if step.number in numbers:
                return how(step, source, parallel, original)
            return original(step, source, parallel)

        monkeypatch.setattr(loop, "accumulate_gradients", spoiled)

    return spoil


def state_after(run: Path, step: int) -> dict[str, bytes]:
    directory = run / "checkpoints" / f"step-{step:06d}"
    return {name: (directory / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


@pytest.mark.parametrize("how", [nan_features, infinite_loss, pytest.param(infinite_gradient, marks=pytest.mark.slow)])
def test_a_step_that_is_not_finite_changes_nothing_and_is_named(how, spoil, make_config, tmp_path, caplog):
    every = ("trainer.save_every=1", "trainer.keep_last=9", "trainer.warmup_ratio=0.5", "trainer.steps=4")
    train(make_config(*every, f"output_dir={tmp_path}/whole"))
    spoil({2}, how)
    train(make_config(*every))
    run = tmp_path / "run"
    assert state_after(run, 2) == state_after(tmp_path / "whole", 2)
    assert state_after(run, 3) == state_after(run, 2) != state_after(tmp_path / "whole", 3)
    assert state_after(run, 4) != state_after(run, 3)
    rows = metrics(run)
    assert [row["train/skipped"] for row in rows] == [0, 0, 1, 1]
    assert ["train/loss" in row for row in rows] == [True, True, False, True]
    assert [row["train/lr"] for row in rows] == [row["train/lr"] for row in metrics(tmp_path / "whole")]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    (said,) = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert said.startswith("step 3 (epoch 0): loss ")
    assert "its samples are [" in said
    assert said.endswith("It is skipped, as 1 of 3 steps are: look at these samples")


def test_the_mean_of_a_window_leaves_a_skipped_step_out(spoil, make_config, tmp_path):
    train(make_config(f"output_dir={tmp_path}/each", "trainer.steps=4"))
    spoil({3})
    train(make_config("trainer.log_every=4", "trainer.steps=4"))
    (row,) = metrics(tmp_path / "run")
    assert row["train/loss"] == pytest.approx(sum(row["train/loss"] for row in metrics(tmp_path / "each")[:3]) / 3)


def test_one_too_many_stops_the_run_also_after_a_resume(spoil, make_config, tmp_path):
    spoil({2, 4})
    stops = (
        r"step 5 \(epoch \d\): loss nan, gradient norm nan; its samples are \[.*last checkpoint: step 4\), and 2 of 5 "
    )
    rule = r"steps were skipped, more than trainer\.max_skipped=0\.01 allows\. Lower trainer\.lr.*look at these samples"
    for resume in ("false", "true"):
        with pytest.raises(FloatingPointError, match=stops + rule):
            train(make_config("trainer.save_every=2", f"resume={resume}"))
        kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
        assert kept == ["step-000002", "step-000004"]
    train(make_config("trainer.save_every=2", "resume=true", "trainer.max_skipped=0.4"))
    assert metrics(tmp_path / "run")[-1]["train/skipped"] == 2


def test_none_may_be_skipped_where_the_share_is_0(spoil, make_config):
    spoil({0})
    with pytest.raises(FloatingPointError, match=r"step 1 .*last checkpoint: none\), and 1 of 1 steps were skipped"):
        train(make_config("trainer.max_skipped=0"))


@pytest.mark.parametrize(
    ("share", "skipped", "done", "goes_on"),
    [
        *((0.01, 1, 1, True), (0.01, 2, 199, False), (0.01, 2, 200, True), (0.01, 3, 200, False)),
        *((0.0, 0, 9, True), (0.0, 1, 1000, False), (1.0, 5, 5, True)),
    ],
)
def test_the_rule(share, skipped, done, goes_on):
    assert TrainerConfig(max_skipped=share).may_skip(skipped, done) == goes_on


SPOILT_SAMPLES = """
import math, torch
from train import train_heads
from train.features import FeatureSource

original, samples = FeatureSource.run, {samples}

def run(source, batch):
    features = original(source, batch)
    rows = [[row[: len(ids)].tolist() == ids for ids in samples] for row in batch.ids_BT]
    features["final_norm"][torch.tensor(rows).any(1)] = math.nan
    return features

FeatureSource.run = run
train_heads.main()
"""


def sample_ids(config, target, index):
    """The token ids [T] of a prepared sample."""
    return prepare(config.data.train, config.data, target.tokenizer, target.eos_ids).sample(index)[0]


@pytest.fixture
def spoil_sample(monkeypatch, tiny_target):
    """`spoil_sample(config, 7)`: what the target says of this sample is not finite, until the first step."""
    original, combine = FeatureSource.run, LinearForecast.combine

    def spoil_sample(config, index):
        ids_T = sample_ids(config, tiny_target(), index)

        def run(source, batch):
            features = original(source, batch)
            for row, span in document_spans(batch.documents_BT):
                if batch.ids_BT[row, span].equal(ids_T):
                    features[FINAL_NORM][row, span] = math.nan
            return features

        def mend(forecast, reduce):
            monkeypatch.setattr(FeatureSource, "run", original)
            combine(forecast, reduce)

        monkeypatch.setattr(FeatureSource, "run", run)
        monkeypatch.setattr(LinearForecast, "combine", mend)

    return spoil_sample


@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_sample_that_is_not_finite_is_left_out_of_the_warm_start_and_named(
    packing, spoil_sample, make_config, tmp_path, caplog
):
    config = make_config("heads.init=regression", f"data.packing={packing}", "trainer.steps=2")
    spoil_sample(config, 7)
    train(config)
    assert [row["train/skipped"] for row in metrics(tmp_path / "run")] == [0, 0]
    (said,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert re.fullmatch(
        r"linear forecast: the target's features are not finite in 1 of \d\d samples, \[7\]\. "
        r"What is not finite is left out of it: look at these samples",
        said,
    )


def test_too_many_such_samples_stop_the_run(spoil_sample, make_config):
    config = make_config("heads.init=regression", "trainer.max_skipped=0")
    spoil_sample(config, 7)
    rule = r"1 of \d\d samples, \[7\], more than trainer\.max_skipped=0\.0 allows\. Run the target in bfloat16"
    with pytest.raises(FloatingPointError, match=rule):
        train(config)


@pytest.mark.slow
def test_two_processes_count_and_name_such_samples_together(make_values, make_config, tiny_target, tmp_path):
    settings = ("heads.init=regression", "data.packing=false", "trainer.batch_size=8")
    spoilt = [sample_ids(make_config(*settings), tiny_target(), index).tolist() for index in (3, 7, 12, 21)]
    script = tmp_path / "spoilt.py"
    script.write_text(SPOILT_SAMPLES.format(samples=spoilt))
    code, said = launch([str(script), "model=tiny", "data=sharegpt", *as_overrides(make_values(*settings))])
    assert code != 0
    assert said.count("4 of 40 samples, [3, 7, 12, 21], more than trainer.max_skipped=0.01 allows.") == 1, said


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_all_processes_skip_what_is_not_finite_in_one(launcher, spoil, make_config, make_values, tmp_path):
    settings = ("data.packing=false", "trainer.batch_size=8", "trainer.save_every=3")
    spoil({2})
    train(make_config(*settings, f"output_dir={tmp_path}/one"))
    code, said = launch_with(SPOIL, launcher, make_values(*settings, f"output_dir={tmp_path}/two"), tmp_path)
    assert code == 0, said
    assert_same_rows(tmp_path / "one", tmp_path / "two")
    assert said.count("It is skipped, as 1 of 3 steps are") == 1
    state = json.loads((tmp_path / "two" / "checkpoints" / "step-000006" / "state.json").read_text())
    assert state["skipped"] == 1
    assert [row["train/skipped"] for row in metrics(tmp_path / "two")] == [0, 0, 1, 1, 1, 1]
