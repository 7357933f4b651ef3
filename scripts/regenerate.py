"""Let the target answer prompts, and invent prompts to answer; stop and run again to go on.

python scripts/regenerate.py prompts=[data/demo/prompts.jsonl] output=outputs/answers.jsonl samples=2
python scripts/regenerate.py invent=1500 output=outputs/invented.jsonl
python scripts/regenerate.py invent=1500 invent_like=[prompts.jsonl] output=outputs/more-of-the-same-kinds.jsonl
python scripts/regenerate.py url=http://localhost:8000/v1 prompts=[prompts.jsonl] output=outputs/answers.jsonl
"""

import asyncio
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from data.conversations import load_conversations
from data.invention import Openings, invent
from data.progress import Progress
from data.regenerate import AnswerLog, Job, Prompt, answer, open_jobs, read_prompts
from data.regenerate_settings import keep_to_settings
from eval.batched import generate_batch
from eval.config import from_hydra
from eval.sampling import SamplingConfig
from eval.serving.answering import AnsweringClient, ServerConfig, request_fields
from eval.serving.load import ServerGone
from eval.serving.regeneration import Intake, answer_by_server
from heads.target import Target, TargetConfig, load_target, load_tokenizer

TARGET_SETTINGS = ("path", "revision", "dtype", "adapter", "quantization", "template_kwargs")


@dataclass(frozen=True)
class RegenerateConfig(ServerConfig):
    """`conf/regenerate.yaml`.

    prompts: to answer; sources as in conf/data.
    invent: how many more prompts the target samples itself (data/invention.py).
    invent_like: sources of prompts whose kinds of work, in turn, the invented ones shall be of; `shots` are shown.
    """

    model: TargetConfig
    output: str
    prompts: list[str] = field(default_factory=list)
    invent: int = 0
    invent_like: list[str] = field(default_factory=list)
    shots: int = 3
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
        if self.invent_like and not self.invent:
            raise ValueError(f"invent_like={self.invent_like} is for invented prompts; say how many: invent=1000")
        for name in ("shots", "samples", "batch_size", "max_new_tokens", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def answer_settings(self) -> dict[str, Any]:
        """What an answer follows from, beside its prompt."""
        room = {"max_new_tokens": self.max_new_tokens}
        server = {"served_model": self.served_model, "extra_body": self.extra_body}
        return {**self._target_settings(), **_named("sampling", self.sampling), **room, **server}

    def prompt_settings(self) -> dict[str, Any]:
        """What an invented prompt follows from."""
        shown = {"invent_like": self.invent_like, "shots": self.shots if self.invent_like else 0}
        room = {"max_prompt_tokens": self.max_prompt_tokens}
        return {**self._target_settings(), **_named("prompt_sampling", self.prompt_sampling), **shown, **room}

    def _target_settings(self) -> dict[str, Any]:
        return {"seed": self.seed, **{f"model.{name}": getattr(self.model, name) for name in TARGET_SETTINGS}}


def _named(group: str, sampling: SamplingConfig) -> dict[str, Any]:
    return {f"{group}.{name}": value for name, value in asdict(sampling).items()}


def regenerate(config: RegenerateConfig) -> None:
    """Invent what is asked for, then answer everything into `config.output`, by the server at `config.url` if given.

    Raises:
        ValueError: if the rows that are there were made by other settings, or for a target or prompts of no use.
    """
    prompts = _prompts_of(config.prompts)
    with AnswerLog(Path(config.output)) as log:
        keep_to_settings(log, config.answer_settings())
        closing = (_in_process if config.url is None else _by_server)(config, prompts, log)
    print(closing)


def _prompts_of(sources: list[str]) -> list[Prompt]:
    return read_prompts(load_conversations(sources, needs_answer=False)) if sources else []


def _in_process(config: RegenerateConfig, prompts: list[Prompt], log: AnswerLog) -> str:
    target = load_target(config.model)
    if config.invent:
        prompts = prompts + _invented(config, target, log.path.with_suffix(".prompts.jsonl"), prompts)
    with TokenProgress("answering", "answers", len(prompts) * config.samples, len(log.rows)) as (on_rows, on_tokens):
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
    return _closing(log)


def _by_server(config: RegenerateConfig, prompts: list[Prompt], log: AnswerLog) -> str:
    template_kwargs = dict(config.model.template_kwargs)
    tokenizer, eos_ids = load_tokenizer(config.model)
    total = len(prompts) * config.samples
    jobs = open_jobs(prompts, log, tokenizer, template_kwargs, config.samples, config.seed)
    with TokenProgress("answering", "answers", total, total - len(jobs)) as (on_rows, on_tokens):

        def on_answer(tokens: int) -> None:
            on_rows(1)
            on_tokens(tokens)

        intake = Intake(log, tokenizer, eos_ids, total, config.max_failed_share, on_answer)
        try:
            asyncio.run(_ask(config, jobs, intake, template_kwargs))
        except ServerGone as error:
            raise ValueError(f"{error}; start it and run again to go on: {_closing(log)}") from error
    return "; ".join(note for note in (_closing(log), intake.closing()) if note)


async def _ask(config: RegenerateConfig, jobs: list[Job], intake: Intake, template_kwargs: dict[str, Any]) -> None:
    fields = request_fields(config, config.sampling, config.max_new_tokens, template_kwargs)
    async with AnsweringClient(config, fields, config.model.path) as client:
        await answer_by_server(client, jobs, intake)


def _closing(log: AnswerLog) -> str:
    return f"{len(log.rows)} answers, {sum(row['tokens'] for row in log.rows)} tokens in {log.path}"


def _invented(config: RegenerateConfig, target: Target, path: Path, known: list[Prompt]) -> list[Prompt]:
    examples = _prompts_of(config.invent_like)
    template_kwargs = dict(config.model.template_kwargs)
    with AnswerLog(path) as log:
        keep_to_settings(log, config.prompt_settings())
        with TokenProgress("inventing", "prompts", config.invent, len(log.rows)) as (on_rows, on_tokens):
            invent(
                log,
                config.invent,
                lambda ids, seeds: generate_batch(
                    target, ids, config.prompt_sampling, config.max_prompt_tokens, seeds, on_tokens
                ),
                target.tokenizer,
                target.eos_ids,
                Openings(target.tokenizer, template_kwargs, examples, config.shots, config.seed),
                [prompt.messages[-1]["content"] for prompt in (*known, *examples)],
                config.batch_size,
                config.seed,
                on_rows,
            )
    return [Prompt(row["id"], row["category"], [{"role": "user", "content": row["prompt"]}]) for row in log.rows]


class TokenProgress:
    """Progress over rows that also tells the tokens in them; entering it gives the two functions that count."""

    def __init__(self, what: str, unit: str, total: int, done: int):
        self.progress, self.tokens = Progress(what, unit, total, done), 0

    def __enter__(self):
        self.progress.__enter__()
        return self.on_rows, self.on_tokens

    def __exit__(self, *exception: object) -> None:
        self.progress.__exit__(*exception)

    def on_rows(self, count: int) -> None:
        rate = self.tokens / (self.progress.seconds or 1.0)
        self.progress.advance(count, f"{self.tokens:,} tokens ({rate:,.0f}/s)")

    def on_tokens(self, count: int) -> None:
        self.tokens += count
        self.on_rows(0)


@hydra.main(version_base="1.3", config_path="../conf", config_name="regenerate")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every request
    try:
        regenerate(from_hydra(RegenerateConfig, composed))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
