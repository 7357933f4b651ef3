"""Invented prompts: what the target goes on from, and which of its turns are worth answering."""

import pytest

from data.invention import DRAWS, REPLY, Openings, fault, invent
from data.regenerate import AnswerLog, Prompt
from heads.tiny import tiny_tokenizer

EOS = 258
KINDS = {"code": "abc", "maths": "uv"}
EXAMPLES = [
    Prompt(f"{kind}-{letter}", kind, [{"role": "user", "content": f"Do {letter} please"}])
    for kind, letters in KINDS.items()
    for letter in letters
]


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


def test_the_prefix_is_the_serving_prompt_up_to_the_users_text(tokenizer):
    prefix, category = Openings(tokenizer, {}, [], shots=3, seed=0)(7)
    assert tokenizer.decode(prefix) == "<|im_start|>user\n"
    assert category == "invented"


def test_invented_prompts_are_filtered_and_never_repeat(tokenizer, tmp_path):
    texts = iter(["Tell me about the sea.", "too short", "tell me, about the SEA!", "What is a known prompt?"] + [
        f"Explain the number {i} in plain words." for i in range(20)
    ])  # fmt: skip

    def generate(prompts, seeds):
        return [[*tokenizer.encode(next(texts)), EOS] for _ in prompts]

    known = ["What is a known prompt?"]
    with AnswerLog(tmp_path / "prompts.jsonl") as log:
        invent(log, 4, generate, tokenizer, [EOS], lambda number: ([1, 2], "any"), known, batch_size=5, seed=0)
    assert [row["prompt"] for row in log.rows] == ["Tell me about the sea."] + [
        f"Explain the number {i} in plain words." for i in range(3)
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("one two three", "length"),
        ("- a list that begins with a dash", "does not begin like a sentence"),
        ("<b>what is this</b> tag doing", "does not begin like a sentence"),
        ("please print <|im_end|> for me now", "template markers"),
        ("go go go go go go go stop", "repeats itself"),
        ("What makes the sky look blue?", None),
    ],
)
def test_faults(text, reason):
    assert fault(text) == reason


def test_examples_of_one_kind_stand_before_a_turn_and_kinds_take_turns(tokenizer):
    openings = Openings(tokenizer, {}, EXAMPLES, shots=2, seed=0)
    seen = set()
    for number in range(40):
        prefix, category = openings(number)
        assert category == sorted(KINDS)[number % 2]
        text = tokenizer.decode(prefix)
        assert text.endswith("<|im_start|>user\n")
        assert text.count(REPLY) == 2
        shown = [f"Do {letter} please" for letter in KINDS[category] if f"Do {letter} please" in text]
        assert len(shown) == 2
        seen.update(shown)
        assert openings(number) == (prefix, category)
    assert seen == {prompt.messages[-1]["content"] for prompt in EXAMPLES}


def test_some_turns_of_a_kind_see_the_same_examples_and_the_next_ones_others(tokenizer):
    openings = Openings(tokenizer, {}, EXAMPLES, shots=2, seed=0)
    code = [tuple(openings(number)[0]) for number in range(0, 2 * DRAWS * 10, 2)]
    rounds = [set(code[start : start + DRAWS]) for start in range(0, len(code), DRAWS)]
    assert all(len(shown) == 1 for shown in rounds)
    assert len(set.union(*rounds)) > 1


def test_few_examples_are_all_shown_and_a_kind_is_kept_with_the_prompt(tokenizer, tmp_path):
    openings = Openings(tokenizer, {}, EXAMPLES, shots=9, seed=0)
    assert tokenizer.decode(openings(0)[0]).count(REPLY) == len(KINDS["code"])

    def generate(prompts, seeds):
        return [[*tokenizer.encode(f"Explain the number {seed} in words."), EOS] for seed in seeds]

    with AnswerLog(tmp_path / "prompts.jsonl") as log:
        invent(log, 5, generate, tokenizer, [EOS], openings, [], batch_size=2, seed=0)
    assert [row["category"] for row in log.rows] == ["code", "maths", "code", "maths", "code"]


def test_a_template_that_rewrites_the_users_text_is_refused(tokenizer):
    tokenizer.chat_template = "{% for message in messages %}{{ message.content | length }}{% endfor %}"
    with pytest.raises(ValueError, match="does not show the user's text as it is"):
        Openings(tokenizer, {}, [], shots=1, seed=0)
