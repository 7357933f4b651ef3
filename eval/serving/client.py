"""A client of one OpenAI-compatible server: streamed chat completions with retries and time-outs, and its counters."""

import asyncio
import os
import time
from dataclasses import dataclass, field, fields
from typing import Any

import httpx

from data.regenerate import Prompt
from eval.serving.connection import SHOWN, Connection
from eval.serving.counters import Counters, parse_counters
from eval.serving.failures import BUSY, UNREACHABLE, Attempts, RequestFailed, RetryConfig, TryAgain, try_later
from eval.serving.records import RequestResult
from eval.serving.stream import DONE, Answer, events, parse_chunk

SETTLING_READS = 20
OWN_FIELDS = {"max_tokens", "messages", "model", "seed", "stream", "stream_options", "temperature", "tools"}


@dataclass(frozen=True)
class TimeoutConfig:
    """Seconds. The first token may wait in the server's queue; between chunks, a living server says something."""

    connect_s: float = 5.0
    first_token_s: float = 120.0
    between_chunks_s: float = 30.0
    total_s: float = 600.0

    def __post_init__(self):
        for item in fields(self):
            if getattr(self, item.name) <= 0:
                raise ValueError(f"timeout.{item.name}={getattr(self, item.name)} must be above 0")


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """What every request asks for, and how patient the client is.

    model: the name under which the server serves; None takes the only one that it lists.
    extra_body: goes into each request as it is, for what engines add to the API: top_k, ignore_eos, ...
    api_key_variable: the environment variable that holds the server's key, if it wants one.
    settle_s: between two readings of the counters, which lag behind the answers.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    model: str | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    timeout: TimeoutConfig = field(default_factory=TimeoutConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    api_key_variable: str | None = None
    settle_s: float = 0.2

    def __post_init__(self):
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 2: one token has no rate")
        for name in ("temperature", "settle_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if taken := sorted(set(self.extra_body) & OWN_FIELDS):
            raise ValueError(f"extra_body.{taken[0]} is set by the bench itself; remove it")


class ChatClient(Connection):
    """A connection whose answers are streamed and timed."""

    def __init__(self, url: str, config: ClientConfig, connections: int):
        super().__init__(
            url,
            model=config.model,
            key=_key(config.api_key_variable),
            connections=connections,
            connect_s=config.timeout.connect_s,
            patience_s=config.timeout.between_chunks_s,
        )
        self.config = config

    async def counters(self) -> Counters:
        """A reading of the server's counters that has settled: two in a row agree.

        Raises:
            ValueError: if there is no /metrics, or nothing in it that we know.
        """
        reading = parse_counters((await self.get("/metrics")).text)
        for _ in range(SETTLING_READS):
            await asyncio.sleep(self.config.settle_s)
            later = parse_counters((await self.get("/metrics")).text)
            if later == reading:
                break
            reading = later
        return reading

    async def ask(self, prompt: Prompt, index: int) -> RequestResult:
        """Send a prompt, again where that may help, and read its answer. `index` makes the request's seed."""
        began, attempts = time.perf_counter(), Attempts()
        body = self._body(prompt, index)
        try:
            answer = await attempts.until_answered(lambda: self._attempt(body), self.config.retry)
        except RequestFailed as failure:
            waited_s = time.perf_counter() - began
            return RequestResult(prompt.name, attempts.retries, waited_s, failure=failure.kind, detail=failure.detail)
        return _result(prompt.name, attempts.retries, attempts.sent - began, attempts.sent, answer)

    def _body(self, prompt: Prompt, index: int) -> dict[str, Any]:
        tools = {"tools": prompt.tools} if prompt.tools else {}
        return {
            "model": self.model,
            "messages": prompt.messages,
            **tools,
            "max_tokens": self.config.max_tokens,
            "temperature": self.config.temperature,
            "seed": self.config.seed + index,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.config.extra_body,
        }

    async def _attempt(self, body: dict[str, Any]) -> Answer:
        limits = self.config.timeout
        answer = Answer()
        whole, silence = asyncio.timeout(limits.total_s), asyncio.timeout(limits.first_token_s)
        try:
            async with whole, silence:
                await self._stream(body, answer, silence)
        except TimeoutError as error:
            if whole.expired():
                raise RequestFailed("took too long", f"no end within {limits.total_s} s") from error
            if answer.first_token is None:
                raise RequestFailed("no first token", f"none within {limits.first_token_s} s") from error
            raise RequestFailed("stalled", f"nothing for {limits.between_chunks_s} s amid the answer") from error
        except httpx.RequestError as error:
            raise _transport_failure(error, answer) from error
        return _checked(answer)

    async def _stream(self, body: dict[str, Any], answer: Answer, silence: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            await _require_stream(response)
            async for data in events(response.aiter_bytes()):
                if data == DONE:
                    break
                answer.add(parse_chunk(data), time.perf_counter())
                if answer.first_token is not None:
                    silence.reschedule(loop.time() + self.config.timeout.between_chunks_s)


def _key(variable: str | None) -> str | None:
    if variable is not None and variable not in os.environ:
        raise ValueError(f"api_key_variable={variable} is not set in the environment; export it")
    return None if variable is None else os.environ[variable]


async def _require_stream(response: httpx.Response) -> None:
    if response.status_code in BUSY:
        await response.aread()
        raise try_later(response)
    if response.status_code != httpx.codes.OK:
        raise RequestFailed(f"status {response.status_code}", await _said(response))
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        raise RequestFailed("not a stream", await _said(response))


async def _said(response: httpx.Response) -> str:
    await response.aread()
    return response.text[:SHOWN]


def _transport_failure(error: httpx.RequestError, answer: Answer) -> RequestFailed:
    detail = f"{type(error).__name__}: {error}"
    if answer.texts:
        return RequestFailed("connection lost", f"{detail}, after {len(answer.texts)} chunks")
    return TryAgain(UNREACHABLE, detail)


def _checked(answer: Answer) -> Answer:
    if answer.finish is None:
        raise RequestFailed("connection lost", f"the stream ended after {len(answer.texts)} chunks without an end")
    if answer.usage is None or not isinstance(answer.usage.get("completion_tokens"), int):
        raise RequestFailed("no usage", "the server sent no token counts, and chunks are not tokens")
    return answer


def _result(prompt: str, retries: int, waited_s: float, sent: float, answer: Answer) -> RequestResult:
    assert answer.usage is not None
    assert answer.first_token is not None
    assert answer.end is not None
    details = answer.usage.get("prompt_tokens_details") or {}
    return RequestResult(
        prompt,
        retries,
        waited_s,
        ttft_s=answer.first_token - sent,
        decode_s=answer.end - answer.first_token,
        prompt_tokens=answer.usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens"),
        completion_tokens=answer.usage["completion_tokens"],
        chunks=answer.token_chunks,
        finish=answer.finish,
        text="".join(answer.texts),
    )
