"""Evaluation prompts: rendered as serving renders them, spread evenly over their categories."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TypeVar

from data.conversations import load_conversations
from data.regenerate import Prompt, prompt_ids, read_prompts
from heads.target import Target


@dataclass(frozen=True)
class EvalPrompt:
    """A serving prompt as token ids."""

    name: str
    category: str
    ids: list[int]


P = TypeVar("P", EvalPrompt, Prompt)


def load_prompts(sources: Sequence[str], target: Target, limit: int | None = None) -> list[EvalPrompt]:
    """Read prompts and keep `limit` of them, taking one category after the other in turn.

    Raises:
        ValueError: if a source is missing or empty, or a prompt leaves no room in the target's context.
    """
    rendered = []
    for prompt in read_prompts(load_conversations(sources, needs_answer=False)):
        ids = prompt_ids(prompt, target.tokenizer, target.config.template_kwargs)
        if len(ids) >= target.max_context:
            raise ValueError(
                f"prompt {prompt.name} has {len(ids)} tokens but the context of {target.config.name} holds "
                f"{target.max_context}; shorten or remove it"
            )
        rendered.append(EvalPrompt(prompt.name, prompt.category, ids))
    return in_turn(rendered, limit)


def in_turn(prompts: Iterable[P], limit: int | None) -> list[P]:
    """`limit` prompts, taken from one category after the other."""
    by_category: dict[str, list[P]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    turns = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in turns if prompt is not None][:limit]
