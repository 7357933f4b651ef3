"""Counters of the three engines, by difference, against rounds that are known by hand."""

import pytest

from eval.metrics import alpha_rates
from eval.serving.counters import Counters, parse_counters

# Rounds that accept [3, 0, 2, 3, 1] of three drafts.
ROUNDS = """\
# HELP {0}spec_decode_num_drafts_total Number of drafts.
# TYPE {0}spec_decode_num_drafts_total counter
{0}spec_decode_num_drafts_total{1} 5
# TYPE {0}spec_decode_num_draft_tokens_total counter
{0}spec_decode_num_draft_tokens_total{1} 15
# TYPE {0}spec_decode_num_accepted_tokens_total counter
{0}spec_decode_num_accepted_tokens_total{1} 9
# TYPE {0}spec_decode_num_accepted_tokens_per_pos_total counter
{0}spec_decode_num_accepted_tokens_per_pos_total{{position="2"}} 2
{0}spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 4
{0}spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} 3
"""
VLLM = ROUNDS.format("vllm:", '{engine="0",model_name="m"}').replace(" 5\n", " 5.0\n") + (
    "# TYPE vllm:spec_decode_num_drafts_created gauge\n"
    'vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09\n'
)
LLAMACPP = ROUNDS.format("llamacpp:", "") + (
    "# TYPE llamacpp:tokens_predicted_total counter\nllamacpp:tokens_predicted_total 15\n"
    "# TYPE llamacpp:predicted_tokens_seconds gauge\nllamacpp:predicted_tokens_seconds 12.25\n"
)
SGLANG = (
    "# TYPE sglang:spec_accept_length gauge\n"
    'sglang:spec_accept_length{tp_rank="0"} 9.5\n'
    "# TYPE sglang:generation_tokens_total counter\n"
    'sglang:generation_tokens_total{model_name="m"} 15.0\n'
    "# TYPE sglang:num_requests_total counter\n"
    'sglang:num_requests_total{model_name="m"} 1.0\n'
    "# TYPE sglang:spec_verify_calls_total counter\n"
    'sglang:spec_verify_calls_total{model_name="m"} 5.0\n'
)


@pytest.mark.parametrize("text", [VLLM, LLAMACPP], ids=["vllm", "llamacpp"])
def test_positions_become_conditional_rates(text):
    counters = parse_counters(text)
    assert counters.tau == pytest.approx(14 / 5)
    assert counters.alphas == ((4, 5), (3, 4), (2, 3))
    assert alpha_rates(counters.alphas) == [4 / 5, 3 / 4, 2 / 3]
    assert not counters.has_short_drafts


def test_what_an_engine_does_not_count_is_unknown_not_zero():
    counters = parse_counters(SGLANG)
    assert counters.engine == "sglang"
    assert counters.tau == pytest.approx(14 / 5)  # 15 tokens, one of them from prefill, in 5 verifications
    assert counters.alphas == ()
    assert counters.accepted_tokens is None
    assert counters.missing == ()
    assert parse_counters(VLLM).missing == ("vllm:generation_tokens_total", "vllm:request_success_total")
    plain = parse_counters("# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total 8\n")
    assert plain.tau is None
    assert plain.drafts is None
    assert "vllm:spec_decode_num_drafts_total" in plain.missing


def test_a_difference_is_of_one_period():
    before, after = parse_counters(VLLM), parse_counters(VLLM.replace(" 5.0", " 7.0").replace(" 4", " 5"))
    gained = after - before
    assert (gained.drafts, gained.accepted_tokens, gained.accepted_per_position) == (2, 0, (1, 0, 0))
    assert gained.generated_tokens is None
    # A labelled counter shows up with its first count: until then it stood at 0.
    late = parse_counters(LLAMACPP) - Counters("llamacpp", drafts=0, generated_tokens=0)
    assert late.accepted_per_position == (4, 3, 2)
    assert late.drafts == 5
    # A deeper draft adds a position.
    deeper = Counters("vllm", accepted_per_position=(4, 3, 1)) - Counters("vllm", accepted_per_position=(1, 1))
    assert deeper.accepted_per_position == (3, 2, 1)


def test_a_restart_between_readings_is_seen():
    now, then = Counters("vllm", drafts=3), Counters("vllm", drafts=5)
    for fallen in (now, Counters("vllm")):
        with pytest.raises(ValueError, match=r"drafts fell from 5 to .*restarted"):
            _ = fallen - then
    with pytest.raises(ValueError, match="accepted_per_position fell"):
        _ = Counters("vllm", accepted_per_position=(1,)) - Counters("vllm", accepted_per_position=(1, 0))
    with pytest.raises(ValueError, match="sglang and of vllm"):
        _ = Counters("sglang") - then


def test_periods_and_engine_processes_add_up():
    one = parse_counters(LLAMACPP)
    both = one + Counters("llamacpp", 1, 3, 1, (1, 0, 0, 0), 2)
    assert (both.drafts, both.accepted_per_position, both.generated_tokens) == (6, (5, 3, 2, 0), 17)
    assert both.requests is None
    twice = parse_counters(
        VLLM + VLLM.replace('engine="0"', 'engine="1"').replace('position="', 'engine="1",position="')
    )
    assert (twice.drafts, twice.accepted_per_position) == (10, (8, 6, 4))
    with pytest.raises(ValueError, match="no sum"):
        _ = one + Counters("vllm")


def test_short_drafts_and_rounded_counts_are_noticed():
    assert parse_counters(VLLM.replace(" 15", " 14")).has_short_drafts
    rounded = parse_counters(LLAMACPP.replace("predicted_total 15", "predicted_total 3.05406e+06"))
    assert rounded.generated_tokens == 3_054_060
    assert rounded.is_rounded
    assert not parse_counters(LLAMACPP).is_rounded


def test_forwards_without_a_draft_are_told_from_the_tokens():
    # 48 tokens in 8 answers: 40 decoded, 6 of them accepted in 10 verifications, so 24 forwards had no draft.
    assert Counters("vllm", 10, 30, 6, (6, 0, 0), 48, 8).undrafted == 24
    # Accepted past the end of the answers: more than was decoded.
    assert Counters("vllm", 10, 30, 30, (10, 10, 10), 48, 8).undrafted == 0
    assert parse_counters(LLAMACPP).undrafted is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing of vLLM, SGLang or llama.cpp"),
        ("# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 1\n", "--enable-metrics"),
        ("<html>not found</html>", "not in Prometheus' text format"),
        (VLLM.replace('position="1"', 'position="5"'), "positions must be 0, 1, 2"),
        (VLLM.replace('position="1"', 'position="last"'), "has the position 'last'"),
    ],
)
def test_what_is_no_reading_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_counters(text)
