"""The client against a server that answers right, late, wrongly or not at all."""

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest

from data.regenerate import Prompt
from eval.serving.client import ChatClient, ClientConfig, TimeoutConfig
from eval.serving.connection import server_root
from eval.serving.failures import RetryConfig, retry_after_s
from eval.serving.records import RequestResult
from tests.eval.serving.faulty_server import FaultyServer, chunk_sizes, text_of

PROMPT = Prompt("p", "chat", [{"role": "user", "content": "say"}])
SOON, LATE = 0.3, 30.0
PATIENCE = TimeoutConfig(connect_s=LATE, first_token_s=LATE, between_chunks_s=LATE, total_s=LATE)
FAST = RetryConfig(attempts=2, first_wait_s=0.01)


def ask(server: FaultyServer, index: int = 0, prompt: Prompt = PROMPT, **settings) -> RequestResult:
    async def run():
        async with ChatClient(
            server.url, ClientConfig(**{"timeout": PATIENCE, "retry": FAST, **settings}), 1
        ) as client:
            await client.find_model()
            return await client.ask(prompt, index)

    return asyncio.run(run())


def test_tokens_are_the_servers_and_times_the_clocks():
    with FaultyServer(first_s=0.06, chunk_s=0.03) as server:
        result = ask(server)
    sizes, _ = chunk_sizes(10, drafts=True)
    assert len(sizes) == 5  # chunks, of 10 tokens
    assert (result.completion_tokens, result.prompt_tokens, result.cached_tokens) == (10, 7, 4)
    assert result.text == "".join(map(text_of, range(5), sizes))
    assert (result.failure, result.finish, result.retries) == (None, "length", 0)
    assert result.ttft_s is not None
    assert result.decode_s is not None
    assert result.ttft_s >= 0.06
    # A client that is late for the first chunk sees less of the answer's time, but not less of the whole.
    assert result.latency_s is not None
    assert result.latency_s >= 0.06 + 4 * 0.03
    assert result.timing is not None
    assert result.timing.tokens == 9


@pytest.mark.parametrize("tools", [{}, {"tools": [{"type": "function", "function": {"name": "weather"}}]}])
def test_a_request_asks_for_what_was_configured(tools):
    with FaultyServer() as server:
        ask(
            server,
            index=3,
            prompt=replace(PROMPT, **tools),
            max_tokens=17,
            temperature=0.5,
            seed=40,
            extra_body={"ignore_eos": True},
        )
    assert server.bodies == [
        {
            "model": "tiny",
            "messages": PROMPT.messages,
            **tools,
            "max_tokens": 17,
            "temperature": 0.5,
            "seed": 43,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]


@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("drop", "connection lost", "after 3 chunks"),
        ("malformed", "malformed chunk", "choices"),
        ("not a chunk", "malformed chunk", "not a chat completion"),
        ("error", "server error", "EngineDeadError"),
        ("no usage", "no usage", "chunks are not tokens"),
        ("no end", "connection lost", "without an end"),
        ("not a stream", "not a stream", "{}"),
        ("broken", "status 500", "too much"),
    ],
)
def test_a_bad_answer_is_a_failure_with_its_reason(fault, kind, detail):
    with FaultyServer({0: fault}) as server:
        result = ask(server)
    assert (result.failure, result.retries) == (kind, 0)
    assert detail in result.detail
    assert result.completion_tokens is None
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("fault", "timeout", "kind", "detail"),
    [
        ("stall", replace(PATIENCE, between_chunks_s=SOON), "stalled", "nothing for 0.3 s"),
        ("mute", replace(PATIENCE, first_token_s=SOON), "no first token", "none within 0.3 s"),  # comments are no token
        ("", replace(PATIENCE, total_s=SOON), "took too long", "no end within 0.3 s"),
    ],
)
def test_an_answer_may_not_take_forever(fault, timeout, kind, detail):
    with FaultyServer({0: fault}, chunk_s=0.2) as server:
        result = ask(server, timeout=timeout)
    assert (result.failure, result.detail[: len(detail)]) == (kind, detail)


@pytest.mark.parametrize("fault", ["busy", "unavailable", "refuse"])
def test_a_passing_trouble_is_tried_again(fault):
    with FaultyServer({0: fault, 1: fault}) as server:
        result = ask(server)
    assert (result.failure, result.retries, result.completion_tokens) == (None, 2, 10)
    assert result.ttft_s is not None
    assert result.waited_s >= 0.01  # a pause, which is no part of the time to the first token


def test_retries_end():
    with FaultyServer(dict.fromkeys(range(9), "unavailable")) as server:
        result = ask(server)
    assert (result.failure, result.retries, len(server.bodies)) == ("status 503", 2, 3)


def test_the_server_says_how_long_to_wait():
    with FaultyServer({0: "busy"}, retry_after="0.5") as server:
        result = ask(server)
    assert (result.failure, result.retries) == (None, 1)
    assert result.waited_s >= 0.5
    with FaultyServer({0: "busy"}, retry_after="3600") as server:
        result = ask(server)
    assert (result.failure, result.retries) == ("status 429", 0)
    assert result.detail == "too much (asks to wait 3600 s)"


def test_waiting_is_no_part_of_an_answers_time():
    async def run(url: str) -> tuple[float, RequestResult]:
        async with ChatClient(url, ClientConfig(timeout=PATIENCE, retry=FAST, model="tiny"), 1) as client:
            began = time.perf_counter()
            result = await client.ask(PROMPT, 0)
            return time.perf_counter() - began, result

    with FaultyServer({0: "busy"}, retry_after="0.5") as server:
        took_s, result = asyncio.run(run(server.url))
    assert result.latency_s is not None
    assert result.waited_s + result.latency_s <= took_s


def test_retry_after_is_a_number_or_a_date():
    def asked(value: str) -> float:
        return retry_after_s(httpx.Response(429, headers={"Retry-After": value}))

    assert asked("2.5") == 2.5
    assert 25 < asked(format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)) <= 30
    assert asked(format_datetime(datetime.now(UTC) - timedelta(seconds=30), usegmt=True)) == 0
    assert asked("soon") == asked("-3") == 0
    assert retry_after_s(httpx.Response(503)) == 0


def test_one_piece_has_no_time_per_token():
    with FaultyServer({0: "one piece"}) as server:
        result = ask(server)
    # The end of the answer comes in a packet of its own: 9 tokens in that moment would be an absurd rate.
    assert (result.completion_tokens, result.chunks, result.timing) == (10, 1, None)


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "sesame")
    with FaultyServer() as server:
        ask(server, api_key_variable="SERVER_KEY")
        with pytest.raises(ValueError, match="api_key_variable=NO_SUCH_KEY is not set"):
            ask(server, api_key_variable="NO_SUCH_KEY")
    assert server.keys == ["Bearer sesame"]


def test_addresses():
    assert server_root("http://host:8000/v1/") == "http://host:8000"
    for wrong in ("host:8000", "ftp://host", "http://", "http://[::1"):
        with pytest.raises(ValueError, match=r"must be like|is not an address"):
            server_root(wrong)
