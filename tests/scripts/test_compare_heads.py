"""Heads under one budget: trained by the training command, decoded in one run, one table and one picture."""

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

import scripts.compare_heads
from eval.benchmark import ENGINE, GENERATE
from eval.comparison import compare, draw_comparison, draw_learning, label_runs, tau_interval
from eval.config import from_hydra
from eval.records import Cycle, PromptResult, Timing
from scripts.compare_heads import CompareConfig, Entry, compare_runs, kept_checkpoints, table_of, train_all
from tests.test_configs import CONF, compose_train

TINY = {"model": {"name": "tiny", "path": "random:llama"}, "prompts": ["p.jsonl"]}


def compose_compare(*overrides: str) -> CompareConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return from_hydra(CompareConfig, compose("compare", overrides=list(overrides)))


# No preset, and values that a command line must quote.
OTHER = {"name": "other", "path": "random:qwen2", "licence": "see: a, b", "template_kwargs": {"enable_thinking": False}}
CROSS_ENTROPY = ["heads.objective.ce_weight=1.0", "heads.objective.kl_weight=0.0"]


@pytest.mark.slow
def test_entries_are_trained_and_compared_and_found_again_as_runs(tmp_path):
    answers = tmp_path / "answers.jsonl"
    talk = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "one two three four"}]
    answers.write_text("".join(json.dumps({"id": f"p{i}", "messages": talk}) + "\n" for i in range(2)))
    budget = {
        "steps": 2,
        "batch_size": 1,
        "micro_batch_size": 1,
        "eval_prompts": 0,
        "init_tokens": 4,
        "log_every": 1,
        "save_every": 1,
        "tracker": "none",
    }
    config = from_hydra(
        CompareConfig,
        {
            "model": OTHER,
            "families": ["medusa", {"label": "eagle3-ce", "heads": "eagle3", "overrides": CROSS_ENTROPY}],
            "train": [f"data.train=[{answers}]", f"data.cache_dir={tmp_path / 'cache'}", "threads=1"]
            + [f"trainer.{name}={value}" for name, value in budget.items()],
            "prompts": [str(answers)],
            "output": str(tmp_path),
            "tree": {"calibration": [str(answers)], "max_nodes": 3, "depth": 2, "expand": 2, "calibration_tokens": 12},
            "benchmark": {"max_new_tokens": 12},
        },
    )
    runs = train_all(config)
    objectives = {name: OmegaConf.load(run / "config.yaml").heads.objective for name, run in runs.items()}
    assert (objectives["eagle3-ce"].ce_weight, objectives["eagle3-ce"].kl_weight) == (1.0, 0.0)
    models = [OmegaConf.to_object(OmegaConf.load(run / "config.yaml").model) for run in runs.values()]
    assert models == [asdict(config.model)] * 2
    rows = compare_runs(config, runs)
    assert [row["heads"] for row in rows] == ["medusa", "eagle3-ce"]
    for row in rows:
        assert row["equal"] is True
        assert row["tau_low"] <= row["tau"] <= row["tau_high"]
        assert row["parameters"] > 0
        assert row["memory_gb"] > 0
    assert table_of(rows).row_count == 2
    draw_comparison(rows, tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").stat().st_size > 1000
    again = replace(config, families=[], runs=[str(run) for run in runs.values()])
    assert train_all(again) == runs

    kept = kept_checkpoints({"eagle3-ce": runs["eagle3-ce"]})
    assert list(kept) == ["eagle3-ce step-000001", "eagle3-ce step-000002"]
    points = compare_runs(config, kept)
    assert [row["train_tokens"] for row in points] == [rows[1]["train_tokens"] // 2, rows[1]["train_tokens"]]
    assert points[-1]["tau"] == rows[1]["tau"]
    draw_learning(points, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="holds no checkpoints; give the directory of a training run"):
        kept_checkpoints({"heads": runs["medusa"] / "heads"})


def test_an_interval_is_over_prompts():
    def result(emitted):
        cycle = Cycle(offered=1, accepted=emitted - 1, emitted=emitted, node=0)
        return PromptResult("p", "kind", 1, emitted, {}, [], [cycle], None, None, 0)

    assert tau_interval([result(2)] * 5) == (2.0, 2.0)
    low, high = tau_interval([result(1), result(3)] * 20)
    assert 1.5 < low < 2.0 < high < 2.5


def test_the_speedup_is_over_the_plain_setting_that_is_fastest_beside_all_heads():
    def result(name, seconds, engine, generate):
        timings = [Timing(tokens=10, prefill_s=1.0, decode_s=s) for s in (seconds, engine, generate)]
        plain = {ENGINE: [timings[1]], GENERATE: [timings[2]]}
        cycle = Cycle(offered=1, accepted=1, emitted=2, node=1)
        return [PromptResult(name, "kind", 1, 11, plain, [timings[0]], [cycle] * 5, True)]

    # Beside the second heads alone the engine was the faster one.
    results = {"one": result("p", 2.0, 8.0, 4.0), "other": result("p", 4.0, 6.0, 7.0)}
    rows = compare(results, {"one": 1, "other": 1})
    assert [row["fastest_plain"] for row in rows] == [GENERATE] * 2
    assert [row["speedup"] for row in rows] == [2.0, 1.75]
    assert [row["speedup_engine"] for row in rows] == [4.0, 1.5]
    assert rows[0]["speedup_low"] == rows[0]["speedup_high"] == 2.0
    assert f"over {GENERATE}" in str(table_of(rows).columns[3].header)


def test_runs_of_equal_folder_names_are_told_apart():
    runs = ["a/one/heads", "b/one/heads", "b/two", "outputs/medusa"]
    labels = ["a/one/heads", "b/one/heads", "two", "outputs/medusa"]
    assert label_runs(runs, taken=["medusa"]) == {label: Path(run) for label, run in zip(labels, runs, strict=True)}
    assert label_runs(["a", "x/a"]) == {f"{Path.cwd().name}/a": Path("a"), "x/a": Path("x/a")}
    with pytest.raises(ValueError, match="runs names a twice; name each run once"):
        label_runs(["a", "b/../a"])


@pytest.mark.parametrize(
    ("families", "message"),
    [
        ([], "nothing to compare; give families="),
        (["eagle3", {"heads": "eagle3"}], "two of families are called eagle3; tell them apart: {label: other"),
        ([{"label": "a/b", "heads": "eagle3"}], "label 'a/b' must be of letters"),
        ([{"label": "ce"}], r"families has {'label': 'ce'}; give a name of conf/heads/, or {label"),
        ([{"heads": "eagle3", "override": []}], r"unknown setting override \(did you mean overrides\?\)"),
    ],
)
def test_families_that_cannot_be_told_apart_or_read_are_refused(families, message):
    with pytest.raises(ValueError, match=message):
        from_hydra(CompareConfig, {**TINY, "families": families})


def test_the_command_line_names_families_or_gives_them_settings_of_their_own():
    named = compose_compare("families=[eagle3,medusa]").entries()
    assert named == [Entry("eagle3", "eagle3"), Entry("medusa", "medusa")]
    labelled = compose_compare("families=[{label: ce, heads: eagle3, overrides: ['heads.objective.ce_weight=1.0']}]")
    assert labelled.entries() == [Entry("eagle3", "ce", ["heads.objective.ce_weight=1.0"])]


def test_the_commands_that_the_script_shows_compose():
    commands = [line for line in str(scripts.compare_heads.__doc__).splitlines() if line.startswith("python")]
    configs = [compose_compare(*shlex.split(command, comments=True)[2:]) for command in commands]
    assert [len(config.entries()) for config in configs] == [3, 4, 0, 0]
    assert [config.train for config in configs] == [
        ["trainer.max_seconds=600", "trainer.epochs=4"],
        ["trainer.max_seconds=600"],
        [],
        [],
    ]
    assert [config.checkpoints for config in configs] == [False, False, False, True]
    assert configs[2].runs == ["outputs/a", "outputs/b"]


@pytest.mark.parametrize("path", sorted((CONF / "comparison").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_made_comparison_composes(path):
    config = compose_compare(f"comparison={path.stem}")
    assert config.output != compose_compare("runs=[a]").output
    assert f"comparison={path.stem}" in path.read_text()
    objectives = [compose_train(f"heads={entry.heads}", *entry.overrides).heads for entry in config.entries()]
    assert len({str(objective) for objective in objectives}) == len(objectives), "two entries are the same"


@pytest.mark.parametrize("comparison", sorted(path.stem for path in (CONF / "comparison").glob("*.yaml")))
def test_a_ready_made_comparison_trains_what_it_says(comparison):
    entries = compose_compare(f"comparison={comparison}").entries()
    assert len({entry.label for entry in entries}) == len(entries) == 4
    trained = [composed_heads(entry) for entry in entries]
    weights = [
        {name for name, value in heads.objective.items() if name.endswith("_weight") and value} for heads in trained
    ]
    if "losses" in comparison:
        expected = {"cross-entropy": "ce", "kl": "kl", "total-variation": "tv", "hybrid": "hybrid"}
        assert weights == [{f"{expected[entry.label]}_weight"} for entry in entries]


def composed_heads(entry: Entry) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("train", overrides=[f"heads={entry.heads}", *entry.overrides]).heads
