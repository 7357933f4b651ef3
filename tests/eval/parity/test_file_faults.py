"""Faults planted in exported files, under right checksums: each is caught, and the first line names it."""

import json
import re

import pytest
import torch

from eval.parity.certificate import PARITY_FILE
from heads.export.files import write_checksums
from tests.eval.parity.conftest import faults, refresh

TAPS = "eagle_aux_hidden_state_layer_ids"
O_PROJ, UP_PROJ = "layers.0.self_attn.o_proj.weight", "layers.0.mlp.up_proj.weight"
QKV = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]


def at_top(key, value):
    """Set a key of config.json; `value` may be a function of the old one."""

    def change(config, tensors):
        config[key] = value(config[key]) if callable(value) else value

    return change


def inside(section, key, value):
    def change(config, tensors):
        at_top(key, value)(config[section], tensors)

    return change


def tensor(name, value):
    """Replace a tensor by a function of itself; None takes it away."""

    def change(config, tensors):
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value(tensors[name])

    return change


def each(*changes):
    def change(config, tensors):
        for one in changes:
            one(config, tensors)

    return change


def shifted(step):
    return lambda numbers: [number + step for number in numbers]


def base(theta):
    new = {"rope_type": "default", "rope_theta": theta}
    return each(at_top("rope_theta", theta), at_top("rope_parameters", new))


def rolled(weight):
    return weight.roll(weight.shape[1] // 2, 1)


def first_212(rows):
    return rows[:212]


def swapped(first, second):
    def change(config, tensors):
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


def extra(name, shape):
    def change(config, tensors):
        tensors[name] = torch.ones(shape)

    return change


FAULTS = {
    "SGLang's numbers in vLLM's key": ("vllm", at_top(TAPS, shifted(-1)), "vLLM would read post_block.0.,.*off by one"),
    "vLLM's numbers in SGLang's key": (
        "vllm", inside("eagle_config", TAPS, shifted(1)), "SGLang would read post_block.2., .*off by one",
    ),
    "vLLM's numbers for SGLang": (
        "modelopt", inside("eagle_config", TAPS, shifted(1)), "SGLang would read post_block.2., .*off by one",
    ),
    "taps one too high": ("speculators", at_top(TAPS, shifted(1)), "vLLM would read post_block.2., .*off by one"),
    "vLLM's numbers for the server of TensorRT-LLM": (
        "tensorrt-llm", inside("speculative_config", "eagle3_layers_to_capture", [1, 3, 8]),
        "TensorRT-LLM would read post_block.1., .*off by one",
    ),
    "TensorRT-LLM's numbers for llama.cpp": (
        "llama.cpp", at_top(TAPS, shifted(-1)), "llama.cpp would read post_block.0., .*off by one",
    ),
    "two taps for llama.cpp": ("llama.cpp", at_top(TAPS, [2, 4]), "names 2 taps, llama.cpp takes exactly 3"),
    "a norm where TensorRT-LLM does not look": (
        "tensorrt-llm",
        each(inside("eagle_config", "norm_before_fc", False), at_top("norm_before_fc", True)),
        "tensors: input_norm.weight is unexpected",
    ),
    "norm of the fed state lost for TensorRT-LLM": (
        "tensorrt-llm", inside("eagle_config", "return_hidden_post_norm", False), "norm_output was True in training",
    ),
    "RoPE scaling lost for llama.cpp": (
        "llama.cpp", each(base(1e4), at_top("rope_scaling", None)), "rope_freqs.weight is not the scaling of config.j",
    ),
    "absolute d2t for TensorRT-LLM": (
        "tensorrt-llm", tensor("d2t", lambda d2t: d2t + torch.arange(len(d2t), dtype=torch.int32)),
        "d2t holds token ids; it must hold offsets",
    ),
    "biases unknown to TensorRT-LLM": (
        "tensorrt-llm", lambda config, tensors: config.pop("attention_bias"), "config.json lacks attention_bias",
    ),
    "other taps": ("vllm", at_top(TAPS, [2, 4, 8]), "the heads were trained on post_block.1., post_block.3., post_bl"),
    "two taps untold": (
        "vllm, qwen3",
        each(at_top("num_aux_hidden_states", None), at_top("eagle_config", {})),
        "names 2 taps and tells vLLM to expect 3",
    ),
    "RoPE base": ("vllm", base(1e6), "RoPE base or scaling: trained with .*'rope_theta': 10000"),
    "RoPE base in one of two keys": ("vllm", at_top("rope_theta", 1e6), "rope_parameters=.* disagrees with rope_theta"),
    "norm before the residual lost": (
        "vllm, qwen3", at_top("norm_before_residual", False), "norm_before_residual was True in training, config.json",
    ),
    "norm before the residual gained": ("vllm", at_top("norm_before_residual", True), "norm_before_residual was False"),
    "norm of the fed state lost": ("vllm, qwen3", at_top("norm_output", False), "norm_output was True in training"),
    "norm of the taps lost": (
        "sglang", at_top("norm_before_fc", False), "tensors: input_norm.weight is unexpected",
    ),
    "a norm that the engine does not know": (
        "sglang", at_top("norm_before_residual", True), "norm_before_residual=True, which SGLang does not follow",
    ),
    "the flag that engines read differently where it is missing": (
        "speculators", lambda config, tensors: config.pop("norm_before_residual"), "lacks norm_before_residual",
    ),
    "d2t lost": ("vllm", tensor("d2t", None), "tensors: d2t is missing"),
    "absolute d2t": (
        "vllm", tensor("d2t", lambda d2t: d2t + torch.arange(len(d2t))), "d2t holds token ids; it must hold offsets",
    ),
    "stale d2t": ("sglang", tensor("d2t", lambda d2t: d2t - 1), "another draft vocabulary: 213 of 213 ids"),
    "stale t2d": ("vllm", tensor("t2d", lambda t2d: t2d.roll(1)), "t2d and d2t disagree"),
    "d2t out of range": ("modelopt", tensor("d2t", lambda d2t: d2t + 300), "d2t leaves the target's 320 ids"),
    "another size of the vocabulary": (
        "safeailab", each(at_top("draft_vocab_size", 212), *(tensor(n, first_212) for n in ("d2t", "lm_head.weight"))),
        "draft_vocab_size=212, the heads were trained on 213 ids",
    ),
    "embedding of another model": (
        "speculators", tensor("embed_tokens.weight", torch.randn_like), "embed_tokens.weight in the file is not the t",
    ),
    "LM head of another row order": (
        "vllm", tensor("lm_head.weight", lambda weight: weight.flip(0)), "the rows of the LM head are in another order",
    ),
    "LM head of the target": (
        "vllm, all ids", tensor("lm_head.weight", lambda weight: torch.randn_like(weight)), "no single usual mistake",
    ),
    "missing tensor": ("vllm", tensor(UP_PROJ, None), "tensors: layer.mlp.up_proj.weight is missing"),
    "extra tensor": ("sglang", extra("verifier_norm.weight", 32), "verifier_norm.weight is unexpected"),
    "norm that EAGLE-1 does not have": (
        "eagle vllm", extra("layers.0.input_layernorm.weight", 32), "layer.input_layernorm.weight is unexpected",
    ),
    "transposed": ("vllm", tensor(O_PROJ, torch.t), "layer.self_attn.o_proj.weight is transposed"),
    "misshapen": ("vllm", tensor(UP_PROJ, torch.t), r"layer.mlp.up_proj.weight is \[32, 64\], not \[64, 32\]"),
    "halves of EAGLE-1's fc": ("eagle vllm", tensor("fc.weight", rolled), "the halves of fc.weight are swapped"),
    "order of the taps": (
        "vllm", tensor("fc.weight", lambda weight: torch.cat(weight.split(32, 1)[::-1], 1)),
        "the blocks of fc.weight are swapped",
    ),
    "embedding and feature": (
        "vllm", each(*(tensor(name, rolled) for name in QKV)), "embedding and feature are swapped in q, k and v",
    ),
    "gate and up": ("vllm", swapped("layers.0.mlp.gate_proj.weight", UP_PROJ), "gate_proj and up_proj are swapped"),
    "norm frozen in bfloat16": (
        "vllm", tensor("norm.weight", lambda weight: weight.bfloat16().float()),
        "norm.weight holds bfloat16 values in a float32 file",
    ),
    "norm never trained": ("vllm", tensor("norm.weight", torch.ones_like), "norm.weight is all ones, as if never tr"),
    "fc bias zeroed": ("eagle safeailab", tensor("fc.bias", torch.zeros_like), "fc.bias is all zeros"),
    "fc bias not announced": ("eagle safeailab", at_top("bias", False), "SafeAILab drops fc.bias"),
    "biases of q, k and v not announced": ("eagle safeailab", at_top("qkv_bias", False), "drops layer.self_attn.q_pr"),
    "epsilon of norms": ("vllm", at_top("rms_norm_eps", 1e-2), "rms_norm_eps was 1e-06 in training"),
    "window not announced": (
        "speculators", inside("transformer_layer_config", "layer_types", ["full_attention"]),
        "sliding_window=4 was there in training",
    ),
    "tied embeddings": ("vllm", at_top("tie_word_embeddings", True), "would replace the LM head by the embedding"),
    "context of training": ("vllm", at_top("max_position_embeddings", 64), "=64 ends before the target's 512"),
    "two layers": ("vllm", at_top("num_hidden_layers", 2), "num_hidden_layers=2, the file holds 1"),
    "a class that the engine refuses": (
        "eagle vllm", at_top("architectures", ["LlamaForCausalLMEagle"]), "vLLM loads EagleLlamaForCausalLM, Llama",
    ),
    "vocabulary of another model": ("vllm", at_top("vocab_size", 321), "vocab_size=321, the target has 320"),
    "no epsilon": ("vllm", at_top("rms_norm_eps", None), "config.json lacks a number for rms_norm_eps"),
    "a size that is text": ("vllm", at_top("hidden_size", "32"), "lacks whole numbers for hidden_size"),
    "taps that are text": ("sglang", at_top("eagle_config", {TAPS: ["0"]}), "must be whole numbers"),
    "another speculator": ("speculators", at_top("speculators_model_type", "peagle"), "=peagle, the file holds eagle3"),
    "RoPE that cannot be replayed": (
        "vllm", each(at_top("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}),
                     at_top("rope_scaling", {"rope_type": "longrope"})), "rope_type=longrope cannot be replayed",
    ),
    "Medusa biases not announced": ("medusa vllm", at_top("medusa_fc_bias", False), "vLLM drops blocks.0.layers.0.bi"),
    "transposed Medusa block": (
        "medusa vllm", tensor("blocks.1.layers.0.weight", torch.t), "blocks.1.layers.0.weight is transposed",
    ),
    "Medusa head missing": ("medusa vllm", at_top("num_heads", 4), "lm_heads.3.weight is missing"),
    "shared LM head of another row order": (
        "medusa vllm, shared", tensor("lm_head.weight", lambda weight: weight.flip(0)),
        "lm_head.weight in the file is not the target's: 320 of 320 rows differ",
    ),
    "the other generation of Medusa": ("medusa fasterdecoding", at_top("version", "2"), "0.1.weight is unexpected"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_files_is_caught_and_named_first(damaged, target, name):
    case, change, message = FAULTS[name]
    first = faults(damaged(case, change), target)[0]
    assert re.search(message, first), first


@pytest.mark.parametrize(
    "name",
    [
        "RoPE base",
        "norm before the residual lost",
        "LM head of another row order",
        "halves of EAGLE-1's fc",
        "transposed",
    ],
)
def test_rounding_hides_no_fault(damaged, target, name):
    case, change, message = FAULTS[name]
    first = faults(damaged(case, change, "bfloat16"), target)[0]
    assert re.search(message, first), first


def test_what_a_wrong_vocabulary_does_to_proposals_is_shown(damaged, target):
    named = faults(damaged("sglang", FAULTS["stale d2t"][1]), target)
    assert any(re.search("3 of 3 chains propose other tokens", fault) for fault in named)
    assert not any("logits" in fault for fault in named)


def test_files_that_changed_since_the_export_are_named(damaged, target):
    directory = damaged("vllm", lambda config, tensors: None)
    assert faults(directory, target) == []
    (directory / "README.md").write_text("changed")
    assert re.search("checksums: .*README.md is not the file that was exported", faults(directory, target)[0])
    (directory / "golden.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    assert "files: golden.safetensors: engines would load it as weights" in faults(directory, target)[0]
    (directory / "golden.safetensors").unlink()
    refresh(directory)
    certificate = json.loads((directory / PARITY_FILE).read_text())
    certificate["tensors"]["fc.weight"] = "0" * 64
    del certificate["tensors"]["d2t"]
    (directory / PARITY_FILE).write_text(json.dumps(certificate))
    (directory / "SHA256SUMS").unlink()
    write_checksums(directory)
    assert faults(directory, target) == [
        "tensor checksums: d2t is new since the export; fc.weight is not the tensor that was exported"
    ]
