"""Heads as an engine gets them: files in its format, and what our own importer reads from these same files."""

import logging
from dataclasses import dataclass
from pathlib import Path

from eval.serving.target_file import TargetFile
from heads.export.eagle_outline import LEAST_CHAIN
from heads.export.files import CONFIG_FILE, read_json
from heads.export.formats import check_kind
from heads.export.kinds import WRITERS, read_heads
from heads.family import DraftHeads
from heads.layout import FORMAT, heads_directory
from heads.target import Target

logger = logging.getLogger(__name__)

VLLM, LLAMA_CPP = "vllm", "llama.cpp"  # formats


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
    source: str,
    target: Target,
    chain: int | None,
    output: Path,
    *,
    target_gguf: TargetFile | None = None,
    allow_other_weights: bool = False,
) -> ServedHeads:
    """Read exported heads; heads as trained, or a run's, are first exported to `output`.

    chain: None for all heads of Medusa, else 3. target_gguf: given, the heads are for llama.cpp.

    Raises:
        ValueError: if `source` holds no heads that the engine's format takes, or `chain` is longer than they draft.
    """
    given = Path(source)
    directory = given if (given / CONFIG_FILE).is_file() else heads_directory(given)
    if read_json(directory / CONFIG_FILE).get("format") == FORMAT:
        directory = _export(directory, target, output, target_gguf, allow_other_weights)
    heads = _read(directory, target)
    if target_gguf is not None:
        check_kind(heads.kind, LLAMA_CPP, f"{directory} holds")
    most = heads.depth if heads.kind == "medusa" else None
    if chain is not None and not 1 <= chain <= (most or chain):
        bounds = "at least 1" if most is None else f"1 to {most}, the number of Medusa heads"
        raise ValueError(f"num_speculative_tokens={chain} must be {bounds}")
    return ServedHeads(directory.resolve(), heads, chain or most or LEAST_CHAIN)


def _export(
    source: Path, target: Target, output: Path, target_gguf: TargetFile | None, allow_other_weights: bool
) -> Path:
    kind, form = read_json(source / CONFIG_FILE)["kind"], VLLM if target_gguf is None else LLAMA_CPP
    check_kind(kind, form, f"{source} holds")
    directory, more = output / f"export-{form}", {}
    if target_gguf is not None:
        # ggml multiplies in the dtype of the weights; vLLM casts them to that of the target itself.
        more = {"target_gguf": target_gguf.path, "dtype": str(target.dtype).removeprefix("torch.")}
    expand = kind != "eagle3"
    WRITERS[kind](
        source, directory, target, form, expand_vocabulary=expand, allow_other_weights=allow_other_weights, **more
    )
    logger.info("exported %s heads to %s", kind, directory)
    return directory


def _read(directory: Path, target: Target) -> DraftHeads:
    """Read an export as the engine does, which knows the kind of the heads from the config."""
    config = read_json(directory / CONFIG_FILE)
    if config.get("model_type") == "medusa":
        return read_heads(directory, target, "medusa", VLLM)
    if "speculators_model_type" in config:
        return read_heads(directory, target, "eagle3", "speculators")
    return read_heads(directory, target, "eagle3" if "draft_vocab_size" in config else "eagle", VLLM)
