"""Adapted targets: a LoRA adapter (peft) over a target's frozen weights, read from disk, merged, and told apart.

    adapter_config.json          peft's settings: rank, scale, which layers
    adapter_model.safetensors    "base_model.model.<layer>.lora_A.weight" [r, in], "....lora_B.weight" [out, r]

An adapted target computes W + (alpha / r) B A where the original has W: it is another model, which gives other answers.
So heads that were trained on it belong to it alone. Its config names the adapter by digest (`ADAPTER_KEY`), which a
merged target keeps when it is saved, and from which its identity follows (heads/identity.py).
"""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model_state_dict
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import CONFIG_NAME as ADAPTER_CONFIG
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_WEIGHTS
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from heads.export.files import read_json

ADAPTER_KEY = "headstart_adapter_sha256"  # in the config of a merged target
SCALE = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")  # what the strength of a LoRA follows from


def apply_adapter(model: PreTrainedModel, source: str) -> PreTrainedModel:
    """`model` with the adapter of `source`: merged into its weights, or beside them where they are quantised.

    Raises:
        ValueError: if `source` is no LoRA adapter for this model.
    """
    adapted = attach_adapter(model, source)
    quantised = model.config.to_dict().get("quantization_config") is not None
    return sign(adapted) if quantised else merge_adapter(adapted)


def attach_adapter(model: PreTrainedModel, source: str) -> PeftModel:
    """Put the frozen adapter of `source`, a directory or hub id, beside the weights of `model`, which it changes.

    Raises:
        ValueError: if `source` is no LoRA adapter, one that would untie the LM head, or one for another model.
    """
    directory = _locate(source)
    read_json(directory / ADAPTER_CONFIG)
    config = PeftConfig.from_pretrained(str(directory))
    if not isinstance(config, LoraConfig):
        kind = PeftType(config.peft_type).value
        raise ValueError(f"model.adapter={source} is of the type {kind}; give a LoRA adapter, no other can be merged")
    _refuse_tied(model, config, source)
    try:
        with without_deprecation():
            warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
            adapted = PeftModel.from_pretrained(model, str(directory), torch_device=str(model.device))
    except (RuntimeError, ValueError, UserWarning, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"model.adapter={source} is damaged or does not fit the target; give a whole adapter of this target, or "
            f"the target that it was trained on (model.path=...). peft says: {reason}"
        ) from error
    return adapted.eval()


def merge_adapter(adapted: PeftModel) -> PreTrainedModel:
    """Add the adapter to the weights; the model is then as it was before, in kind and in size.

    Raises:
        ValueError: if a merged weight is not finite.
    """
    sign(adapted)
    merged = cast(Any, adapted).merge_and_unload(safe_merge=True)
    return merged.requires_grad_(False)


def sign(adapted: PeftModel) -> PreTrainedModel:
    """Note the adapter in the config of the model that it changes, behind what was merged into it before."""
    model = cast(PreTrainedModel, adapted.get_base_model())
    setattr(model.config, ADAPTER_KEY, chained(signature(model), adapter_sha256(adapted)))
    return model


def signature(model: PreTrainedModel) -> str:
    """The digest of the adapter that `model` carries, "" for an original."""
    return model.config.to_dict().get(ADAPTER_KEY, "")


def adapter_sha256(adapted: PeftModel) -> str:
    """SHA-256 of an adapter: its weights in float32 and its strength."""
    settings = adapted.peft_config["default"].to_dict()
    digest = hashlib.sha256(json.dumps({name: settings[name] for name in SCALE}, sort_keys=True).encode())
    for name, tensor in sorted(get_peft_model_state_dict(adapted, save_embedding_layers=False).items()):
        digest.update(name.encode() + tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def chained(before: str, digest: str) -> str:
    """The digest of an adapter on a target that carries another one already, or none ("")."""
    return hashlib.sha256(f"{before}{digest}".encode()).hexdigest() if before else digest


@contextlib.contextmanager
def without_deprecation() -> Iterator[None]:
    """Inside, peft 0.21 may ask transformers 5.24 for a name that the latter warns about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def _locate(source: str) -> Path:
    try:
        cached_file(source, ADAPTER_CONFIG)
        weights = cached_file(source, ADAPTER_WEIGHTS)
    except OSError as error:
        raise ValueError(
            f"model.adapter={source} is neither a directory nor a reachable hub id with {ADAPTER_CONFIG} and "
            f"{ADAPTER_WEIGHTS} (pickles are not read); give <run>/adapter, or another LoRA adapter of peft. "
            f"transformers says: {str(error).splitlines()[0]}"
        ) from error
    assert weights is not None
    return Path(weights).parent


def _refuse_tied(model: PreTrainedModel, config: LoraConfig, source: str) -> None:
    """Refuse an adapter of one end of a tie: merged, it would change the other end as well."""
    if not model.config.get_text_config().tie_word_embeddings:
        return
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if module in ends]
    saved = tuple(config.modules_to_save or ())
    touched = [name for name in names if check_target_module_exists(config, name) or name.endswith(saved)]
    if touched:
        raise ValueError(
            f"model.adapter={source} changes {touched[0]}, but this target ties {' and '.join(names)}: merged, both "
            "would change; give an adapter of the decoder's layers alone"
        )
