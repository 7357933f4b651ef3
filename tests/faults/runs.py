"""The long runs as users start them: their command, their result, and what of them a kill must not cost."""

import json
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import scripts.extract_features  # so that forks find all modules imported
import scripts.regenerate  # noqa: F401
import train.train_heads  # noqa: F401
from data.features import fault_of
from data.render import render_prompt
from heads.tiny import tiny_tokenizer
from tests.faults.harness import Ended, Work, command, run_fork
from train import checkpoint

TIMES = ("train/supervised_tokens_per_s", "train/memory_gb")
SAVE_EVERY, STEPS, SAMPLES, ANSWERS = 2, 8, 3, 12
HEADS = ("model=tiny", "heads=medusa", "heads.num_heads=2", "data=sharegpt", "data.max_length=192", "threads=1")


class LongRun(ABC):
    """A run below `root` on the files in `chats`; the same command starts it and goes on with it."""

    def __init__(self, root: Path, chats: Path, *changes: str):
        self.root, self.chats, self.changes = root, chats, changes
        root.mkdir(exist_ok=True)

    @abstractmethod
    def command(self) -> Work:
        """What is run, again and again until it is done."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """What must be equal to the bit, however often the run was killed."""

    @abstractmethod
    def kept(self) -> dict[str, Any]:
        """What is there now and must be the same when the run is done."""

    def finish(self) -> Ended:
        """Run to the end."""
        ended = run_fork(self.command())
        assert ended.code == 0, ended.said
        return ended


class Training(LongRun):
    """Eight steps with a warm start, a checkpoint at every second one and two measurements of tau."""

    def command(self) -> Work:
        settings = {"steps": STEPS, "save_every": SAVE_EVERY, "eval_every": 4, "batch_size": 4, "micro_batch_size": 2}
        return command(
            "train/train_heads.py",
            *(*HEADS, "trainer=debug", "resume=true"),
            *(f"trainer.{name}={value}" for name, value in settings.items()),
            *(f"data.{name}=[{self.chats / f'{name}.jsonl'}]" for name in ("train", "heldout")),
            *(f"data.cache_dir={self.root / 'cache'}", f"output_dir={self.directory}"),
            *self.changes,
        )

    @property
    def directory(self) -> Path:
        return self.root / "run"

    def rows(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl, without times."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]

    def result(self) -> dict[str, Any]:
        last = self.directory / "checkpoints" / f"step-{STEPS:06d}"
        files = [*(self.directory / "heads").iterdir(), *(last / name for name in checkpoint.read_state(last).hashes)]
        content = {str(path.relative_to(self.directory)): path.read_bytes() for path in files}
        return {**content, "metrics": self.rows(), "window": checkpoint.read_state(last).window}

    def kept(self) -> dict[str, Any]:
        """Nothing by name, but all steps up to the last interval: see `newest`."""
        logged = self.rows()[-1]["step"] if self.rows() else 0
        assert self.newest() >= (logged - 1) // SAVE_EVERY * SAVE_EVERY
        return {}

    def newest(self) -> int:
        """The step of the newest checkpoint, which is whole; 0 if there is none yet."""
        found = checkpoint.checkpoints(self.directory / "checkpoints")
        assert all(checkpoint.damage(directory) is None for directory in found)
        return checkpoint.read_state(found[-1]).step if found else 0


class Extraction(LongRun):
    """Features in a few shards."""

    def command(self) -> Work:
        return command(
            "scripts/extract_features.py",
            *(*HEADS, "data.heldout=[]", "precision=float32", "shard_mb=0.02"),
            *(f"data.train=[{self.chats / 'train.jsonl'}]", f"data.cache_dir={self.root / 'cache'}"),
            *(f"output={self.root / 'features'}", *self.changes),
        )

    def directory(self) -> Path:
        """The features, which lie in a directory named by what they are of."""
        (found,) = (self.root / "features").iterdir()
        return found

    def result(self) -> dict[str, Any]:
        return {path.name: path.read_bytes() for path in self.directory().iterdir()}

    def kept(self) -> dict[str, Any]:
        """Whole shards are not written again."""
        shards = list(self.root.glob("features/*/shard-*.safetensors"))
        assert all(fault_of(shard) is None for shard in shards)
        return {shard.name: shard.stat().st_mtime_ns for shard in shards}


class Regeneration(LongRun):
    """Three sampled answers to each of four prompts, by the target in this process."""

    def command(self) -> Work:
        return command(
            "scripts/regenerate.py",
            *("model=tiny", f"prompts=[{self.chats / 'heldout.jsonl'}]", f"output={self.root / 'answers.jsonl'}"),
            *(f"samples={SAMPLES}", "batch_size=2", "max_new_tokens=12", "concurrency=2", *self.changes),
        )

    def result(self) -> dict[str, Any]:
        rows = [json.loads(line) for line in (self.root / "answers.jsonl").read_text().splitlines()]
        assert len(rows) == ANSWERS
        return {row["id"]: row for row in rows}

    def kept(self) -> dict[str, Any]:
        """Whole lines are not asked for again."""
        path = self.root / "answers.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return {row["id"]: row for row in map(json.loads, lines)}


class Served(Regeneration):
    """The same by a server, which `url=...` names and `said_by_server` answers for."""


def said_by_server(body: dict[str, Any]) -> dict[str, Any]:
    """An answer as vLLM gives it, which depends on its prompt and seed alone; it takes a moment."""
    time.sleep(0.02)
    tokenizer = tiny_tokenizer()
    prompt = render_prompt(body["messages"], tokenizer, {})
    said = [*tokenizer.encode(f"{body['messages'][-1]['content']} by {body['seed']}"), tokenizer.eos_token_id]
    choice = {"message": {"content": tokenizer.decode(said)}, "finish_reason": "stop", "token_ids": said}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(said)}
    return {"choices": [choice], "prompt_token_ids": prompt, "usage": usage}
