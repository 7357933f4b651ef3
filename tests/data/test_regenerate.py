import json

import pytest

from data.conversations import Conversation, load_conversations
from data.problems import Problems
from data.regenerate import AnswerLog, Prompt, answer, read_prompts
from data.regenerate_settings import keep_to_settings
from data.render import render_prompt
from data.samples import SampleBuilder
from heads.tiny import tiny_tokenizer

EOS = 258


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def echo(tokenizer, calls):
    """A stand-in for the target: says its seed, and notes what it was asked."""

    def generate(prompts, seeds):
        calls.append(len(prompts))
        return [[*tokenizer.encode(f"seed {seed}"), EOS] for seed in seeds]

    return generate


PROMPTS = [Prompt(f"p{i}", "qa", [{"role": "user", "content": "why? " * (i + 1)}]) for i in range(5)]


def run(path, tokenizer, generate, prompts=PROMPTS, **changes):
    settings = {"batch_size": 2, "samples": 2, "seed": 7, **changes}
    with AnswerLog(path) as log:
        answer(prompts, log, generate, tokenizer, [EOS], {}, **settings)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_interrupted_run_goes_on_and_gives_what_a_straight_one_gives(tokenizer, tmp_path):
    straight = run(tmp_path / "straight.jsonl", tokenizer, echo(tokenizer, []))
    assert sorted(row["id"] for row in straight) == sorted(f"p{i}#{s}" for i in range(5) for s in range(2))

    def dies(prompts, seeds):
        if len(calls) == 2:
            raise KeyboardInterrupt
        return echo(tokenizer, calls)(prompts, seeds)

    calls: list[int] = []
    path = tmp_path / "interrupted.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(path, tokenizer, dies)
    with path.open("a") as file:
        file.write('{"id": "p4#1", "mess')  # killed in the middle of a line
    calls = []
    resumed = run(path, tokenizer, echo(tokenizer, calls))
    assert sum(calls) == 6
    assert sorted(map(json.dumps, resumed)) == sorted(map(json.dumps, straight))


def test_a_row_says_how_it_ended(tokenizer, tmp_path):
    rows = run(
        tmp_path / "a.jsonl", tokenizer, lambda prompts, seeds: [[65, 66]] * len(prompts), PROMPTS[:1], samples=1
    )
    assert rows[0]["finish"] == "length"
    assert rows[0]["messages"][-1] == {"role": "assistant", "content": tokenizer.decode([65, 66])}
    rows = run(tmp_path / "b.jsonl", tokenizer, echo(tokenizer, []), PROMPTS[:1], samples=1)
    assert rows[0]["finish"] == "stop"
    assert rows[0]["messages"][-1]["content"].startswith("seed ")


def test_a_damaged_line_is_named(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\nnonsense\n{"id": 2}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2 is not JSON"):
        AnswerLog(path)


def test_two_prompts_of_one_name_are_refused():
    rows = [Conversation([{"role": "user", "content": "a"}], id="x", origin=f"f:{n}") for n in (1, 2)]
    with pytest.raises(ValueError, match="f:2: id 'x' occurs twice"):
        read_prompts(rows)


def test_an_answer_in_other_tokens_than_the_tokenizers_keeps_its_ids(tokenizer, tmp_path):
    invalid = [*tokenizer.encode("ok"), tokenizer.encode("é")[0], EOS]  # half a character cannot be read back
    rows = run(tmp_path / "a.jsonl", tokenizer, lambda prompts, seeds: [invalid] * len(prompts), PROMPTS[:1], samples=1)
    assert rows[0]["answer_ids"] == invalid
    (conversation,) = load_conversations([str(tmp_path / "a.jsonl")])
    builder = SampleBuilder(tokenizer, [EOS], {}, max_length=200)
    builder.add(conversation, Problems())
    ids, supervised = builder.finish(Problems(), "").sample(0)
    assert ids[supervised].tolist() == invalid
    assert ids[~supervised].tolist() == render_prompt(PROMPTS[0].messages, tokenizer, {})


def test_an_answer_that_ran_out_of_room_is_not_supervised_to_end(tokenizer, tmp_path):
    said = tokenizer.encode("and so on")
    run(tmp_path / "a.jsonl", tokenizer, lambda prompts, seeds: [said] * len(prompts), PROMPTS[:1], samples=1)
    builder = SampleBuilder(tokenizer, [EOS], {}, max_length=200)
    for conversation in load_conversations([str(tmp_path / "a.jsonl")]):
        builder.add(conversation, Problems())
    ids, supervised = builder.finish(Problems(), "").sample(0)
    assert ids[supervised].tolist() == said


def test_tools_are_in_the_prompt_and_in_the_row(tmp_path):
    tokenizer, shown = tiny_tokenizer(), []
    tokenizer.chat_template = f"{{{{ tools }}}}{tokenizer.chat_template}"
    prompt = Prompt("p", "qa", PROMPTS[0].messages, tools=[{"name": "look"}])

    def generate(prompts, seeds):
        shown.extend(tokenizer.decode(ids) for ids in prompts)
        return [[65, EOS]]

    rows = run(tmp_path / "a.jsonl", tokenizer, generate, [prompt], samples=1)
    assert shown[0].startswith("[{'name': 'look'}]")
    assert rows[0]["tools"] == [{"name": "look"}]
    (conversation,) = load_conversations([str(tmp_path / "a.jsonl")])
    assert read_prompts([conversation])[0].tools == prompt.tools


SETTINGS = {"seed": 0, "sampling.temperature": 0.3, "model.template_kwargs": {"a": [1, None]}, "extra_body": {}}


def hold(path, rows, **changes):
    """Go on with the log in `path` by the settings with `changes`."""
    with AnswerLog(path) as log:
        keep_to_settings(log, {**SETTINGS, **changes})
        log.append(rows)


def test_a_log_is_gone_on_with_by_the_settings_that_made_it(tmp_path):
    path = tmp_path / "answers.jsonl"
    hold(path, [], seed=3)  # killed before the first row: nothing to keep to
    for name in "ab":
        hold(path, [{"id": name}])
    with pytest.raises(ValueError, match=r"answers\.jsonl holds 2 rows that were made by other settings") as error:
        hold(path, [{"id": "c"}], **{"seed": 1, "sampling.temperature": 0.0})
    assert "(seed: 0 before, 1 now, sampling.temperature: 0.3 before, 0.0 now)" in str(error.value)
    assert "restore these to go on, or give another output=" in str(error.value)
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a", "b"]
    hold(path, [{"id": "c"}])


@pytest.mark.parametrize("note", [None, "", "nonsense", "[1]"])
def test_rows_that_nobody_knows_the_settings_of_are_refused_and_can_be_vouched_for(tmp_path, note):
    path, noted = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.settings.json"
    path.write_text('{"id": "a"}\n')
    if note is not None:
        noted.write_text(note)
    with pytest.raises(ValueError, match="holds 1 rows, but how they were made cannot be read") as error:
        hold(path, [{"id": "b"}])
    said = str(error.value)
    assert "give another output=, or, if they were made by the settings of now, write these into" in said
    assert path.read_text() == '{"id": "a"}\n'
    noted.write_text(said[said.index(f"{noted}: ") + len(f"{noted}: ") :])
    hold(path, [{"id": "b"}])
