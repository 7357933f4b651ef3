"""EAGLE heads as a format sees them, and the rules by which formats refuse what they cannot express."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.eagle_layer import LayerShape

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_OPTIONS = ("qk_norm", "attention_bias", "sliding_window")
LEAST_CHAIN = 3  # EAGLE-1 learns one step and drafts by repeating it


@dataclass(frozen=True)
class Outline:
    """What determines config keys, tensor names and shapes of exported EAGLE heads.

    heads: with everything spelled out (`EagleHeads.resolve`). target, target_architecture: how others know the target.
    target_gguf: the target's GGUF file, for heads that are written as GGUF, too.
    """

    heads: Eagle3Config | EagleConfig
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    target_layers: int
    dtype: str
    target: str = ""
    target_architecture: str = ""
    target_gguf: str = ""

    @property
    def kind(self) -> str:
        return "eagle3" if isinstance(self.heads, Eagle3Config) else "eagle"

    @property
    def layer(self) -> LayerShape:
        return self.heads.layer

    @property
    def taps(self) -> list[int]:
        """Decoder blocks (0-based) whose outputs are fused; none for EAGLE-1."""
        return list(self.heads.taps or []) if isinstance(self.heads, Eagle3Config) else []

    @property
    def chain(self) -> int:
        """How many tokens an engine should draft."""
        return max(self.heads.num_steps, 1 if self.kind == "eagle3" else LEAST_CHAIN)

    @property
    def reduced(self) -> bool:
        """Whether only some token ids can be drafted."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def rope(self) -> dict[str, Any]:
        """Parameters of the rotary embedding; what is missing is what transformers takes."""
        return {"rope_type": "default", "rope_theta": 10000.0, **self.layer.rope_parameters}

    def flag(self, name: str) -> bool:
        """A norm flag; EAGLE-1 has none."""
        return isinstance(self.heads, Eagle3Config) and getattr(self.heads, name)


def default_taps(num_layers: int) -> list[int] | None:
    """The blocks that every engine takes where a file names none; None for targets too shallow for three.

    SafeAILab, vLLM and SGLang count the states that *enter* layers 2, n // 2 and n - 3: outputs of blocks one lower.
    """
    taps = [1, num_layers // 2 - 1, num_layers - 4]
    return taps if 0 < taps[0] < taps[1] < taps[2] else None


@dataclass(frozen=True)
class Problem:
    """A setting of the heads that a format cannot express: the setting, the rule, and the setting that works."""

    value: str
    why: str
    plain: str


Rule = Callable[[Outline], Problem | None]


def without(option: str, why: str) -> Rule:
    """Refuse an option of NORM_FLAGS or LAYER_OPTIONS."""

    def rule(outline: Outline) -> Problem | None:
        layered = option in LAYER_OPTIONS
        value = getattr(outline.layer, option) if layered else outline.flag(option)
        name = f"heads.layer.{option}" if layered else f"heads.{option}"
        plain = "null" if option == "sliding_window" else "false"
        return Problem(f"{name}={value}", why, f"{name}={plain}") if value else None

    return rule


def rope_types(*known: str, scaled_theta: float | None = None) -> Rule:
    """Refuse rotary embeddings that the engine cannot compute. scaled_theta: its only base for all but the default."""

    def rule(outline: Outline) -> Problem | None:
        rope_type, theta = outline.rope["rope_type"], outline.rope["rope_theta"]
        if rope_type in known and (rope_type == "default" or scaled_theta in (None, theta)):
            return None
        why = f"it computes {', '.join(known)} only"
        if scaled_theta is not None:
            why += f", and all but the default with rope_theta={scaled_theta:g} whatever the file says"
        name = "heads.layer.rope_parameters.rope_type"
        return Problem(f"{name}={rope_type} with rope_theta={theta:g}", why, f"{name}=default")

    return rule


def tap_count(least: int, most: int | None, why: str) -> Rule:
    """Refuse another number of taps."""

    def rule(outline: Outline) -> Problem | None:
        count = len(outline.taps)
        fits = least <= count and (most is None or count <= most)
        return None if fits else Problem(f"heads.taps={outline.taps}", why, f"{most or least} taps")

    return rule


def taps_inside(outline: Outline) -> Problem | None:
    """Refuse the last block as a tap: SGLang collects states on entering a block, and none is entered from there."""
    last = outline.target_layers - 1
    if last not in outline.taps:
        return None
    why = f"SGLang does not collect the output of the last block, {last}"
    return Problem(f"heads.taps={outline.taps}", why, f"heads.taps below {last}")


def conventional_taps(outline: Outline) -> Problem | None:
    """Refuse taps other than the default, for formats without a place for them."""
    default = default_taps(outline.target_layers)
    if outline.taps == default:
        return None
    if default is None:
        why = f"it taps three different blocks, and {outline.target_layers} blocks of the target are too few"
        return Problem(f"heads.taps={outline.taps}", why, "a target of at least 7 blocks")
    why = f"it has no place for taps and always takes {default}"
    return Problem(f"heads.taps={outline.taps}", why, f"heads.taps={default}")


def square_attention(outline: Outline) -> Problem | None:
    """Refuse heads whose sizes do not add up to the width."""
    layer, width = outline.layer, outline.hidden_size
    if layer.head_dim * layer.num_attention_heads == width:
        return None
    why = f"it derives the head size from the width, {width} / {layer.num_attention_heads}"
    fix = f"heads.layer.num_attention_heads times heads.layer.head_dim equal to {width}"
    return Problem(f"heads.layer.head_dim={layer.head_dim}", why, fix)


def no_fc_bias(outline: Outline) -> Problem | None:
    """Refuse the bias of EAGLE-1's joining map."""
    if not (isinstance(outline.heads, EagleConfig) and outline.heads.bias):
        return None
    return Problem("heads.bias=True", "it drops fc.bias without an error", "heads.bias=false")


NO_QK_NORM = without("qk_norm", "its layer has no norms of queries and keys")
NO_BIASES = without("attention_bias", "its attention has no biases")
NO_WINDOW = without("sliding_window", "its attention sees all positions")
PLAIN_LAYER = (NO_QK_NORM, NO_BIASES, NO_WINDOW)
RAW_RESIDUAL = without("norm_before_residual", "its residual stream starts from the feature before the norm")
NO_JOINT_NORM = without("norm_before_fc", "it has no norm over the joined taps")
NO_TAP_NORMS = without("fc_norm", "it has no norms of single taps")
RAW_FEEDBACK = without("norm_output", "it feeds back the state before the norm")
# A single tap has the width of the embedding, by which SGLang knows a state that fc has already seen.
SEVERAL_TAPS = tap_count(2, None, "SGLang leaves out fc for a single tap")
SEVERAL_CAPTURED = tap_count(2, None, "TensorRT-LLM makes no fc for a single tap")
THREE_TAPS = tap_count(3, 3, "it joins exactly 3")
SAFEAILAB_ROPE = rope_types("default", "linear", "dynamic", scaled_theta=10000.0)
