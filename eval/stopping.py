"""When a generation ends: end-of-text ids, stop strings, token and context limits.

Plain and speculative decoding push their tokens one by one through the same `Stopper`, also inside an accepted
block, so both end at the same token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopConditions:
    """Limits of one generation; the token that meets one of them is still emitted."""

    eos_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    max_new_tokens: int = 128
    max_context: int = 1 << 30  # prompt and new tokens together

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if any(not text for text in self.stop_strings):
            raise ValueError("a stop string must not be empty; remove it from stop_strings")


class Stopper:
    """Watches the tokens of one generation.

    Raises:
        ValueError: if the prompt leaves no room for a single token.
    """

    def __init__(self, conditions: StopConditions, prompt_length: int, decode: Callable[[Sequence[int]], str]):
        if prompt_length >= conditions.max_context:
            raise ValueError(
                f"the prompt has {prompt_length} tokens but the context holds {conditions.max_context}, one of them "
                "new; shorten the prompt"
            )
        self.conditions = conditions
        self.limit = min(conditions.max_new_tokens, conditions.max_context - prompt_length)
        self.decode = decode
        self.tokens: list[int] = []
        self.reason: str | None = None

    @property
    def room(self) -> int:
        """How many more tokens may be emitted."""
        return self.limit - len(self.tokens)

    def push(self, tokens: Sequence[int]) -> int:
        """Emit tokens until a condition holds; return how many were emitted, and set `reason` if one held."""
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            self.reason = self._reason(token)
            if self.reason is not None:
                return count
        return len(tokens)

    def _reason(self, token: int) -> str | None:
        if token in self.conditions.eos_ids:
            return "eos"
        if self._ends_a_stop_string():
            return "stop string"
        return "length" if not self.room else None

    def _ends_a_stop_string(self) -> bool:
        # A token adds at least one byte to the text, so the last len(bytes) tokens hold any stop string that has
        # just been completed; a few more keep multi-byte characters whole.
        for text in self.conditions.stop_strings:
            if text in self.decode(self.tokens[-(len(text.encode()) + 4) :]):
                return True
        return False
