"""Heads as an engine gets them: files in its format, and what our own importer reads from these same files."""

import logging
from dataclasses import dataclass
from pathlib import Path

from heads.export.eagle_outline import LEAST_CHAIN
from heads.export.files import CONFIG_FILE, read_json
from heads.export.formats import check_kind
from heads.export.kinds import WRITERS, read_heads
from heads.family import DraftHeads
from heads.layout import FORMAT, heads_directory
from heads.target import Target

logger = logging.getLogger(__name__)

ENGINE_FORMAT = "vllm"  # llama.cpp converts it


@dataclass(frozen=True)
class ServedHeads:
    """directory: what the engine is given. heads: as read from it. chain: tokens that are drafted in a row."""

    directory: Path
    heads: DraftHeads
    chain: int

    @property
    def kind(self) -> str:
        return self.heads.kind


def served_heads(
    source: str, target: Target, chain: int | None, output: Path, *, allow_other_weights: bool = False
) -> ServedHeads:
    """Read exported heads; heads as trained, or a run's, are first exported to `output`.

    chain: None for all heads of Medusa, else 3.

    Raises:
        ValueError: if `source` holds no heads that the engine's format takes, or `chain` is longer than they draft.
    """
    given = Path(source)
    directory = given if (given / CONFIG_FILE).is_file() else heads_directory(given)
    if read_json(directory / CONFIG_FILE).get("format") == FORMAT:
        directory = _export(directory, target, output / f"export-{ENGINE_FORMAT}", allow_other_weights)
    heads = _read(directory, target)
    most = heads.depth if heads.kind == "medusa" else None
    if chain is not None and not 1 <= chain <= (most or chain):
        bounds = "at least 1" if most is None else f"1 to {most}, the number of Medusa heads"
        raise ValueError(f"num_speculative_tokens={chain} must be {bounds}")
    return ServedHeads(directory.resolve(), heads, chain or most or LEAST_CHAIN)


def _export(source: Path, target: Target, directory: Path, allow_other_weights: bool) -> Path:
    kind = read_json(source / CONFIG_FILE)["kind"]
    check_kind(kind, ENGINE_FORMAT, f"{source} holds")
    WRITERS[kind](
        source,
        directory,
        target,
        ENGINE_FORMAT,
        expand_vocabulary=kind != "eagle3",
        allow_other_weights=allow_other_weights,
    )
    logger.info("exported %s heads to %s", kind, directory)
    return directory


def _read(directory: Path, target: Target) -> DraftHeads:
    """Read an export as the engine does, which knows the kind of the heads from the config."""
    config = read_json(directory / CONFIG_FILE)
    if config.get("model_type") == "medusa":
        return read_heads(directory, target, "medusa", ENGINE_FORMAT)
    if "speculators_model_type" in config:
        return read_heads(directory, target, "eagle3", "speculators")
    return read_heads(directory, target, "eagle3" if "draft_vocab_size" in config else "eagle", ENGINE_FORMAT)
