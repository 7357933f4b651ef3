"""Turns whose ids cannot be read off the plain rendering: merges, think blocks, ends of turn."""

import pytest

from data.problems import RowError
from data.render import render, render_prompt

CHATML = ["<|im_start|>", "<|im_end|>"]
THINK = ("<think>", "</think>")
SINGLE = [
    {"role": "user", "content": "Name the capital of France."},
    {"role": "assistant", "content": "The capital is Paris."},
]
MULTI = [
    *SINGLE,
    {"role": "user", "content": "And the colour of the sea?"},
    {"role": "assistant", "content": "Blue, mostly."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four"},
]


def test_boundary_merge_is_tokenised_as_continuation(make_tokenizer):
    """The prompt ends in a line break, the answer begins with one, and the vocabulary joins the two."""
    tokenizer = make_tokenizer("chatml", CHATML, "<|im_end|>", kind="joined-breaks")
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "\nYes"}]
    both, one = tokenizer.convert_tokens_to_ids(["ĊĊ", "Ċ"])
    assert both in tokenizer.apply_chat_template(messages, return_dict=False)  # the plain rendering merges
    (sample,) = render(messages, tokenizer, [tokenizer.eos_token_id], {})
    assert both not in sample.ids
    start = sample.supervised.index(True)
    assert sample.ids[start - 1] == sample.ids[start] == one


THINK_LAST = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_think_block_in_last_turn_only_splits_per_turn(kwargs, make_tokenizer):  # DAT-02
    tokenizer = make_tokenizer(THINK_LAST, CHATML, "<|im_end|>", words=THINK)
    samples = render(MULTI, tokenizer, [tokenizer.eos_token_id], kwargs)
    assert len(samples) == 3
    for sample, turn in zip(samples, (1, 3, 5), strict=True):
        prompt = render_prompt(MULTI[:turn], tokenizer, kwargs)
        assert sample.ids[: len(prompt)] == prompt
        assert sample.supervised == [False] * len(prompt) + [True] * (len(sample.ids) - len(prompt))
        answer = tokenizer.decode(sample.ids[len(prompt) :])
        block = "" if kwargs else "<think>\n\n</think>\n\n"
        assert answer == block + MULTI[turn]["content"] + "<|im_end|>"


THINK_PROMPT = (  # as DeepSeek-R1 and QwQ: the prompt opens the thinking, history drops it
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' %}{% set c = c.split('</think>')[-1].lstrip() %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)


def test_opened_thinking_is_neither_doubled_nor_lost(make_tokenizer):  # DAT-14
    tokenizer = make_tokenizer(THINK_PROMPT, CHATML, "<|im_end|>", words=THINK)
    ends = [tokenizer.eos_token_id]
    turns = [{"role": "assistant", "content": f"<think>\nHm {i}\n</think>\n\nAnswer {i}"} for i in range(2)]
    messages = [MULTI[0], turns[0], MULTI[2], turns[1]]
    samples = render(messages, tokenizer, ends, {})
    assert len(samples) == 2
    for i, sample in enumerate(samples):
        text = tokenizer.decode(sample.ids)
        assert text.count("<think>") == text.count("</think>") == 1
        start = sample.supervised.index(True)
        assert tokenizer.decode(sample.ids[start:]) == f"Hm {i}\n</think>\n\nAnswer {i}<|im_end|>"
    with pytest.raises(RowError, match=r"opens <think> and the answer never closes it"):
        render(SINGLE, tokenizer, ends, {})
    reasoned = {**SINGLE[1], "reasoning_content": "Hm"}
    with pytest.raises(RowError, match="put the text that the target emitted into content"):
        render([SINGLE[0], reasoned], tokenizer, ends, {})


def test_thinking_answers_with_thinking_switched_off_are_refused(make_tokenizer):
    tokenizer = make_tokenizer("qwen3", CHATML, "<|im_end|>", words=THINK)
    messages = [SINGLE[0], {"role": "assistant", "content": "<think>\nHm\n</think>\n\nParis"}]
    ends = [tokenizer.eos_token_id]
    (sample,) = render(messages, tokenizer, ends, {})
    assert tokenizer.decode(sample.ids).count("<think>") == 1
    with pytest.raises(RowError, match=r"repeats the <think> .*enable_thinking"):
        render(messages, tokenizer, ends, {"enable_thinking": False})


def test_template_tail_is_not_supervised(chatml):
    tokenizer, ends = chatml
    (sample,) = render(SINGLE, tokenizer, ends, {})
    assert sample.ids[-1] == ends[0]
    # An end of turn that the caller does not know: all but the blank tail.
    (sample,) = render(SINGLE, tokenizer, [], {})
    assert sample.ids[-1] == ends[0]


def test_no_special_end_keeps_the_words(make_tokenizer):
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer = make_tokenizer(template, CHATML, "<|im_end|>")
    (sample,) = render(SINGLE, tokenizer, [tokenizer.eos_token_id], {})
    assert tokenizer.decode(sample.ids).endswith("assistant: The capital is Paris.")
    assert sample.num_supervised == len("The capital is Paris.")


def test_answer_that_holds_an_end_of_turn_is_refused(chatml):
    tokenizer, ends = chatml
    messages = [SINGLE[0], {"role": "assistant", "content": "It ends in <|im_end|> always."}]
    with pytest.raises(RowError, match="the answer holds an end-of-turn token"):
        render(messages, tokenizer, ends, {})
