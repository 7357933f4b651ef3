"""A run explains itself: its directory, the resolved config and what it ran on."""

import json
import os
import platform
import shlex
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from omegaconf import OmegaConf

from data.disk import write_whole
from eval.lineage import CONFIG_FILE, RUN_FILE
from train.config import TrainConfig

GO_ON = "go on with resume=true"
PACKAGES = ("accelerate", "peft", "safetensors", "tokenizers", "torch", "transformers")


def open_directory(config: TrainConfig, accelerator: Accelerator) -> Path:
    """Make `output_dir` on the main process.

    Raises:
        ValueError: on every process, if it holds something and `resume` is not set.
    """
    directory = Path(config.output_dir)
    problem = ""
    if accelerator.is_main_process:
        if directory.exists() and not directory.is_dir():
            problem = f"output_dir={directory} is a file; give a directory that is new or empty"
        elif directory.exists() and any(directory.iterdir()) and not config.resume:
            problem = (
                f"output_dir={directory} is not empty; go on with that run by resume=true, or give this one "
                "another run_name"
            )
        else:
            problem = _made(directory)
    # One process decides for all: the others might look after the first has made the directory.
    (problem,) = broadcast_object_list([problem])
    if problem:
        raise ValueError(problem)
    return directory


def _made(directory: Path) -> str:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"output_dir={directory} cannot be made ({error}); give a directory that may be written to"
    return ""


def record(config: TrainConfig, directory: Path, facts: dict[str, Any]) -> str:
    """Write config.yaml and add this start to run.json; returns the run's id, the same after each resume."""
    write_whole(directory / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(config.resolved())), GO_ON)
    path = directory / RUN_FILE
    run = json.loads(path.read_text()) if path.exists() else {"id": uuid.uuid4().hex[:8], "starts": []}
    run["starts"].append({**circumstances(), **facts})
    write_whole(path, json.dumps(run, indent=2) + "\n", GO_ON)
    return run["id"]


def circumstances() -> dict[str, Any]:
    """Command, code, packages and machine of this process."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.argv]),
        "git": git_state(Path(__file__).parents[1]),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "machine": {
            "host": platform.node(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            "processes": int(os.environ.get("WORLD_SIZE", "1")),
        },
    }


def git_state(checkout: Path) -> dict[str, Any]:
    """Revision of the checkout, and whether it has changes; both None outside of git."""
    try:
        revision = _git(checkout, "rev-parse", "HEAD")
        return {"revision": revision, "dirty": bool(_git(checkout, "status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"revision": None, "dirty": None}


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
