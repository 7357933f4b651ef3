"""What the check says of four answers."""

import re
from dataclasses import replace

import pytest

from eval.records import Timing
from eval.serving.conformance import Comparison, differences, first_difference, problems, tau, total
from eval.serving.conformance_report import markdown, prompt_cells, sentence, summarise
from eval.serving.counters import Counters
from eval.serving.engine import Answer

TOKENS = list(range(10, 20))
SETTINGS = {
    "engine": "vLLM",
    "version": "0.32.0",
    "target": "t",
    "dtype": "float32",
    "kind": "eagle3",
    "format": "vllm",
    "heads": "run",
    "num_speculative_tokens": 3,
    "max_new_tokens": 10,
}


def answer(tokens=TOKENS, drafts=4, accepted=(3, 2, 1), engine="vllm", seconds=1.0) -> Answer:
    counters = Counters(engine, drafts, 3 * drafts, sum(accepted), accepted)
    return Answer(list(tokens), Timing(len(tokens), 0.0, seconds), counters)


def plain(tokens=TOKENS, seconds=2.0) -> Answer:
    return Answer(list(tokens), Timing(len(tokens), 0.0, seconds))


def row(name="p", **changes) -> Comparison:
    return replace(Comparison(name, 5, plain(), answer(), plain(), answer()), **changes)


def names(rows, exact=True) -> list[str]:
    return [problem.name for problem in problems(rows, "vLLM", exact)]


def test_equal_texts_and_counters_pass():
    rows = [row("a"), row("b")]
    assert problems(rows, "vLLM", exact=True) == []
    summary = summarise(rows, [], [], SETTINGS)
    assert summary["passed"]
    found = "texts equal on 2 of 2 prompts, counters on 2 of 2"
    assert sentence(summary) == f"vLLM serves these heads as they decode here: {found}"
    assert summary["engine"]["drafts"] == 8
    assert summary["engine"]["accepted"] == [6, 4, 2]
    assert summary["engine"]["tau"] == pytest.approx(18 / 8)
    assert summary["engine"]["speedup"]["median"] == pytest.approx(2.0)


OTHER = [*TOKENS[:4], 99, *TOKENS[5:]]
# An engine that computes the target itself differently.
OTHERWISE = {"engine_plain": plain(OTHER), "engine_heads": answer(OTHER, drafts=5)}


@pytest.mark.parametrize(
    ("changes", "found", "says"),
    [
        (
            {"engine_heads": answer(OTHER)},
            "engine_texts_differ",
            "vLLM with heads leaves vLLM without heads, on 1 of 2",
        ),
        (
            OTHERWISE,
            "plain_texts_differ",
            "vLLM without heads leaves our plain greedy decoding",
        ),
        ({"own_heads": answer(OTHER)}, "own_texts_differ", "our decoder with heads leaves its own plain"),
        (
            {"engine_heads": answer(accepted=(3, 2, 2))},
            "counters_differ",
            r"first on b: vLLM 4 drafts, accepted \[3, 2, 2\], here 4 drafts, accepted \[3, 2, 1\]",
        ),
        ({"engine_heads": answer(drafts=5)}, "counters_differ", "vLLM 5 drafts"),
        ({"engine_heads": answer(TOKENS[:7])}, "engine_texts_differ", "first on b at token 7"),
    ],
)
def test_each_difference_has_its_name(changes, found, says):
    rows = [row("a"), row("b", **changes)]
    (problem,) = problems(rows, "vLLM", exact=True)
    assert problem.name == found
    assert re.search(says, problem.text)
    summary = summarise(rows, [problem], [], SETTINGS)
    assert not summary["passed"]
    assert f"- **{found}**: " in markdown(summary)
    assert ("does not serve these heads" in sentence(summary)) == (found != "plain_texts_differ")


def test_an_engine_that_does_not_use_the_heads_fails_either_way():
    idle = [row(engine_heads=replace(answer(), counters=Counters("vllm", None)))]
    assert names(idle) == ["nothing_drafted", "counters_differ"]
    assert names(idle, exact=False) == ["nothing_drafted"]


def test_an_engine_that_rounds_may_differ_but_must_accept_about_as_much():
    differing = [row(engine_heads=answer(OTHER, drafts=5, accepted=(3, 1, 0), engine="llamacpp"))]
    assert names(differing, exact=False) == []
    assert [note.name for note in differences(differing, "llama.cpp")] == ["engine_texts_differ", "counters_differ"]
    deaf = [row(engine_heads=answer(drafts=9, accepted=(0, 0, 0), engine="llamacpp"))]
    assert names(deaf, exact=False) == ["accepts_too_little"]


def said(rows: list[Comparison], exact: bool = False) -> str:
    return sentence(summarise(rows, problems(rows, "vLLM", exact), [], SETTINGS))


@pytest.mark.parametrize("exact", [True, False])
def test_prompts_that_are_answered_otherwise_without_heads_are_not_judged(exact):
    rows = [row("a"), row("b", **OTHERWISE)]
    assert said(rows, exact) == (
        "vLLM serves these heads as they decode here, as far as can be judged: texts equal on 1 of 1 prompts, counters "
        "on 1 of 1; 1 of 2 cannot be judged, since without heads vLLM answers otherwise than we do"
    )
    assert said([row("b", **OTHERWISE)], exact) == (
        "whether vLLM serves these heads as they decode here cannot be judged: without heads it answers none of the 1 "
        "prompts as we do"
    )
    # That the counters are the same by chance says nothing.
    summary = summarise([row("b", **{**OTHERWISE, "engine_heads": answer(OTHER)})], [], [], SETTINGS)
    assert (summary["plain_texts_equal"], summary["texts_equal"], summary["counters_equal"]) == (0, 0, 0)
    assert prompt_cells(summary["prompts"][0])[2] == "not judged"


def test_a_failure_is_one_also_where_nothing_can_be_judged():
    leaves_itself = {"engine_plain": plain(OTHER), "engine_heads": answer()}
    assert names([row(**leaves_itself)]) == ["engine_texts_differ", "plain_texts_differ"]
    for changes, exact in ((leaves_itself, True), ({**OTHERWISE, "engine_heads": answer(OTHER, 9, (0, 0, 0))}, False)):
        assert said([row(**changes)], exact).startswith("vLLM does not serve these heads as they decode here: ")


def test_the_sentence_on_an_engine_that_rounds_gives_both_taus():
    assert said([row("a"), row("b", engine_heads=answer(OTHER, drafts=5))]) == (
        "vLLM serves these heads at tau 2.00, where they decode at tau 2.25 here: texts equal on 1 of 2 prompts, "
        "counters on 1 of 2"
    )


def test_numbers_that_differ_stand_beside_each_other():
    summary = summarise([row(engine_heads=answer(drafts=5, accepted=(3, 2, 2)))], [], [], SETTINGS)
    assert prompt_cells(summary["prompts"][0]) == ("p", "10", "equal", "5 / 4", "3 2 2 / 3 2 1")
    assert "| p | 10 | equal | 5 / 4 | 3 2 2 / 3 2 1 |" in markdown(summary)


def test_where_answers_part():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_tau_counts_what_was_answered():
    assert tau([answer(), answer(drafts=2)]) == pytest.approx(18 / 6)
    assert tau([plain()]) is None
    assert total([plain()]) is None
