"""What a user reads when a disk is full or refuses: which file, why, how much room there is, and what to do."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


@contextlib.contextmanager
def writing(path: Path, then: str) -> Iterator[None]:
    """Name `path` where the body cannot write it; `then` says how to go on.

    Raises:
        OSError: in place of a failed write, which the safetensors library reports as an error of its own.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} could not be written ({error}); {remedy(path)}, then {then}") from error


def remedy(path: Path) -> str:
    """What helps where `path` could not be written."""
    return f"{free_bytes(path) / 1e9:.1f} GB are free there. Make room, or allow writing there"


def free_bytes(path: Path) -> int:
    """Room on the disk that holds `path`, or will hold it."""
    there = next(parent for parent in (path, *path.resolve().parents) if parent.exists())
    return shutil.disk_usage(there).free
