"""The prompts of a bench, spread evenly over their categories; the server applies its own chat template."""

import json
from collections.abc import Sequence
from hashlib import sha256

from data.conversations import load_conversations
from data.regenerate import Prompt, read_prompts
from eval.prompts import in_turn


def load_prompts(sources: Sequence[str], limit: int | None) -> list[Prompt]:
    """Read prompts and keep `limit` of them, taking one category after the other in turn.

    Raises:
        ValueError: if a source is missing or empty.
    """
    return in_turn(read_prompts(load_conversations(sources, needs_answer=False)), limit)


def digest(prompts: Sequence[Prompt]) -> str:
    """What two benches must share to have asked the same."""
    return sha256(json.dumps([prompt.messages for prompt in prompts]).encode()).hexdigest()[:16]
