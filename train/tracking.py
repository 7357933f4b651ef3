"""Where metrics go: a tracker of the user's choice through Accelerate, and always `<run>/metrics.jsonl`."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from data.disk import write_whole, writing
from eval.lineage import METRICS_FILE, PROJECT, heads_item, offline_mode
from train.config import TrainConfig
from train.provenance import GO_ON


class Tracking:
    """Logs rows of metrics; only the main process writes."""

    def __init__(self, accelerator: Accelerator, config: TrainConfig, directory: Path, run_id: str, step: int) -> None:
        """Open the log at `step` steps done: later rows of a run that was stopped are cut off.

        Raises:
            ValueError: if the tracker is not installed.
        """
        self.accelerator, self.directory, self.run_id = accelerator, directory, run_id
        self.path = directory / METRICS_FILE
        self.tracker = tracker = config.trainer.tracker
        if tracker != "none":
            check_tracker(tracker)
            options = {"wandb": wandb_options(directory, run_id)} if tracker == "wandb" else {}
            accelerator.init_trackers(PROJECT, config=flat(config.resolved()), init_kwargs=options)
        if accelerator.is_main_process:
            cut_rows(self.path, step)

    def log(self, values: dict[str, float], step: int) -> None:
        """Write one row; `step` counts the optimiser steps done."""
        self.accelerator.log(values, step=step)
        if self.accelerator.is_main_process:
            with writing(self.path, GO_ON), self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")

    def log_heads(self, heads: Path) -> None:
        """Log the directory of trained heads as an artifact of the run; only W&B has them."""
        if self.tracker == "wandb" and self.accelerator.is_main_process:
            run: Any = self.accelerator.get_tracker("wandb", unwrap=True)
            run.log_artifact(heads_item(heads).artifact(self.directory.name, heads_run=self.run_id))

    def close(self) -> None:
        """Finish the trackers."""
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()


def check_tracker(tracker: str) -> None:
    """Raise ValueError if the tracker's package is missing: Accelerate would go on without a word."""
    if importlib.util.find_spec(tracker) is None:
        raise ValueError(
            f"trainer.tracker={tracker} is not installed; run `pip install {tracker}`, or set trainer.tracker=none"
        )


def wandb_options(directory: Path, run_id: str) -> dict[str, Any]:
    """Options of `wandb.init`. What is made of the heads later joins the group, see `eval.lineage`."""
    name = directory.name
    options = {"name": name, "group": name, "job_type": "training", "dir": str(directory), "id": run_id}
    return {**options, "resume": "allow", **offline_mode()}


def cut_rows(path: Path, step: int) -> None:
    """Keep the rows of `path` up to `step`; what a stopped run logged after its checkpoint comes again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        # Only the last line can be torn, by a kill in the middle of a write.
        if not line.endswith("\n") or json.loads(line)["step"] > step:
            break
        kept.append(line)
    write_whole(path, "".join(kept), GO_ON)


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, int | float | str | bool]:
    """{"trainer": {"lr": 1}} -> {"trainer.lr": 1}, since TensorBoard takes nothing nested and no null."""
    values: dict[str, int | float | str | bool] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value if isinstance(value, int | float | str | bool) else str(value)
    return values
