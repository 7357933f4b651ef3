"""What a server streams: bytes -> server-sent events -> chunks of a chat completion -> one answer with its times."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from eval.serving.connection import SHOWN
from eval.serving.failures import RequestFailed

DONE = "[DONE]"


@dataclass(frozen=True)
class Chunk:
    """One chunk. usage: the server's token counts, where this chunk carries them.

    has_tokens: it stands for generated tokens, which may have no text yet: a token can be half a character. A chunk
    without text that names the role only opens the answer.
    """

    text: str
    finish: str | None
    usage: dict[str, Any] | None
    has_tokens: bool


@dataclass
class Answer:
    """The chunks of one answer so far. Times are of the caller's clock; None until they have come."""

    first_token: float | None = None
    end: float | None = None
    token_chunks: int = 0
    finish: str | None = None
    usage: dict[str, Any] | None = None
    texts: list[str] = field(default_factory=list)

    def add(self, chunk: Chunk, now: float) -> None:
        """Take in a chunk that arrived at `now`. An answer without tokens begins where it ends."""
        if chunk.has_tokens or chunk.finish:
            self.first_token = now if self.first_token is None else self.first_token
            self.end = now
        self.token_chunks += chunk.has_tokens
        self.texts.append(chunk.text)
        self.finish = chunk.finish or self.finish
        self.usage = chunk.usage or self.usage


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each server-sent event; comments and other fields are left out.

    Lines end at line feeds only: text may hold other separators that `str.splitlines` would cut at, such as U+2028.

    Raises:
        RequestFailed: for bytes that are not UTF-8.
    """
    rest, data = b"", []
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and data:
                yield _decode(b"\n".join(data))
                data = []


def parse_chunk(data: str) -> Chunk:
    """One event's data as a chunk.

    Raises:
        RequestFailed: if it is not a chunk of a chat completion, or carries an error of the server.
    """
    try:
        content = json.loads(data)
    except json.JSONDecodeError as error:
        raise RequestFailed("malformed chunk", f"{error}: {data[:SHOWN]!r}") from error
    if isinstance(content, dict) and content.get("error"):
        raise RequestFailed("server error", str(content["error"])[:SHOWN])
    try:
        usage, choices = dict(content.get("usage") or {}) or None, content["choices"]
        if not choices:
            return Chunk("", None, usage, False)
        delta, finish = choices[0].get("delta") or {}, choices[0].get("finish_reason")
        text = _text(delta)
        return Chunk(text, finish, usage, bool(text) or not (finish or delta.get("role")))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RequestFailed("malformed chunk", f"not a chat completion: {data[:SHOWN]!r}") from error


def _text(delta: dict[str, Any]) -> str:
    """Everything that a delta says: thoughts and tool calls are generated tokens too."""
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    called = [call.get(name) for call in calls for name in ("name", "arguments")]
    parts = [delta.get("reasoning_content"), delta.get("reasoning"), delta.get("content"), *called]
    return "".join(part for part in parts if part)


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestFailed("malformed chunk", f"{error}") from error
