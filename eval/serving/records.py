"""What a serving bench measures, request by request: plain data that is written to its log as it comes."""

from dataclasses import dataclass
from typing import Any

from eval.records import Timing
from eval.serving.counters import Counters

ON, OFF = "on", "off"  # the arms: a server that drafts with heads, the same target served without


@dataclass(frozen=True)
class Block:
    """All prompts, once, at one concurrency, against one arm."""

    index: int
    arm: str
    concurrency: int
    repeat: int


@dataclass(frozen=True)
class RequestResult:
    """One request: what it took, or why it failed. Seconds; times run from the attempt that was answered.

    Token counts are the server's own (`usage`); None in a failed request that did not get that far.
    """

    prompt: str
    retries: int
    waited_s: float  # in attempts and pauses before the one that counts
    ttft_s: float | None = None  # until the first chunk that holds tokens
    decode_s: float | None = None  # from there to the chunk that ended the answer
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, found in the server's prefix cache; None: it does not say
    completion_tokens: int | None = None
    chunks: int = 0  # that held tokens
    finish: str | None = None
    text: str = ""
    failure: str | None = None  # a kind that failures are counted by
    detail: str = ""

    @property
    def timing(self) -> Timing | None:
        """The answer's tokens after the first and the seconds they took; None where there is no such time.

        None: the request failed, or its tokens came in one piece.
        """
        if self.failure or self.completion_tokens is None or min(self.completion_tokens, self.chunks) < 2:
            return None
        assert self.ttft_s is not None
        assert self.decode_s is not None
        return Timing(self.completion_tokens - 1, self.ttft_s, self.decode_s)

    @property
    def latency_s(self) -> float | None:
        """Seconds from sending to the end of the answer."""
        return None if self.ttft_s is None or self.decode_s is None else self.ttft_s + self.decode_s


@dataclass(frozen=True)
class BlockResult:
    """How a block went as a whole; `counters` is what the server counted during it."""

    block: Block
    seconds: float  # from the first request to the end of the last
    complete: bool  # every request was sent, and was answered or failed
    counters: Counters | None
    unknown: str = ""  # why there are no counters, or why they are not only this block's


@dataclass(frozen=True)
class Run:
    """A bench as its log holds it, whole or broken off."""

    settings: dict[str, Any]
    plan: list[Block]
    prompts: int  # requests of each block
    requests: list[tuple[int, RequestResult]]  # with the index of their block
    blocks: list[BlockResult]
    stopped: str | None  # None: it ran to its end
