"""Checkpoints that are whole or do not exist.

    <run>/checkpoints/step-000123/
        config.json, model.safetensors   the heads, as `heads.layout.save_heads` writes them
        optimizer.safetensors            AdamW's moments by parameter name
        adapter_config.json, adapter_model.safetensors   the target's adapter, in a run that trains one
        state.json                       scalars, and the sha256 of the other files

A checkpoint is written beside, synced and renamed; hashes are checked before it is used. Nothing is pickled. One that
is replaced or removed is first renamed to a hidden name, so that a kill leaves each whole, or hidden to be tidied up.
There is no random state to save: batches and seeds are functions of the step number.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from data.disk import remedy
from data.prepared import file_sha256
from heads.export.files import CONFIG_FILE, replacing, write_tensors
from heads.family import DraftHeads
from heads.identity import TargetIdentity
from heads.layout import WEIGHTS_FILE, save_heads
from train.adapter import ADAPTER_FILES, DRIFT_FILE, Adapter

logger = logging.getLogger(__name__)

REPLACED = ".replaced-"
OPTIMIZER_FILE, STATE_FILE = "optimizer.safetensors", "state.json"


class SaveError(OSError):
    """A checkpoint could not be written."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands after `step` steps, `skipped` of which changed nothing.

    `tokens` counts the supervised tokens that the steps learned from, one seen twice as two. `tau` was measured at this
    step, None if it was not.

    `fixed` holds the settings that the rest of the run must share; `window` the sums since the last log.
    """

    step: int
    seconds: float
    tau: float | None
    window: dict[str, Any]
    fixed: dict[str, Any]
    skipped: int = 0
    tokens: int = 0
    hashes: dict[str, str] = field(default_factory=dict)


def save(
    root: Path,
    heads: DraftHeads,
    optimizer: dict[str, Tensor],
    state: RunState,
    identity: TargetIdentity,
    adapter: Adapter | None = None,
) -> Path:
    """Write one checkpoint below `root` and return its directory.

    Raises:
        SaveError: if the disk is full or refuses; checkpoints written before stay.
    """
    final = root / f"step-{state.step:06d}"
    temporary, replaced = root / f".writing-{final.name}", root / f"{REPLACED}{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _tidy(root)
        save_heads(heads, temporary, identity, {"data_digest": state.fixed["data"]})
        write_tensors(temporary / OPTIMIZER_FILE, optimizer)
        if adapter is not None:
            adapter.save(temporary)
        hashes = {path.name: file_sha256(path) for path in sorted(temporary.iterdir())}
        (temporary / STATE_FILE).write_text(json.dumps({**asdict(state), "hashes": hashes}, indent=1) + "\n")
        _sync([*temporary.iterdir(), temporary])
        if final.exists():
            os.rename(final, replaced)
        os.rename(temporary, final)
        _sync([root])
    except OSError as error:
        if replaced.exists() and not final.exists():
            os.rename(replaced, final)
        shutil.rmtree(temporary, ignore_errors=True)
        raise SaveError(
            f"checkpoint {final} could not be written ({error}); {remedy(root)}, then go on with resume=true from "
            f"{_name_of_last(root)}"
        ) from error
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def set_aside_damaged(root: Path) -> None:
    """Tidy up; rename checkpoints that are not what was written to `damaged-...`, and warn why."""
    _tidy(root)
    for directory in checkpoints(root):
        problem = damage(directory)
        if problem is not None:
            aside = directory.with_name(f"damaged-{directory.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(directory, aside)
            logger.warning("checkpoint %s is damaged (%s): not used, and now %s", directory, problem, aside.name)


def best(root: Path) -> Path | None:
    """The checkpoint with the highest tau (the latest, if several), the last one if none was measured."""
    every = checkpoints(root)
    measured = {directory: tau for directory in every if (tau := read_state(directory).tau) is not None}
    if measured:
        return max(reversed(measured), key=lambda directory: measured[directory])
    return every[-1] if every else None


def prune(root: Path, keep_last: int) -> None:
    """Delete all checkpoints but the last `keep_last` and the best."""
    every = checkpoints(root)
    kept = {*every[-keep_last:], best(root)}
    for directory in every:
        if directory not in kept:
            removed = root / f".removed-{directory.name}"
            os.rename(directory, removed)
            shutil.rmtree(removed, ignore_errors=True)


def checkpoints(root: Path) -> list[Path]:
    """The checkpoint directories by rising step."""
    return sorted(root.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def read_state(directory: Path) -> RunState:
    """The scalars of a checkpoint."""
    return RunState(**json.loads((directory / STATE_FILE).read_text()))


def damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint, None if nothing is."""
    try:
        hashes = read_state(directory).hashes
        changed = [name for name, expected in hashes.items() if file_sha256(directory / name) != expected]
    except (OSError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    if changed:
        return f"{', '.join(changed)}: not the bytes that were written"
    return None


def check_fixed(stored: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise ValueError if a run is resumed with settings that would make it another run."""
    changed = [
        f"{name}: {stored.get(name)} before, {value} now"
        for name, value in current.items()
        if stored.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"resume=true, but these settings are not those of the run ({'; '.join(changed)}); restore them, "
            "or start another run with another run_name"
        )


def copy_heads(checkpoint: Path, destination: Path) -> None:
    """Copy the heads of a checkpoint, without what only training needs; older ones there are replaced."""
    names = (CONFIG_FILE, WEIGHTS_FILE)
    with replacing(destination, names) as fresh:
        for name in names:
            shutil.copyfile(checkpoint / name, fresh / name)


def copy_adapter(checkpoint: Path, destination: Path) -> None:
    """Copy the adapter of a checkpoint; an older one there is replaced, with what was measured of it."""
    with replacing(destination, (*ADAPTER_FILES, DRIFT_FILE)) as fresh:
        for name in ADAPTER_FILES:
            shutil.copyfile(checkpoint / name, fresh / name)


def _name_of_last(root: Path) -> str:
    last = checkpoints(root)[-1:]
    return str(last[0]) if last else "the start: there is no checkpoint yet"


def _tidy(root: Path) -> None:
    """Remove what a killed process left unfinished; a checkpoint that it had not replaced yet comes back."""
    for path in root.glob(f"{REPLACED}*"):
        final = root / path.name.removeprefix(REPLACED)
        if not final.exists():
            os.rename(path, final)
    for path in root.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
