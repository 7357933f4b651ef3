"""EAGLE-3 heads as one GGUF file, with the tensors and keys that llama.cpp b11434's own converter writes.

Weights keep the dtype of the export, norms are float32. Rows of q and k are interleaved, as ggml rotates them; `d2t`
holds token ids, not offsets. llama.cpp compares the tokenizers of target and heads, so that of the target is copied
from its own GGUF file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads.export.eagle_outline import Outline
from heads.vocabulary import from_offsets

# Shapes: H heads, d head size, N inputs

ARCHITECTURE = "eagle3"
BLOCK = "layers.0"
NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    f"{BLOCK}.input_layernorm.weight": "blk.0.attn_norm.weight",
    f"{BLOCK}.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    f"{BLOCK}.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    f"{BLOCK}.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    f"{BLOCK}.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    f"{BLOCK}.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    f"{BLOCK}.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    f"{BLOCK}.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    f"{BLOCK}.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    f"{BLOCK}.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
TYPES = {
    "float32": (GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bfloat16": (GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "float16": (GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}
Field = tuple[Any, GGUFValueType, GGUFValueType | None]  # value, type, type of the elements of an array


def tokenizer_fields(target_gguf: Path, outline: Outline) -> dict[str, Field]:
    """The tokenizer of a target's GGUF file.

    Raises:
        ValueError: if there is no such file, or it holds another target than the outline's.
    """
    if not target_gguf.is_file():
        raise ValueError(f"target_gguf={target_gguf} does not exist; give the file that llama-server gets with -m")
    try:
        fields = gguf.GGUFReader(target_gguf).fields
        architecture = fields["general.architecture"].contents()
        tokens = len(fields["tokenizer.ggml.tokens"].data)
        width, blocks = (fields[f"{architecture}.{key}"].contents() for key in ("embedding_length", "block_count"))
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"target_gguf={target_gguf} is no GGUF file of a language model ({error!r})") from error
    found, wanted = (tokens, width, blocks), (outline.vocab_size, outline.hidden_size, outline.target_layers)
    for name, here, there in zip(("tokens", "width", "blocks"), found, wanted, strict=True):
        if here != there:
            raise ValueError(
                f"target_gguf={target_gguf} has {name}={here}, the target has {there}; give the file of this target"
            )
    return {
        key: (field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for key, field in fields.items()
        if key.startswith("tokenizer.")
    }


def write_gguf(path: Path, outline: Outline, tensors: Mapping[str, Tensor], tokenizer: Mapping[str, Field]) -> None:
    """Write the file. tensors: by their names in model.safetensors. tokenizer: from `tokenizer_fields`."""
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    _add_keys(writer, outline)
    for key, (value, kind, element) in tokenizer.items():
        writer.add_key_value(key, value, kind, element)
    weights_type, _ = TYPES[outline.dtype]
    for name, tensor in _gguf_tensors(outline, tensors).items():
        if not tensor.is_floating_point():
            writer.add_tensor(name, tensor.numpy(), raw_dtype=GGMLQuantizationType.I64)
            continue
        kind = weights_type if tensor.ndim > 1 else GGMLQuantizationType.F32
        # Exact: the weights are in this dtype already, and every one of them is a float32.
        writer.add_tensor(name, gguf.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_keys(writer: gguf.GGUFWriter, outline: Outline) -> None:
    layer, rope = outline.layer, outline.rope
    writer.add_type("model")
    writer.add_name(f"EAGLE-3 heads for {outline.target}")
    writer.add_file_type(TYPES[outline.dtype][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(1)
    writer.add_context_length(layer.max_position_embeddings)
    writer.add_embedding_length(outline.hidden_size)
    writer.add_feed_forward_length(layer.intermediate_size)
    writer.add_head_count(layer.num_attention_heads)
    writer.add_head_count_kv(layer.num_key_value_heads)
    writer.add_key_length(layer.head_dim)
    writer.add_value_length(layer.head_dim)
    writer.add_layer_norm_rms_eps(layer.rms_norm_eps)
    writer.add_vocab_size(outline.vocab_size)
    writer.add_rope_dimension_count(layer.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    entered = [tap + 1 for tap in outline.taps]  # llama.cpp counts the blocks that the tapped states enter
    writer.add_array(f"{ARCHITECTURE}.target_layers", entered)
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", outline.hidden_size)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", outline.flag("norm_before_residual"))
    writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", outline.flag("norm_before_fc"))


def _gguf_tensors(outline: Outline, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    layer = outline.layer
    named = {NAMES[name]: tensor.detach().cpu() for name, tensor in tensors.items() if name in NAMES}
    for part, heads in (("q", layer.num_attention_heads), ("k", layer.num_key_value_heads)):
        named[f"blk.0.attn_{part}.weight"] = interleave(named[f"blk.0.attn_{part}.weight"], heads)
    if outline.rope["rope_type"] == "llama3":
        named["rope_freqs.weight"] = _frequency_divisors(outline)
    if outline.reduced:
        named["d2t"] = from_offsets(tensors["d2t"].detach().cpu())
    assert len(tensors.keys() - NAMES.keys() - {"d2t", "t2d"}) == 0
    return named


def interleave(weight_HdN: Tensor, heads: int) -> Tensor:
    """Rows of each head as ggml rotates them: 0, d/2, 1, d/2 + 1, ... of [H * d, N]."""
    halves = weight_HdN.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()


def _frequency_divisors(outline: Outline) -> Tensor:
    """By what llama3's scaling divides each frequency of the unscaled embedding [d / 2]."""
    config = LlamaConfig(head_dim=outline.layer.head_dim, rope_parameters=dict(outline.rope))
    exponents = torch.arange(0, outline.layer.head_dim, 2) / outline.layer.head_dim
    return outline.rope["rope_theta"] ** -exponents / LlamaRotaryEmbedding(config).inv_freq
