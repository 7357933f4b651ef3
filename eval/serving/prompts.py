"""The prompts of a bench, spread evenly over their categories; the server applies its own chat template."""

import json
from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain, zip_longest

from data.conversations import load_conversations
from data.regenerate import Prompt, read_prompts


def load_prompts(sources: Sequence[str], limit: int | None) -> list[Prompt]:
    """Read prompts and keep `limit` of them, taking one category after the other in turn.

    Raises:
        ValueError: if a source is missing or empty.
    """
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in read_prompts(load_conversations(sources, needs_answer=False)):
        by_category[prompt.category].append(prompt)
    in_turn = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in in_turn if prompt is not None][:limit]


def digest(prompts: Sequence[Prompt]) -> str:
    """What two benches must share to have asked the same."""
    return sha256(json.dumps([prompt.messages for prompt in prompts]).encode()).hexdigest()[:16]
