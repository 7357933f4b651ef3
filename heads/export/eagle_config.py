"""config.json of exported EAGLE heads, format by format: every key and its value.

All formats but speculators' are a flat Hugging Face Llama config with keys besides. Tap numbers come in two
conventions, of the same states: SpecForge, SGLang, ModelOpt and TensorRT-LLM count the blocks whose *outputs* are
tapped, as we do (`eagle_config`); vLLM, llama.cpp and speculators count the layers that they *enter*, one more (at the
top).
"""

from typing import Any

from heads.eagle import EagleConfig
from heads.export.eagle_outline import NORM_FLAGS, Outline

TAPS = "eagle_aux_hidden_state_layer_ids"
EAGLE3_CLASS = "LlamaForCausalLMEagle3"  # loaded by vLLM, SGLang, TensorRT-LLM and llama.cpp


def safeailab(outline: Outline) -> dict[str, Any]:
    return {
        "architectures": [EAGLE3_CLASS],
        **_layer(outline),
        **_old_rope(outline, type_key="type"),
        "draft_vocab_size": outline.draft_vocab_size,
        "torch_dtype": outline.dtype,
    }


def specforge(outline: Outline) -> dict[str, Any]:
    return {
        "architectures": [EAGLE3_CLASS],
        **_layer(outline),
        **_rope(outline),
        "draft_vocab_size": outline.draft_vocab_size,
        "dtype": outline.dtype,
        "eagle_config": {TAPS: outline.taps},
        # Only where set: SpecForge reads norm_output=false as "no norm before the LM head".
        **{flag: True for flag in ("fc_norm", "norm_output") if outline.flag(flag)},
    }


def sglang(outline: Outline) -> dict[str, Any]:
    return {
        "architectures": [EAGLE3_CLASS],
        **_layer(outline),
        **_rope(outline),
        "draft_vocab_size": outline.draft_vocab_size,
        "dtype": outline.dtype,
        "eagle_config": {TAPS: outline.taps, "use_aux_hidden_state": True},
        **_flags(outline),
    }


def vllm(outline: Outline) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Qwen3ForCausalLM" if outline.layer.qk_norm else EAGLE3_CLASS],
        **_layer(outline),
        **_rope(outline),
        **_windows(outline),
        "attention_bias": outline.layer.attention_bias,
        "draft_vocab_size": outline.draft_vocab_size,
        "dtype": outline.dtype,
        "torch_dtype": outline.dtype,
        # vLLM and llama.cpp read the first, SGLang only the second: right in all three.
        TAPS: [tap + 1 for tap in outline.taps],
        "eagle_config": {TAPS: outline.taps, "use_aux_hidden_state": True},
        **({"num_aux_hidden_states": len(outline.taps)} if len(outline.taps) != 3 else {}),
        **_flags(outline),
    }


def speculators(outline: Outline) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": outline.chain,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": outline.target, "architectures": [outline.target_architecture]},
        },
        "draft_vocab_size": outline.draft_vocab_size,
        "dtype": outline.dtype,
        TAPS: [tap + 1 for tap in outline.taps],
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **_flags(outline),
        "transformer_layer_config": {
            **_layer(outline),
            **_windows(outline),
            "rope_parameters": outline.rope,
            "attention_bias": outline.layer.attention_bias,
            "mlp_bias": False,
            **({"num_aux_hidden_states": len(outline.taps)} if len(outline.taps) != 3 else {}),
        },
    }


def modelopt(outline: Outline) -> dict[str, Any]:
    return {
        "architectures": [EAGLE3_CLASS],
        **_layer(outline),
        **_old_rope(outline, type_key="rope_type"),
        "attention_bias": False,
        "mlp_bias": False,
        "draft_vocab_size": outline.draft_vocab_size,
        "torch_dtype": outline.dtype,
        "eagle_config": {
            TAPS: outline.taps,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    }


def tensorrt_llm(outline: Outline) -> dict[str, Any]:
    return {
        "architectures": [EAGLE3_CLASS],
        **_layer(outline),
        **_rope(outline),
        "attention_bias": outline.layer.attention_bias,
        "mlp_bias": False,
        "draft_vocab_size": outline.draft_vocab_size,
        "dtype": outline.dtype,
        "torch_dtype": outline.dtype,
        "fc_norm": outline.flag("fc_norm"),
        # The server is told the taps in a file of its own; here they are for whoever reads the heads again.
        "eagle_config": {
            TAPS: outline.taps,
            "use_aux_hidden_state": True,
            "next_layer_regular": True,
            "norm_before_fc": outline.flag("norm_before_fc"),
            "return_hidden_post_norm": outline.flag("norm_output"),
        },
    }


def safeailab_eagle1(outline: Outline) -> dict[str, Any]:
    assert isinstance(outline.heads, EagleConfig)
    return {
        "architectures": ["LlamaForCausalLM"],
        **_layer(outline),
        **_old_rope(outline, type_key="type"),
        "bias": outline.heads.bias,  # of fc; without the key it has one
        "qkv_bias": outline.layer.attention_bias,
        "torch_dtype": outline.dtype,
    }


def vllm_eagle1(outline: Outline) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],  # vLLM puts "Eagle" before it
        **_layer(outline),
        **_rope(outline),
        # attention_bias would give o_proj a bias, too, which no file fills in; vLLM takes "bias" for the same.
        "qkv_bias": outline.layer.attention_bias,
        "dtype": outline.dtype,
        "torch_dtype": outline.dtype,
    }


def _layer(outline: Outline) -> dict[str, Any]:
    layer = outline.layer
    return {
        "model_type": "qwen3" if layer.qk_norm else "llama",
        "hidden_act": "silu",
        "hidden_size": outline.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": layer.max_position_embeddings,
        "vocab_size": outline.vocab_size,
        "tie_word_embeddings": False,
    }


def _flags(outline: Outline) -> dict[str, bool]:
    return {flag: outline.flag(flag) for flag in NORM_FLAGS}


def _windows(outline: Outline) -> dict[str, Any]:
    window = outline.layer.sliding_window
    if window is None:
        return {}
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": ["sliding_attention"]}


def _rope(outline: Outline) -> dict[str, Any]:
    """As transformers 5 has it, and what older engines read in its place."""
    keys: dict[str, Any] = {"rope_theta": outline.rope["rope_theta"], "rope_parameters": outline.rope}
    scaling = _scaling(outline, "rope_type")
    return keys if scaling is None else {**keys, "rope_scaling": scaling}


def _old_rope(outline: Outline, type_key: str) -> dict[str, Any]:
    return {"rope_theta": outline.rope["rope_theta"], "rope_scaling": _scaling(outline, type_key)}


def _scaling(outline: Outline, type_key: str) -> dict[str, Any] | None:
    rest = {key: value for key, value in outline.rope.items() if key not in ("rope_theta", "rope_type")}
    return None if outline.rope["rope_type"] == "default" else {type_key: outline.rope["rope_type"], **rest}
