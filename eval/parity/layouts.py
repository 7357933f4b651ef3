"""How engines read exported EAGLE heads: what they look for in config.json, and which tensors they then expect.

Written from what the engines do, not from what heads/export writes, which this is here to check:

    format        engine      layer        taps: where, and the block that a number names      norm flags
    vllm          vLLM        both         top level; the block that the state enters (*)      all
    speculators   vLLM        layers.0     top level; the block that the state enters (*)      all
    sglang        SGLang      both         eagle_config; the block that the state leaves       not before the residual
    specforge     SGLang      midlayer     eagle_config; the block that the state leaves       fc_norm, norm_output
    modelopt      SGLang      layers.0     eagle_config; the block that the state leaves       none
    tensorrt-llm  TensorRT-   both         trtllm-serve.yaml; the block that the state leaves  not before the residual
                  LLM
    llama.cpp     llama.cpp   both         top level; the block that the state enters          norm_before_...
    safeailab     SafeAILab   midlayer     nowhere: always those that enter 2, n // 2, n - 3   none

    (*) or else the numbers in eagle_config, read in the same way

    eagle: safeailab adds fc.bias unless `bias` is false; vllm drops it. Neither has a norm at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TAPS = "eagle_aux_hidden_state_layer_ids"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NESTED_FIRST = ("norm_before_fc",)  # for which engines look in eagle_config, then at the top
SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
LLAMA3_CLASSES = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"})


@dataclass(frozen=True)
class Layout:
    """How one engine reads one format.

    blocks: names by which it knows the decoder layer. section: where config.json describes that layer, None for the
    top level. tap_paths: keys that lead to the taps, in the order in which it looks; tap_shift: the block entered minus
    the number in the file. flags: the norm flags that it follows; flag_paths: where, if not in the usual places.
    server_file: what its server is started with, read along with config.json. fc_bias: EAGLE-1's fc has one: "config"
    by the key `bias`, "dropped" never. bias_key: says that q, k and v have biases. square: the head size follows from
    the width.
    """

    engine: str
    classes: frozenset[str]
    blocks: tuple[str, ...]
    tap_paths: tuple[tuple[str, ...], ...] = ()
    tap_shift: int = 0
    flags: frozenset[str] = frozenset()
    section: str | None = None
    needed: frozenset[str] = frozenset()
    bias_key: str = "attention_bias"
    fc_bias: str = "dropped"
    windows: bool = False
    square: bool = False
    flag_paths: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    server_file: str | None = None


EITHER, TOP, NESTED = ("layers.0", "midlayer"), (TAPS,), ("eagle_config", TAPS)
CAPTURED = ("speculative_config", "eagle3_layers_to_capture")
LAYOUTS: Mapping[tuple[str, str], Layout] = {
    ("eagle3", "vllm"): Layout(
        "vLLM", LLAMA3_CLASSES | {"Eagle3Qwen3ForCausalLM"}, EITHER, (TOP, NESTED), 0, frozenset(NORM_FLAGS),
        windows=True,
    ),
    # vLLM takes a missing norm_before_residual for true, speculators for false.
    ("eagle3", "speculators"): Layout(
        "vLLM", frozenset({"Eagle3DraftModel", "Eagle3Speculator"}), ("layers.0",), (TOP, NESTED), 0,
        frozenset(NORM_FLAGS), section="transformer_layer_config", windows=True,
        needed=frozenset({"norm_before_residual", "speculators_model_type", "speculators_config"}),
    ),
    ("eagle3", "sglang"): Layout(
        "SGLang", LLAMA3_CLASSES, EITHER, (NESTED,), 1, frozenset({"norm_before_fc", "fc_norm", "norm_output"})
    ),
    ("eagle3", "specforge"): Layout(
        "SGLang", LLAMA3_CLASSES, ("midlayer",), (NESTED,), 1, frozenset({"fc_norm", "norm_output"})
    ),
    ("eagle3", "modelopt"): Layout("SGLang", LLAMA3_CLASSES, ("layers.0",), (NESTED,), 1),
    ("eagle3", "tensorrt-llm"): Layout(
        "TensorRT-LLM", LLAMA3_CLASSES | {"EAGLE3LlamaForCausalLM"}, EITHER, (CAPTURED,), 1,
        frozenset({"norm_before_fc", "fc_norm", "norm_output"}),
        needed=frozenset({"attention_bias", "speculative_config"}), server_file="trtllm-serve.yaml",
        flag_paths={
            "norm_before_fc": (("eagle_config", "norm_before_fc"),),
            "norm_output": (("eagle_config", "return_hidden_post_norm"), ("norm_output",)),
        },
    ),
    ("eagle3", "llama.cpp"): Layout(
        "llama.cpp", LLAMA3_CLASSES, EITHER, (TOP,), 0, frozenset({"norm_before_residual", "norm_before_fc"})
    ),
    ("eagle3", "safeailab"): Layout("SafeAILab", LLAMA3_CLASSES, ("midlayer",), square=True),
    ("eagle", "safeailab"): Layout(
        "SafeAILab", frozenset({"LlamaForCausalLM"}), ("layers.0",), bias_key="qkv_bias", fc_bias="config", square=True
    ),
    ("eagle", "vllm"): Layout(
        "vLLM", frozenset({"LlamaForCausalLM", "EagleLlamaForCausalLM"}), ("layers.0",), bias_key="qkv_bias"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class EagleSpec:
    """A drafter as an engine understands its config.json.

    entered: the blocks whose input states are fused (the number of blocks stands for the state behind the last), none
    for EAGLE-1, which reads the state behind the final norm. norms: how often the final norm is applied before the LM
    head: once, or never for EAGLE-1. window: positions seen, None for all.
    """

    kind: str
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    rope: dict[str, Any]
    window: int | None
    qk_norm: bool
    attention_bias: bool
    fc_bias: bool
    entered: tuple[int, ...]
    norms: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def read_spec(layout: Layout, kind: str, config: Mapping[str, Any], num_layers: int) -> EagleSpec:
    """What the engine makes of config.json for a target of `num_layers` blocks.

    Raises:
        ValueError: naming a key that it needs and does not find, or whose value it cannot follow.
    """
    if lacking := sorted(layout.needed - config.keys()):
        raise ValueError(f"config.json lacks {', '.join(lacking)}")
    layer = config if layout.section is None else config.get(layout.section)
    if not isinstance(layer, dict):
        raise ValueError(f"config.json lacks {layout.section}")
    windowed = layout.windows and layer.get("layer_types") == ["sliding_attention"]
    if lacking := [key for key in (*SIZES, *["sliding_window"] * windowed) if type(layer.get(key)) is not int]:
        raise ValueError(f"config.json lacks whole numbers for {', '.join(lacking)}")
    if not isinstance(layer.get("rms_norm_eps"), float):
        raise ValueError("config.json lacks a number for rms_norm_eps")
    if kind == "eagle3" and "draft_vocab_size" not in config:
        raise ValueError("config.json lacks draft_vocab_size, by which llama.cpp knows EAGLE-3")
    heads, width = layer["num_attention_heads"], layer["hidden_size"]
    return EagleSpec(
        kind=kind,
        hidden_size=width,
        vocab_size=layer["vocab_size"],
        draft_vocab_size=config.get("draft_vocab_size") or layer["vocab_size"],
        num_heads=heads,
        num_kv_heads=layer.get("num_key_value_heads") or heads,
        head_dim=width // heads if layout.square else layer.get("head_dim") or width // heads,
        intermediate_size=layer["intermediate_size"],
        eps=layer["rms_norm_eps"],
        rope=read_rope(layer),
        window=layer["sliding_window"] if windowed else None,
        qk_norm=layer.get("model_type") == "qwen3",
        attention_bias=layer.get(layout.bias_key) is True,
        fc_bias=layout.fc_bias == "config" and config.get("bias", True),
        entered=read_taps(layout, config, num_layers) if kind == "eagle3" else (),
        norms=1 if kind == "eagle3" else 0,
        **{flag: read_flag(layout, config, flag) for flag in layout.flags},
    )


def read_flag(layout: Layout, config: Mapping[str, Any], flag: str) -> bool:
    """A norm flag from the first place that has it."""
    usual = (("eagle_config", flag), (flag,)) if flag in NESTED_FIRST else ((flag,),)
    found = (_at(config, path) for path in layout.flag_paths.get(flag, usual))
    return next((value for value in found if value is not None), False) is True


def read_taps(layout: Layout, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The blocks whose input states the engine taps.

    Raises:
        ValueError: if there are none where it looks, and its own choice would not be three different ones; or if
            vLLM would take another number of states than it is told.
    """
    lists = (_at(config, path) for path in layout.tap_paths)
    found = next((numbers for numbers in lists if numbers), None)
    if found is None:
        usual = (2, num_layers // 2, num_layers - 3)
        if sorted(set(usual)) != list(usual):
            raise ValueError(f"config.json names no taps where {layout.engine} looks for them")
        return usual
    if not isinstance(found, list) or not all(type(number) is int for number in found):
        raise ValueError(f"config.json: {TAPS}={found!r} must be whole numbers")
    if layout.engine == "llama.cpp" and len(found) != 3:
        raise ValueError(f"config.json names {len(found)} taps, llama.cpp takes exactly 3")
    if layout.engine == "vLLM":
        layer = config.get(layout.section or "", config)
        told = layer.get("num_aux_hidden_states") or len(_at(config, NESTED) or range(3))
        if told != len(found):
            raise ValueError(f"config.json names {len(found)} taps and tells vLLM to expect {told}")
    return tuple(sorted({number + layout.tap_shift for number in found}))


def _at(config: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = config
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def block_of(tap: str) -> int:
    """The decoder block whose output a tap is: 3 of "post_block[3]"."""
    return int(tap.removeprefix("post_block[").removesuffix("]"))


def read_rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the rotary embedding: transformers 5's key, else the two older ones.

    Raises:
        ValueError: if both are there and disagree: engines read one or the other.
    """
    old = {"rope_theta": layer.get("rope_theta", 10000.0), **(layer.get("rope_scaling") or {})}
    new = layer.get("rope_parameters")
    readings = [_named_type(reading) for reading in (new, old) if reading is not None]
    told = "rope_theta" in layer or layer.get("rope_scaling")
    if len(readings) == 2 and told and readings[0] != readings[1]:
        raise ValueError(
            f"config.json: rope_parameters={readings[0]} disagrees with rope_theta and rope_scaling={readings[1]}"
        )
    return readings[0]


def _named_type(rope: Mapping[str, Any]) -> dict[str, Any]:
    named = {"rope_type": rope.get("type", "default"), "rope_theta": 10000.0, **rope}
    named.pop("type", None)
    return named
