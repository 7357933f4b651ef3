"""One assistant turn: the ids that the target would generate after the serving prompt.

The usual case is simple: the conversation rendered up to and including the answer begins with the serving
prompt, id for id, and what follows is the answer. Two things break it, and this file is about them:

- a merge across the boundary: "assistant\\n" + "\\nYes" may hold a token "\\n\\n" with which the prompt alone
  does not end. Serving cannot take a token of the prompt back, so the answer is tokenised as a continuation;
- a template that prompts otherwise than it renders history (a think block that only the generation prompt
  has). Then the answer and the template's end of turn are put after the serving prompt.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from data.conversations import Message
from data.problems import RowError

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
PROBE = "headstartprobe"


def chat_text(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    *,
    generation_prompt: bool,
) -> str:
    """The rendered text. Raises RowError, in the template's own words, if it refuses the messages."""
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; set chat_template or take an instruct model")
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt, **template_kwargs
        )
    # A template that adds a missing field to text raises TypeError.
    except (jinja2.TemplateError, TypeError) as error:
        raise RowError("the chat template refuses the row", str(error)) from error
    assert isinstance(text, str)
    return text


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of rendered text. A BOS, if there is to be one, is in the text: the tokenizer must not add one."""
    return tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def answer_ids(
    messages: Sequence[Message],
    prompt_text: str,
    prompt_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Collection[int],
    template_kwargs: Mapping[str, Any],
) -> list[int]:
    """Ids of the last message, an assistant turn, as generated after `prompt_ids`, the end of turn included.

    Raises RowError if this cannot be said truly (see the reasons below).
    """
    full_text = chat_text(messages, tokenizer, template_kwargs, generation_prompt=False)
    stable = full_text.startswith(prompt_text)
    answer_text = full_text[len(prompt_text) :] if stable else ""
    if not stable or THINK_OPEN in prompt_text or THINK_OPEN in answer_text:
        history_text = chat_text(messages[:-1], tokenizer, template_kwargs, generation_prompt=False)
        opening = prompt_text[_shared_length(prompt_text, history_text) :]
        if not stable:
            answer_text = _served_answer(messages, full_text, opening, tokenizer, template_kwargs)
        _check_thinking(opening, answer_text)
    full_ids = encode(prompt_text + answer_text, tokenizer)
    if full_ids[: len(prompt_ids)] == prompt_ids:
        span = full_ids[len(prompt_ids) :]
    else:
        span = _continuation_ids(answer_text, prompt_ids, full_ids, tokenizer)
    return _cut_after_end_of_turn(span, tokenizer, eos_ids)


def _served_answer(
    messages: Sequence[Message],
    full_text: str,
    opening: str,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
) -> str:
    """The answer and the end of turn, where the generation prompt `opening` is not what history holds."""
    answer = messages[-1]
    unplaced = [name for name in ("tool_calls", *REASONING_FIELDS) if answer.get(name)]
    if unplaced:
        raise RowError(
            f"the template renders a turn with {unplaced[0]} otherwise than it prompts for it",
            "put the text that the target emitted into content",
        )
    probed = [*messages[:-1], {**answer, "content": PROBE}]
    probe_text = chat_text(probed, tokenizer, template_kwargs, generation_prompt=False)
    _, found, end_of_turn = probe_text.rpartition(PROBE)
    if not found:
        raise RowError("the chat template does not render the answer")
    content = answer["content"]
    if content not in full_text and content.strip() in full_text:
        content = content.strip()  # the template trims answers
    return content[_overlap(opening, content) :] + end_of_turn


def _overlap(opening: str, content: str) -> int:
    """Length of the text that ends `opening` and begins `content` ("<think>\\n"), blank text not counted."""
    for length in range(min(len(opening), len(content)), 0, -1):
        if opening.endswith(content[:length]) and content[:length].strip():
            return length
    return 0


def _check_thinking(opening: str, answer_text: str) -> None:
    for marker in (THINK_OPEN, THINK_CLOSE):
        if marker in opening and marker in answer_text:
            raise RowError(
                f"the answer repeats the {marker} of the generation prompt",
                "use the template_kwargs (enable_thinking) that the answers were made with",
            )
    if opening.rfind(THINK_OPEN) > opening.rfind(THINK_CLOSE) and THINK_CLOSE not in answer_text:
        raise RowError(
            f"the generation prompt opens {THINK_OPEN} and the answer never closes it",
            "regenerate the answers with thinking, or switch it off in template_kwargs",
        )


def _continuation_ids(
    text: str, prompt_ids: list[int], full_ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Ids of `text` that, put after `prompt_ids`, spell what `full_ids` spell."""

    def spell(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    candidates = [encode(text, tokenizer)]
    # SentencePiece-like tokenizers put a space before a text. What leads the text takes that space: a special
    # token for those that do so once, a line break for those that do so again after each special token.
    for lead in [*tokenizer.all_special_tokens[:1], "\n"]:
        lead_ids, led_ids = encode(lead, tokenizer), encode(lead + text, tokenizer)
        if led_ids[: len(lead_ids)] == lead_ids:
            candidates.append(led_ids[len(lead_ids) :])
    spelt = spell(full_ids)
    for candidate in candidates:
        if spell(prompt_ids + candidate) == spelt:
            return candidate
    raise RowError("the answer cannot be tokenised after the serving prompt", repr(text[:80]))


def _cut_after_end_of_turn(span: list[int], tokenizer: PreTrainedTokenizerBase, eos_ids: Collection[int]) -> list[int]:
    """Cuts what the template writes after the token at which serving stops: the first of `eos_ids`.

    Without such a token, only the blank tokens at the end are cut.
    """

    def blank(token: int) -> bool:
        return not str(tokenizer.decode([token])).strip()

    end = next((index + 1 for index, token in enumerate(span) if token in eos_ids), None)
    if end is None:
        end = len(span)
        while end > 0 and blank(span[end - 1]):
            end -= 1
        return span[:end]
    # Phi-3 writes <|end|>, a line break, <|endoftext|>; words there mean that the answer itself holds an end.
    special_ids = {*tokenizer.all_special_ids, *eos_ids}
    if not all(token in special_ids or blank(token) for token in span[end:]):
        raise RowError("the answer holds an end-of-turn token", repr(tokenizer.decode(span[max(0, end - 8) : end])))
    return span[:end]


def _shared_length(first: str, second: str) -> int:
    differing = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))
