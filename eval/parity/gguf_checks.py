"""Whether the GGUF file of an export, from which llama.cpp drafts, says what the directory beside it says."""

from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import torch
from torch import Tensor

from eval.parity.exported import Exported, Finding
from eval.parity.layouts import EagleSpec
from eval.parity.rotary import frequencies
from heads.export.engines import GGUF_FILE

# Shapes: H heads, d head size, N inputs

LAYER = "layer.self_attn."
NAMES = {  # llama.cpp's, and ours of `expected`
    "fc": "fc", "enc.output_norm": "input_norm", "output_norm": "norm", "output": "lm_head",
    "blk.0.attn_norm": "layer.input_layernorm", "blk.0.attn_norm_2": "layer.hidden_norm",
    "blk.0.attn_q": f"{LAYER}q_proj", "blk.0.attn_k": f"{LAYER}k_proj", "blk.0.attn_v": f"{LAYER}v_proj",
    "blk.0.attn_output": f"{LAYER}o_proj", "blk.0.ffn_norm": "layer.post_attention_layernorm",
    "blk.0.ffn_gate": "layer.mlp.gate_proj", "blk.0.ffn_up": "layer.mlp.up_proj",
    "blk.0.ffn_down": "layer.mlp.down_proj",
}  # fmt: skip
QUERIES, KEYS = f"{LAYER}q_proj.weight", f"{LAYER}k_proj.weight"


def check_gguf(exported: Exported) -> Iterator[Finding]:
    """The keys and tensors of heads.gguf, where there is one.

    Raises:
        ValueError: if it cannot be read.
    """
    path, spec = exported.directory / GGUF_FILE, exported.spec
    if not path.is_file() or not isinstance(spec, EagleSpec):
        return
    reader = gguf.GGUFReader(path)
    keys = _key_faults(spec, {key: field.contents() for key, field in reader.fields.items()})
    yield Finding(f"keys of {GGUF_FILE}", "those of config.json", f"{len(keys)} wrong", "; ".join(keys))
    tensors = {tensor.name: _read(tensor) for tensor in reader.tensors}
    wrong = _tensor_faults(exported, spec, tensors)
    yield Finding(
        f"tensors of {GGUF_FILE}", f"those of {exported.weights_file}", f"{len(wrong)} wrong", "; ".join(wrong)
    )


def _read(tensor: gguf.ReaderTensor) -> Tensor:
    """As float32, or as it is if it holds whole numbers."""
    if tensor.tensor_type == gguf.GGMLQuantizationType.I64:
        return torch.from_numpy(tensor.data.copy())
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())


def _key_faults(spec: EagleSpec, found: Mapping[str, Any]) -> list[str]:
    expected = {
        "general.architecture": "eagle3",
        "eagle3.block_count": 1,
        "eagle3.embedding_length": spec.hidden_size,
        "eagle3.feed_forward_length": spec.intermediate_size,
        "eagle3.attention.head_count": spec.num_heads,
        "eagle3.attention.head_count_kv": spec.num_kv_heads,
        "eagle3.attention.key_length": spec.head_dim,
        "eagle3.attention.value_length": spec.head_dim,
        "eagle3.attention.layer_norm_rms_epsilon": _float32(spec.eps),
        "eagle3.rope.freq_base": _float32(spec.rope["rope_theta"]),
        "eagle3.rope.scaling.factor": _float32(spec.rope["factor"]) if spec.rope["rope_type"] == "linear" else None,
        "eagle3.target_layers": list(spec.entered),
        "eagle3.target_hidden_size": spec.hidden_size,
        "eagle3.norm_before_residual": spec.norm_before_residual,
        "eagle3.norm_before_fc": spec.norm_before_fc,
    }
    wrong = [
        f"{key}={found.get(key)}, by config.json it must be {value}"
        for key, value in expected.items()
        if found.get(key) != value
    ]
    tokens = len(found.get("tokenizer.ggml.tokens", []))
    return wrong + [f"its tokenizer has {tokens} tokens, the target {spec.vocab_size}"] * (tokens != spec.vocab_size)


def _float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def _tensor_faults(exported: Exported, spec: EagleSpec, found: Mapping[str, Tensor]) -> list[str]:
    theirs = {
        NAMES[name.removesuffix(".weight")] + ".weight" for name in found if name.removesuffix(".weight") in NAMES
    }
    ours = {name: tensor.float() for name, tensor in exported.tensors.items() if name not in ("d2t", "t2d")}
    wrong = [f"{name} is missing" for name in ours.keys() - theirs]
    for name, tensor in found.items():
        own = NAMES.get(name.removesuffix(".weight"), name.removesuffix(".weight")) + ".weight"
        if name == "d2t":
            wrong += _map_faults(exported.engine_ids, tensor)
        elif name == "rope_freqs.weight":
            wrong += _rotary_faults(spec, tensor)
        elif own not in ours:
            wrong.append(f"{name} is unexpected")
        elif not torch.equal(_in_order(spec, own, tensor), ours[own]):
            plain = own in (QUERIES, KEYS) and torch.equal(tensor, ours[own])
            why = "has its rows in the order of Hugging Face, not of ggml" if plain else f"is not {own}"
            wrong.append(f"{name} {why}")
    if "d2t" not in found and len(exported.engine_ids) < exported.target.vocab_size:
        wrong.append("d2t is missing: llama.cpp would take draft indices for token ids")
    scaled = spec.rope["rope_type"] == "llama3"
    return sorted(wrong) + ["rope_freqs.weight is missing"] * (scaled and "rope_freqs.weight" not in found)


def _in_order(spec: EagleSpec, name: str, weight: Tensor) -> Tensor:
    """Queries and keys with the rows of a head as halves again: ggml rotates neighbours."""
    if name not in (QUERIES, KEYS):
        return weight
    heads = spec.num_heads if name == QUERIES else spec.num_kv_heads
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _map_faults(ids: Tensor, d2t: Tensor) -> list[str]:
    if torch.equal(d2t, ids):
        return []
    offsets = torch.equal(d2t, ids - torch.arange(len(ids)))
    return ["d2t holds offsets; llama.cpp takes token ids" if offsets else "d2t is of another draft vocabulary"]


def _rotary_faults(spec: EagleSpec, divisors: Tensor) -> list[str]:
    radians, _ = frequencies(spec.rope, spec.head_dim)
    plain, _ = frequencies({"rope_type": "default", "rope_theta": spec.rope["rope_theta"]}, spec.head_dim)
    expected = (plain / radians)[: len(divisors)]
    close = len(divisors) == spec.head_dim // 2 and torch.allclose(divisors, expected, rtol=1e-5)
    return [] if close else ["rope_freqs.weight is not the scaling of config.json"]
