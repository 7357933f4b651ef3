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
from heads.target import Target, dtype_name

logger = logging.getLogger(__name__)

# Formats.
VLLM, SPECULATORS, LLAMA_CPP, FASTERDECODING = "vllm", "speculators", "llama.cpp", "fasterdecoding"


@dataclass(frozen=True)
class ServedHeads:
    """directory: what the engine is given, in `format`. heads: as read from it. chain: tokens drafted in a row."""

    directory: Path
    heads: DraftHeads
    chain: int
    format: str

    @property
    def kind(self) -> str:
        return self.heads.kind


def served_heads(
    source: str,
    target: Target,
    chain: int | None,
    output: Path,
    *,
    form: str | None = None,
    target_gguf: TargetFile | None = None,
    allow_other_weights: bool = False,
) -> ServedHeads:
    """Read exported heads; heads as trained, or a run's, are first exported to `output`.

    chain: None for all heads of Medusa, else 3. form: the format of the files; None takes exports as they are, and
    exports for vLLM. target_gguf: given, the heads are for llama.cpp.

    Raises:
        ValueError: if `source` holds no heads that the engine's format takes, or an export in another one than `form`,
            or `chain` is longer than they draft.
    """
    given = Path(source)
    directory = given if (given / CONFIG_FILE).is_file() else heads_directory(given)
    if read_json(directory / CONFIG_FILE).get("format") == FORMAT:
        directory = _export(directory, target, output, form or VLLM, target_gguf, allow_other_weights)
    kind, found = kind_and_format(directory)
    if form not in (None, found):
        raise ValueError(
            f"heads={source} is an export with format={found}, not format={form}; leave format out, or give the run "
            "that it was exported from"
        )
    if target_gguf is not None:
        check_kind(kind, LLAMA_CPP, f"{directory} holds")
    elif found == FASTERDECODING:
        raise ValueError(
            f"{directory} holds {kind} heads with format={found}, whose biases vLLM drops without a word; export them "
            "with format=vllm"
        )
    heads = read_heads(directory, target, kind, found)
    read = found if target_gguf is None else LLAMA_CPP
    return ServedHeads(directory.resolve(), heads, _chain_length(heads, chain), read)


def _chain_length(heads: DraftHeads, given: int | None) -> int:
    most = heads.depth if heads.kind == "medusa" else None
    if given is not None and not 1 <= given <= (most or given):
        bounds = "at least 1" if most is None else f"1 to {most}, the number of Medusa heads"
        raise ValueError(f"num_speculative_tokens={given} must be {bounds}")
    return given or most or LEAST_CHAIN


def kind_and_format(directory: Path) -> tuple[str, str]:
    """What an export holds, told by its config as vLLM tells it; what llama.cpp converts counts as vLLM's format."""
    config = read_json(directory / CONFIG_FILE)
    if config.get("model_type") == "medusa":
        return "medusa", FASTERDECODING if "medusa_num_heads" in config else VLLM
    if "speculators_model_type" in config:
        return "eagle3", SPECULATORS
    return "eagle3" if "draft_vocab_size" in config else "eagle", VLLM


def _export(
    source: Path, target: Target, output: Path, form: str, target_gguf: TargetFile | None, allow_other_weights: bool
) -> Path:
    more = {}
    if target_gguf is not None:
        # ggml multiplies in the dtype of the weights; vLLM casts them to that of the target itself.
        more = {"target_gguf": target_gguf.path, "dtype": dtype_name(target.dtype)}
        form = LLAMA_CPP
    kind, directory = read_json(source / CONFIG_FILE)["kind"], output / f"export-{form}"
    check_kind(kind, form, f"{source} holds")
    expand = kind != "eagle3"
    WRITERS[kind](
        source, directory, target, form, expand_vocabulary=expand, allow_other_weights=allow_other_weights, **more
    )
    logger.info("exported %s heads to %s", kind, directory)
    return directory
