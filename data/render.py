"""The chat template -> token ids and the supervised mask m (m[t] = 1 when the target generates x[t]).

Every turn is built as it is served: the prompt that serving would send, then the answer up to and including
the token at which serving stops. No text is searched for by pattern; no {% generation %} tags are needed.

    messages       user "Hi", assistant "Yes"
    serving prompt <user> Hi <end> \\n <assistant>
    full           <user> Hi <end> \\n <assistant> Yes <end> \\n
    ids            <user> Hi <end> \\n <assistant> Yes <end>      the last "\\n" is not generated
    supervised     0      0  0     0  0           1   1

Turns share one sample as long as each serving prompt continues the sample so far, id for id. Where the
template renders history otherwise than it was served (Qwen3 strips old thinking), a new sample begins with
that turn's own serving prompt.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations import Message
from data.problems import RowError
from data.turns import answer_ids, chat_text, encode


@dataclass(frozen=True)
class Sample:
    """One token sequence; `supervised[t]` says that ids[t] is an assistant token (end of turn included)."""

    ids: list[int]
    supervised: list[bool]
    category: str = ""
    origin: str = ""

    @property
    def num_supervised(self) -> int:
        """Number of supervised tokens."""
        return sum(self.supervised)


def render_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> list[int]:
    """Ids of the prompt that serving sends for `messages`, for training, evaluation and regeneration alike.

    `template_kwargs` (enable_thinking, tools ...) go to the chat template. Raises RowError if the template
    refuses the messages.
    """
    _, prompt_ids = _serving_prompt(messages, tokenizer, template_kwargs)
    return prompt_ids


def render(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Collection[int],
    template_kwargs: Mapping[str, Any],
    *,
    category: str = "",
    origin: str = "",
) -> list[Sample]:
    """Samples of one conversation; each assistant turn is supervised in exactly one of them.

    `eos_ids`: every id at which serving stops (generation_config's list). Messages after the last assistant
    turn are left out. Raises RowError if the template refuses the row, if there is no assistant turn, or if a
    turn cannot be built as served.
    """
    samples: list[Sample] = []
    ids: list[int] = []
    supervised: list[bool] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt_text, prompt_ids = _serving_prompt(messages[:index], tokenizer, template_kwargs)
        answer = answer_ids(messages[: index + 1], prompt_text, prompt_ids, tokenizer, eos_ids, template_kwargs)
        if not answer:
            raise RowError("an answer has no tokens", f"turn {index}")
        if prompt_ids[: len(ids)] != ids:
            samples.append(Sample(ids, supervised, category, origin))
            ids, supervised = [], []
        supervised = supervised + [False] * (len(prompt_ids) - len(ids)) + [True] * len(answer)
        ids = prompt_ids + answer
    if not ids:
        raise RowError("no assistant turn")
    return [*samples, Sample(ids, supervised, category, origin)]


def supervised_spans(sample: Sample) -> list[tuple[int, int]]:
    """(start, stop) of each run of supervised tokens: one run for each answer."""
    edges = [t for t, m in enumerate(sample.supervised) if t == 0 or m != sample.supervised[t - 1]]
    bounds = pairwise([*edges, len(sample.supervised)])
    return [(start, stop) for start, stop in bounds if sample.supervised[start]]


def render_said(
    messages: Sequence[Message],
    answer_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    *,
    category: str = "",
    origin: str = "",
) -> Sample:
    """The sample of a conversation whose last answer is known in the tokens in which it was said.

    Only that answer is supervised. Raises RowError if the template refuses the row.
    """
    prompt_ids = render_prompt(messages[:-1], tokenizer, template_kwargs)
    supervised = [False] * len(prompt_ids) + [True] * len(answer_ids)
    return Sample([*prompt_ids, *answer_ids], supervised, category, origin)


def without_end(sample: Sample, eos_ids: Collection[int]) -> Sample:
    """Takes the end of turn off an answer that ran out of room: the target never said it."""
    if not sample.ids or sample.ids[-1] not in eos_ids:
        return sample
    return replace(sample, ids=sample.ids[:-1], supervised=sample.supervised[:-1])


def truncate(sample: Sample, max_length: int) -> Sample | None:
    """Cuts `sample` on the right to `max_length` tokens; None if no supervised token is left."""
    if not any(sample.supervised[:max_length]):
        return None
    return replace(sample, ids=sample.ids[:max_length], supervised=sample.supervised[:max_length])


def _serving_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> tuple[str, list[int]]:
    if not messages:
        raise RowError("the conversation starts with an assistant turn")
    text = chat_text(messages, tokenizer, template_kwargs, generation_prompt=True)
    ids = encode(text, tokenizer)
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        raise RowError("the chat template writes BOS twice", repr(text[:40]))
    return text, ids
