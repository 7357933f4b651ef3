"""Rows -> checked conversations.

A row holds one of
    conversations   ShareGPT: [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]
    messages        OpenAI:   [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]
    prompt          text, with `response` or `completion` beside it or not
and, if it likes, `category`, `id`, `tools`, `finish` and `answer_ids`. Turns may be spelt either way under either
name; other columns are not looked at. `data/sources.py` says what a source is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from data.problems import Problems, RowError
from data.sources import read_rows

Message = dict[str, Any]

ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """One row. Messages have "role" and "content"; other keys (tool_calls ...) stay for the chat template.

    `origin` is "file:line" or "source[index]"; `tools` are the row's function schemas, None if it has none.
    """

    messages: list[Message]
    category: str = ""
    origin: str = ""
    id: str = ""
    tools: list[Any] | None = None
    answer_ids: list[int] | None = None  # the last answer in the tokens in which it was said, its end included
    finished: bool = True  # False (`"finish": "length"`): the last answer was cut, so its end is not the model's

    def with_system(self, system_prompt: str | None) -> "Conversation":
        """Puts `system_prompt` first, unless it is None or the row has a system or developer message."""
        if system_prompt is None or self.messages[0]["role"] in ("system", "developer"):
            return self
        return replace(self, messages=[{"role": "system", "content": system_prompt}, *self.messages])


def read_conversations(source: str, problems: Problems, *, needs_answer: bool = True) -> Iterator[Conversation]:
    """Yields the usable rows of `source` in order and records the others in `problems`.

    `needs_answer`: a row without assistant turn is bad (training); False takes it (evaluation, regeneration).
    Call `problems.check(max_bad_share)` at the end. Raises ValueError for a missing, empty or unknown source.
    """
    num_before = problems.num_rows
    for origin, row in read_rows(source):
        problems.num_rows += 1
        try:
            conversation = _conversation(row, origin)
            if needs_answer and all(message["role"] != "assistant" for message in conversation.messages):
                raise RowError("no assistant turn")
        except RowError as error:
            problems.add(origin, error)
        else:
            yield conversation
    if problems.num_rows == num_before:
        raise ValueError(f"source {source!r} is empty; give a source with at least one conversation")


def load_conversations(
    sources: Iterable[str],
    *,
    needs_answer: bool = True,
    max_bad_share: float = 0.01,
    limit: int | None = None,
) -> list[Conversation]:
    """The first `limit` conversations of all sources; raises ValueError if too many rows are bad."""
    problems = Problems()
    rows = (row for source in sources for row in read_conversations(source, problems, needs_answer=needs_answer))
    conversations = list(islice(rows, limit))
    problems.check(max_bad_share)
    return conversations


def _conversation(row: Any, origin: str) -> Conversation:
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError("the row is not an object", type(row).__name__)
    tools = row.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RowError("tools must be a list of function schemas", repr(tools)[:80])
    return Conversation(
        messages=_messages(row),
        category=_text_or_empty(row, "category"),
        origin=origin,
        id=_text_or_empty(row, "id"),
        tools=tools,
        answer_ids=row.get("answer_ids"),
        finished=row.get("finish") != "length",
    )


def _text_or_empty(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if value is None else str(value)


def _messages(row: dict[str, Any]) -> list[Message]:
    for name in ("messages", "conversations"):
        if row.get(name) is not None:
            turns = row[name]
            if not isinstance(turns, list) or not turns:
                raise RowError(f"{name} must be a list of at least one turn")
            return [_message(turn) for turn in turns]
    prompt = row.get("prompt")
    if prompt is None:
        raise RowError("no conversations, messages or prompt", f"the row has {sorted(map(str, row))}")
    messages = [_message({"role": "user", "content": prompt})]
    answers = [row[name] for name in ("response", "completion") if row.get(name) is not None]
    if len(answers) == 2:
        raise RowError("both response and completion")
    return messages + [_message({"role": "assistant", "content": answer}) for answer in answers]


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise RowError("a turn is not an object", type(turn).__name__)
    # Parquet and datasets fill the fields that a turn lacks with None.
    message = {key: value for key, value in turn.items() if value is not None}
    name, content = message.get("from", message.get("role")), message.get("value", message.get("content"))
    if not isinstance(name, str) or name not in ROLES:
        raise RowError(f"unknown role {name!r}", f"use one of {', '.join(ROLES)}")
    role, text = ROLES[name], _content(content)
    if role in ("user", "assistant") and not text.strip() and not message.get("tool_calls"):
        raise RowError(f"empty {role} turn")
    others = {key: value for key, value in message.items() if key not in ("from", "value", "role", "content")}
    return {"role": role, "content": text, **others}


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("content is neither text nor a list of parts", type(content).__name__)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RowError("content holds a part that is not text", repr(part)[:80])
    return "".join(part["text"] for part in content)
