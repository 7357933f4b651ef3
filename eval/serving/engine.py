"""What a serving engine is to the check, and how one running engine is asked for greedy answers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import httpx

from eval.records import Timing
from eval.serving.counters import Counters, parse_counters
from eval.serving.engine_process import EngineFailed, Launch

SETTLE_S = 0.05  # counters may lag behind the answers that they count
SETTLING_READS = 40


@dataclass(frozen=True)
class Answer:
    """A greedy answer. timing: of the whole request or generation, prefill included. counters: with heads only."""

    tokens: list[int]
    timing: Timing
    counters: Counters | None = None


class Engine(Protocol):
    """A serving engine with one target and heads for it.

    name: for people. exact: whether it computes what our decoder computes, so that texts and counters must be equal.
    drafts_past_end: whether its last draft is as long as the others, though the token limit cuts the answer inside.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    drafts_past_end: ClassVar[bool]

    def launch(self, with_heads: bool) -> Launch:
        """How its server is started."""
        ...

    def request(self, ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]) -> tuple[str, dict[str, Any]]:
        """Path and body of the request for a greedy answer to exactly these token ids."""
        ...

    def tokens(self, reply: dict[str, Any]) -> list[int]:
        """The token ids of a reply. Raises KeyError, IndexError or TypeError where there are none."""
        ...

    def version(self, client: httpx.Client) -> str:
        """What the running server says that it is."""
        ...


class EngineClient:
    """Asks the engine at one address, one request at a time."""

    def __init__(self, engine: Engine, address: str, timeout_s: float):
        self.engine = engine
        # Without trust_env a proxy of this machine would be asked for its own loopback.
        self.http = httpx.Client(base_url=address, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.close()

    def version(self) -> str:
        return self.engine.version(self.http)

    def answer(self, ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int], counted: bool) -> Answer:
        """One answer; with `counted`, also what the engine counted while it gave it.

        Raises:
            EngineFailed: if the engine does not answer, or not with token ids.
        """
        before = self._counters() if counted else None
        path, body = self.engine.request(ids, max_new_tokens, stop_ids)
        started = time.perf_counter()
        reply = self._ask(path, body)
        seconds = time.perf_counter() - started
        try:
            tokens = self.engine.tokens(reply.json())
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineFailed(
                f"{self.engine.name} sent no token ids: {reply.text[:300]}; does it serve another version's API?"
            ) from error
        timing = Timing(tokens=len(tokens), prefill_s=0.0, decode_s=seconds)
        return Answer(tokens, timing, self._counters() - before if before is not None else None)

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            reply = self.http.get(path) if body is None else self.http.post(path, json=body)
        except httpx.TransportError as error:
            raise EngineFailed(f"{self.engine.name} did not answer {path}: {error!r}") from error
        if not reply.is_success:
            raise EngineFailed(f"{self.engine.name} answered {path} with {reply.status_code}: {reply.text[:300]}")
        return reply

    def _counters(self) -> Counters:
        """What the engine has counted so far, once two readings agree."""
        last = None
        for _ in range(SETTLING_READS):
            now = parse_counters(self._ask("/metrics").text)
            if now == last:
                return now
            last = now
            time.sleep(SETTLE_S)
        raise EngineFailed(f"the counters of {self.engine.name} do not come to rest; does anyone else ask this server?")
