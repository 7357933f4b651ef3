"""Files that are written whole or not at all, and what a user reads when a disk is full or refuses."""

import contextlib
import os
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


@contextlib.contextmanager
def whole(path: Path, then: str) -> Iterator[Path]:
    """Yield the name under which the body writes a file that then becomes `path`: readers see the old or the new one.

    Raises:
        OSError: as `writing` does; a file that was there stays.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with writing(path, then):
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str, then: str) -> None:
    """Write a text file as `whole` does."""
    with whole(path, then) as partial:
        partial.write_text(text, encoding="utf-8")


def remedy(path: Path) -> str:
    """What helps where `path` could not be written."""
    return f"{free_bytes(path) / 1e9:.1f} GB are free there. Make room, or allow writing there"


def free_bytes(path: Path) -> int:
    """Room on the disk that holds `path`, or will hold it."""
    there = next(parent for parent in (path, *path.resolve().parents) if parent.exists())
    return shutil.disk_usage(there).free
