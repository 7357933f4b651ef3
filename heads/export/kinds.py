"""Writing and reading exports of any kind of heads: which writer and which reader a kind has."""

from collections.abc import Callable, Mapping
from pathlib import Path

from heads.export import eagle_reader, eagle_writer, medusa_reader, medusa_writer
from heads.export.package import Export
from heads.family import DraftHeads
from heads.target import Target

WRITERS: Mapping[str, Callable[..., Export]] = {
    "medusa": medusa_writer.export_heads,
    "eagle": eagle_writer.export_heads,
    "eagle3": eagle_writer.export_heads,
}


def read_heads(directory: Path, target: Target, kind: str, format_name: str) -> DraftHeads:
    """Read an export that holds heads of `kind`. Raises ValueError if the files are not what the format says."""
    if kind == "medusa":
        return medusa_reader.import_heads(directory, target, format_name)
    return eagle_reader.import_heads(directory, target, kind, format_name)
