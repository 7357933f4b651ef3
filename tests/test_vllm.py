"""A real vLLM, installed by the check itself, serves tiny EAGLE-3 heads token by token and count by count as we decode.

Two starts of vLLM: about a minute, and two more where it is not installed yet.
"""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval.config import from_hydra
from eval.serving.check_config import ServeCheckConfig
from eval.serving.engine_check import check_engine
from eval.serving.environment import EngineUnavailable
from heads.tiny import SHAPE, tiny_tokenizer
from scripts.regenerate import RegenerateConfig, regenerate
from train.config import from_hydra as train_config
from train.loop import train

pytestmark = pytest.mark.slow

# vLLM's attention has no smaller heads, and its default taps need 7 layers to be three.
LARGER = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


@pytest.fixture
def target(tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SHAPE, **LARGER, "model_type": "llama", "initializer_range": 0.2})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = SHAPE["eos_token_id"]
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return {"name": "tiny-8", "path": str(tmp_path / "target"), "dtype": "float32"}


def write_prompts(path, words) -> str:
    path.write_text("".join(json.dumps({"id": f"p{word}", "prompt": f"say {word}"}) + "\n" for word in words))
    return str(path)


def test_vllm_does_what_our_decoder_does(target, tmp_path):
    known, unknown = write_prompts(tmp_path / "known.jsonl", "abcd"), write_prompts(tmp_path / "unknown.jsonl", "xyz")
    answers = str(tmp_path / "answers.jsonl")
    asked = {"model": target, "prompts": [known], "output": answers, "max_new_tokens": 40}
    regenerate(from_hydra(RegenerateConfig, asked))
    trainer = {"steps": 40, "batch_size": 2, "micro_batch_size": 2, "lr": 1e-2, "eval_prompts": 0, "tracker": "none"}
    train(
        train_config(
            {
                "model": target,
                # A reduced draft vocabulary, so that d2t takes part.
                "heads": {"kind": "eagle3", "num_steps": 3, "draft_vocab_size": 200, "objective": {"decay": 1.0}},
                "data": {"train": [answers], "max_length": 128, "cache_dir": str(tmp_path / "cache")},
                "trainer": trainer,
                "run_name": "tiny-8",
                "output_dir": str(tmp_path / "run"),
            }
        )
    )
    settings = {"model": target, "source": str(tmp_path / "run"), "prompts": [known, unknown], "max_new_tokens": 40}
    try:
        summary = check_engine(from_hydra(ServeCheckConfig, settings))
    except EngineUnavailable as missing:
        pytest.skip(str(missing))
    assert summary["failures"] == []
    assert (summary["texts_equal"], summary["counters_equal"]) == (7, 7)
    accepted = summary["engine"]["accepted"]
    assert summary["engine"]["drafts"] > accepted[0] > accepted[2] > 0
    assert summary["settings"]["version"].startswith("0.32.0")
