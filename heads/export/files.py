"""Directories of heads on disk: written whole or not at all, read strictly, weights in safetensors only."""

import contextlib
import hashlib
import json
import os
import shutil
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG_FILE = "config.json"
CHECKSUM_FILE = "SHA256SUMS"
PICKLES = {".bin", ".pkl", ".pt", ".pth"}

Record = TypeVar("Record")
Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@contextlib.contextmanager
def replacing(directory: Path, names: Collection[str]) -> Iterator[Path]:
    """Give an empty directory to write the files `names` into; after success it becomes `directory`.

    If anything fails, `directory` stays what it was. Where it already exists, it is absent for the instant
    between two renames; killed right there, the process leaves the old files in `.<name>.<pid>.old`.

    Raises:
        ValueError: if `directory` holds a file that is not among `names` and so would be lost.
    """
    directory = directory.resolve()
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; give a directory")
    if directory.exists() and (others := sorted({entry.name for entry in directory.iterdir()} - set(names))):
        raise ValueError(f"{directory} holds {', '.join(others[:5])}, which would be lost; give another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    old = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        for file in fresh.iterdir():
            _to_disk(file)
        if directory.exists():
            directory.rename(old)
        fresh.rename(directory)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _to_disk(file: Path) -> None:
    # A rename can reach the disk before the bytes do: after a power cut the file would be there, but empty.
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. Raises OSError where the library reports a failed write as its own error."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(ready, path, metadata={"format": "pt"})  # transformers refuses files without this note
    except SafetensorError as error:
        raise OSError(f"could not write {path}: {error}") from error
    # The library leaves the file readable by its owner only; servers often run as someone else.
    path.chmod(path.parent.stat().st_mode & 0o666)


def write_checksums(directory: Path) -> None:
    """Write SHA256SUMS over all files of the directory, as `sha256sum --check` reads it."""
    lines = [f"{_sha256(file)}  {file.name}\n" for file in sorted(directory.iterdir())]
    (directory / CHECKSUM_FILE).write_text("".join(lines))


def verify_checksums(directory: Path) -> None:
    """Compare the files with SHA256SUMS, where there is one.

    Raises:
        ValueError: if a line names a file outside the directory, or a file is missing or has changed.
    """
    listing = directory / CHECKSUM_FILE
    if not listing.is_file():
        return
    for line in listing.read_text().splitlines():
        digest, _, name = line.partition("  ")
        if not name or name != Path(name).name or name == "..":
            raise ValueError(f"{listing} names {name!r}, which is not a file of this directory; do not trust it")
        if not (directory / name).is_file() or _sha256(directory / name) != digest:
            raise ValueError(
                f"{directory / name} is not the file that was exported (by {CHECKSUM_FILE}); "
                f"copy it again, or delete {CHECKSUM_FILE} if the change was meant"
            )


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError if the file is missing or holds anything but one JSON object."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a directory with {path.name} and a safetensors file")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy or export it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold one JSON object, not a {type(values).__name__}")
    return values


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Raises ValueError if the file is missing, damaged, or there are only pickles in its place."""
    if not path.is_file():
        entries = path.parent.iterdir() if path.parent.is_dir() else ()
        for entry in sorted(entries):
            refuse_pickle(entry)
        raise ValueError(f"{path} does not exist; the directory must hold the weights under this name")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); copy or export it again") from error


def refuse_pickle(path: Path) -> None:
    """Raises ValueError, with the way to convert it, if the file is a pickle by its name."""
    if path.suffix not in PICKLES:
        return
    converted = path.with_suffix(".safetensors").name
    raise ValueError(
        f"{path} is a pickle, which can run any code when it is read, so it is not read; if you trust it: "
        'python -c "import torch; from safetensors.torch import save_file; '
        f"w = torch.load('{path.name}', map_location='cpu', weights_only=True); "
        f"save_file({{k: v.contiguous().clone() for k, v in w.items()}}, '{converted}')\""
    )


def check_tensors(tensors: Mapping[str, Tensor], expected: Expected, path: Path) -> None:
    """Raises ValueError that names every missing and unexpected tensor, wrong shape and wrong dtype."""
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is unexpected" for name in tensors if name not in expected]
    for name, (shape, dtype) in expected.items():
        if name in tensors and tensors[name].shape != torch.Size(shape):
            problems.append(f"{name} has shape {list(tensors[name].shape)}, not {list(shape)}")
        if name in tensors and tensors[name].dtype != dtype:
            problems.append(f"{name} is {tensors[name].dtype}, not {dtype}")
    if problems:
        raise ValueError(f"{path} does not fit its {CONFIG_FILE}: {'; '.join(problems)}; export it again")


def from_json(schema: type[Record], values: Any, where: str) -> Record:
    """Build a dataclass and nested ones. Raises ValueError naming an unknown, missing or mistyped key."""
    assert is_dataclass(schema)
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a JSON object, not {values!r}")
    hints = get_type_hints(schema)
    if unknown := sorted(values.keys() - hints.keys()):
        raise ValueError(f"{where} has unknown keys: {', '.join(unknown)}; known are {', '.join(hints)}")
    needed = {field.name for field in fields(schema) if field.default is field.default_factory is MISSING}
    if missing := sorted(needed - values.keys()):
        raise ValueError(f"{where} lacks {', '.join(missing)}; save the heads again")
    return schema(**{name: _typed(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _typed(hint: Any, value: Any, where: str) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, value, where)
    members = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    allowed = cast(tuple[type, ...], tuple(get_origin(member) or member for member in members))
    if tuple in allowed and isinstance(value, list):
        return tuple(value)
    if float in allowed and type(value) is int:
        return float(value)
    if not isinstance(value, allowed):
        raise ValueError(f"{where}={value!r} must be {' or '.join(kind.__name__ for kind in allowed)}")
    return value
