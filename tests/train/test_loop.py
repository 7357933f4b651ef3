"""The promises of training: exact resume, exact accumulation, an untouched target, errors that help."""

import itertools
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from heads.layout import load_heads
from heads.target import TargetConfig, load_target
from train import loop, train_heads
from train.loop import train
from train.optimizer import Clock
from train.start import load_frozen_target
from train.tracking import cut_rows

TIMES = ("train/supervised_tokens_per_s", "train/memory_gb")


def metrics(directory: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Weights, moments and metrics are equal to the bit."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        left, right = (load_file(run / "checkpoints" / f"step-{step:06d}" / name) for run in (one, other))
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    assert metrics(one) == metrics(other)


class StopError(Exception):
    pass


def stop_before(step_number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = loop.accumulate_gradients

    def stopping(step, *rest):
        if step.number == step_number:
            raise StopError
        return original(step, *rest)

    monkeypatch.setattr(loop, "accumulate_gradients", stopping)


# Steps 3 and 6 are in the middle of a window of two, of an epoch of five, and each has two micro-batches.
RESUMABLE = ("trainer.save_every=3", "trainer.log_every=2", "heads.objective.kl_weight=0.5")


def test_six_steps_equal_three_and_a_resume_and_three(make_config, tmp_path, monkeypatch):
    train(make_config(*RESUMABLE, f"output_dir={tmp_path}/straight"))
    stopped = f"output_dir={tmp_path}/stopped"
    with monkeypatch.context() as patch:
        stop_before(4, patch)
        with pytest.raises(StopError):
            train(make_config(*RESUMABLE, stopped))
    assert metrics(tmp_path / "stopped")[-1]["step"] == 4  # logged after the checkpoint: comes again
    train(make_config(*RESUMABLE, stopped, "resume=true"))
    assert_same_run(tmp_path / "straight", tmp_path / "stopped", 6)
    starts = json.loads((tmp_path / "stopped" / "run.json").read_text())["starts"]
    assert [start["from_step"] for start in starts] == [0, 3]


def test_a_truncated_checkpoint_is_passed_over(make_config, tmp_path, caplog):
    overrides = ("trainer.save_every=2", "trainer.keep_last=3")
    train(make_config(*overrides, f"output_dir={tmp_path}/straight"))
    train(make_config(*overrides, f"output_dir={tmp_path}/damaged"))
    newest = tmp_path / "damaged" / "checkpoints" / "step-000006" / "model.safetensors"
    os.truncate(newest, newest.stat().st_size - 100)
    train(make_config(*overrides, f"output_dir={tmp_path}/damaged", "resume=true"))
    assert "step-000006 is damaged (model.safetensors" in caplog.text
    assert_same_run(tmp_path / "straight", tmp_path / "damaged", 6)


def test_accumulation_is_exact(make_config, tmp_path):
    """1 x 8, 4 x 2 and 8 x 1 micro-batches give the same losses and weights, whatever the padding."""
    weights = {}
    for size in (8, 2, 1):
        overrides = ("trainer.batch_size=8", "data.packing=false", "heads.objective.kl_weight=0.5")
        run = f"output_dir={tmp_path}/{size}"
        train(make_config(*overrides, run, f"trainer.micro_batch_size={size}", "trainer.precision=float32"))
        weights[size] = load_file(tmp_path / str(size) / "heads" / "model.safetensors")
    for size in (2, 1):
        for one, other in zip(metrics(tmp_path / "8"), metrics(tmp_path / str(size)), strict=True):
            assert one == pytest.approx(other, abs=1e-5, rel=1e-6)
        for name in ("block_weight", "block_bias", "lm_head_weight"):
            torch.testing.assert_close(weights[8][name], weights[size][name], rtol=0, atol=1e-6)


def test_the_target_is_bit_identical_after_training_and_every_head_has_learnt(make_config, tmp_path, monkeypatch):
    kept = {}

    def keeping(config, accelerator, original=load_frozen_target):
        kept["target"] = original(config, accelerator)
        return kept["target"]

    monkeypatch.setattr("train.start.load_frozen_target", keeping)
    tied = ("model.path=random:llama-tied", "trainer.weight_decay=0.1", "heads.num_layers=2")
    directory = train(make_config(*tied))
    fresh = load_target(TargetConfig("tiny", "random:llama-tied"))
    before, after = fresh.model.state_dict(), kept["target"].model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in kept["target"].model.parameters())
    heads = load_heads(directory, fresh)
    for k in range(3):
        assert heads.block_weight[:, k].abs().amax(dim=(1, 2)).min() > 0
        assert not torch.equal(heads.lm_head_weight[k], fresh.lm_head.weight)
    assert metrics(tmp_path / "run")[-1]["train/loss"] < metrics(tmp_path / "run")[0]["train/loss"]


def test_the_best_by_tau_is_handed_out(make_config, tmp_path, monkeypatch):
    taus = iter([1.5, 2.5, 2.0])
    monkeypatch.setattr("train.run.measure_tau", lambda *arguments: (next(taus), [0.5, 0.25, 0.0]))
    directory = train(
        make_config("trainer.eval_every=2", "trainer.eval_prompts=1", "trainer.keep_last=1", "trainer.log_every=2")
    )
    root = tmp_path / "run"
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    best = (root / "checkpoints" / "step-000004" / "model.safetensors").read_bytes()
    assert (directory / "model.safetensors").read_bytes() == best
    rows = metrics(root)
    assert [row["eval/tau"] for row in rows if "eval/tau" in row] == [1.5, 2.5, 2.0]
    # Training rows hold training numbers alone, and measured rows measured ones.
    assert all(len({name.partition("/")[0] for name in row} - {"step"}) == 1 for row in rows)


def test_a_run_explains_itself_and_measures_tau_by_decoding(make_config, tmp_path):
    directory = train(make_config("trainer.steps=2", "trainer.eval_prompts=2", "heads.draft_vocab_size=64"))
    assert directory == tmp_path / "run" / "heads"
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["heads"]["kind"] == "medusa"
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    (start,) = run["starts"]
    assert {
        "time",
        "command",
        "git",
        "versions",
        "machine",
        "data_digest",
        "target",
        "draft_vocab_size",
    } <= set(start)
    first, second, measured = metrics(tmp_path / "run")
    assert {"train/loss", "train/ce", "train/lr", "train/grad_norm", "train/alpha_1"} <= set(first)
    assert {f"train/top{top}_head{head}" for top in (1, 5, 10) for head in range(3)} <= set(first)
    assert first["train/lr"] > second["train/lr"] > 0
    assert measured["eval/tau"] >= 1
    assert "eval/alpha_1" in measured


def test_a_finished_run_resumed_changes_nothing(make_config, tmp_path):
    train(make_config("trainer.steps=2"))
    before = metrics(tmp_path / "run")
    train(make_config("trainer.steps=2", "resume=true"))
    assert metrics(tmp_path / "run") == before


def test_learning_rates_do_not_depend_on_accumulation(make_config, tmp_path):
    rates = {}
    for size in (4, 1):
        train(make_config(f"trainer.micro_batch_size={size}", f"output_dir={tmp_path}/{size}"))
        rates[size] = [row["train/lr"] for row in metrics(tmp_path / str(size))]
    assert rates[4] == rates[1]
    assert len(rates[4]) == 6


def test_a_time_budget_anneals_and_ends_the_run(make_config, tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(Clock, "seconds", property(lambda clock: next(ticks) * 0.1))
    train(make_config("trainer.steps=100000", "trainer.max_seconds=1.0", "trainer.lr=1.0"))
    rates = [row["train/lr"] for row in metrics(tmp_path / "run")]
    assert len(rates) == 10  # one look at the clock in each step
    assert max(rates[1:]) > 0.9
    assert rates[-1] < 0.05
    assert (tmp_path / "run" / "heads" / "model.safetensors").exists()


def test_bfloat16_computes_over_float32_masters(make_config, tmp_path):
    train(make_config("trainer.precision=bfloat16", "trainer.lr=1e-5", "trainer.steps=3"))
    weights = load_file(tmp_path / "run" / "checkpoints" / "step-000003" / "model.safetensors")
    initial = load_target(TargetConfig("tiny", "random:llama")).lm_head.weight
    assert weights["lm_head_weight"].dtype == torch.float32
    moved = weights["lm_head_weight"][0] - initial
    assert (moved != 0).float().mean() > 0.9  # in bfloat16 steps of 1e-5 would vanish beside weights of 0.3
    assert moved.abs().max() < 1e-4


def test_an_answer_too_short_for_any_head_gives_a_finite_step(make_config, chats, tmp_path):
    """Answers of a token and its end of turn: only the first head has a label, and nothing breaks."""
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8
    source = tmp_path / "short.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(make_config(f"data.train=[{source}]", "data.packing=false", "heads.num_heads=4"))
    rows = metrics(tmp_path / "run")
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert "train/top1_head3" not in rows[0]


def test_a_run_directory_in_use_is_refused(make_config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"output_dir=.*run is not empty; go on with that run by resume=true"):
        train(make_config())
    with pytest.raises(ValueError, match=r"output_dir=.*notes\.txt is a file; give a directory"):
        train(make_config(f"output_dir={tmp_path}/run/notes.txt"))


def test_wrong_sources_are_named(make_config, tmp_path):
    with pytest.raises(ValueError, match=r"source '.*nowhere\.jsonl' is neither a file nor a folder; give a path"):
        train(make_config(f"data.train=[{tmp_path}/nowhere.jsonl]", f"output_dir={tmp_path}/a"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"source '.*empty\.jsonl' is empty; give a source with at least one"):
        train(make_config(f"data.train=[{tmp_path}/empty.jsonl]", f"output_dir={tmp_path}/b"))
    with pytest.raises(ValueError, match=r"batch_size=400 must be at most \d+, the number of rows"):
        train(make_config("trainer.batch_size=400", f"output_dir={tmp_path}/c"))
    with pytest.raises(ValueError, match=r"random:lama is not a known tiny family; use one of llama"):
        train(make_config("model.path=random:lama", f"output_dir={tmp_path}/d"))
    with pytest.raises(ValueError, match=r"heads\.draft_vocab_size=1 must be above"):
        train(make_config("heads.draft_vocab_size=1", f"output_dir={tmp_path}/e"))


def test_a_run_resumed_with_other_settings_is_refused(make_config):
    train(make_config("trainer.steps=1"))
    with pytest.raises(ValueError, match=r"trainer\.batch_size: 4 before, 2 now; seed: 0 before, 1 now"):
        train(make_config("trainer.steps=2", "resume=true", "seed=1", "trainer.batch_size=2"))


def test_processes_that_would_train_apart_are_refused(make_config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2, but accelerate runs 1 process.*accelerate launch --multi_gpu"):
        train(make_config())


def test_rows_after_the_checkpoint_and_torn_ones_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "eval/tau": 1.0}\n{"step": 3}\n{"ste')
    cut_rows(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 2, "eval/tau": 1.0}\n'
    cut_rows(path, 0)
    assert path.read_text() == ""


def test_the_entry_prints_one_clean_message(monkeypatch, capsys, tmp_path):
    arguments = ["model=tiny", "trainer=debug", "data=sharegpt", f"output_dir={tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["train_heads.py", *arguments, "data.train=[nowhere.jsonl]", "data.heldout=[x]"])
    with pytest.raises(SystemExit) as stopped:
        train_heads.main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "error: source 'nowhere.jsonl' is neither a file nor a folder; give a path" in message
    assert "Traceback" not in message


def test_a_warm_start_by_regression_survives_a_resume_bit_for_bit(make_config, tmp_path):
    warm = ("heads.init=regression", "trainer.keep_features=true", "trainer.steps=4", "trainer.save_every=2")
    straight = train(make_config(*warm, f"output_dir={tmp_path / 'straight'}"))
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed", ignore=shutil.ignore_patterns("step-000004", "heads"))
    resumed = train(make_config(*warm, "resume=true", f"output_dir={tmp_path / 'resumed'}"))
    cold = train(make_config("trainer.steps=4", f"output_dir={tmp_path / 'cold'}"))
    one, other, third = (load_file(path / "model.safetensors") for path in (straight, resumed, cold))
    assert all(one[name].equal(other[name]) for name in one)
    assert not one["lm_head_weight"].equal(third["lm_head_weight"])
