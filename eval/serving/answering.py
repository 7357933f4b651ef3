"""A client that asks for whole answers to train on: patient, one seed for each answer, with token ids where there are.

Not streamed, since SGLang gives token ids with whole answers only; nothing is timed, so nothing is lost by that.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from data.regenerate import Job
from eval.sampling import SamplingConfig
from eval.serving.completion import Completion, parse_completion
from eval.serving.connection import LOCKED, SHOWN, Advice, Connection
from eval.serving.failures import UNREACHABLE, Attempts, RequestFailed, RetryConfig, TryAgain, try_later

KEY_VARIABLE = "OPENAI_API_KEY"
CONNECT_S, PATIENCE_S = 5.0, 30.0
ASK_FOR_IDS = ("return_token_ids", "return_prompt_token_ids")  # vLLM takes the first, SGLang both
OWN_FIELDS = {"chat_template_kwargs", "max_tokens", "messages", "model", "seed", "stream", "temperature", "tools"}


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Which server answers, and how patient we are.

    url: None for a target in this process. served_model: None takes the only one that the server lists.
    concurrency: requests under way at a time. timeout_s: for one attempt, the wait in the server's queue included.
    max_failed_share: of all answers; with more than that failed, the run stops.
    token_ids: ask for them; False for a server that refuses fields which OpenAI's API does not know.
    extra_body: goes into each request as it is: min_p, repetition_penalty, tool_choice, ...
    """

    url: str | None = None
    served_model: str | None = None
    concurrency: int = 32
    timeout_s: float = 600.0
    max_failed_share: float = 0.01
    token_ids: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    retry: RetryConfig = field(default_factory=lambda: RetryConfig(attempts=8, longest_wait_s=60.0))

    def __post_init__(self):
        if self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency} must be at least 1")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s={self.timeout_s} must be above 0")
        if not 0 <= self.max_failed_share < 1:
            raise ValueError(f"max_failed_share={self.max_failed_share} must be in [0, 1)")
        if taken := sorted(set(self.extra_body) & OWN_FIELDS):
            raise ValueError(f"extra_body.{taken[0]} is set by other settings; remove it")


@dataclass(frozen=True)
class Answered:
    """What came of a job: a completion, or why there is none."""

    job: Job
    retries: int
    completion: Completion | None = None
    failure: str | None = None  # a kind that failures are counted by
    detail: str = ""


class AnsweringClient(Connection):
    """A connection that asks jobs. fields: what is the same in all requests (see `request_fields`)."""

    def __init__(self, config: ServerConfig, fields: Mapping[str, Any], target: str):
        assert config.url is not None
        super().__init__(
            config.url,
            model=config.served_model,
            key=os.environ.get(KEY_VARIABLE),
            connections=config.concurrency,
            connect_s=CONNECT_S,
            patience_s=PATIENCE_S,
            advice=Advice(
                start=f"start one (vllm serve {target}), or correct url=",
                model="served_model=...",
                key=f"export {KEY_VARIABLE}",
            ),
        )
        self.config, self.fields = config, dict(fields)

    async def ask(self, job: Job, index: int) -> Answered:
        """Send a job's prompt, again where that may help, and read its answer.

        Raises:
            ValueError: if the server would refuse all others as well.
        """
        attempts, body = Attempts(), self._body(job)
        try:
            completion = await attempts.until_answered(lambda: self._attempt(body), self.config.retry)
        except RequestFailed as failure:
            return Answered(job, attempts.retries, failure=failure.kind, detail=failure.detail)
        return Answered(job, attempts.retries, completion)

    def _body(self, job: Job) -> dict[str, Any]:
        tools = {"tools": job.prompt.tools} if job.prompt.tools else {}
        messages = [_as_sent(message) for message in job.prompt.messages]
        return {"model": self.model, "messages": messages, "seed": job.seed, **tools, **self.fields}

    async def _attempt(self, body: dict[str, Any]) -> Completion:
        limit = self.config.timeout_s
        try:
            async with asyncio.timeout(limit):
                response = await self.http.post("/v1/chat/completions", json=body)
        except TimeoutError as error:
            raise TryAgain("took too long", f"no answer within timeout_s={limit:g}") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise TryAgain(UNREACHABLE, f"{type(error).__name__}: {error}") from error
        except httpx.RequestError as error:
            raise TryAgain("connection lost", f"{type(error).__name__}: {error}") from error
        self._require_answer(response)
        return parse_completion(response)

    def _require_answer(self, response: httpx.Response) -> None:
        status = response.status_code
        if status in LOCKED:
            raise self.locked(response)
        if status == httpx.codes.NOT_FOUND:
            raise ValueError(
                f"{self.url} does not serve {self.model} by /v1/chat/completions ({response.text[:SHOWN]!r}); "
                f"correct {self.advice.model} or url="
            )
        if status == httpx.codes.TOO_MANY_REQUESTS or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise try_later(response)
        if status != httpx.codes.OK:
            raise RequestFailed(f"status {status}", response.text[:SHOWN])


def request_fields(
    config: ServerConfig, sampling: SamplingConfig, max_new_tokens: int, template_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """What all requests ask for alike; top_k only where it is on, since OpenAI's own API does not know it."""
    return {
        "max_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **({"top_k": sampling.top_k} if sampling.top_k else {}),
        **({"chat_template_kwargs": dict(template_kwargs)} if template_kwargs else {}),
        **(dict.fromkeys(ASK_FOR_IDS, True) if config.token_ids else {}),
        **config.extra_body,
    }


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the API wants it: arguments of tool calls as JSON text, which servers read for their templates."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_call_as_sent(call) for call in message["tool_calls"]]}


def _call_as_sent(call: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] | None = call.get("function")
    if function is None or isinstance(function.get("arguments"), str | None):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
