"""Write Medusa heads as an engine reads them; what is in a format is stated in `medusa_formats`."""

from dataclasses import dataclass, replace
from pathlib import Path

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
from heads.export.medusa_formats import TARGET_LM_HEAD, MedusaFormat, Outline, find_format
from heads.export.model_card import model_card, read_report
from heads.identity import TargetIdentity, identify
from heads.layout import load_heads, read_config
from heads.medusa import MedusaHeads
from heads.target import DTYPES, Target

# Shapes: K heads, D hidden, V vocabulary

CARD_FILE = "README.md"


@dataclass(frozen=True)
class Export:
    """What was written, the command that serves it, and what that cannot do."""

    files: list[Path]
    command: str
    limits: list[str]


def export_heads(
    source: Path,
    directory: Path,
    target: Target,
    format_name: str,
    *,
    dtype: str | None = None,
    expand_vocabulary: bool = False,
    allow_other_weights: bool = False,
) -> Export:
    """Write the heads saved in `source` as an engine reads them, with a model card and checksums.

    dtype: of the written weights, None for that of the heads.
    expand_vocabulary: for own LM heads over a reduced draft vocabulary, fill other rows with the target's.

    Raises:
        ValueError: if the heads cannot be loaded or written in the format, or `directory` holds other files.
    """
    form = find_format(format_name)
    heads = load_heads(source, target, allow_other_weights=allow_other_weights)
    saved = read_config(source)
    trained_on, present = from_json(TargetIdentity, saved["target"], "target"), identify(target)
    outline = Outline(
        num_heads=heads.config.num_heads,
        num_layers=heads.config.num_layers,
        hidden_size=heads.hidden_size,
        vocab_size=heads.vocab_size,
        shared=heads.config.lm_head == "shared",
        dtype=dtype or str(heads.block_weight.dtype).removeprefix("torch."),
        target=present.name,
    )
    limits = form.limits(outline) + vocabulary_limits(heads, expand_vocabulary)
    if trained_on.weights_sha256 != present.weights_sha256:
        limits.append(f"the heads were trained on {trained_on.name} with other weights: expect less acceptance")
    tensors = _tensors(form, outline, heads, target)
    command = form.serve(outline, directory.resolve().name)
    size, licence = len(heads.d2t), target.config.licence
    card = model_card(outline, trained_on, licence, size, saved["extra"], read_report(source), command, limits)
    names = [form.weights_file, CONFIG_FILE, CARD_FILE, CHECKSUM_FILE]
    with replacing(directory, names) as fresh:
        write_tensors(fresh / form.weights_file, tensors)
        write_json(fresh / CONFIG_FILE, form.values(outline))
        (fresh / CARD_FILE).write_text(card)
        write_checksums(fresh)
    local = replace(outline, target=target.model.config.name_or_path or present.name)
    return Export([directory / name for name in names], form.serve(local, str(directory)), limits)


def vocabulary_limits(heads: MedusaHeads, expand: bool) -> list[str]:
    """Say what becomes of a reduced draft vocabulary in a format without one.

    Raises:
        ValueError: for own LM heads, unless `expand`. They have no rows for the other ids, and no row can
            stand for "never": without a bias, zero rows have logit 0, which often is the largest.
    """
    size = len(heads.d2t)
    if size == heads.vocab_size:
        return []
    if heads.config.lm_head == "shared":
        drafts = f"the heads were trained to draft {size} of {heads.vocab_size} token ids, the engine drafts all"
        return [f"{drafts} with the target's LM head: the output is the same, the acceptance may differ"]
    if not expand:
        raise ValueError(
            f"the heads draft {size} of {heads.vocab_size} token ids, this format cannot; set "
            "expand_vocabulary=true to fill the other rows with the target's LM head, or train with "
            "heads.draft_vocab_size=null"
        )
    rows = f"{heads.vocab_size - size} of {heads.vocab_size} rows of each LM head are the target's, untrained"
    return [f"{rows}: the output is the same, the acceptance may differ, the file has full size"]


def _tensors(form: MedusaFormat, outline: Outline, heads: MedusaHeads, target: Target) -> dict[str, Tensor]:
    if outline.dtype not in DTYPES:
        raise ValueError(f"dtype={outline.dtype} must be one of {', '.join(DTYPES)}, or null for that of the heads")
    dtype = DTYPES[outline.dtype]
    stacked = {name: tensor.detach() for name, tensor in heads.named_parameters()}
    lm_head_VD = target.lm_head.get_parameter("weight").detach()
    if not outline.shared and len(heads.d2t) < heads.vocab_size:
        expanded_KVD = lm_head_VD.to(heads.lm_head_weight.dtype).repeat(outline.num_heads, 1, 1)
        expanded_KVD[:, heads.draft_ids] = heads.lm_head_weight.detach()
        stacked["lm_head_weight"] = expanded_KVD
    stacked[TARGET_LM_HEAD] = lm_head_VD
    tensors = {name: stacked[at.name][at.index].to(dtype) for name, at in form.tensors(outline).items()}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(
                f"{name} holds values that are not finite in {outline.dtype}; export with dtype=float32, or "
                "train again if they are not finite there either"
            )
    return tensors
