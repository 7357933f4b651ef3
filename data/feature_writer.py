"""Writing a feature store: a shard is there whole or not at all, so that a stop at any moment costs one shard's work.

Whoever runs the same extraction again writes the shards that are missing or damaged (data/feature_plan.py says which
documents they hold), and ends with the same bytes as a run that was never stopped.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from data.disk import free_bytes, writing
from data.feature_plan import Document, Plan, stored_positions
from data.feature_precision import encode
from data.features import (
    EXTRACT_AGAIN,
    INDEX_FILE,
    KEYS,
    LENGTHS,
    OFFSETS,
    POSITIONS,
    checksum_line,
    checksum_path,
    fault_of,
    shard_path,
    tensor_name,
)
from data.prepared import file_sha256

# Shapes: T tokens of a document, N rows of a tap in a shard, D hidden


class StoreWriter:
    """Brings `directory` to what `plan` says; one process at a time.

    Raises:
        ValueError: before anything is written, if what is missing does not fit on the disk; or if another process
            writes there.
        OSError: if writing fails; whole shards stay.
    """

    def __init__(self, directory: Path, plan: Plan):
        self.directory, self.plan = directory, plan
        self.missing = [n for n in range(len(plan.shards)) if fault_of(shard_path(directory, n)) is not None]

    @contextlib.contextmanager
    def open(self) -> Iterator["StoreWriter"]:
        """Check the room, then take the directory for this process."""
        check_room(self.directory, sum(self.plan.shard_bytes(number) for number in self.missing))
        with writing(self.directory, EXTRACT_AGAIN):
            self.directory.mkdir(parents=True, exist_ok=True)
        with _locked(self.directory):
            for left in self.directory.glob(".tmp*"):  # by the safetensors library, where it was killed
                left.unlink()
            with writing(self.directory / INDEX_FILE, EXTRACT_AGAIN):
                _write_text(self.directory / INDEX_FILE, self.plan.index.to_json())
            yield self

    def write(self, number: int, features: Iterable[dict[str, Tensor]]) -> None:
        """Write shard `number` from the features {tap: [T, D]} of its documents, in their order."""
        tensors = self._tensors(self.plan.shards[number], features)
        shard = shard_path(self.directory, number)
        partial = _partial(shard)
        with writing(shard, EXTRACT_AGAIN):
            save_file(tensors, partial)
            # The library leaves the file readable by its owner only; others may train from it.
            partial.chmod(self.directory.stat().st_mode & 0o666)
            _to_disk(partial)
            # The checksum first: a shard under its own name then always has one.
            _write_text(checksum_path(shard), checksum_line(shard, file_sha256(partial)))
            _rename(partial, shard)

    def _tensors(self, documents: list[Document], features: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
        layout = self.plan.index.layout
        parts: dict[str, list[Tensor]] = {name: [] for tap in layout.taps for name in layout.parts(tap)}
        for document, found in zip(documents, features, strict=True):
            stored = stored_positions(self.plan.prepared, document.samples, self.plan.positions)
            for tap in layout.taps:
                rows_ND = found[tap]
                if tap not in layout.whole:
                    places_N = stored[tap].nonzero().squeeze(1)
                    rows_ND = rows_ND[places_N.to(rows_ND.device)]
                    parts[tensor_name(tap, POSITIONS)].append(places_N.int())
                assert rows_ND.shape == (document.rows[tap], layout.width), (tap, rows_ND.shape)
                self._check_finite(rows_ND, tap, document)
                for name, part in encode(rows_ND, layout.precision).items():
                    parts[tensor_name(tap, name)].append(part.cpu())
        offsets = {tap: [0, *(document.rows[tap] for document in documents)] for tap in layout.taps}
        return {
            KEYS: torch.tensor([list(document.key) for document in documents], dtype=torch.uint8),
            LENGTHS: torch.tensor([document.tokens for document in documents], dtype=torch.int32),
            **{tensor_name(tap, OFFSETS): torch.tensor(rows).cumsum(0) for tap, rows in offsets.items()},
            **{name: torch.cat(rows) for name, rows in parts.items()},
        }

    def _check_finite(self, rows_ND: Tensor, tap: str, document: Document) -> None:
        if not rows_ND.isfinite().all():
            raise ValueError(
                f"the target's {tap} is not finite in sample {document.samples[0]} ({document.tokens} tokens); "
                "run the target in bfloat16 or float32, or leave that sample out"
            )


def check_room(directory: Path, need: int) -> None:
    """Raises ValueError if `need` bytes do not fit on the disk of `directory`."""
    free = free_bytes(directory)
    if need > free:
        raise ValueError(
            f"the features need {need / 1e9:.2f} GB in {directory}, {free / 1e9:.2f} GB are free; free some, give "
            "another output=, a smaller precision= (int8, bfloat16), or less data (data.limit=)"
        )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process writes to {directory}; wait for it, or give another output=") from error
        yield
    finally:
        os.close(descriptor)  # and with it the lock, as a kill does


def _partial(path: Path) -> Path:
    # Always the same name: what a killed process left is overwritten by the next one.
    return path.with_name(f".{path.name}.partial")


def _write_text(path: Path, text: str) -> None:
    partial = _partial(path)
    partial.write_text(text)
    _to_disk(partial)
    _rename(partial, path)


def _rename(partial: Path, path: Path) -> None:
    os.replace(partial, path)
    _to_disk(path.parent)


def _to_disk(path: Path) -> None:
    # A rename can reach the disk before the bytes do, and after a power cut names an empty file.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
