"""A report shows how its heads were trained and what other runs on the target came to."""

import json
from pathlib import Path

import pytest
import yaml

from eval.report import write_report
from eval.run_record import other_reports, training_curves
from tests.eval.test_report import SIX, evaluation


def run_directory(path: Path, logged: list[dict[str, float]]) -> Path:
    """A training run as train/provenance.py and train/tracking.py leave it."""
    (path / "heads").mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"id": "abc"}))
    (path / "config.yaml").write_text(yaml.safe_dump({"output_dir": str(path), "trainer": {"tracker": "none"}}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    return path


LOGGED = [
    {"step": 10, "train/loss": 4.0, "train/alpha_1": 0.2, "train/alpha_2": 0.1},
    {"step": 20, "train/loss": 3.0, "train/alpha_1": 0.3, "train/alpha_2": 0.2},
    {"step": 20, "eval/tau": 1.4, "eval/alpha_1": 0.3},
    {"step": 30, "train/loss": 2.5, "train/alpha_1": 0.4, "train/alpha_2": 0.25},
]


@pytest.mark.parametrize("given", ["", "heads"])
def test_curves_are_those_of_the_run_that_trained_the_heads(given, tmp_path):
    run = run_directory(tmp_path / "run", LOGGED)
    assert training_curves(run / given) == {
        "steps": [10, 20, 30],
        "loss": [4.0, 3.0, 2.5],
        "alpha": [[0.2, 0.3, 0.4], [0.1, 0.2, 0.25]],
        "measured": [[20, 1.4]],
    }
    assert training_curves(tmp_path) is None


@pytest.mark.slow
def test_the_page_draws_the_curves_and_lists_the_neighbours(tmp_path, caplog):
    write_report(evaluation(SIX, kind="hydra"), tmp_path / "hydra")
    write_report(evaluation(SIX[:3]), tmp_path / "fewer prompts")
    write_report(evaluation(SIX, target="another"), tmp_path / "another target")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "report.json").write_text('{"tau": 1.5}')
    run = run_directory(tmp_path / "run", LOGGED)
    summary = write_report(evaluation(SIX, heads=str(run)), run)
    rows = [(row["run"], row["kind"], row["same_prompts"]) for row in summary["other_runs"]]
    assert sorted(rows) == [("fewer prompts", "medusa", False), ("hydra", "hydra", True)]
    assert "old/report.json is no report that this version reads" in caplog.text
    page = (run / "report.html").read_text()
    assert page.count("<svg") == 8
    assert "tau 1.40" in page
    assert "Other runs on this target" in page
    assert "| hydra | hydra | 2.80 | 2.00 | [2.00, 2.00] | 10.00 | yes |" in (run / "report.md").read_text()


def test_a_report_is_not_its_own_neighbour(tmp_path):
    write_report(evaluation(SIX), tmp_path / "run")
    assert other_reports(tmp_path / "run", "target", []) == []
