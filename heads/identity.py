"""Which target heads belong to: what must be equal for trained heads to fit the target at hand."""

import hashlib
import json
import logging
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heads.target import Target, TargetConfig

logger = logging.getLogger(__name__)

FINGERPRINT_ROWS = 64
TRAINED_ON = "load the target that the heads were trained on (model=... or model.path=...)"
FIXES = {
    "tokenizer_sha256": "token ids would mean other text; use the tokenizer that the heads were trained with",
    "template_sha256": "prompts would not look as in training; restore the chat template of the training run",
    "weights_sha256": (
        f"{TRAINED_ON} in float32 or bfloat16 (float16 rounds otherwise), or set allow_other_weights=true "
        "for a fine-tune of it, at the price of some acceptance. Heads trained together with an adapter need the "
        "adapted target: model.adapter=<run>/adapter, or model.path= what scripts/merge_adapter.py made of it"
    ),
}


@dataclass(frozen=True)
class TargetIdentity:
    """A target without its paths. Digests are hexadecimal SHA-256, "" where there is nothing to digest."""

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    tokenizer_sha256: str
    template_sha256: str
    weights_sha256: str


def identify(target: Target) -> TargetIdentity:
    """Describe a loaded target. The weights are sampled, not read in full: it takes about a second."""
    template = target.tokenizer.chat_template or ""
    if not isinstance(template, str):  # several named templates
        template = json.dumps(template, sort_keys=True)
    return TargetIdentity(
        name=public_name(target.config),
        model_type=target.text_config.model_type,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        tokenizer_sha256=_sha256(_tokenizer_text(target.tokenizer).encode()),
        template_sha256=_sha256(template.encode()),
        weights_sha256=_weights_sha256(target),
    )


def public_name(config: TargetConfig) -> str:
    """Return the target's hub id, else the user's name for it: what others know it by, no local path."""
    is_hub_id = ":" not in config.path and not config.path.startswith((".", "~")) and not Path(config.path).exists()
    return config.path if is_hub_id else Path(config.name).name


def check(saved: TargetIdentity, present: TargetIdentity, *, allow_other_weights: bool = False) -> None:
    """Check that heads saved with one target fit the present one. Another name alone is only logged.

    Raises:
        ValueError: naming the first field that differs, both values and the fix.
    """
    for name in (field.name for field in fields(saved)):
        ours, theirs = getattr(saved, name), getattr(present, name)
        if ours == theirs:
            continue
        if name == "name" or (name == "weights_sha256" and allow_other_weights):
            logger.warning("heads were trained on a target with %s=%s, this one has %s", name, ours, theirs)
            continue
        raise ValueError(
            f"heads were trained on a target with {name}={ours or 'none'}, this one has {theirs or 'none'}; "
            f"{FIXES.get(name, TRAINED_ON)}"
        )


def _tokenizer_text(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.is_fast:
        return json.dumps(sorted(tokenizer.get_vocab().items()))
    settings = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    # Every call with padding=... or truncation=... leaves its arguments in the backend.
    settings["truncation"] = settings["padding"] = None
    return json.dumps(settings, sort_keys=True)


def _weights_sha256(target: Target) -> str:
    """Of the sampled weights and of the adapter that changes the others, which are not sampled."""
    sampled = b"".join(_bfloat16_bytes(weight) for weight in _fingerprint(target))
    return _sha256(sampled + target.adapter_sha256.encode())


def _fingerprint(target: Target) -> list[Tensor]:
    """The final norm (all that a decoder has of one dimension outside its blocks) and rows of the LM head."""
    outside = [weight for name, weight in target.decoder.named_parameters() if not name.startswith("layers.")]
    rows = target.lm_head.get_parameter("weight")[:FINGERPRINT_ROWS]
    return [*(weight for weight in outside if weight.ndim == 1), rows]


def _bfloat16_bytes(weight: Tensor) -> bytes:
    # bfloat16 is the coarsest dtype in which targets are held, and float32 rounds to it the same everywhere.
    return weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if content else ""
