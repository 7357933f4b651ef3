"""From records to figures, by hand."""

from dataclasses import replace

import pytest

from eval.serving.counters import Counters
from eval.serving.records import OFF, ON, Block, BlockResult, RequestResult, Run
from eval.serving.report import markdown, sentence
from eval.serving.speedup import require_comparable
from eval.serving.summary import percentiles, summarise

ARMS = {
    ON: {"url": "http://on", "model": "m|<b>", "engine": "vllm"},
    OFF: {"url": "http://off", "model": "m", "engine": None},
}
SETTINGS = {"work": {"max_tokens": 9, "prompts_digest": "x"}, "arms": ARMS, "concurrency": [1]}


def answer(prompt: str, decode_s: float, ttft_s: float = 0.1, tokens: int = 5, **more) -> RequestResult:
    timed = {"ttft_s": ttft_s, "decode_s": decode_s, "completion_tokens": tokens, "chunks": 2, "prompt_tokens": 3}
    return RequestResult(prompt, 0, 0.0, **{**timed, **more})


def run_of(off: list[list[RequestResult]], on: list[list[RequestResult]], stopped: str | None = None) -> Run:
    """Blocks off, on, off, on of one user and two prompts; each takes twice the seconds of its first answer."""
    plan = [Block(2 * repeat + side, arm, 1, repeat) for repeat in range(len(on)) for side, arm in enumerate((OFF, ON))]
    blocks = [results for pair in zip(off, on, strict=True) for results in pair]
    counted = Counters("vllm", 5, 15, 9, (4, 3, 2), 10, 2)
    ends = [
        BlockResult(block, 2 * (results[0].decode_s or 0), True, counted if block.arm == ON else None)
        for block, results in zip(plan, blocks, strict=True)
    ]
    requests = [(block.index, result) for block, results in zip(plan, blocks, strict=True) for result in results]
    return Run(SETTINGS, plan, 2, requests, ends, stopped)


def test_percentiles_are_linear_between_neighbours():
    assert percentiles([float(n) for n in range(101)]) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([1.0, 2.0]) == pytest.approx({"p50": 1.5, "p90": 1.9, "p99": 1.99})
    assert percentiles([]) is None


def test_rates_are_pooled_over_prompts_at_their_medians():
    # Prompt a takes 4, 8 and 4 s for the 4 tokens after its first, b always 12 s: 8 tokens in 16 s.
    off = [[answer("a", a), answer("b", 12.0)] for a in (4.0, 8.0, 4.0)]
    on = [[answer("a", a / 2), answer("b", 6.0)] for a in (4.0, 8.0, 4.0)]
    summary = summarise(run_of(off, on))
    plain, heads = summary["rows"]
    assert (plain["arm"], heads["arm"]) == (OFF, ON)
    assert plain["user_tokens_per_s"] == 0.5
    assert heads["user_tokens_per_s"] == 1.0
    assert plain["tpot_s"]["p50"] == pytest.approx(2.5)  # of 1, 1, 2, 3, 3, 3 s
    assert plain["ttft_s"] == pytest.approx({"p50": 0.1, "p90": 0.1, "p99": 0.1})
    assert [block["tokens_per_s"] for block in plain["blocks"]] == [10 / 8, 10 / 16, 10 / 8]
    assert plain["tokens_per_s"] == 10 / 8
    (speedup,) = summary["speedups"]
    assert speedup["user"] == {"median": 2.0, "low": 2.0, "high": 2.0, "prompts": 2}
    assert speedup["total"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert heads["acceptance"]["tau"] == 2.8
    assert heads["acceptance"]["alpha"] == [4 / 5, 3 / 4, 2 / 3]
    assert heads["acceptance"]["alpha_counts"] == [[12, 15], [9, 12], [6, 9]]
    assert sentence(summary) == (
        "Tokens per second of one user, with heads over without: 2.00x [2.00, 2.00] at concurrency 1; tau 2.80."
    )
    page = markdown(summary)
    assert r"# Serving bench of m\|&lt;b> and m" in page
    assert "| 1 | 2 | 0.75 | 9 | 12 |" in page


def test_only_prompts_that_both_answered_enter_the_ratio():
    lost = RequestResult("b", 1, 0.2, failure="stalled", detail="nothing")
    summary = summarise(run_of([[answer("a", 4.0), lost]], [[answer("a", 2.0), answer("b", 100.0)]]))
    assert summary["speedups"][0]["user"] == {"median": 2.0, "low": 2.0, "high": 2.0, "prompts": 1}
    assert summary["rows"][0]["requests"]["failed"] == 1
    assert summary["rows"][0]["failures"] == {"stalled": {"count": 1, "first": "nothing"}}
    none = summarise(run_of([[lost, lost]], [[answer("a", 2.0), answer("b", 2.0)]]))
    assert none["speedups"][0]["user"] is None
    assert none["rows"][0]["tokens_per_s"] is None
    assert "with heads over without" in markdown(none).lower()


def test_short_and_undivided_answers_have_no_rate():
    whole = [answer("a", 0.001, chunks=1), answer("b", 0.1, tokens=1)]
    summary = summarise(run_of([whole], [[answer("a", 2.0), answer("b", 2.0)]]))
    row = summary["rows"][0]
    assert (row["user_tokens_per_s"], row["tpot_s"], row["requests"]["untimed"]) == (None, None, 2)
    assert row["tokens"] == 6
    assert "off, concurrency 1: 2 answers came in one piece, which has no time per token" in summary["notes"]


def test_another_engine_is_no_baseline():
    both = summarise(run_of([[answer("a", 2.0), answer("b", 2.0)]], [[answer("a", 2.0), answer("b", 2.0)]]))
    now = {**SETTINGS, "arms": {ON: {**ARMS[ON], "engine": "sglang"}}}
    with pytest.raises(ValueError, match="measured another engine: sglang and vllm"):
        require_comparable(now, both)
    require_comparable({**SETTINGS, "arms": {ON: ARMS[ON]}}, both)


def test_forwards_without_drafts_are_said():
    answers = [[answer("a", 2.0), answer("b", 2.0)]]
    run = run_of(answers, answers)
    lookup = replace(run.blocks[1], counters=Counters("vllm", 4, 10, 1, (1, 0, 0), 30, 2))
    notes = summarise(replace(run, blocks=[run.blocks[0], lookup]))["notes"]
    assert "on, concurrency 1: tau leaves out about 23 target forwards that verified no draft, 4 did" in notes
    assert any("some drafts were shorter" in note for note in notes)
