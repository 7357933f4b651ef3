"""Random targets of a few thousand parameters, made on the spot for tests and dry runs (`model=tiny`)."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 320

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama3-rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 12},
    "gemma2": {"model_type": "gemma2", "sliding_window": 12, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 12,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte plus three special tokens, with a ChatML template."""
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=SPECIAL[0], eos_token=SPECIAL[2], chat_template=CHATML
    )


def tiny_model_and_tokenizer(family: str, seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Make a random model of `family` (see FAMILIES) in float32 and the byte tokenizer.

    Raises:
        ValueError: if the family is unknown.
    """
    if family not in FAMILIES:
        raise ValueError(f"random:{family} is not a known tiny family; use one of {', '.join(FAMILIES)}")
    settings = {**SHAPE, **FAMILIES[family]}
    config = AutoConfig.for_model(**settings)
    # Soft-capped attention scores exist in eager attention only.
    attention = "eager" if family == "gemma2" else "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        _randomise_norms_and_biases(model)
    model.generation_config.eos_token_id = SHAPE["eos_token_id"]
    return model.eval(), tiny_tokenizer()


def _randomise_norms_and_biases(model: PreTrainedModel) -> None:
    # Norm weights of one and zero biases would hide a missing or doubled norm, or a dropped bias.
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
