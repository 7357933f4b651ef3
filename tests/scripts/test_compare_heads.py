"""Families under one budget: trained by the training command, decoded in one run, one table and one picture."""

import json

import pytest

from eval.comparison import draw_comparison, tau_interval
from eval.config import from_hydra
from eval.records import Cycle, PromptResult
from scripts.compare_heads import CompareConfig, compare_runs, table_of, train_all


def test_two_families_are_trained_and_compared(tmp_path):
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
        "tracker": "none",
    }
    config = from_hydra(
        CompareConfig,
        {
            "model": {"name": "tiny", "path": "random:llama"},
            "heads": ["medusa", "eagle3"],
            "train": [f"data.train=[{answers}]", f"data.cache_dir={tmp_path / 'cache'}", "threads=1"]
            + [f"trainer.{name}={value}" for name, value in budget.items()],
            "prompts": [str(answers)],
            "output": str(tmp_path),
            "tree": {"calibration": [str(answers)], "max_nodes": 3, "depth": 2, "expand": 2, "calibration_tokens": 12},
            "benchmark": {"max_new_tokens": 12},
        },
    )
    rows = compare_runs(config, train_all(config))
    assert [row["heads"] for row in rows] == ["medusa", "eagle3"]
    for row in rows:
        assert row["equal"] is True
        assert row["tau_low"] <= row["tau"] <= row["tau_high"]
        assert row["parameters"] > 0
        assert row["memory_gb"] > 0
    assert table_of(rows).row_count == 2
    draw_comparison(rows, tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").stat().st_size > 1000


def test_an_interval_is_over_prompts():
    def result(emitted):
        cycle = Cycle(offered=1, accepted=emitted - 1, emitted=emitted, node=0)
        return PromptResult("p", "kind", 1, emitted, {}, [], [cycle], None, None, 0)

    assert tau_interval([result(2)] * 5) == (2.0, 2.0)
    low, high = tau_interval([result(1), result(3)] * 20)
    assert 1.5 < low < 2.0 < high < 2.5


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="nothing to compare"):
        from_hydra(CompareConfig, {"model": {"name": "tiny", "path": "random:llama"}, "prompts": ["p.jsonl"]})
