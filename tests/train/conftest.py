"""A training run of seconds: the tiny target, forty short chats, a config made from a few overrides."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from train.config import TrainConfig, from_hydra

WORDS = ("the", "cat", "dog", "sat", "on", "a", "mat", "and", "ran", "far", "away", "one", "big", "red", "house")


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl (40 conversations of one turn) and heldout.jsonl (4 prompts)."""
    folder = tmp_path_factory.mktemp("chats")
    draw = random.Random(0)

    def text(words: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(words))

    rows = [
        {
            "messages": [
                {"role": "user", "content": text(4)},
                {"role": "assistant", "content": text(draw.randint(4, 12))},
            ]
        }
        for _ in range(40)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": f"{text(3)} {number}"} for number in range(4)]
    (folder / "heldout.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@pytest.fixture
def make_values(chats: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """make("trainer.steps=2", ...) -> the values of a run below tmp_path, as Hydra would compose them."""

    def make(*overrides: str) -> dict[str, Any]:
        base = {
            "model": {"name": "tiny", "path": "random:llama"},
            "heads": {"kind": "medusa", "num_heads": 3, "init": "target"},
            "data": {
                "train": [str(chats / "train.jsonl")],
                "heldout": [str(chats / "heldout.jsonl")],
                "max_length": 192,
                "cache_dir": str(chats / "cache"),
            },
            "trainer": {
                "steps": 6,
                "batch_size": 4,
                "micro_batch_size": 2,
                "log_every": 1,
                "eval_prompts": 0,
                "eval_tokens": 8,
                "save_every": 0,
                "tracker": "none",
            },
            "run_name": "run",
            "output_dir": str(tmp_path / "run"),
        }
        merged = OmegaConf.merge(OmegaConf.create(base), OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(merged)
        assert isinstance(values, dict)
        return {str(name): value for name, value in values.items()}

    return make


@pytest.fixture
def make_config(make_values: Callable[..., dict[str, Any]]) -> Callable[..., TrainConfig]:
    """make("trainer.steps=2", ...) -> the checked config."""
    return lambda *overrides: from_hydra(make_values(*overrides))
