"""Where metrics go: a tracker of the user's choice through Accelerate, and always `<run>/metrics.jsonl`."""

import importlib.util
import json
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from accelerate import Accelerator

from train.config import TrainConfig

PROJECT = "headstart"
METRICS_FILE = "metrics.jsonl"


class Tracking:
    """Logs rows of metrics; only the main process writes."""

    def __init__(self, accelerator: Accelerator, config: TrainConfig, directory: Path, run_id: str, step: int) -> None:
        """Open the log at `step` steps done: later rows of a run that was stopped are cut off.

        Raises:
            ValueError: if the tracker is not installed.
        """
        self.accelerator = accelerator
        self.path = directory / METRICS_FILE
        tracker = config.trainer.tracker
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
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")

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
    """Options of `wandb.init`: offline unless the user is logged in or says otherwise by WANDB_MODE."""
    options: dict[str, Any] = {"name": directory.name, "dir": str(directory), "id": run_id, "resume": "allow"}
    if "WANDB_MODE" not in os.environ and not wandb_logged_in():
        options["mode"] = "offline"
    return options


def wandb_logged_in() -> bool:
    """Whether a key for Weights & Biases lies where its client looks for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return host is not None and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


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
    temporary = path.with_name(f".{path.name}")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, int | float | str | bool]:
    """{"trainer": {"lr": 1}} -> {"trainer.lr": 1}, since TensorBoard takes nothing nested and no null."""
    values: dict[str, int | float | str | bool] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value if isinstance(value, int | float | str | bool) else str(value)
    return values
