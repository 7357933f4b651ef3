"""Does an engine do what our decoder does? Its answers beside ours, token by token and count by count.

There are four greedy answers to each prompt: the engine's without heads and with them, and our decoder's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from eval.serving.counters import Counters
from eval.serving.engine import Answer

# A weaker engine must accept this share of the drafts that our decoder accepts.
LEAST_SHARE = 0.5


@dataclass(frozen=True)
class Comparison:
    """The four answers to one prompt; those with heads carry counters."""

    name: str
    prompt_tokens: int
    engine_plain: Answer
    engine_heads: Answer
    own_plain: Answer
    own_heads: Answer

    @property
    def plain_texts_equal(self) -> bool:
        """Whether both answer alike without heads; if not, what they do with heads cannot be compared."""
        return self.engine_plain.tokens == self.own_plain.tokens

    @property
    def texts_equal(self) -> bool:
        """Whether all four answers are the same tokens."""
        first = self.own_plain.tokens
        return all(answer.tokens == first for answer in (self.own_heads, self.engine_plain, self.engine_heads))

    @property
    def counters_equal(self) -> bool:
        """Whether both drafted and accepted alike, where that can be compared."""
        return self.plain_texts_equal and counts(self.engine_heads.counters) == counts(self.own_heads.counters)


@dataclass(frozen=True)
class Problem:
    """name: short and fixed, for scripts. text: what differs, where first."""

    name: str
    text: str


@dataclass(frozen=True)
class TextPair:
    """Two of the four answers that must be the same tokens."""

    name: str
    one: Callable[[Comparison], Answer]
    other: Callable[[Comparison], Answer]
    says: str


PLAIN_TEXTS = "plain_texts_differ"
TEXT_PAIRS = (
    TextPair(
        "own_texts_differ",
        lambda row: row.own_plain,
        lambda row: row.own_heads,
        "our decoder with heads leaves its own plain greedy decoding",
    ),
    TextPair(
        "engine_texts_differ",
        lambda row: row.engine_plain,
        lambda row: row.engine_heads,
        "{engine} with heads leaves {engine} without heads",
    ),
    TextPair(
        PLAIN_TEXTS,
        lambda row: row.own_plain,
        lambda row: row.engine_plain,
        "{engine} without heads leaves our plain greedy decoding: the target itself is computed differently",
    ),
)


def problems(rows: Sequence[Comparison], engine: str, exact: bool) -> list[Problem]:
    """Every way in which the engine fails the check, none if it passes.

    exact: texts and counters must be equal; else the heads must be in use and accept about as much as here.
    """
    found = [_nothing_drafted(rows, engine)]
    if exact:
        found += [*differences(rows, engine)]
    else:
        found += [_accepts_too_little(rows, engine)]
    return [problem for problem in found if problem is not None]


def differences(rows: Sequence[Comparison], engine: str) -> list[Problem]:
    """Which texts and counters are not equal; of an engine that is not exact, worth knowing and no failure."""
    found = [_texts_differ(rows, pair, engine) for pair in TEXT_PAIRS] + [_counters_differ(rows, engine)]
    return [problem for problem in found if problem is not None]


def counts(counters: Counters | None) -> tuple[int, tuple[int, ...]]:
    """Drafts and, of these, those whose first k tokens were accepted; zeros where nothing was drafted."""
    if counters is None or not counters.drafts:
        return 0, ()
    return counters.drafts, counters.accepted_per_position or ()


def total(answers: Sequence[Answer]) -> Counters | None:
    """The counters of several answers together; None where none has any."""
    counted = [answer.counters for answer in answers if answer.counters is not None]
    return reduce(add, counted) if counted else None


def tau(answers: Sequence[Answer]) -> float | None:
    """Tokens per target forward while decoding, the target's own included; None without drafts.

    From tokens that were answered, so what is accepted behind the end of an answer does not count.
    """
    counters = total(answers)
    if counters is None or not counters.drafts:
        return None
    return sum(len(answer.tokens) - 1 for answer in answers) / counters.drafts


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two answers are not the same; the length of the shorter if it begins the longer."""
    if list(one) == list(other):
        return None
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _texts_differ(rows: Sequence[Comparison], pair: TextPair, engine: str) -> Problem | None:
    places = [(row, first_difference(pair.one(row).tokens, pair.other(row).tokens)) for row in rows]
    differing = [(row, place) for row, place in places if place is not None]
    if not differing:
        return None
    row, place = differing[0]
    says = pair.says.format(engine=engine)
    return Problem(
        pair.name, f"{says}, on {len(differing)} of {len(rows)} prompts, first on {row.name} at token {place}"
    )


def _counters_differ(rows: Sequence[Comparison], engine: str) -> Problem | None:
    judged = [row for row in rows if row.plain_texts_equal]
    differing = [row for row in judged if not row.counters_equal]
    if not differing:
        return None
    first = differing[0]
    theirs, ours = counts(first.engine_heads.counters), counts(first.own_heads.counters)
    where = f"on {len(differing)} of {len(judged)} prompts, first on {first.name}"
    shown = f"{engine} {theirs[0]} drafts, accepted {list(theirs[1])}, here {ours[0]} drafts, accepted {list(ours[1])}"
    return Problem("counters_differ", f"{engine} accepts other drafts than our decoder {where}: {shown}")


def _nothing_drafted(rows: Sequence[Comparison], engine: str) -> Problem | None:
    counters = total([row.engine_heads for row in rows])
    if counters is not None and counters.drafts:
        return None
    return Problem("nothing_drafted", f"{engine} drafted nothing: it does not use the heads")


def _accepts_too_little(rows: Sequence[Comparison], engine: str) -> Problem | None:
    theirs, ours = tau([row.engine_heads for row in rows]), tau([row.own_heads for row in rows])
    if theirs is None or ours is None or theirs - 1 >= LEAST_SHARE * (ours - 1):
        return None
    return Problem(
        "accepts_too_little",
        f"{engine} reaches tau {theirs:.2f} where our decoder reaches {ours:.2f}: the heads are read wrongly",
    )
