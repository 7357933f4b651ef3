"""Read Medusa heads in the format of an engine; what is in a format is stated in `medusa_formats`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.export.files import (
    CONFIG_FILE,
    check_tensors,
    read_json,
    read_tensors,
    refuse_pickle,
    verify_checksums,
)
from heads.export.medusa_formats import TARGET_LM_HEAD, MedusaFormat, Outline, find_format
from heads.medusa import MedusaConfig, MedusaHeads
from heads.target import DTYPES, Target, dtype_name

# Shapes: D hidden, V vocabulary

OLD_PREFIX = "medusa_heads."  # ModelOpt and older files put it before every name


def import_heads(directory: Path, target: Target, format_name: str) -> MedusaHeads:
    """Read heads in an engine's format and bind them to the target, over its full vocabulary.

    float16 weights become float32, which holds them exactly; other dtypes stay.

    Raises:
        ValueError: if a file is missing, damaged or a pickle, a config key or a tensor is missing, unknown or
            wrong, or the heads are not for this target's width, vocabulary or LM head.
    """
    form = find_format(format_name)
    refuse_pickle(directory)
    config = read_json(directory / CONFIG_FILE)
    path = directory / form.weights_file
    tensors = _without_prefix(read_tensors(path), path)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES.values()):
        raise ValueError(
            f"{path} holds {', '.join(sorted(map(str, dtypes)))}; all must share one of {', '.join(DTYPES)}"
        )
    dtype = dtypes.pop()
    outline = _outline(form, config, target, dtype_name(dtype), directory / CONFIG_FILE)
    _check_lm_heads(form, outline, tensors, path)
    table = form.tensors(outline)
    check_tensors(tensors, {name: (at.shape, dtype) for name, at in table.items()}, path)
    verify_checksums(directory)

    medusa = MedusaConfig(outline.num_heads, outline.num_layers, "shared" if outline.shared else "own")
    heads = MedusaHeads(medusa, outline.hidden_size, outline.vocab_size, torch.arange(outline.vocab_size))
    heads = heads.to(torch.float32 if dtype == torch.float16 else dtype)
    lm_head_VD = target.lm_head.get_parameter("weight").detach().cpu()
    stacked = {name: parameter.data for name, parameter in heads.named_parameters()}
    for name, at in table.items():
        if at.name != TARGET_LM_HEAD:
            stacked[at.name][at.index].copy_(tensors[name])
        elif not torch.equal(tensors[name], lm_head_VD.to(dtype)):
            raise ValueError(f"{path}: {name} is not this target's LM head; load the target that it was exported for")
    return heads.bind(target)


def _without_prefix(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    renamed = {name.removeprefix(OLD_PREFIX): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        raise ValueError(f"{path} holds tensors both with and without the prefix {OLD_PREFIX}; remove one of each")
    return renamed


def _outline(form: MedusaFormat, config: dict[str, Any], target: Target, dtype: str, path: Path) -> Outline:
    """Derive the outline from a config and the target, and check every key against it."""
    for key in (form.num_heads_key, form.num_layers_key):
        if type(config.get(key)) is not int or config[key] < 1:
            raise ValueError(f"{path}: {key}={config.get(key)!r} must be a whole number of at least 1")
    outline = Outline(
        num_heads=config[form.num_heads_key],
        num_layers=config[form.num_layers_key],
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        shared=config.get(form.shared_key) in (True, "2"),
        dtype=dtype,
        target="",
    )
    right = form.values(outline)
    if missing := sorted(right.keys() - form.optional - config.keys()):
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    if unknown := sorted(config.keys() - right.keys() - form.ignored):
        raise ValueError(f"{path} has keys that are not followed: {', '.join(unknown)}; known are {', '.join(right)}")
    for key in sorted(right.keys() & config.keys() - form.free):
        if config[key] != right[key]:
            raise ValueError(
                f"{path}: {key}={config[key]!r}, but for this target and weights it must be {right[key]!r}"
            )
    return outline


def _check_lm_heads(form: MedusaFormat, outline: Outline, tensors: dict[str, Tensor], path: Path) -> None:
    """Compare the declared kind of LM head with the file's. vLLM knows two names for a shared one."""
    own_name = form.own_name(0, outline.num_layers)
    shared_name = form.shared_lm_head
    if outline.shared and shared_name is not None and shared_name not in tensors and own_name in tensors:
        tensors[shared_name] = tensors.pop(own_name)
    if (own_name in tensors) == outline.shared:
        kind = "the target's LM head for all heads" if outline.shared else "an LM head for each head"
        found = "holds" if own_name in tensors else "lacks"
        raise ValueError(
            f"{path}: {CONFIG_FILE} declares {kind} ({form.shared_key}) but the file {found} {own_name}; "
            f"correct {form.shared_key} or export it again"
        )
