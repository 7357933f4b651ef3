"""The promise: supervised are exactly the tokens that the target would generate after the served prompt."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data.problems import RowError
from data.render import Sample, render, render_prompt, truncate


@dataclass(frozen=True)
class Spec:
    """How the target behind a template stops and what it writes around an answer: the oracle's knowledge."""

    template: str
    specials: list[str]
    eos: list[str]  # serving stops at any of these; the first ends an assistant turn
    answer: str = "{}"  # what the target generates after the serving prompt, without the end of turn
    bos: str | None = None
    eos_token: str | None = None  # for the template and the tokenizer, where it is not the first of eos
    kwargs: dict[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ("tool",)  # cases that the template refuses
    stable: bool = True  # turns of a conversation without system text share one sample
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.template, *(f"{key}={value}" for key, value in self.kwargs.items())])

    def tokenizer(self, make: Callable[..., PreTrainedTokenizerFast], kind: str = "byte") -> PreTrainedTokenizerFast:
        eos_token = self.eos_token or self.eos[0]
        return make(self.template, self.specials, eos_token, bos=self.bos, words=self.words, kind=kind)

    def eos_ids(self, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        return [tokenizer.convert_tokens_to_ids(text) for text in self.eos]


CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
CHATML_EOS = ["<|im_end|>", "<|endoftext|>"]
THINK = ("<think>", "</think>")
EMPTY_THINK = "<think>\n\n</think>\n\n"
LLAMA3 = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"]
GEMMA = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
PHI3 = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"]
PHI4 = ["<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|endoftext|>"]
SPECS = [
    Spec("llama2", ["<s>", "</s>"], ["</s>"], " {} ", bos="<s>"),
    Spec("llama3", LLAMA3, ["<|eot_id|>", "<|end_of_text|>"], bos=LLAMA3[0], lacks=()),
    Spec("qwen2_5", CHATML, CHATML_EOS, lacks=()),
    Spec("qwen3", CHATML, CHATML_EOS, EMPTY_THINK + "{}", lacks=(), stable=False, words=THINK),
    Spec("qwen3", CHATML, CHATML_EOS, kwargs={"enable_thinking": False}, lacks=(), stable=False, words=THINK),
    Spec("mistral", ["<s>", "</s>"], ["</s>"], " {}", bos="<s>"),
    Spec("gemma", GEMMA, ["<end_of_turn>", "<eos>"], bos="<bos>", eos_token="<eos>", lacks=("tool", "system")),
    Spec("vicuna", ["<s>", "</s>"], ["</s>"], " {}", bos="<s>"),
    Spec("chatml", CHATML, ["<|im_end|>"], lacks=()),
    Spec("phi3", PHI3, ["<|end|>", "<|assistant|>", "<|endoftext|>"], eos_token="<|endoftext|>"),
    Spec("phi4", PHI4, ["<|im_end|>"]),
]

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
SYSTEM = [{"role": "system", "content": "Be brief."}]
OPEN_END = [*MULTI, {"role": "user", "content": "Thanks, never answered"}]
PADDED = [SINGLE[0], {"role": "assistant", "content": "Words, \n\nmore words."}]
TOOLS = [
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": "Let me look."},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]
CASES = {
    "single": SINGLE,
    "multi": MULTI,
    "system": SYSTEM + MULTI,
    "open": OPEN_END,
    "breaks": PADDED,
    "tool": TOOLS,
}


def served_turns(messages, spec, tokenizer):
    """Simulated serving: (prompt ids that are sent, ids that the target then emits) of each assistant turn.

    One character is one token, so the generated ids are spelt here, without the code under test.
    """
    turns = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(
                messages[:index], add_generation_prompt=True, return_dict=False, **spec.kwargs
            )
            generated = []
            for piece in _split(spec.answer.format(message["content"]), spec.words):
                whole = piece in spec.words
                generated += [tokenizer.convert_tokens_to_ids(piece)] if whole else _spell(piece, tokenizer)
            turns.append((prompt, [*generated, tokenizer.convert_tokens_to_ids(spec.eos[0])]))
    return turns


def _split(text, markers):
    for marker in markers:
        if marker in text:
            before, after = text.split(marker, 1)
            return [*_split(before, markers), marker, *_split(after, markers)]
    return [text] if text else []


def _spell(text, tokenizer):
    symbols = {" ": "Ġ", "\n": "Ċ"}
    return [tokenizer.convert_tokens_to_ids(symbols.get(character, character)) for character in text]


def check_samples(samples, turns):
    """Each turn is supervised in exactly one sample, behind its own serving prompt, and nothing else is."""
    expected = {id(sample): [False] * len(sample.ids) for sample in samples}
    position = 0
    for prompt, generated in turns:
        sample = samples[position]
        if sample.ids[: len(prompt) + len(generated)] != prompt + generated:
            position += 1
            sample = samples[position]
        assert sample.ids[: len(prompt)] == prompt
        assert sample.ids[len(prompt) : len(prompt) + len(generated)] == generated
        for t in range(len(prompt), len(prompt) + len(generated)):
            expected[id(sample)][t] = True
    assert position == len(samples) - 1
    for sample in samples:
        assert sample.supervised == expected[id(sample)]


def test_nothing_is_missing():
    assert {spec.template for spec in SPECS} == {file.stem for file in (Path(__file__).parent / "templates").iterdir()}


@pytest.mark.parametrize(
    ("spec", "case"), [(spec, case) for spec in SPECS for case in CASES if case not in spec.lacks], ids=str
)
def test_supervised_equals_simulated_serving(spec, case, make_tokenizer):
    tokenizer = spec.tokenizer(make_tokenizer)
    samples = render(CASES[case], tokenizer, spec.eos_ids(tokenizer), spec.kwargs)
    check_samples(samples, served_turns(CASES[case], spec, tokenizer))


@pytest.mark.parametrize(
    ("spec", "case"),
    [(spec, case) for spec in SPECS for case in ("single", "multi") if spec.stable or case == "single"],
    ids=str,
)
def test_supervised_equals_character_offsets(spec, case, make_tokenizer):
    """Second oracle: where the answers stand in the text rendered once, end of turn included."""
    tokenizer, messages = spec.tokenizer(make_tokenizer), CASES[case]
    text = tokenizer.apply_chat_template(messages, tokenize=False, **spec.kwargs)
    spans, cursor = [], 0
    for message in messages:
        if message["role"] == "assistant":
            wanted = spec.answer.format(message["content"])
            start = text.index(wanted, cursor)
            ends = [text.index(end, start) + len(end) for end in spec.eos if end in text[start:]]
            cursor = min(ends)
            spans.append((start, cursor))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    naive = [any(a <= start and end <= b for a, b in spans) for start, end in encoded["offset_mapping"]]
    (sample,) = render(messages, tokenizer, spec.eos_ids(tokenizer), spec.kwargs)
    assert sample.ids == encoded["input_ids"][: len(sample.ids)]
    assert sample.supervised == naive[: len(sample.ids)]
    assert not any(naive[len(sample.ids) :])


@pytest.mark.parametrize("kind", ["trained", "metaspace", "joined-breaks"])
@pytest.mark.parametrize("case", ["single", "multi", "breaks"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_merges_keep_the_serving_prompt(spec, kind, case, make_tokenizer):
    """With tokens that may cross any boundary: the served prompt's ids, then ids that spell the answer."""
    tokenizer, messages = spec.tokenizer(make_tokenizer, kind), CASES[case]
    ends = spec.eos_ids(tokenizer)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    found = 0
    for sample in render(messages, tokenizer, ends, spec.kwargs):
        for start, stop in runs(sample.supervised):
            prompt = render_prompt(messages[: turns[found]], tokenizer, spec.kwargs)
            assert prompt == tokenizer.apply_chat_template(
                messages[: turns[found]], add_generation_prompt=True, return_dict=False, **spec.kwargs
            )
            assert sample.ids[:start] == prompt
            assert [t for t in range(start, stop) if sample.ids[t] in ends] == [stop - 1]
            text = tokenizer.decode(sample.ids[:stop])
            assert text.startswith(tokenizer.decode(prompt))
            spelt = text[len(tokenizer.decode(prompt)) :].removesuffix(tokenizer.decode(sample.ids[stop - 1]))
            assert spelt == spec.answer.format(messages[turns[found]]["content"])
            found += 1
    assert found == len(turns)


def runs(mask):
    starts = [t for t in range(len(mask)) if mask[t] and (t == 0 or not mask[t - 1])]
    stops = [t + 1 for t in range(len(mask)) if mask[t] and (t + 1 == len(mask) or not mask[t + 1])]
    return list(zip(starts, stops, strict=True))


def test_the_drawing_in_the_docstring(make_tokenizer):
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>' + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    tokenizer = make_tokenizer(template, ["<user>", "<end>", "<assistant>"], "<end>")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    (sample,) = render(messages, tokenizer, [tokenizer.eos_token_id], {})
    tokens = tokenizer.convert_ids_to_tokens(sample.ids)
    assert tokens == ["<user>", "H", "i", "<end>", "Ċ", "<assistant>", "Y", "e", "s", "<end>"]
    assert sample.supervised == [False] * 6 + [True] * 4


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_tool_calls_reach_the_template(name, make_tokenizer):
    tokenizer = make_tokenizer(name, CHATML, "<|im_end|>", words=THINK)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [TOOLS[0], {"role": "assistant", "content": "", "tool_calls": [call]}, *TOOLS[2:]]
    kwargs = {"tools": [{"type": "function", "function": {"name": "weather"}}], "enable_thinking": False}
    samples = render(messages, tokenizer, [tokenizer.eos_token_id], kwargs)
    text = tokenizer.decode([token for s in samples for token, m in zip(s.ids, s.supervised, strict=True) if m])
    assert text.count("<|im_end|>") == 2
    written = text[text.index("{") : text.index("\n</tool_call>")]
    assert json.loads(written) == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert "rain<" not in text.replace("It rains.", "")


def test_template_without_generation_tags_counts_by_hand(chatml):  # DAT-04
    tokenizer, ends = chatml
    assert "generation %" not in tokenizer.chat_template
    (sample,) = render(MULTI, tokenizer, ends, {})
    answers = [m["content"] for m in MULTI if m["role"] == "assistant"]
    assert sample.num_supervised == sum(len(answer) + 1 for answer in answers)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("gemma", SYSTEM + SINGLE, "the chat template refuses the row: System role not supported"),
        ("gemma", [SINGLE[0], *SINGLE], "the chat template refuses the row: .*must alternate"),
        ("llama2", [SINGLE[0], *SINGLE], "the chat template refuses the row: .*must alternate"),
        ("mistral", [SINGLE[0], *SINGLE], "the chat template refuses the row: .*must alternate"),
        ("chatml", [SINGLE[0], {"role": "assistant", "content": None}], "the chat template refuses the row"),
        ("chatml", SINGLE[1:], "the conversation starts with an assistant turn"),
        ("chatml", SINGLE[:1], "no assistant turn"),
    ],
)
def test_rows_that_cannot_be_rendered(template, messages, reason, make_tokenizer):
    tokenizer = make_tokenizer(template, ["<s>", "</s>"], "</s>", bos="<s>")
    with pytest.raises(RowError, match=reason):
        render(messages, tokenizer, [tokenizer.eos_token_id], {})


def test_system_text_in_the_last_user_turn_splits(make_tokenizer):
    """Mistral moves the system text to the last user turn: history is not what was served."""
    tokenizer = make_tokenizer("mistral", ["<s>", "</s>"], "</s>", bos="<s>")
    ends = [tokenizer.eos_token_id]
    assert len(render(MULTI, tokenizer, ends, {})) == 1
    assert len(render(SYSTEM + MULTI, tokenizer, ends, {})) == 3


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.bos], ids=str)
def test_one_bos(spec, make_tokenizer):
    tokenizer = spec.tokenizer(make_tokenizer, "metaspace")
    bos = tokenizer.bos_token_id
    assert tokenizer("Hi")["input_ids"][0] == bos  # the tokenizer would add one
    ids = render_prompt(SINGLE[:1], tokenizer, spec.kwargs)
    assert ids[0] == bos
    assert ids.count(bos) == 1
    tokenizer.chat_template = "{{ bos_token + bos_token }}Hi"
    with pytest.raises(RowError, match="BOS twice"):
        render_prompt(SINGLE[:1], tokenizer, {})


def test_missing_template_names_the_fix(chatml):
    tokenizer, _ = chatml
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template; set"):
        render(SINGLE, tokenizer, [], {})


@pytest.mark.parametrize("length", [1, 20, 34, 40, 60, 1000])
def test_truncation_cuts_ids_and_mask_alike(chatml, length):  # DAT-06
    tokenizer, ends = chatml
    (sample,) = render(MULTI, tokenizer, ends, {})
    cut = truncate(sample, length)
    if not any(sample.supervised[:length]):
        assert cut is None
    else:
        assert cut is not None
        assert len(cut.ids) == len(cut.supervised) == min(length, len(sample.ids))
        assert cut.ids == sample.ids[:length]
        assert cut.supervised == sample.supervised[:length]


def test_category_and_origin_stay_with_the_sample(chatml):
    tokenizer, ends = chatml
    (sample,) = render(SINGLE, tokenizer, ends, {}, category="maths", origin="a.jsonl:3")
    assert (sample.category, sample.origin) == ("maths", "a.jsonl:3")
    assert truncate(sample, 60) == Sample(sample.ids[:60], sample.supervised[:60], "maths", "a.jsonl:3")
