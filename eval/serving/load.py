"""Load on a server: a fixed number of users, each of whom asks the next prompt when the last one is answered."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from eval.serving.failures import UNREACHABLE


class ServerGone(Exception):  # noqa: N818
    """The server takes no connections any more, however often it is tried."""


class Result(Protocol):
    """What came of a request; failure: None if it was answered."""

    @property
    def failure(self) -> str | None: ...
    @property
    def detail(self) -> str: ...
    @property
    def retries(self) -> int: ...


P = TypeVar("P", contravariant=True)
R = TypeVar("R", bound=Result, covariant=True)


class Client(Protocol[P, R]):
    """Who asks: one server's clients for a bench and for regeneration."""

    @property
    def url(self) -> str: ...
    async def ask(self, prompt: P, index: int, /) -> R: ...


async def run_load(
    client: Client[P, R], prompts: Sequence[P], concurrency: int, on_result: Callable[[R], None]
) -> float:
    """Ask every prompt once, `concurrency` at a time; returns the seconds from the first request to the last answer.

    `on_result` is told of each request as it ends, in the order in which they end.

    Raises:
        ServerGone: when a request could not connect. The others under way are finished first, no more are sent.
    """
    waiting = iter(enumerate(prompts))
    gone: list[R] = []
    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as users:
            for _ in range(min(concurrency, len(prompts))):
                users.create_task(_user(client, waiting, on_result, gone))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures  # one is enough to say: a full disk, not the server
    if gone:
        raise ServerGone(f"{client.url} takes no connections ({gone[0].detail}), after {gone[0].retries} retries")
    return time.perf_counter() - began


async def _user(
    client: Client[P, R],
    waiting: Iterator[tuple[int, P]],
    on_result: Callable[[R], None],
    gone: list[R],
) -> None:
    for index, prompt in waiting:
        result = await client.ask(prompt, index)
        on_result(result)
        if result.failure == UNREACHABLE:
            gone.append(result)
        if gone:
            return
