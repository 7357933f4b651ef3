"""config.json of EAGLE heads from elsewhere -> an outline, with every key accounted for.

A file is read as its engine reads it, then the config that we would write for the same heads is compared with it key
by key: what differs, is missing or is not followed is named.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.eagle_layer import LayerShape
from heads.export.eagle_config import TAPS
from heads.export.eagle_formats import EagleFormat
from heads.export.eagle_outline import NORM_FLAGS, Outline, default_taps
from heads.target import Target

# Without these a file means what the config classes and engines take by default, which is what we write.
OPTIONAL = frozenset(
    {"model_type", "hidden_act", "head_dim", "num_key_value_heads", "tie_word_embeddings", "attention_bias", "mlp_bias",
     "qkv_bias", "bias", "use_sliding_window", *NORM_FLAGS}
)  # fmt: skip
# Checked while they are read, or of no effect on the heads.
FREE = frozenset(
    {"architectures", "rope_theta", "rope_scaling", "rope_parameters", "eagle_config", TAPS, "sliding_window", "dtype",
     "torch_dtype", "embed_requires_grad", "speculators_config", "speculators_version", "transformer_layer_config"}
)  # fmt: skip
# What Hugging Face and the trainers write besides.
IGNORED = frozenset(
    {"_name_or_path", "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward", "eos_token_id",
     "id2label", "initializer_range", "is_encoder_decoder", "label2id", "max_window_layers", "output_attentions",
     "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "target_model_type",
     "transformers_version", "use_cache"}
)  # fmt: skip


@dataclass(frozen=True)
class ConfigFile:
    """config.json, and the part of it that describes the decoder layer (the same one in flat formats)."""

    path: Path
    top: dict[str, Any]
    layer: dict[str, Any]

    def nested(self, key: str) -> dict[str, Any]:
        """An object inside, empty where there is none."""
        value = self.top.get(key, {})
        if not isinstance(value, dict):
            raise ValueError(f"{self.path}: {key}={value!r} must be a JSON object")
        return _without_nulls(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.top.get(key, default)
        if type(value) is not bool:
            raise ValueError(f"{self.path}: {key}={value!r} must be true or false")
        return value

    def size(self, values: Mapping[str, Any], key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = values.get(key, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.path}: {key}={value!r} must be a whole number of at least 1")
        return value


def read_outline(form: EagleFormat, config: dict[str, Any], target: Target, dtype: str, path: Path) -> Outline:
    """Derive the outline from a config and the target, and check every key against it.

    Raises:
        ValueError: naming the key that is missing, not followed, ambiguous, or has another value than it must.
    """
    top = _without_nulls(config)
    layer = top if form.layer_key is None else top.get(form.layer_key)
    if not isinstance(layer, dict):
        raise ValueError(f"{path} lacks {form.layer_key}, the sizes of the decoder layer")
    file = ConfigFile(path, top, _without_nulls(layer))
    heads = _heads(form, file, target)
    outline = Outline(
        heads=heads,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=heads.draft_vocab_size or target.vocab_size,
        target_layers=target.num_layers,
        dtype=dtype,
    )
    _compare(form, file, outline)
    form.check(outline)
    return outline


def _heads(form: EagleFormat, file: ConfigFile, target: Target) -> Eagle3Config | EagleConfig:
    layer = _layer(form, file, target.hidden_size)
    if form.kind == "eagle":
        return EagleConfig(bias=file.flag("bias", form.fc_bias), layer=layer)
    flags: dict[str, Any] = {flag: _norm_flag(form, file, flag) for flag in NORM_FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ValueError(f"{file.path}: norm_before_fc and fc_norm would norm the taps twice; heads have one or none")
    if form.name == "specforge" and not file.top.get("norm_output", True):
        raise ValueError(
            f"{file.path}: norm_output=false means no norm before the LM head to SpecForge, but feeding back the "
            "state before the norm to engines; remove the key if the heads have that norm"
        )
    drafted = file.size(file.top, "draft_vocab_size")
    if drafted > target.vocab_size:
        raise ValueError(
            f"{file.path}: draft_vocab_size={drafted} is above the target's vocabulary of {target.vocab_size}; load "
            "the target that the heads were trained on"
        )
    return Eagle3Config(
        num_steps=_steps(form, file),
        taps=_taps(form, file, target.num_layers),
        draft_vocab_size=drafted if drafted < target.vocab_size else None,
        layer=layer,
        **flags,
    )


def _norm_flag(form: EagleFormat, file: ConfigFile, flag: str) -> bool:
    """A norm flag from where the engine looks for it."""
    if (name := form.nested_flags.get(flag)) is None:
        return file.flag(flag)
    value = file.nested("eagle_config").get(name, False)
    if type(value) is not bool:
        raise ValueError(f"{file.path}: eagle_config.{name}={value!r} must be true or false")
    return value


def _layer(form: EagleFormat, file: ConfigFile, hidden_size: int) -> LayerShape:
    values = file.layer
    heads = file.size(values, "num_attention_heads")
    eps = values.get("rms_norm_eps")
    if not isinstance(eps, float) or eps <= 0:
        raise ValueError(f"{file.path}: rms_norm_eps={eps!r} must be a number above 0")
    windowed = values.get("layer_types") == ["sliding_attention"]
    return LayerShape(
        num_attention_heads=heads,
        num_key_value_heads=file.size(values, "num_key_value_heads", heads),
        head_dim=file.size(values, "head_dim", hidden_size // heads),
        intermediate_size=file.size(values, "intermediate_size"),
        rms_norm_eps=eps,
        max_position_embeddings=file.size(values, "max_position_embeddings"),
        rope_parameters=_rope(values, file.path),
        attention_bias=values.get(form.bias_key, False) is True,
        qk_norm=values.get("model_type") == "qwen3",
        sliding_window=file.size(values, "sliding_window") if windowed else None,
    )


def _rope(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Parameters of the rotary embedding, from the new key, the two old ones, or both where they agree."""
    new, scaling = values.get("rope_parameters"), values.get("rope_scaling")
    theta = values.get("rope_theta", 10000.0)  # the default of Llama's config and of every reader
    if new is None:
        return _one_rope(scaling or {}, theta)
    rope = _one_rope(new, theta)
    agrees = "rope_theta" not in values or rope["rope_theta"] == theta
    if not agrees or (scaling is not None and _one_rope(scaling, rope["rope_theta"]) != rope):
        raise ValueError(f"{path}: rope_parameters={new} disagrees with the older rope_theta and rope_scaling")
    return rope


def _one_rope(given: Mapping[str, Any], theta: float) -> dict[str, Any]:
    rope = {"rope_type": given.get("type", "default"), "rope_theta": theta, **given}
    rope.pop("type", None)  # the old name of rope_type
    return rope


def _taps(form: EagleFormat, file: ConfigFile, num_layers: int) -> list[int]:
    """Blocks whose outputs are tapped, from the key that the engine reads."""
    nested = file.nested("eagle_config").get(TAPS)
    ids = nested if form.tap_shift == 0 else file.top.get(TAPS, None if TAPS in form.needed else nested)
    if form.tap_shift is None or ids is None:
        if (taps := default_taps(num_layers)) is None:
            raise ValueError(f"{file.path} names no taps, and of {num_layers} blocks the usual three are not distinct")
        return taps
    least, most = form.tap_shift, num_layers - 1 + form.tap_shift
    if not isinstance(ids, list) or not all(type(i) is int and least <= i <= most for i in ids):
        raise ValueError(f"{file.path}: {TAPS}={ids!r} must be numbers from {least} to {most} for this target")
    return [i - form.tap_shift for i in ids]


def _steps(form: EagleFormat, file: ConfigFile) -> int:
    """Drafted steps where the file names them."""
    if form.layer_key is None:
        return Eagle3Config.num_steps
    try:
        proposal = file.top["speculators_config"]["proposal_methods"][0]
        return file.size(proposal, "speculative_tokens")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{file.path} lacks speculators_config.proposal_methods[0].speculative_tokens") from error


def _compare(form: EagleFormat, file: ConfigFile, outline: Outline) -> None:
    right, where = _without_nulls(form.config(outline)), str(file.path)
    named, ours = file.top.get("architectures"), right["architectures"][0]
    known = [name for name in form.architectures if ("Qwen3" in name) == ("Qwen3" in ours)]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
        raise ValueError(f"{where}: architectures={named!r} must be one of {', '.join(known)}")
    plain = _plain(outline)
    if form.layer_key is not None:
        layer = _without_nulls(right[form.layer_key])
        _compare_keys(file.layer, layer, plain, form, f"{where}: {form.layer_key}")
    _compare_keys(file.top, right, plain, form, where)
    _compare_eagle_config(form, file, outline, right.get("eagle_config", {}))


def _compare_eagle_config(form: EagleFormat, file: ConfigFile, outline: Outline, ours: Mapping[str, Any]) -> None:
    """Compare `eagle_config`, and the two lists of taps with each other: engines read one or the other."""
    inner = file.nested("eagle_config")
    entered = [tap + 1 for tap in outline.taps]
    alone = form.tap_shift == 1 and TAPS not in file.top  # vLLM reads the nested list where there is no other
    # Engines look for norm_before_fc here first.
    right = {"use_aux_hidden_state": True, "norm_before_fc": outline.flag("norm_before_fc"), **ours}
    right[TAPS] = entered if alone else outline.taps
    for key, value in inner.items():
        if key not in right:
            raise ValueError(f"{file.path} has keys that are not followed: eagle_config.{key}")
        if value != right[key]:
            raise ValueError(f"{file.path}: eagle_config.{key}={value!r}, but it must be {right[key]!r}")
    if file.top.get(TAPS, entered) != entered:
        raise ValueError(f"{file.path}: {TAPS}={file.top[TAPS]}, but for these taps it must be {entered}")


def _compare_keys(
    found: Mapping[str, Any], right: Mapping[str, Any], plain: Mapping[str, Any], form: EagleFormat, where: str
) -> None:
    if missing := sorted(right.keys() - ((OPTIONAL | FREE) - form.needed) - found.keys()):
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(found.keys() - right.keys() - plain.keys() - FREE - IGNORED):
        raise ValueError(f"{where} has keys that are not followed: {', '.join(unknown)}")
    for key in sorted(found.keys() - FREE - IGNORED):
        if found[key] != (value := right.get(key, plain.get(key))):
            raise ValueError(
                f"{where}: {key}={found[key]!r}, but for this target and format={form.name} it must be {value!r}"
            )


def _plain(outline: Outline) -> dict[str, Any]:
    """Keys that a file may have besides, with the one value that changes nothing."""
    return {
        **dict.fromkeys(NORM_FLAGS, False),
        "attention_bias": False,
        "bias": False,
        "mlp_bias": False,
        "layer_types": ["full_attention"],
        "num_aux_hidden_states": len(outline.taps),
        "pretraining_tp": 1,
        "qkv_bias": False,
        "target_hidden_size": outline.hidden_size,
        "use_sliding_window": False,
    }


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
