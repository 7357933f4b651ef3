"""Heads as a GGUF file: every key and tensor that llama.cpp reads, and the tokenizer of the target's own file."""

import math

import gguf
import pytest
import torch
from safetensors.torch import load_file

from heads.eagle3 import Eagle3Config
from heads.eagle_layer import LayerShape
from heads.export.eagle_writer import export_heads
from heads.identity import identify
from heads.layout import save_heads
from heads.target import Target
from tests.heads.gguf_target import write_target_gguf
from tests.heads.test_eagle import LLAMA3, make
from tests.heads.test_eagle_import import DRAFT_IDS, EVERY_ID, deep_target

LINEAR = {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.5}
PLAIN = Eagle3Config(num_steps=4)
NORMED = Eagle3Config(
    norm_before_residual=True, norm_before_fc=True, taps=[0, 2, 7],
    layer=LayerShape(num_attention_heads=6, num_key_value_heads=3, head_dim=4, rope_parameters=LINEAR),
)  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return deep_target()


@pytest.fixture
def export(target, tmp_path):
    """export(config, ids, **options) -> what was done; the target's GGUF file is target.gguf."""

    def export_(config, ids=EVERY_ID, **options):
        save_heads(make(target, config, draft_ids=ids), tmp_path / "heads", identify(target))
        options = {"target_gguf": write_target_gguf(tmp_path / "target.gguf", target), **options}
        return export_heads(tmp_path / "heads", tmp_path / "out", target, options.pop("name", "llama.cpp"), **options)

    return export_


def read(path):
    """Keys, and tensors with their types, as a program that knows nothing of heads reads them."""
    reader = gguf.GGUFReader(path)
    keys = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    return keys, {tensor.name: tensor for tensor in reader.tensors}


KEYS = {
    "general.architecture": "eagle3",
    "general.type": "model",
    "general.name": "EAGLE-3 heads for tiny-8",
    "general.file_type": 0,
    "general.quantization_version": 2,
    "eagle3.block_count": 1,
    "eagle3.context_length": 512,
    "eagle3.embedding_length": 32,
    "eagle3.feed_forward_length": 64,
    "eagle3.attention.head_count": 6,
    "eagle3.attention.head_count_kv": 3,
    "eagle3.attention.key_length": 4,
    "eagle3.attention.value_length": 4,
    "eagle3.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
    "eagle3.vocab_size": 320,
    "eagle3.rope.dimension_count": 4,
    "eagle3.rope.freq_base": 5000.0,
    "eagle3.rope.scaling.type": "linear",
    "eagle3.rope.scaling.factor": 2.5,
    "eagle3.target_layers": [1, 3, 8],
    "eagle3.target_hidden_size": 32,
    "eagle3.norm_before_residual": True,
    "eagle3.norm_before_fc": True,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [f"<{i}>" for i in range(320)],
    "tokenizer.ggml.token_type": [1] * 320,
    "tokenizer.ggml.merges": ["a b", "c d"],
    "tokenizer.ggml.eos_token_id": 258,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
}
SAME = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "input_norm.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "blk.0.attn_norm.weight": "layers.0.input_layernorm.weight",
    "blk.0.attn_norm_2.weight": "layers.0.hidden_norm.weight",
    "blk.0.attn_v.weight": "layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "layers.0.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "layers.0.mlp.down_proj.weight",
}


def rows(heads, d):
    """Where each row of a rotated projection comes from: neighbours in ggml, halves in Hugging Face."""
    return [head * d + pair + half * d // 2 for head in range(heads) for pair in range(d // 2) for half in (0, 1)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_key_and_tensor_is_there(export, tmp_path, dtype):
    export(NORMED, DRAFT_IDS, dtype=dtype)
    keys, tensors = read(tmp_path / "out" / "heads.gguf")
    file_type = {"float32": 0, "float16": 1, "bfloat16": 32}[dtype]
    assert keys == KEYS | {"general.file_type": file_type}
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == SAME.keys() | {"blk.0.attn_q.weight", "blk.0.attn_k.weight", "d2t"}
    types = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    for name, tensor in tensors.items():
        if name == "d2t":
            assert tensor.tensor_type.name == "I64"
            assert tensor.data.tolist() == DRAFT_IDS.tolist()
            continue
        assert tensor.tensor_type.name == (types[dtype] if len(tensor.shape) > 1 else "F32")
        found = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if name in SAME:
            assert torch.equal(found, weights[SAME[name]].float()), name
        else:
            part, heads = ("q", 6) if "attn_q" in name else ("k", 3)
            assert torch.equal(found, weights[f"layers.0.self_attn.{part}_proj.weight"].float()[rows(heads, 4)]), name


def test_llama3_rotation_is_a_tensor_and_a_full_vocabulary_has_no_map(export, tmp_path):
    export(Eagle3Config(layer=LayerShape(rope_parameters=LLAMA3)))
    keys, tensors = read(tmp_path / "out" / "heads.gguf")
    assert "d2t" not in tensors
    assert "enc.output_norm.weight" not in tensors
    assert not any(key.startswith("eagle3.rope.scaling") for key in keys)
    # Waves of 2 pi, 63, 628 and 6283 positions: kept up to 16 / 4, divided by 8 from 16 / 1 on, the first one between.
    kept = (16 / (2 * math.pi) - 1) / (4 - 1)
    assert tensors["rope_freqs.weight"].data.tolist() == pytest.approx([1 / (kept + (1 - kept) / 8), 8, 8, 8])


def test_the_command_names_both_files(export, tmp_path):
    done = export(PLAIN)
    flags = "--spec-type draft-eagle3 --spec-draft-n-max 4"
    assert done.command == f"llama-server -m {tmp_path}/target.gguf -md {tmp_path}/out/heads.gguf {flags}"
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"llama-server -m target.gguf -md out/heads.gguf {flags}" in card
    assert "heads.gguf holds the tokenizer of target.gguf" in card
    assert "heads.gguf" in (tmp_path / "out" / "SHA256SUMS").read_text()
    assert str(tmp_path).encode() not in (tmp_path / "out" / "heads.gguf").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 7}, "has blocks=7, the target has 8; give the file of this target"),
        ({"embedding_length": 64}, "has width=64, the target has 32"),
        ({"tokens": 321}, "has tokens=321, the target has 320"),
    ],
)
def test_the_file_of_another_target_is_refused(export, target, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        export(PLAIN, target_gguf=write_target_gguf(tmp_path / "other.gguf", target, **changes))
    assert not (tmp_path / "out").exists()


def test_what_is_no_gguf_file_or_not_for_this_format_is_refused(export, tmp_path):
    (tmp_path / "text.gguf").write_text("text, and more of it")
    with pytest.raises(ValueError, match=r"text\.gguf is no GGUF file of a language model"):
        export(PLAIN, target_gguf=tmp_path / "text.gguf")
    with pytest.raises(ValueError, match=r"target_gguf=.*nowhere does not exist; give the file that llama-server gets"):
        export(PLAIN, target_gguf=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is for format=llama\.cpp, not for format=vllm"):
        export(PLAIN, name="vllm")
