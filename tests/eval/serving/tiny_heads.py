"""A tiny target on disk, of the least size that real engines take, and heads that are trained on its answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from eval.config import from_hydra
from heads.tiny import SHAPE, tiny_tokenizer
from scripts.regenerate import RegenerateConfig, regenerate
from train.config import from_hydra as train_config
from train.loop import train

# vLLM's attention has no smaller heads, and its default taps need 7 layers to be three.
LARGER = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
CROSS_ENTROPY = {"ce_weight": 1.0, "kl_weight": 0.0}
HEADS: dict[str, dict[str, Any]] = {
    # A reduced draft vocabulary, so that d2t takes part.
    "eagle3": {"kind": "eagle3", "num_steps": 3, "draft_vocab_size": 200, "objective": {**CROSS_ENTROPY, "decay": 1.0}},
    "eagle": {"kind": "eagle", "objective": CROSS_ENTROPY},
    "medusa": {"kind": "medusa", "num_heads": 3, "draft_vocab_size": 200, "objective": {"decay": 1.0}},
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tiny_target() -> PreTrainedModel:
    """A random target in float32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SHAPE, **LARGER, "model_type": "llama", "initializer_range": 0.2})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = SHAPE["eos_token_id"]
    return model


def make_it_recite(model: PreTrainedModel) -> None:
    """Let a target answer with the alphabet, again and again, by margins that no rounding of 16 bits can turn."""
    ids = tiny_tokenizer()(LETTERS)["input_ids"]
    (before_answer,) = tiny_tokenizer()("\n")["input_ids"]
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(lm_head, nn.Linear)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.01)  # the state of a token stays close to its embedding
        lm_head.weight.zero_()
        for now, following in zip([before_answer, *ids], [*ids, ids[0]], strict=True):
            lm_head.weight[following] += embedding.weight[now]


def save_target(model: PreTrainedModel, directory: Path) -> dict[str, Any]:
    """Write the target with its tokenizer. Returns the settings of `model`, under the directory's name."""
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return {"name": directory.name, "path": str(directory), "dtype": "float32"}


def write_prompts(path: Path, prompts: Sequence[str]) -> str:
    path.write_text("".join(json.dumps({"id": text, "prompt": text}) + "\n" for text in prompts))
    return str(path)


def train_heads(target: dict[str, Any], prompts: str, kind: str, folder: Path) -> Path:
    """Train on the target's own answers; returns the run's directory, in `folder`."""
    folder.mkdir(exist_ok=True)
    answers, run = str(folder / "answers.jsonl"), folder / "run"
    asked = {"model": target, "prompts": [prompts], "output": answers, "max_new_tokens": 40}
    regenerate(from_hydra(RegenerateConfig, asked))
    trainer = {"steps": 40, "batch_size": 2, "micro_batch_size": 2, "lr": 1e-2, "eval_prompts": 0, "tracker": "none"}
    train(
        train_config(
            {
                "model": target,
                "heads": HEADS[kind],
                "data": {"train": [answers], "max_length": 128, "cache_dir": str(folder / "cache")},
                "trainer": trainer,
                "run_name": "tiny-8",
                "output_dir": str(run),
            }
        )
    )
    return run
