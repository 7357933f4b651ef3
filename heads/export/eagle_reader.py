"""Read EAGLE heads in the format of an engine or another trainer; what is in a format is stated in `eagle_formats`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from heads import HEADS
from heads.eagle import EagleHeads
from heads.export.eagle_config_reader import read_outline
from heads.export.eagle_formats import BLOCKS, WEIGHTS_FILE, EagleFormat, find_format
from heads.export.eagle_outline import Outline
from heads.export.eagle_tensors import EMBEDDINGS, ZEROS, Source
from heads.export.files import (
    CONFIG_FILE,
    check_tensors,
    read_json,
    read_tensors,
    refuse_pickle,
    verify_checksums,
)
from heads.target import DTYPES, Target, dtype_name
from heads.vocabulary import check_offsets, from_offsets, membership, to_offsets

# Shapes: V vocabulary, Vd draft vocabulary, D hidden


def import_heads(directory: Path, target: Target, kind: str, format_name: str) -> EagleHeads:
    """Read heads and bind them to the target.

    float16 weights become float32, which holds them exactly; other dtypes stay. Draft ids that are not ascending (as
    ModelOpt writes them) are sorted, with their rows of the LM head.

    Raises:
        ValueError: if a file is missing, damaged or a pickle, a config key or a tensor is missing, unknown or wrong,
            d2t does not hold offsets, or the heads are not for this target's width, vocabulary or embeddings.
    """
    form = find_format(kind, format_name)
    refuse_pickle(directory)
    config = read_json(directory / CONFIG_FILE)
    path = directory / WEIGHTS_FILE
    tensors = _own_block(read_tensors(path), form, path)
    dtype = _dtype(tensors, path)
    outline = read_outline(form, config, target, dtype_name(dtype), directory / CONFIG_FILE)
    table = _expected(form, outline, tensors)
    check_tensors(tensors, {name: (at.shape, at.dtype or dtype) for name, at in table.items()}, path)
    verify_checksums(directory)
    _check_copies(table, tensors, target, path)
    ids, order = _draft_ids(tensors, outline, path)

    heads = _empty_heads(outline, ids, directory / CONFIG_FILE)
    heads = heads.to(torch.float32 if dtype == torch.float16 else dtype)
    state = {at.name: tensors[name] for name, at in table.items() if at.name in heads.state_dict()}
    if "lm_head_weight" in state:
        state["lm_head_weight"] = state["lm_head_weight"][order]
    heads.load_state_dict({**heads.state_dict(), **state, "d2t": heads.d2t, "t2d": heads.t2d})
    return heads.bind(target)


def _own_block(tensors: dict[str, Tensor], form: EagleFormat, path: Path) -> dict[str, Tensor]:
    """Rename the decoder layer where the engine knows it by two names."""
    if not form.any_block:
        return tensors
    other = next(block for block in BLOCKS if block != form.block)
    renamed = {re.sub(rf"^{re.escape(other)}\.", f"{form.block}.", name): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        raise ValueError(f"{path} holds tensors of {BLOCKS[0]} and of {BLOCKS[1]}, which are one layer; remove one")
    return renamed


def _empty_heads(outline: Outline, ids: Tensor, path: Path) -> EagleHeads:
    family = cast(type[EagleHeads], HEADS[outline.kind])
    try:
        return family(outline.heads, outline.hidden_size, outline.vocab_size, ids)
    except KeyError as error:  # from transformers
        raise ValueError(f"{path}: the rotary embedding {outline.rope} is unknown or incomplete: {error}") from error


def _dtype(tensors: Mapping[str, Tensor], path: Path) -> torch.dtype:
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES.values()):
        raise ValueError(
            f"{path} holds {', '.join(sorted(map(str, dtypes)))}; all weights must share one of {', '.join(DTYPES)}"
        )
    return dtypes.pop()


def _expected(form: EagleFormat, outline: Outline, tensors: Mapping[str, Tensor]) -> dict[str, Source]:
    """What the file must hold: all of the format but what it may lack and lacks."""
    optional = form.optional_tensors(outline)
    table = form.tensors(outline) | optional
    return {name: at for name, at in table.items() if name in tensors or name not in optional}


def _check_copies(table: Mapping[str, Source], tensors: Mapping[str, Tensor], target: Target, path: Path) -> None:
    """Check tensors that heads do not hold themselves.

    Raises:
        ValueError: if embeddings are not the target's, or a bias that our layer does not have is not zero.
    """
    for name, at in table.items():
        if at.name == ZEROS and tensors[name].any():
            raise ValueError(f"{path}: {name} is not zero; heads here have no such bias")
        if at.name != EMBEDDINGS:
            continue
        theirs_VD, ours_VD = tensors[name], target.embedding.weight.detach().cpu()
        # In the coarser dtype of the two, since either may have been rounded to it.
        coarse = max(theirs_VD.dtype, ours_VD.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        difference = (theirs_VD.to(coarse).float() - ours_VD.to(coarse).float()).abs().max().item()
        if difference:
            raise ValueError(
                f"{path}: {name} differs from the target's embeddings by up to {difference:.3g}; heads here use the "
                "target's own: load the target that they were trained on (embeddings trained with the heads cannot be "
                "kept)"
            )


def _draft_ids(tensors: Mapping[str, Tensor], outline: Outline, path: Path) -> tuple[Tensor, Tensor]:
    """The ids [Vd] of the draft vocabulary, ascending, and the rows of the file's LM head in their order.

    Raises:
        ValueError: if d2t leaves the vocabulary, repeats an id, disagrees with t2d, or seems to hold ids.
    """
    if "d2t" not in tensors:
        every = torch.arange(outline.vocab_size)
        return every, every
    d2t = tensors["d2t"]
    ids, order = from_offsets(d2t).sort()
    try:
        check_offsets(to_offsets(ids), outline.vocab_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if "t2d" in tensors:
        if len(wrong := (tensors["t2d"] != membership(ids, outline.vocab_size)).nonzero()):
            raise ValueError(
                f"{path}: t2d and d2t disagree on token id {wrong[0].item()}; d2t must hold offsets (token id minus "
                "draft index), not the ids themselves"
            )
    elif len(d2t) > 1 and outline.reduced and (d2t[1:] > d2t[:-1]).all():
        raise ValueError(
            f"{path}: d2t rises at every step, so it seems to hold ids, not offsets (token id minus draft "
            "index); subtract the index, or write t2d beside it to settle it"
        )
    return ids, order
