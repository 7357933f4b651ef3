"""Our own format of trained heads, `headstart`: a directory with config.json and model.safetensors.

    config.json         what the heads are and which target they belong to (KEYS)
    model.safetensors   `state_dict()` of the heads in float32 or bfloat16; of Medusa heads:
                        block_weight [L, K, D, D], block_bias [L, K, D],
                        lm_head_weight [K, Vd, D] (own LM heads only),
                        d2t [Vd] int64 offsets, t2d [V] bool

Reading is strict: what does not fit raises an error that names it; nothing is filled in.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads import HEADS
from heads.export.files import (
    CONFIG_FILE,
    check_tensors,
    from_json,
    read_json,
    read_tensors,
    replacing,
    write_json,
    write_tensors,
)
from heads.family import DraftHeads
from heads.identity import TargetIdentity, check, identify
from heads.target import DTYPES, Target, dtype_name
from heads.vocabulary import check_offsets, from_offsets

FORMAT, FORMAT_VERSION = "headstart", 1
WEIGHTS_FILE = "model.safetensors"
SAVED_DTYPES = ("float32", "bfloat16")
KEYS = {
    "format": "headstart",
    "format_version": "1",
    "kind": "the family, a key of heads.HEADS",
    "taps": "names of the target's features that the heads read",
    "norm": "which norm these features went through",
    "heads": "the family's config",
    "draft_vocab_size": "number of token ids that can be proposed, the length of d2t",
    "dtype": "of the weights",
    "target": "TargetIdentity",
    "extra": "what the writer wants to keep beside: `coverage` and `data_digest` go to model cards",
}


def save_heads(
    heads: DraftHeads,
    directory: str | Path,
    identity: TargetIdentity,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write heads; a directory of heads that is already there is replaced once the new one is complete.

    extra: JSON values to keep with the heads, without local paths; see KEYS.

    Raises:
        ValueError: if the weights are neither float32 nor bfloat16, or the directory holds other files.
        OSError: if writing fails; what was there before stays.
    """
    dtypes = {dtype_name(parameter.dtype) for parameter in heads.parameters()}
    if len(dtypes) > 1 or not dtypes <= set(SAVED_DTYPES):
        raise ValueError(f"heads are {', '.join(sorted(dtypes))}; save them as all float32 or all bfloat16")
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": heads.kind,
        "taps": list(heads.taps),
        "norm": heads.norm,
        "heads": asdict(heads.config),
        "draft_vocab_size": len(heads.d2t),
        "dtype": dtypes.pop(),
        "target": asdict(identity),
        "extra": dict(extra or {}),
    }
    with replacing(Path(directory), {CONFIG_FILE, WEIGHTS_FILE}) as fresh:
        write_tensors(fresh / WEIGHTS_FILE, heads.state_dict())
        write_json(fresh / CONFIG_FILE, config)


def load_heads(directory: str | Path, target: Target, *, allow_other_weights: bool = False) -> DraftHeads:
    """Read heads in the dtype in which they were saved and bind them to the target.

    allow_other_weights: accept a fine-tune of the target that the heads were trained on.

    Raises:
        ValueError: if the files are missing, damaged or do not fit together, or the target is another one.
    """
    directory = Path(directory)
    config = read_config(directory)
    where = str(directory / CONFIG_FILE)
    saved = from_json(TargetIdentity, config["target"], f"{where}: target")
    check(saved, identify(target), allow_other_weights=allow_other_weights)
    tensors = read_tensors(directory / WEIGHTS_FILE)
    draft_ids = _draft_ids(tensors, config["draft_vocab_size"], saved.vocab_size, directory / WEIGHTS_FILE)
    family = HEADS[config["kind"]]
    family_config = from_json(family.config_class, config["heads"], f"{where}: heads")
    heads = family(family_config, saved.hidden_size, saved.vocab_size, draft_ids).to(DTYPES[config["dtype"]])
    for key, right in (("taps", list(heads.taps)), ("norm", heads.norm)):
        if config[key] != right:
            raise ValueError(f"{where}: {key}={config[key]!r}, but these {heads.kind} heads read {right!r}")
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in heads.state_dict().items()}
    check_tensors(tensors, expected, directory / WEIGHTS_FILE)
    if len(wrong := (tensors["t2d"] != heads.t2d).nonzero()):
        raise ValueError(
            f"{directory / WEIGHTS_FILE}: t2d and d2t disagree on token id {wrong[0].item()}; "
            "d2t must hold offsets (token id minus draft index)"
        )
    heads.load_state_dict(tensors)
    return heads.bind(target)


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json of saved heads; its `heads` and `target` are checked by `load_heads`.

    Raises:
        ValueError: naming the key that is missing, unknown, or has a value that this version cannot follow.
    """
    path = directory / CONFIG_FILE
    config = read_json(path)
    if config.get("format") != FORMAT:
        raise ValueError(
            f"{path}: format={config.get('format')!r} is not {FORMAT!r}; "
            "convert heads of other formats with scripts/import_heads.py"
        )
    if config.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version={config.get('format_version')!r}, this version of Headstart reads "
            f"{FORMAT_VERSION}; update Headstart"
        )
    if unknown := sorted(config.keys() - KEYS.keys()):
        raise ValueError(f"{path} has unknown keys: {', '.join(unknown)}; known are {', '.join(KEYS)}")
    if missing := sorted(KEYS.keys() - config.keys()):
        raise ValueError(f"{path} lacks {', '.join(missing)}; save the heads again")
    if config["kind"] not in HEADS:
        raise ValueError(f"{path}: kind={config['kind']!r} is unknown; known are {', '.join(HEADS)}")
    if config["dtype"] not in SAVED_DTYPES:
        raise ValueError(f"{path}: dtype={config['dtype']!r} must be one of {', '.join(SAVED_DTYPES)}")
    return config


def _draft_ids(tensors: Mapping[str, Tensor], size: Any, vocab_size: int, path: Path) -> Tensor:
    """Return the checked token ids [Vd] of the draft vocabulary."""
    if "d2t" not in tensors:
        raise ValueError(f"{path}: d2t is missing, so the draft vocabulary is unknown; save the heads again")
    d2t = tensors["d2t"]
    if d2t.dtype != torch.int64 or d2t.shape != (size,):
        raise ValueError(f"{path}: d2t is {d2t.dtype} {list(d2t.shape)}, not torch.int64 [{size}]")
    try:
        check_offsets(d2t, vocab_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return from_offsets(d2t)


def heads_directory(given: str | Path, setting: str = "heads") -> Path:
    """Return the directory of heads: the one given as `setting`, or `heads/` inside a run's.

    Raises:
        ValueError: if neither holds heads.
    """
    given = Path(given)
    for directory in (given, given / "heads"):
        if (directory / CONFIG_FILE).is_file():
            return directory
    raise ValueError(
        f"{setting}={given} holds no {CONFIG_FILE}, nor does {given / 'heads'}; give the directory of a run"
    )
