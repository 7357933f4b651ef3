"""Names and shapes of the tensors of exported EAGLE heads, and what each is in our `EagleHeads.state_dict()`.

`{block}` is the decoder layer: `midlayer` with SafeAILab and SpecForge, `layers.0` elsewhere. EAGLE-1's layer has no
norm before its attention and reads D inputs; EAGLE-3's reads the normed embedding beside the normed feature, 2D.
"""

from dataclasses import dataclass

import torch

from heads.eagle import EagleConfig
from heads.export.eagle_outline import Outline

# Shapes: A taps, D hidden, I intermediate, H heads, G key/value heads, d head size, V vocabulary, Vd draft vocabulary

EMBEDDINGS, ZEROS = "the target's embeddings", "zeros"  # stand beside the names of EagleHeads.state_dict()


@dataclass(frozen=True)
class Source:
    """What a tensor of a format is in our state: its name there and its shape. dtype: None for that of the weights."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


def layer_tensors(outline: Outline, block: str, *, zero_bias: bool) -> dict[str, Source]:
    """The decoder layer. zero_bias: engines give o_proj a bias where q, k and v have one; ours has none."""
    layer, D = outline.layer, outline.hidden_size
    Hd, Gd = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
    inputs, inner = (D if outline.kind == "eagle" else 2 * D), layer.intermediate_size
    attention, mlp = f"{block}.self_attn", f"{block}.mlp"
    table = {
        f"{attention}.q_proj.weight": Source("layer.q_proj.weight", (Hd, inputs)),
        f"{attention}.k_proj.weight": Source("layer.k_proj.weight", (Gd, inputs)),
        f"{attention}.v_proj.weight": Source("layer.v_proj.weight", (Gd, inputs)),
        f"{attention}.o_proj.weight": Source("layer.o_proj.weight", (D, Hd)),
        f"{block}.post_attention_layernorm.weight": Source("layer.post_attention_layernorm.weight", (D,)),
        f"{mlp}.gate_proj.weight": Source("layer.gate_proj.weight", (inner, D)),
        f"{mlp}.up_proj.weight": Source("layer.up_proj.weight", (inner, D)),
        f"{mlp}.down_proj.weight": Source("layer.down_proj.weight", (D, inner)),
    }
    if layer.attention_bias:
        table[f"{attention}.q_proj.bias"] = Source("layer.q_proj.bias", (Hd,))
        table[f"{attention}.k_proj.bias"] = Source("layer.k_proj.bias", (Gd,))
        table[f"{attention}.v_proj.bias"] = Source("layer.v_proj.bias", (Gd,))
        if zero_bias:
            table[f"{attention}.o_proj.bias"] = Source(ZEROS, (D,))
    if layer.qk_norm:
        table[f"{attention}.q_norm.weight"] = Source("layer.q_norm.weight", (layer.head_dim,))
        table[f"{attention}.k_norm.weight"] = Source("layer.k_norm.weight", (layer.head_dim,))
    return table


def eagle3_tensors(outline: Outline, block: str) -> dict[str, Source]:
    """What EAGLE-3 has around its layer, without the maps of the draft vocabulary."""
    A, D = len(outline.taps), outline.hidden_size
    table = {
        "fc.weight": Source("fc.weight", (D, A * D)),
        f"{block}.input_layernorm.weight": Source("input_layernorm.weight", (D,)),
        f"{block}.hidden_norm.weight": Source("hidden_norm.weight", (D,)),
        "norm.weight": Source("final_norm.weight", (D,)),
        "lm_head.weight": Source("lm_head_weight", (outline.draft_vocab_size, D)),
    }
    if outline.flag("norm_before_fc"):
        table["input_norm.weight"] = Source("input_norm.weight", (A * D,))
    if outline.flag("fc_norm"):
        table |= {f"fc_norm.{tap}.weight": Source(f"fc_norms.{tap}.weight", (D,)) for tap in range(A)}
    return table


def eagle1_tensors(outline: Outline) -> dict[str, Source]:
    """What EAGLE-1 has before its layer; it has nothing behind it."""
    D = outline.hidden_size
    table = {"fc.weight": Source("fc.weight", (D, 2 * D))}
    if isinstance(outline.heads, EagleConfig) and outline.heads.bias:
        table["fc.bias"] = Source("fc.bias", (D,))
    return table


def map_tensors(outline: Outline, dtype: torch.dtype) -> dict[str, Source]:
    """The draft vocabulary: d2t holds offsets (token id minus draft index) in `dtype`, t2d membership."""
    return {
        "d2t": Source("d2t", (outline.draft_vocab_size,), dtype),
        "t2d": Source("t2d", (outline.vocab_size,), torch.bool),
    }


def embedding_tensors(outline: Outline) -> dict[str, Source]:
    """The target's embeddings: written for decoders that look for them, else shared by the engine."""
    return {"embed_tokens.weight": Source(EMBEDDINGS, (outline.vocab_size, outline.hidden_size))}
