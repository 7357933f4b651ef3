"""The tensors that an engine expects of an export: names, shapes and which of them it can do without.

Names are ours to compare by: `layer.` stands for whatever the engine calls the decoder layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from eval.parity.layouts import EagleSpec, Layout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Expected:
    """Shapes by name. optional: what the engine takes from the target, or from nowhere, where a file lacks it."""

    required: dict[str, Shape]
    optional: dict[str, Shape]

    def problems(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """What is missing, unexpected or of another shape, each by name."""
        known = self.required | self.optional
        missing = [f"{name} is missing" for name in self.required if name not in tensors]
        unexpected = [f"{name} is unexpected" for name in tensors if name not in known]
        shapes = [
            f"{name} is {list(tensor.shape)}, not {list(known[name])}"
            for name, tensor in tensors.items()
            if name in known and tuple(tensor.shape) != known[name]
        ]
        return missing + unexpected + shapes


def own_names(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with the engine's name of the decoder layer replaced by `layer`."""
    named = {}
    for name, tensor in tensors.items():
        block = next((block for block in layout.blocks if name.startswith(f"{block}.")), None)
        named[name if block is None else name.replace(block, "layer", 1)] = tensor
    return named


def eagle_tensors(layout: Layout, spec: EagleSpec) -> Expected:
    """What the engine expects of these EAGLE heads."""
    width, vocabulary, drafted = spec.hidden_size, spec.vocab_size, spec.draft_vocab_size
    required, optional = _layer(spec), {"embed_tokens.weight": (vocabulary, width)}
    if spec.kind == "eagle":
        required["fc.weight"] = (width, 2 * width)
        if spec.fc_bias:
            required["fc.bias"] = (width,)
        return Expected(required, optional | {"lm_head.weight": (vocabulary, width)})
    taps = len(spec.entered)
    required |= {
        "fc.weight": (width, taps * width),
        "layer.input_layernorm.weight": (width,),
        "layer.hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    if spec.norm_before_fc:
        required["input_norm.weight"] = (taps * width,)
    if spec.fc_norm:
        required |= {f"fc_norm.{tap}.weight": (width,) for tap in range(taps)}
    maps: dict[str, Shape] = {"d2t": (drafted,), "lm_head.weight": (drafted, width)}
    t2d: dict[str, Shape] = {"t2d": (vocabulary,)}
    if drafted == vocabulary:
        return Expected(required, optional | maps | t2d)
    if layout.section is not None:  # speculators' own loader needs both maps
        return Expected(required | maps | t2d, optional)
    return Expected(required | maps, optional | t2d)


def _layer(spec: EagleSpec) -> dict[str, Shape]:
    width, inner = spec.hidden_size, spec.intermediate_size
    inputs = 2 * width if spec.kind == "eagle3" else width
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, Shape] = {
        "layer.self_attn.q_proj.weight": (queries, inputs),
        "layer.self_attn.k_proj.weight": (keys, inputs),
        "layer.self_attn.v_proj.weight": (keys, inputs),
        "layer.self_attn.o_proj.weight": (width, queries),
        "layer.post_attention_layernorm.weight": (width,),
        "layer.mlp.gate_proj.weight": (inner, width),
        "layer.mlp.up_proj.weight": (inner, width),
        "layer.mlp.down_proj.weight": (width, inner),
    }
    if spec.qk_norm:
        shapes |= {f"layer.self_attn.{part}_norm.weight": (spec.head_dim,) for part in "qk"}
    if spec.attention_bias:
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        if spec.kind == "eagle3":
            sizes["o_proj"] = width  # engines give it one wherever the others have one
        shapes |= {f"layer.self_attn.{part}.bias": (size,) for part, size in sizes.items()}
    return shapes
