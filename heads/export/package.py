"""What every export has around its weights: the heads they come from, a model card, checksums."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from heads.export.files import (
    CHECKSUM_FILE,
    CONFIG_FILE,
    from_json,
    replacing,
    write_checksums,
    write_json,
    write_tensors,
)
from heads.export.formats import check_kind
from heads.export.model_card import model_card, read_report
from heads.family import DraftHeads
from heads.identity import TargetIdentity, identify
from heads.layout import load_heads, read_config
from heads.target import DTYPES, Target

CARD_FILE = "README.md"

Heads = TypeVar("Heads", bound=DraftHeads)


@dataclass(frozen=True)
class Content:
    """An export without its card.

    serve: the command (several lines where several engines read the files), given the target's name and the directory.
    facts: rows of the model card that only this family has. beside: files that the format has besides.
    """

    weights_file: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    dtype: str
    title: str
    facts: Mapping[str, Any]
    serve: Callable[[str, str], str]
    limits: list[str]
    beside: tuple["Companion", ...] = ()


@dataclass(frozen=True)
class Companion:
    """Files that belong beside the weights and come from elsewhere: their names, and what writes them into a folder.

    They are written when weights, config and card are there, before the checksums.
    """

    names: tuple[str, ...]
    write: Callable[[Path], None]


@dataclass(frozen=True)
class Export:
    """What was written, the command that serves it, and what that cannot do."""

    files: list[Path]
    command: str
    limits: list[str]


def load_as(
    family: type[Heads], source: Path, target: Target, format_name: str, *, allow_other_weights: bool = False
) -> Heads:
    """Load saved heads for a format. Raises ValueError if they are not of a family that the format takes."""
    check_kind(read_config(source)["kind"], format_name, f"{source} holds")
    heads = load_heads(source, target, allow_other_weights=allow_other_weights)
    if not isinstance(heads, family):
        raise ValueError(f"{source} holds {heads.kind} heads, which this exporter does not write")
    return heads


def cast_weights(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Give weights the dtype of the export; integers and masks stay.

    Raises:
        ValueError: if the dtype is unknown or a weight is not finite in it.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} must be one of {', '.join(DTYPES)}, or null for that of the heads")
    ready = {
        name: tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }
    for name, tensor in ready.items():
        if not tensor.isfinite().all():
            raise ValueError(
                f"{name} holds values that are not finite in {dtype}; export with dtype=float32, or "
                "train again if they are not finite there either"
            )
    return ready


def write_export(
    source: Path, directory: Path, target: Target, content: Content, companion: Companion | None = None
) -> Export:
    """Write what was made of the heads in `source`, with a card and checksums, whole or not at all.

    Raises:
        ValueError: if `directory` holds other files, or the report beside the heads is damaged.
    """
    saved = read_config(source)
    trained_on, present = from_json(TargetIdentity, saved["target"], "target"), identify(target)
    limits = list(content.limits)
    if trained_on.weights_sha256 != present.weights_sha256:
        limits.append(f"the heads were trained on {trained_on.name} with other weights: expect less acceptance")
    card = model_card(
        content.title,
        content.facts,
        trained_on,
        target.config.licence,
        saved["draft_vocab_size"],
        content.dtype,
        saved["extra"],
        read_report(source),
        content.serve(present.name, directory.resolve().name),
        limits,
    )
    companions = [*content.beside, *([companion] if companion else [])]
    beside = [name for each in companions for name in each.names]
    names = [content.weights_file, CONFIG_FILE, CARD_FILE, *beside, CHECKSUM_FILE]
    with replacing(directory, names) as fresh:
        write_tensors(fresh / content.weights_file, content.tensors)
        write_json(fresh / CONFIG_FILE, content.config)
        (fresh / CARD_FILE).write_text(card)
        for each in companions:
            each.write(fresh)
        write_checksums(fresh)
    local = target.model.config.name_or_path or present.name
    if Path(local).is_dir():
        local = str(Path(local).resolve())  # a command may change the directory
    return Export([directory / name for name in names], content.serve(local, str(directory)), limits)
