"""Let the target answer prompts, and invent prompts to answer; stop and run again to go on.

python scripts/regenerate.py prompts=[data/demo/prompts.jsonl] output=outputs/answers.jsonl samples=2
python scripts/regenerate.py invent=1500 output=outputs/invented.jsonl
python scripts/regenerate.py url=http://localhost:8000/v1 prompts=[prompts.jsonl] output=outputs/answers.jsonl
"""

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data.conversations import load_conversations
from data.regenerate import AnswerLog, Job, Prompt, answer, invent, open_jobs, read_prompts, user_turn_prefix
from eval.batched import generate_batch
from eval.config import from_hydra
from eval.sampling import SamplingConfig
from eval.serving.answering import AnsweringClient, ServerConfig, request_fields
from eval.serving.load import ServerGone
from eval.serving.regeneration import Intake, answer_by_server
from heads.target import Target, TargetConfig, load_target, load_tokenizer


@dataclass(frozen=True)
class RegenerateConfig(ServerConfig):
    """`conf/regenerate.yaml`; `prompts` are sources as in conf/data, `invent` the number of prompts to sample."""

    model: TargetConfig
    output: str
    prompts: list[str] = field(default_factory=list)
    invent: int = 0
    samples: int = 1
    batch_size: int = 64
    max_new_tokens: int = 320
    max_prompt_tokens: int = 96
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    prompt_sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.url is not None and self.invent:
            raise ValueError(
                f"invent={self.invent} lets the target go on from a bare start of a user turn, which chat completions "
                "cannot send; invent without url= first, then give the invented prompts as prompts=[...] with url="
            )
        if not self.prompts and not self.invent:
            raise ValueError("nothing to answer; give prompts=[file.jsonl] or invent=1000")
        for name in ("samples", "batch_size", "max_new_tokens", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def regenerate(config: RegenerateConfig) -> None:
    """Invent what is asked for, then answer everything into `config.output`, by the server at `config.url` if given."""
    if config.url is not None:
        _by_server(config)
        return
    target = load_target(config.model)
    output = Path(config.output)
    prompts = read_prompts(load_conversations(config.prompts, needs_answer=False)) if config.prompts else []
    if config.invent:
        prompts += _invented(config, target, output.with_suffix(".prompts.jsonl"), prompts)
    total = len(prompts) * config.samples
    with AnswerLog(output) as log, TokenProgress("answers", total, len(log.rows)) as (on_rows, on_tokens):
        answer(
            prompts,
            log,
            lambda ids, seeds: generate_batch(target, ids, config.sampling, config.max_new_tokens, seeds, on_tokens),
            target.tokenizer,
            target.eos_ids,
            dict(config.model.template_kwargs),
            config.batch_size,
            config.samples,
            config.seed,
            on_rows,
        )
    print(_closing(log, output))


def _by_server(config: RegenerateConfig) -> None:
    output, template_kwargs = Path(config.output), dict(config.model.template_kwargs)
    tokenizer, eos_ids = load_tokenizer(config.model)
    prompts = read_prompts(load_conversations(config.prompts, needs_answer=False))
    total = len(prompts) * config.samples
    with AnswerLog(output) as log:
        jobs = open_jobs(prompts, log, tokenizer, template_kwargs, config.samples, config.seed)
        with TokenProgress("answers", total, total - len(jobs)) as (on_rows, on_tokens):

            def on_answer(tokens: int) -> None:
                on_rows(1)
                on_tokens(tokens)

            intake = Intake(log, tokenizer, eos_ids, total, config.max_failed_share, on_answer)
            try:
                asyncio.run(_ask(config, jobs, intake, template_kwargs))
            except ServerGone as error:
                raise ValueError(f"{error}; start it and run again to go on: {_closing(log, output)}") from error
    print("; ".join(note for note in (_closing(log, output), intake.closing()) if note))


async def _ask(config: RegenerateConfig, jobs: list[Job], intake: Intake, template_kwargs: dict[str, Any]) -> None:
    fields = request_fields(config, config.sampling, config.max_new_tokens, template_kwargs)
    async with AnsweringClient(config, fields, config.model.path) as client:
        await answer_by_server(client, jobs, intake)


def _closing(log: AnswerLog, output: Path) -> str:
    return f"{len(log.rows)} answers, {sum(row['tokens'] for row in log.rows)} tokens in {output}"


def _invented(config: RegenerateConfig, target: Target, path: Path, known: list[Prompt]) -> list[Prompt]:
    with AnswerLog(path) as log, TokenProgress("prompts", config.invent, len(log.rows)) as (on_rows, on_tokens):
        invent(
            log,
            config.invent,
            lambda ids, seeds: generate_batch(
                target, ids, config.prompt_sampling, config.max_prompt_tokens, seeds, on_tokens
            ),
            target.tokenizer,
            target.eos_ids,
            user_turn_prefix(target.tokenizer, dict(config.model.template_kwargs)),
            [prompt.messages[-1]["content"] for prompt in known],
            config.batch_size,
            config.seed,
            on_rows,
        )
    return [Prompt(row["id"], row["category"], [{"role": "user", "content": row["prompt"]}]) for row in log.rows]


class TokenProgress:
    """A bar over rows that also shows tokens per second; entering it gives the two functions that move it."""

    def __init__(self, what: str, total: int, done: int):
        self.progress = Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = self.progress.add_task(what, total=total, completed=done, tokens=0, rate=0.0)
        self.tokens = 0

    def __enter__(self):
        self.progress.start()
        return self.on_rows, self.on_tokens

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def on_rows(self, count: int) -> None:
        self.progress.advance(self.bar, count)

    def on_tokens(self, count: int) -> None:
        self.tokens += count
        elapsed = self.progress.tasks[self.bar].elapsed or 1.0
        self.progress.update(self.bar, tokens=self.tokens, rate=self.tokens / elapsed)


@hydra.main(version_base="1.3", config_path="../conf", config_name="regenerate")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        regenerate(from_hydra(RegenerateConfig, composed))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
