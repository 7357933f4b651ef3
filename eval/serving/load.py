"""Load on a server: a fixed number of users, each of whom asks the next prompt when the last one is answered."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from data.regenerate import Prompt
from eval.serving.client import ChatClient
from eval.serving.failures import UNREACHABLE
from eval.serving.records import RequestResult


class ServerGone(Exception):  # noqa: N818
    """The server takes no connections any more, however often it is tried."""


async def run_load(
    client: ChatClient, prompts: Sequence[Prompt], concurrency: int, on_result: Callable[[RequestResult], None]
) -> float:
    """Ask every prompt once, `concurrency` at a time; returns the seconds from the first request to the last answer.

    `on_result` is told of each request as it ends, in the order in which they end.

    Raises:
        ServerGone: when a request could not connect. The others under way are finished first, no more are sent.
    """
    waiting = iter(enumerate(prompts))
    gone: list[RequestResult] = []
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
    client: ChatClient,
    waiting: Iterator[tuple[int, Prompt]],
    on_result: Callable[[RequestResult], None],
    gone: list[RequestResult],
) -> None:
    for index, prompt in waiting:
        result = await client.ask(prompt, index)
        on_result(result)
        if result.failure == UNREACHABLE:
            gone.append(result)
        if gone:
            return
