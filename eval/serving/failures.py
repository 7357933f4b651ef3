"""How a request can fail, and how long to wait before it is tried again."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx

from eval.serving.connection import SHOWN

T = TypeVar("T")

UNREACHABLE = "no connection"
BUSY = (429, 503)


class RequestFailed(Exception):  # noqa: N818
    """A request that brought no answer. kind: what failures are counted by; detail: what exactly happened."""

    def __init__(self, kind: str, detail: str):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class TryAgain(RequestFailed):
    """A failure that another attempt may not meet. wait_s: the pause that the server asked for, 0 if it did not."""

    def __init__(self, kind: str, detail: str, wait_s: float = 0.0):
        super().__init__(kind, detail)
        self.wait_s = wait_s


@dataclass(frozen=True)
class RetryConfig:
    """Attempts after the first, and the pauses before them: first_wait_s, doubled each time, with jitter."""

    attempts: int = 5
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0

    def __post_init__(self):
        for item in fields(self):
            if getattr(self, item.name) < 0:
                raise ValueError(f"retry.{item.name}={getattr(self, item.name)} must not be negative")

    def wait_s(self, retries: int, failure: TryAgain) -> float | None:
        """Seconds until attempt `retries + 1`; None: do not try again.

        A server that asks for more patience than `longest_wait_s` gets no other attempt.
        """
        if retries >= self.attempts or failure.wait_s > self.longest_wait_s:
            return None
        backed_off = min(self.first_wait_s * 2**retries, self.longest_wait_s)
        # Jitter: requests that were refused together do not come back together.
        return max(failure.wait_s, backed_off * random.uniform(0.75, 1))


@dataclass
class Attempts:
    """The attempts at one request so far. sent: when the last one began, by time.perf_counter."""

    retries: int = 0
    sent: float = 0.0

    async def until_answered(self, attempt: Callable[[], Awaitable[T]], retry: RetryConfig) -> T:
        """What an attempt brings, the first one or a later one.

        Raises:
            RequestFailed: as the last attempt did, when another would not help or `retry` allows none.
        """
        while True:
            self.sent = time.perf_counter()
            try:
                return await attempt()
            except TryAgain as failure:
                wait_s = retry.wait_s(self.retries, failure)
                if wait_s is None:
                    raise
            self.retries += 1
            await asyncio.sleep(wait_s)


def try_later(response: httpx.Response) -> TryAgain:
    """The failure of a request, read to its end, whose server could not answer now."""
    wait_s = retry_after_s(response)
    asked = f" (asks to wait {wait_s:g} s)" if wait_s else ""
    return TryAgain(f"status {response.status_code}", response.text[:SHOWN] + asked, wait_s)


def retry_after_s(response: httpx.Response) -> float:
    """Seconds that the response's Retry-After header asks for, given as a number or a date; 0 if it asks for none."""
    asked = response.headers.get("Retry-After", "").strip()
    if not asked:
        return 0.0
    try:
        return max(0.0, float(asked))
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(asked)
    except ValueError:
        return 0.0  # neither of the two forms that RFC 9110 allows: our own back-off holds
    until = until.replace(tzinfo=until.tzinfo or UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())
