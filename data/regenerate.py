"""Training data from the target itself: it answers prompts, its own among them (data/invention.py).

Heads must learn what the target says, not what somebody else said. Answers are appended to a JSONL file as they are
finished; a run that was stopped goes on with what is missing.

This module knows nothing of models: it is handed a function from token ids to token ids.
"""

import json
import logging
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.conversations import Conversation
from data.disk import writing
from data.render import render_prompt

logger = logging.getLogger(__name__)

# From prompts (token ids) and seeds to continuations, each ending with an end-of-text id unless it ran out of room.
Generate = Callable[[Sequence[Sequence[int]], Sequence[int]], list[list[int]]]

GO_ON = "run again to go on"


@dataclass(frozen=True)
class Prompt:
    """One request: the messages before the answer, a name that is unique in the run, and its kind of work.

    tools: function schemas that the target may call, None if it has none.
    """

    name: str
    category: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Job:
    """One answer to be made. name: in the log. ids: the prompt as serving renders it. seed: of this answer alone."""

    name: str
    prompt: Prompt
    ids: list[int]
    seed: int


class AnswerLog:
    """An append-only JSONL file of finished rows; a last line that was cut short is dropped on opening.

    Raises:
        ValueError: if a line before the last is not JSON.
        OSError: if the file cannot be written; it then ends with the last whole row.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        with writing(path, GO_ON):
            path.parent.mkdir(parents=True, exist_ok=True)
        whole = 0
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            for number, line in enumerate(content[:whole].splitlines(), 1):
                try:
                    self.rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}:{number} is not JSON ({error}); repair or remove that line") from error
        with writing(path, GO_ON):
            # Unbuffered: closing must not write what could not be written before.
            self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
            self._file.truncate(whole)
            self._file.seek(whole)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write whole rows at once, so that a kill loses at most the batch under way."""
        left = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        before = self._file.tell()
        with writing(self.path, GO_ON):
            try:
                while left:  # a disk that is nearly full takes a part
                    left = left[self._file.write(left) :]
            except OSError:
                self._file.truncate(before)
                raise
        self.rows.extend(rows)

    def __enter__(self) -> "AnswerLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def answer(
    prompts: Sequence[Prompt],
    log: AnswerLog,
    generate: Generate,
    tokenizer: Any,
    eos_ids: Sequence[int],
    template_kwargs: dict[str, Any],
    batch_size: int,
    samples: int,
    seed: int,
    on_answers: Callable[[int], None] = lambda count: None,
) -> None:
    """Let the target answer every prompt `samples` times, except what `log` already holds.

    A row keeps `finish`: "stop" when the target ended its turn, "length" when the room ran out.
    """
    jobs = open_jobs(prompts, log, tokenizer, template_kwargs, samples, seed)
    # Prompts of one length share a batch: less padding. A run that is stopped early still has seen all lengths.
    jobs.sort(key=lambda job: (len(job.ids), job.name))
    batches = [jobs[start : start + batch_size] for start in range(0, len(jobs), batch_size)]
    random.Random(seed).shuffle(batches)
    for batch in batches:
        answers = generate([job.ids for job in batch], [job.seed for job in batch])
        log.append([said_row(job, said, tokenizer, eos_ids) for job, said in zip(batch, answers, strict=True)])
        on_answers(len(batch))


def open_jobs(
    prompts: Sequence[Prompt],
    log: AnswerLog,
    tokenizer: Any,
    template_kwargs: dict[str, Any],
    samples: int,
    seed: int,
) -> list[Job]:
    """What is left to answer: `samples` answers to every prompt, except those that `log` already holds."""
    done = {row["id"] for row in log.rows}
    jobs = []
    for prompt in prompts:
        names = [name for name in (f"{prompt.name}#{sample}" for sample in range(samples)) if name not in done]
        if names:
            ids = prompt_ids(prompt, tokenizer, template_kwargs)
            jobs += [Job(name, prompt, ids, stream(seed, name)) for name in names]
    return jobs


def prompt_ids(prompt: Prompt, tokenizer: Any, template_kwargs: dict[str, Any]) -> list[int]:
    """A prompt as serving renders it, its tools included."""
    tools = {"tools": prompt.tools} if prompt.tools else {}
    return render_prompt(prompt.messages, tokenizer, {**template_kwargs, **tools})


def said_row(job: Job, tokens: list[int], tokenizer: Any, eos_ids: Sequence[int]) -> dict[str, Any]:
    """The row of an answer whose tokens are known; the last of them is one of `eos_ids` unless the room ran out."""
    finished = bool(tokens) and tokens[-1] in eos_ids
    said = tokens[:-1] if finished else tokens
    text = tokenizer.decode(said, skip_special_tokens=False)
    row = text_row(job, text, "stop" if finished else "length", len(tokens))
    # A target can say a text in other tokens than its tokenizer would: then only the ids are what it said.
    faithful = tokenizer.encode(text, add_special_tokens=False) == said
    return row if faithful else {**row, "answer_ids": tokens}


def text_row(job: Job, text: str, finish: str, tokens: int) -> dict[str, Any]:
    """The row of an answer as text, of so many tokens with its end; finish: "stop" or "length"."""
    prompt = job.prompt
    return {
        "id": job.name,
        "category": prompt.category,
        "messages": [*prompt.messages, {"role": "assistant", "content": text}],
        **({"tools": prompt.tools} if prompt.tools else {}),
        "finish": finish,
        "tokens": tokens,
    }


def stream(seed: int, name: str) -> int:
    """A seed for one job that depends on nothing but the run's seed and the job's name."""
    return zlib.crc32(f"{seed}:{name}".encode())


def read_prompts(conversations: Sequence[Conversation]) -> list[Prompt]:
    """Turn conversations into prompts: everything up to the last user turn; answers after it are dropped.

    Raises:
        ValueError: if two conversations bear the same id, so that a resumed run could not tell them apart.
    """
    prompts: dict[str, Prompt] = {}
    for conversation in conversations:
        messages = list(conversation.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        name = conversation.id or conversation.origin
        if name in prompts:
            raise ValueError(f"{conversation.origin}: id {name!r} occurs twice; give every prompt an id of its own")
        prompts[name] = Prompt(name, conversation.category, messages, conversation.tools)
    return list(prompts.values())
