"""Two processes of one run, the second of which meets a fault at its third step."""

from pathlib import Path
from typing import Any

from tests.train.test_distributed import as_overrides, launch

SCRIPT = """
import math, os, signal, sys
from train import loop, train_heads

original = loop.accumulate_gradients

def kill(step, source, parallel):
    os.kill(os.getpid(), signal.SIGKILL)

def nan(heads, inputs):
    return {{tap: value * math.nan for tap, value in inputs[0].items()}}, *inputs[1:]

def spoil(step, source, parallel):
    with parallel.heads.register_forward_pre_hook(nan):
        return original(step, source, parallel)

def faulty(step, source, parallel):
    meets = step.number == 2 and os.environ["RANK"] == "1"
    return ({fault} if meets else original)(step, source, parallel)

loop.accumulate_gradients = faulty
train_heads.main()
"""
KILL, SPOIL = "kill", "spoil"


def launch_with(fault: str, launcher: str, values: dict[str, Any], folder: Path) -> tuple[int, str]:
    """Train in two processes under `fault`; returns the exit code and what they said."""
    script = folder / f"{fault}.py"
    script.write_text(SCRIPT.format(fault=fault))
    return launch([str(script), "model=tiny", "data=sharegpt", *as_overrides(values)], launcher)
