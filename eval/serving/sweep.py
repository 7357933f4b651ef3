"""The sweep of a bench: which blocks are run in which order, and what is read before and after each."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from data.regenerate import Prompt
from eval.serving.client import ChatClient
from eval.serving.counters import Counters
from eval.serving.load import ServerGone, run_load
from eval.serving.log import BenchLog
from eval.serving.records import Block, BlockResult, RequestResult


class Display(Protocol):
    """What a person sees of a sweep."""

    def block(self, block: Block) -> None: ...
    def request(self, result: RequestResult) -> None: ...


def plan_blocks(arms: Sequence[str], concurrency: Sequence[int], repeats: int) -> list[Block]:
    """Blocks in the order in which they run: the arms in turn (A B A B), so that drift meets both alike."""
    order = [(arm, users, repeat) for repeat in range(repeats) for users in concurrency for arm in arms]
    return [Block(index, *facts) for index, facts in enumerate(order)]


async def warm_up(client: ChatClient, prompts: Sequence[Prompt], concurrency: int) -> None:
    """Ask prompts that do not count, and see that the server streams and counts tokens.

    Raises:
        ValueError: if one of them fails.
    """
    failed: list[RequestResult] = []

    def look(result: RequestResult) -> None:
        if result.failure:
            failed.append(result)

    try:
        await run_load(client, prompts, concurrency, look)
    except ServerGone as error:
        raise ValueError(f"{error}; start the server, or correct url=") from error
    if failed:
        raise ValueError(
            f"{client.url}: the warm-up request {failed[0].prompt} failed, {failed[0].failure}: {failed[0].detail}; "
            "nothing was measured"
        )


async def sweep(
    clients: Mapping[str, ChatClient],
    prompts: Sequence[Prompt],
    plan: Sequence[Block],
    log: BenchLog,
    display: Display,
) -> None:
    """Run the blocks of `plan` one after the other; everything measured is in `log` the moment it is known.

    Raises:
        ServerGone: if a server takes no connections any more; the blocks that are left are not run.
    """
    for block in plan:
        display.block(block)
        await _run_block(clients[block.arm], prompts, block, log, display)


async def _run_block(
    client: ChatClient, prompts: Sequence[Prompt], block: Block, log: BenchLog, display: Display
) -> None:
    results: list[RequestResult] = []

    def on_result(result: RequestResult) -> None:
        results.append(result)
        log.request(block, result)
        display.request(result)

    before = await _reading(client)
    began = time.perf_counter()
    try:
        seconds = await run_load(client, prompts, block.concurrency, on_result)
    except (ServerGone, asyncio.CancelledError):
        broken_off = "the block was broken off before the counters could be read again"
        log.block(BlockResult(block, time.perf_counter() - began, False, None, broken_off))
        raise
    counters, unknown = _counted(before, await _reading(client), results)
    log.block(BlockResult(block, seconds, True, counters, unknown))


async def _reading(client: ChatClient) -> Counters | str:
    """The counters, or why there are none: acceptance is then unknown, and times are measured all the same."""
    try:
        return await client.counters()
    except ValueError as error:
        return str(error)


def _counted(
    before: Counters | str, after: Counters | str, results: Sequence[RequestResult]
) -> tuple[Counters | None, str]:
    """What the server counted between the readings, and what is to be said of it."""
    if isinstance(before, str):
        return None, before
    if isinstance(after, str):
        return None, after
    try:
        gained = after - before
    except ValueError as error:
        return None, str(error)
    return gained, "; ".join(note for note in (_foreign(gained, results), _rounded(after)) if note)


def _foreign(gained: Counters, results: Sequence[RequestResult]) -> str:
    """Failed requests leave traces that cannot be told from others' requests, so nothing is said of them."""
    if gained.requests in (None, len(results)) or any(result.failure or result.retries for result in results):
        return ""
    return (
        f"the server counted {gained.requests} requests where {len(results)} were sent: others use it, or its "
        "counters lag, and acceptance holds more or less than this bench"
    )


def _rounded(after: Counters) -> str:
    return "the engine rounds counts from a million on; restart it before a bench" if after.is_rounded else ""
