"""Prompts that the target invents itself: given its template up to the start of a user turn, it writes that turn.

That is Magpie (arXiv 2406.08464). Left alone, a target invents what it was trained on most. After some user turns of
one kind of work it goes on in that kind:

    U: <example of a kind>   A: Done. What is next?   U: <another one>   A: Done. What is next?   U: ...
"""

import random
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data.regenerate import AnswerLog, Generate, Prompt, stream

INVENTED = "invented"
MIN_WORDS, MAX_WORDS = 4, 120
MARK = "\ue000"  # a private-use character that no template contains
REPLY = "Done. What is next?"
DRAWS = 4  # turns that are drawn after the same examples: a batch reads an opening once, however long it is


class Openings:
    """What the target goes on from when it invents its n-th prompt, and which kind of work that will be.

    examples: prompts that the invented ones shall be like; their kinds take turns. None: a bare start of a user turn.
    shots: how many examples of the kind, at most, stand before the user turn; `DRAWS` turns of a kind see the same.

    Raises:
        ValueError: if the chat template rewrites the user's text, so that no prefix can be cut.
    """

    def __init__(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any], examples: Sequence[Prompt], shots: int, seed: int
    ):
        self.tokenizer, self.template_kwargs, self.shots, self.seed = tokenizer, template_kwargs, shots, seed
        texts: dict[str, list[str]] = defaultdict(list)
        for prompt in examples:
            texts[prompt.category].append(prompt.messages[-1]["content"])
        self.kinds = sorted(texts.items())
        self.bare = self._prefix([])

    def __call__(self, number: int) -> tuple[list[int], str]:
        """Token ids up to where the user's text begins, and the category."""
        if not self.kinds:
            return self.bare, INVENTED
        rounds, kind = divmod(number, len(self.kinds))
        category, texts = self.kinds[kind]
        opening = random.Random(f"opening {rounds // DRAWS} of {category} of seed {self.seed}")
        chosen = opening.sample(texts, min(self.shots, len(texts)))
        return self._prefix(chosen), category

    def _prefix(self, earlier: Sequence[str]) -> list[int]:
        messages = [
            {"role": role, "content": content}
            for text in earlier
            for role, content in (("user", text), ("assistant", REPLY))
        ]
        rendered = self.tokenizer.apply_chat_template(
            [*messages, {"role": "user", "content": MARK}],
            tokenize=False,
            add_generation_prompt=False,
            **self.template_kwargs,
        )
        before, found, _ = rendered.partition(MARK)
        if not found:
            raise ValueError(
                "the chat template does not show the user's text as it is; give prompts instead of invent="
            )
        return self.tokenizer.encode(before, add_special_tokens=False)


def invent(
    log: AnswerLog,
    count: int,
    generate: Generate,
    tokenizer: Any,
    eos_ids: Sequence[int],
    openings: Callable[[int], tuple[list[int], str]],
    known: Sequence[str],
    batch_size: int,
    seed: int,
    on_prompts: Callable[[int], None] = lambda count: None,
) -> None:
    """Sample user turns until `log` holds `count` acceptable ones, none of which repeats another or a `known` text."""
    seen = {fingerprint(text) for text in known} | {fingerprint(row["prompt"]) for row in log.rows}
    draws = max((row["draw"] for row in log.rows), default=-1) + 1
    while len(log.rows) < count:
        numbers = range(draws, draws + batch_size)
        prefixes, categories = zip(*map(openings, numbers), strict=True)
        turns = generate(prefixes, [stream(seed, f"{INVENTED}-{number}") for number in numbers])
        accepted = []
        for number, category, tokens in zip(numbers, categories, turns, strict=True):
            text = tokenizer.decode(tokens[:-1], skip_special_tokens=False).strip()
            if not tokens or tokens[-1] not in eos_ids or fault(text) or fingerprint(text) in seen:
                continue
            seen.add(fingerprint(text))
            accepted.append({"id": f"{INVENTED}-{number}", "category": category, "prompt": text, "draw": number})
        draws += batch_size
        accepted = accepted[: count - len(log.rows)]
        log.append(accepted)
        on_prompts(len(accepted))


def fault(text: str) -> str | None:
    """Why an invented prompt is not worth answering, or None if it is."""
    words = text.split()
    if not MIN_WORDS <= len(words) <= MAX_WORDS:
        return "length"
    if not text[0].isalnum() and text[0] not in "\"'([":
        return "does not begin like a sentence"
    if any(unicodedata.category(symbol) in {"Cc", "Co", "Cn"} and symbol not in "\n\t" for symbol in text):
        return "control characters"
    if "<|" in text or "|>" in text:
        return "template markers"
    if len(set(words)) < len(words) / 2:
        return "repeats itself"
    return None


def fingerprint(text: str) -> str:
    """A text without case, spacing and punctuation: what counts as the same prompt."""
    return "".join(symbol for symbol in text.casefold() if symbol.isalnum())
