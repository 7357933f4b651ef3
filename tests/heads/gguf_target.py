"""A GGUF file of a tiny target, with all that heads take from it: sizes and tokenizer, but no weights."""

from pathlib import Path

import gguf

from heads.target import Target


def write_target_gguf(path: Path, target: Target, **changes: int) -> Path:
    """Write the file. changes: other values of `block_count`, `embedding_length` or `tokens`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(changes.get("block_count", target.num_layers))
    writer.add_embedding_length(changes.get("embedding_length", target.hidden_size))
    tokens = [f"<{i}>" for i in range(changes.get("tokens", target.vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
