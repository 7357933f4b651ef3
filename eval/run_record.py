"""What lies around evaluated heads on disk: how they were trained, and what other runs on the target came to."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.lineage import METRICS_FILE, find_origin

logger = logging.getLogger(__name__)

Summary = dict[str, Any]


def training_curves(heads: Path) -> Summary | None:
    """What the run that trained `heads` logged, None for heads from elsewhere.

    `steps` with the `loss` and the `alpha` of each head [K] since the step before, on training data; `measured` are
    pairs of a step and the tau that held-out prompts were decoded at.
    """
    origin = find_origin(heads)
    if origin is None or not (origin.directory / METRICS_FILE).is_file():
        return None
    rows = [json.loads(line) for line in (origin.directory / METRICS_FILE).read_text().splitlines()]
    logged = [row for row in rows if "train/loss" in row]
    depth = sum(name.startswith("train/alpha_") for name in logged[0]) if logged else 0
    return {
        "steps": [row["step"] for row in logged],
        "loss": [row["train/loss"] for row in logged],
        "alpha": [[row[f"train/alpha_{k}"] for row in logged] for k in range(1, depth + 1)],
        "measured": [[row["step"], row["eval/tau"]] for row in rows if "eval/tau" in row],
    }


def other_reports(directory: Path, target: str, prompts: Sequence[str]) -> list[Summary]:
    """The headlines of the reports beside `directory` about the same target, the highest speedup first.

    `same_prompts`: whether they were measured on just these prompts. They come from runs of their own, maybe on
    another machine: only scripts/compare_heads.py decodes several heads in turns.
    """
    rows = []
    for file in sorted(directory.resolve().parent.glob("*/report.json")):
        if file.parent == directory.resolve():
            continue
        try:
            row = _headline(json.loads(file.read_text()), file.parent.name, prompts)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            logger.warning(
                "%s is no report that this version reads (%r); it is left out of the comparison", file, error
            )
            continue
        if row["target"] == target:
            rows.append(row)
    return sorted(rows, key=lambda row: -row["speedup"]["median"])


def _headline(report: Summary, run: str, prompts: Sequence[str]) -> Summary:
    kept = {name: report[name] for name in ("kind", "target", "tau", "alpha", "speedup", "tokens_per_s", "acceptance")}
    return {"run": run, **kept, "same_prompts": [row["name"] for row in report["prompts"]] == list(prompts)}
