"""What a server answers in one piece: the body of a chat completion -> text, token ids and how it ended.

Token ids and how they came to their end are no part of the API that all servers share:
    vLLM     `token_ids` and `stop_reason` in the choice, `prompt_token_ids` beside the choices
    SGLang   `token_ids` (in some versions `response_token_ids`), `matched_stop` and `prompt_token_ids` in the choice
"""

from dataclasses import dataclass
from typing import Any

import httpx

from eval.serving.connection import SHOWN
from eval.serving.failures import RequestFailed, TryAgain

# How the API says that an answer ended -> how our rows say it. A tool call ends a turn as any other text does.
FINISHES = {"stop": "stop", "tool_calls": "stop", "function_call": "stop", "length": "length"}
PASSING = ("abort", "error")  # the server broke it off
OUTPUT_IDS, STOPS = ("token_ids", "response_token_ids"), ("stop_reason", "matched_stop")
TAKEN_OUT = ("reasoning", "reasoning_content", "tool_calls", "function_call")
MALFORMED = "malformed answer"


@dataclass(frozen=True)
class Completion:
    """One answer. None: the server does not say.

    text: without special tokens, and without what `taken_out` names (reasoning, tool calls).
    tokens: as the server counts them, the end of turn included. stop: the token id at which it stopped.
    """

    text: str
    finish: str
    tokens: int
    ids: list[int] | None
    prompt_ids: list[int] | None
    prompt_tokens: int | None
    stop: int | None
    taken_out: tuple[str, ...]


def parse_completion(response: httpx.Response) -> Completion:
    """The answer in a response of status 200.

    Raises:
        TryAgain: if it is not a chat completion, or the server broke the answer off.
        RequestFailed: if the answer ended in a way that no target does by itself, or is not counted.
    """
    try:
        content = response.json()
        (choice,) = content["choices"]
        return _completion(content, choice)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TryAgain(MALFORMED, f"{type(error).__name__}: {response.text[:SHOWN]!r}") from error


def _completion(content: dict[str, Any], choice: dict[str, Any]) -> Completion:
    message, finish = choice["message"], choice["finish_reason"]
    if finish in PASSING:
        raise TryAgain(f"finish {finish}", "the server broke the answer off")
    if finish not in FINISHES:
        raise RequestFailed(f"finish {finish}", f"only {', '.join(FINISHES)} are ends of the target's own")
    ids = _ids(choice, *OUTPUT_IDS)
    usage = content.get("usage") or {}
    tokens = len(ids) if ids is not None else usage.get("completion_tokens")
    if not isinstance(tokens, int):
        raise RequestFailed("no usage", "the server sent neither token ids nor token counts")
    stops = [choice[name] for name in STOPS if type(choice.get(name)) is int]
    return Completion(
        text=message.get("content") or "",
        finish=FINISHES[finish],
        tokens=tokens,
        ids=ids,
        prompt_ids=_ids({**content, **choice}, "prompt_token_ids"),
        prompt_tokens=usage.get("prompt_tokens"),
        stop=stops[0] if stops else None,
        taken_out=tuple(name for name in TAKEN_OUT if message.get(name)),
    )


def _ids(holder: dict[str, Any], *names: str) -> list[int] | None:
    found = next((holder[name] for name in names if holder.get(name) is not None), None)
    if found is not None and not all(type(token) is int for token in found):
        raise ValueError(f"{names[0]} are not token ids")
    return found
