"""Raw rows from files and datasets.

A source is one string:

    chats.jsonl, chats.jsonl.gz        one JSON object per line
    chats.json                         one JSON list of objects
    chats.parquet                      one row per conversation
    folder[:split]                     saved by `datasets` save_to_disk, or laid out like a hub repository
    hub:owner/name[@config][:split]    a dataset on the hub

The split is "train" unless named.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import datasets
import pyarrow.parquet

from data.problems import RowError

FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
HUB_PREFIX = "hub:"


def read_rows(source: str) -> Iterator[tuple[str, Any]]:
    """Yields (origin, row); origin is "file:line" or "source[index]", a line that is not JSON is a RowError.

    Raises ValueError, before the first row, for a source that is missing or of an unknown kind.
    """
    path = Path(source)
    if not path.is_file():
        return ((f"{source}[{index}]", row) for index, row in enumerate(_dataset(source)))
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _json_lines(path)
    if path.name.endswith(".json"):
        return _json_list(path)
    if path.name.endswith(".parquet"):
        return _parquet(path)
    raise ValueError(f"source {source!r} must end in one of {', '.join(FILE_SUFFIXES)}; rename or convert it")


def source_files(source: str) -> tuple[str, dict[str, Path]]:
    """The split ("" for a file) and the files, by name, that decide what `source` yields wherever it lies.

    Raises ValueError for a missing source, or for a dataset that lies in no file.
    """
    path = Path(source)
    if path.is_file():
        return "", {path.name: path}
    folder, split = _folder_and_split(source)
    if folder is not None:
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return split, {str(file.relative_to(folder)): file for file in files}
    files = sorted(Path(entry["filename"]) for entry in _dataset(source).cache_files)
    if not files:
        raise ValueError(f"source {source!r} is held in memory only; unset HF_DATASETS_IN_MEMORY_MAX_SIZE")
    return split, {file.name: file for file in files}


def _folder_and_split(source: str) -> tuple[Path | None, str]:
    if source.startswith(HUB_PREFIX):
        _, _, split = source.removeprefix(HUB_PREFIX).partition(":")
        return None, split or "train"
    if Path(source).is_dir():
        return Path(source), "train"
    head, _, split = source.rpartition(":")
    if head and Path(head).is_dir():
        return Path(head), split
    raise ValueError(
        f"source {source!r} is neither a file nor a folder; "
        f"give a path that exists or {HUB_PREFIX}owner/name[@config][:split]"
    )


def _dataset(source: str) -> datasets.Dataset:
    folder, split = _folder_and_split(source)
    if folder is None:
        name, _, config = source.removeprefix(HUB_PREFIX).partition(":")[0].partition("@")
        return cast(datasets.Dataset, datasets.load_dataset(name, config or None, split=split))
    if (folder / "dataset_dict.json").exists():
        splits = datasets.DatasetDict.load_from_disk(str(folder))
        if split not in splits:
            raise ValueError(f"split {split!r} is not in {folder}; use one of {sorted(map(str, splits))}")
        return splits[split]
    if (folder / "state.json").exists():
        return datasets.Dataset.load_from_disk(str(folder))
    return cast(datasets.Dataset, datasets.load_dataset(str(folder), split=split))


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _json_or_error(line)
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is not a whole gzip file ({error}); fetch or compress it again") from error


def _json_or_error(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        return RowError("invalid JSON", str(error))


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: invalid JSON: {error}; one object per line belongs in a .jsonl file") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path} must hold one JSON list of rows, got {type(rows).__name__}; wrap it in [ ]")
    for index, row in enumerate(rows):
        yield f"{path}[{index}]", row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    with pyarrow.parquet.ParquetFile(path) as file:
        index = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{path}[{index}]", row
                index += 1
