"""EAGLE heads as other projects publish them for a target of eight blocks: config.json and tensors, format by format.

The layouts are those of SafeAILab/EAGLE cb7e084, SpecForge a6b6b02, SGLang 0.5.23, vLLM 0.32, speculators 0.9,
ModelOpt 0.47, TensorRT-LLM's main and llama.cpp b11434, by name and shape.
"""

import torch

from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.eagle_layer import LayerShape
from tests.heads.test_eagle import LLAMA3

DRAFT_IDS = torch.tensor([3, 5, 6, 90, 258])
EVERY_ID = torch.arange(320)
HEADS = {
    ("eagle3", "safeailab"): Eagle3Config(),
    ("eagle3", "specforge"): Eagle3Config(fc_norm=True, norm_output=True, layer=LayerShape(rope_parameters=LLAMA3)),
    ("eagle3", "sglang"): Eagle3Config(norm_before_fc=True, norm_output=True, taps=[0, 6]),
    ("eagle3", "vllm"): Eagle3Config(
        norm_before_residual=True, fc_norm=True, taps=[0, 3],
        layer=LayerShape(attention_bias=True, rope_parameters=LLAMA3),
    ),
    ("eagle3", "speculators"): Eagle3Config(
        num_steps=3, norm_before_residual=True, norm_before_fc=True, norm_output=True,
        layer=LayerShape(qk_norm=True, sliding_window=6, num_attention_heads=6, num_key_value_heads=3),
    ),
    ("eagle3", "modelopt"): Eagle3Config(layer=LayerShape(intermediate_size=48)),
    ("eagle3", "tensorrt-llm"): Eagle3Config(
        norm_before_fc=True, norm_output=True, taps=[0, 7], layer=LayerShape(attention_bias=True)
    ),
    ("eagle3", "llama.cpp"): Eagle3Config(
        norm_before_residual=True, norm_before_fc=True, taps=[0, 4, 7], layer=LayerShape(rope_parameters=LLAMA3)
    ),
    ("eagle", "safeailab"): EagleConfig(bias=True, layer=LayerShape(attention_bias=True)),
    ("eagle", "vllm"): EagleConfig(),
}  # fmt: skip
MIDLAYER = [("eagle3", name) for name in ("safeailab", "specforge", "sglang", "tensorrt-llm")]
BLOCK = {key: "midlayer" if key in MIDLAYER else "layers.0" for key in HEADS}
TAPS = "eagle_aux_hidden_state_layer_ids"


ROPE = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
OLD_ROPE = {"rope_theta": 1e4, "rope_scaling": None}
SCALING = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
SCALED_ROPE = {"rope_theta": 1e4, "rope_parameters": LLAMA3, "rope_scaling": SCALING}
LLAMA = {
    "model_type": "llama", "vocab_size": 320, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
EAGLE1 = {"architectures": ["LlamaForCausalLM"], **LLAMA}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], **LLAMA}
OLD_DTYPE, DTYPE = {"torch_dtype": "float32"}, {"dtype": "float32"}
CONFIGS = {  # as each project writes it, for HEADS and the target of eight blocks, without draft_vocab_size
    ("eagle3", "safeailab"): {**EAGLE3, **OLD_ROPE, **OLD_DTYPE},
    ("eagle3", "specforge"): {
        **EAGLE3, **SCALED_ROPE, **DTYPE, "fc_norm": True, "norm_output": True, "eagle_config": {TAPS: [1, 3, 4]},
    },
    ("eagle3", "sglang"): {
        **EAGLE3, **ROPE, **DTYPE, "eagle_config": {TAPS: [0, 6], "use_aux_hidden_state": True},
        "norm_before_residual": False, "norm_before_fc": True, "fc_norm": False, "norm_output": True,
    },
    ("eagle3", "vllm"): {
        **EAGLE3, **SCALED_ROPE, **DTYPE, **OLD_DTYPE, "attention_bias": True, "num_aux_hidden_states": 2,
        TAPS: [1, 4], "eagle_config": {TAPS: [0, 3], "use_aux_hidden_state": True},
        "norm_before_residual": True, "norm_before_fc": False, "fc_norm": True, "norm_output": False,
    },
    ("eagle3", "speculators"): {
        **DTYPE, "architectures": ["Eagle3DraftModel"], TAPS: [2, 4, 5], "embed_requires_grad": False,
        "norm_before_residual": True, "norm_before_fc": True, "fc_norm": False, "norm_output": True,
        "target_hidden_size": None, "tie_word_embeddings": False,
        "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": "tiny-8", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            **LLAMA, "model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 3,
            "sliding_window": 6, "use_sliding_window": True, "layer_types": ["sliding_attention"],
            "rope_parameters": ROPE["rope_parameters"], "attention_bias": False, "mlp_bias": False,
        },
    },
    ("eagle3", "modelopt"): {
        **EAGLE3, **OLD_ROPE, **OLD_DTYPE, "intermediate_size": 48, "attention_bias": False, "mlp_bias": False,
        "eagle_config": {
            TAPS: [1, 3, 4], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
            "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
        },
    },
    ("eagle3", "tensorrt-llm"): {
        **EAGLE3, **ROPE, **DTYPE, **OLD_DTYPE, "attention_bias": True, "mlp_bias": False, "fc_norm": False,
        "eagle_config": {
            TAPS: [0, 7], "use_aux_hidden_state": True, "next_layer_regular": True,
            "norm_before_fc": True, "return_hidden_post_norm": True,
        },
    },
    ("eagle3", "llama.cpp"): {
        **EAGLE3, **SCALED_ROPE, **DTYPE, **OLD_DTYPE, "attention_bias": False,
        TAPS: [1, 5, 8], "eagle_config": {TAPS: [0, 4, 7], "use_aux_hidden_state": True},
        "norm_before_residual": True, "norm_before_fc": True, "fc_norm": False, "norm_output": False,
    },
    ("eagle", "safeailab"): {**EAGLE1, **OLD_ROPE, **OLD_DTYPE, "bias": True, "qkv_bias": True},
    ("eagle", "vllm"): {**EAGLE1, **ROPE, **DTYPE, **OLD_DTYPE, "qkv_bias": False},
}  # fmt: skip


MAP_DTYPE = {name: torch.int32 if name == "tensorrt-llm" else torch.int64 for _, name in HEADS}


def config_of(kind, name, size):
    return {**CONFIGS[kind, name], **({"draft_vocab_size": size} if kind == "eagle3" else {})}


def tensors_of(kind, name, heads):
    """model.safetensors as each project writes it."""
    ours = {key: value.detach() for key, value in heads.state_dict().items()}
    block = BLOCK[kind, name]
    tensors = {"fc.weight": ours["fc.weight"]}
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"{block}.self_attn.{part}.weight"] = ours[f"layer.{part}.weight"]
    for part in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"{block}.mlp.{part}.weight"] = ours[f"layer.{part}.weight"]
    tensors[f"{block}.post_attention_layernorm.weight"] = ours["layer.post_attention_layernorm.weight"]
    if heads.config.layer.attention_bias:
        for part in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{block}.self_attn.{part}.bias"] = ours[f"layer.{part}.bias"]
    if kind == "eagle" and name == "safeailab":
        tensors["fc.bias"] = ours["fc.bias"]
    if kind == "eagle3":
        tensors |= eagle3_tensors(name, block, ours, heads.draft_ids)
    if name in ("specforge", "speculators") or (kind, name) == ("eagle", "safeailab"):
        tensors["embed_tokens.weight"] = heads.target.embedding.weight
    return {key: value.clone() for key, value in tensors.items()}


def eagle3_tensors(name, block, ours, ids):
    tensors = {
        f"{block}.input_layernorm.weight": ours["input_layernorm.weight"],
        f"{block}.hidden_norm.weight": ours["hidden_norm.weight"],
        "norm.weight": ours["final_norm.weight"],
        "lm_head.weight": ours["lm_head_weight"],
    }
    if name == "specforge":
        tensors |= {f"fc_norm.{i}.weight": ours[f"fc_norms.{i}.weight"] for i in range(3)}
    if name == "vllm":
        tensors |= {f"fc_norm.{i}.weight": ours[f"fc_norms.{i}.weight"] for i in range(2)}
    if name in ("vllm", "tensorrt-llm"):
        tensors[f"{block}.self_attn.o_proj.bias"] = torch.zeros(32)
    if name in ("sglang", "speculators", "tensorrt-llm", "llama.cpp"):
        tensors["input_norm.weight"] = ours["input_norm.weight"]
    if name == "speculators":
        tensors |= {f"{block}.self_attn.{part}.weight": ours[f"layer.{part}.weight"] for part in ("q_norm", "k_norm")}
    if len(ids) < 320 or name in ("safeailab", "specforge", "sglang"):
        tensors["d2t"] = (ids - torch.arange(len(ids))).to(MAP_DTYPE[name])
        if name not in ("modelopt", "tensorrt-llm"):
            tensors["t2d"] = torch.isin(EVERY_ID, ids)
    return tensors
