"""Server-sent events and chunks, byte by byte."""

import asyncio
import json

import pytest

from eval.serving.failures import RequestFailed
from eval.serving.stream import Answer, events, parse_chunk


def read(*pieces: bytes) -> list[str]:
    async def run():
        async def stream():
            for piece in pieces:
                yield piece

        return [data async for data in events(stream())]

    return asyncio.run(run())


def chunk(finish: str | None = None, **delta) -> str:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]})


def test_events_survive_any_cut():
    stream = "retry: 5\n: ping\n\ndata: é\u2028\x0b\x85日\r\n\r\nevent: x\ndata:two\ndata: lines\n\ndata: half".encode()
    whole = ["é\u2028\x0b\x85日", "two\nlines"]  # an event without its empty line is not one
    assert read(stream) == whole
    assert read(*(stream[place : place + 1] for place in range(len(stream)))) == whole
    with pytest.raises(RequestFailed, match="malformed chunk: 'utf-8' codec"):
        read(b"data: \xff\n\n")


def test_everything_generated_is_text():
    call = {"function": {"name": "look", "arguments": '{"up": 1}'}}
    assert parse_chunk(chunk(reasoning_content="hm", content=" yes", tool_calls=[call])).text == 'hm yeslook{"up": 1}'
    assert parse_chunk(chunk(content=None, tool_calls=None)).text == ""


def test_an_answer_begins_with_its_first_token_though_it_may_have_no_text():
    answer = Answer()
    said = [chunk(role="assistant", content=""), chunk(content=""), chunk(content="é"), chunk("stop")]
    for second, data in enumerate([*said, '{"choices": [], "usage": {"completion_tokens": 4}}']):
        answer.add(parse_chunk(data), float(second))
    assert (answer.first_token, answer.end, answer.token_chunks) == (1.0, 3.0, 2)
    assert (answer.finish, answer.usage) == ("stop", {"completion_tokens": 4})


@pytest.mark.parametrize(
    "data",
    [
        "{",
        "[]",
        '{"choices": 3}',
        '{"choices": [7]}',
        '{"choices": [{"delta": {"content": 5}}]}',
        '{"choices": [{"delta": {"tool_calls": [1]}}]}',
        '{"choices": [], "usage": [1, 2]}',
        '{"object": "list"}',
    ],
)
def test_what_is_no_chunk_is_a_failure(data):
    with pytest.raises(RequestFailed) as failure:
        parse_chunk(data)
    assert failure.value.kind == "malformed chunk"


def test_text_beside_the_role_is_a_token():
    answer = Answer()
    answer.add(parse_chunk(chunk("length", role="assistant", content="all")), 2.0)
    assert (answer.first_token, answer.end, answer.token_chunks) == (2.0, 2.0, 1)
