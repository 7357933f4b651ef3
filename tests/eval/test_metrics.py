"""Counts and rates, on rounds small enough to check by hand."""

from itertools import pairwise

import pytest

from eval import metrics
from eval.records import Cycle, PromptResult, Timing


def rounds(accepted: list[int], offered: int = 3) -> list[Cycle]:
    """Cycles of a chain, where node d is the d-th draft."""
    return [Cycle(offered, count, count + 1, count) for count in accepted]


def prompt(name: str, plain: dict[str, list[Timing]], heads: list[Timing] | None = None) -> PromptResult:
    return PromptResult(name, "math", 5, 11, plain, heads or [], [], None)


def timing(tokens: int, seconds: float) -> Timing:
    return Timing(tokens=tokens, prefill_s=1.0, decode_s=seconds)


FIELD_ROUNDS = rounds([3, 0, 2, 3, 1])


def test_tau_counts_the_targets_own_token_and_pools_over_cycles():
    assert metrics.tau(FIELD_ROUNDS) == pytest.approx(2.8)
    assert sum(cycle.accepted for cycle in FIELD_ROUNDS) / 5 == pytest.approx(1.8)
    assert metrics.tau(rounds([3]) + rounds([0, 0, 0])) == pytest.approx(7 / 4)  # no mean of prompt means


def test_tau_counts_what_reached_the_output():
    assert metrics.tau([Cycle(3, 3, 4, 3), Cycle(3, 3, 1, 3)]) == pytest.approx(2.5)


def test_tau_of_no_cycle_is_an_error():
    with pytest.raises(ValueError, match="at least one decoding cycle"):
        metrics.tau([])


def test_alpha_is_conditional_on_the_earlier_drafts():
    counts = metrics.alpha(FIELD_ROUNDS, 3)
    assert counts == [(4, 5), (3, 4), (2, 3)]
    assert metrics.pooled_alpha(counts) == pytest.approx(9 / 12)


def test_alpha_offers_only_what_a_pruned_tree_held():
    counts = metrics.alpha([Cycle(3, 3, 4, 3), Cycle(1, 1, 2, 1), Cycle(0, 0, 1, 0)], 4)
    assert counts == [(2, 2), (1, 1), (1, 1), (0, 0)]
    assert metrics.alpha_rates(counts) == [1.0, 1.0, 1.0, None]


def test_expected_tokens_of_a_constant_alpha():
    assert metrics.expected_tokens(0.7, 4) == pytest.approx((1 - 0.7**5) / (1 - 0.7)) == pytest.approx(2.7731)
    assert metrics.expected_tokens(1.0, 4) == 5
    assert metrics.expected_tokens(0.0, 4) == 1


def test_expected_tokens_of_a_chain_is_the_measured_tau():
    assert metrics.expected_tokens_chain([0.8, 0.5, 0.5]) == pytest.approx(2.4)
    assert metrics.expected_tokens_chain([0.8, None]) == pytest.approx(1.8)
    rates = metrics.alpha_rates(metrics.alpha(FIELD_ROUNDS, 3))
    assert metrics.expected_tokens_chain(rates) == pytest.approx(metrics.tau(FIELD_ROUNDS))


def test_node_acceptance_counts_paths_where_the_node_was_offered():
    # Nodes in order: 1 [0], 2 [1], 3 [0,0], 4 [1,0].
    cycles = [Cycle(2, 2, 3, 4), Cycle(2, 1, 2, 1), Cycle(1, 1, 2, 2), Cycle(2, 0, 1, 0)]
    rows = metrics.node_acceptance(cycles, [[1, 0], [0], [1], [0, 0]])
    assert rows == [((0,), 1, 4), ((1,), 2, 4), ((0, 0), 0, 3), ((1, 0), 1, 3)]


def test_rates_of_tree_nodes_sum_to_tau():
    rows = metrics.node_acceptance(FIELD_ROUNDS, [[0], [0, 0], [0, 0, 0]])
    assert 1 + sum(accepted / offered for _, accepted, offered in rows) == pytest.approx(2.8)


def test_tokens_per_s_leaves_prefill_out():
    ticks = [0.0, 1.0, *(1.0 + 0.1 * (i + 1) for i in range(10))]  # prefill, then ten rounds
    decode_s = sum(after - before for before, after in pairwise(ticks[1:]))
    measured = Timing(tokens=29, prefill_s=ticks[1] - ticks[0], decode_s=decode_s)
    assert metrics.tokens_per_s([measured]) == pytest.approx(29.0)


def test_tokens_per_s_weighs_tokens_not_prompts():
    assert metrics.tokens_per_s([timing(10, 1.0), timing(90, 3.0)]) == pytest.approx(25.0)
    assert metrics.tokens_per_s([timing(0, 0.0)]) == 0.0


def test_typical_is_the_median_over_repeats():
    assert metrics.typical([timing(10, 1.0), timing(10, 9.0), timing(10, 2.0)]).decode_s == pytest.approx(2.0)
    sampled = metrics.typical([timing(10, 1.0), timing(40, 4.0), timing(20, 2.0)])
    assert sampled.tokens / sampled.decode_s == pytest.approx(10.0)
    with pytest.raises(ValueError, match="at least one repeat"):
        metrics.typical([])


def test_spread_of_repeats():
    assert metrics.spread([timing(10, 1.0)]) == 0.0
    assert metrics.spread([timing(10, 1.0), timing(10, 2.0), timing(10, 1.25)]) == pytest.approx(5 / 8)


def test_null_method_gives_ratio_one():
    timings = [timing(10 * i, 0.3 * i + 0.1) for i in range(1, 9)]
    ratio = metrics.bootstrap_ratio(timings, timings)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((1.0, 1.0, 1.0))


def test_bootstrap_is_paired_seeded_and_covers_the_ratio():
    plain = [timing(100, 1.0 * scale) for scale in (1, 5, 2, 9, 3, 4)]
    twice = [timing(100, 0.5 * scale) for scale in (1, 5, 2, 9, 3, 4)]
    ratio = metrics.bootstrap_ratio(twice, plain)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))  # unpaired would be wide
    noisy = [timing(100, seconds) for seconds in (0.4, 3.0, 1.2, 4.1, 1.4, 2.3)]
    first, again = metrics.bootstrap_ratio(noisy, plain), metrics.bootstrap_ratio(noisy, plain)
    assert first == again
    assert first.low < first.median < first.high
    assert first.median == pytest.approx(24.0 / 12.4)


def test_bootstrap_survives_prompts_that_end_at_once():
    ratio = metrics.bootstrap_ratio([timing(0, 0.0), timing(10, 1.0)], [timing(0, 0.0), timing(10, 3.0)])
    assert ratio.median == pytest.approx(3.0)
    with pytest.raises(ValueError, match="tokens on both sides"):
        metrics.bootstrap_ratio([timing(0, 0.0)], [timing(0, 0.0)])


def test_fastest_plain_pools_and_excludes():
    results = [
        prompt("a", {"eager": [timing(10, 1.0)], "compiled": [timing(10, 2.0)], "half": [timing(10, 0.1)]}),
        prompt("b", {"eager": [timing(90, 9.0)], "compiled": [timing(90, 3.0)], "half": [timing(90, 0.1)]}),
    ]
    assert metrics.fastest_plain(results) == "half"
    assert metrics.fastest_plain(results, exclude=["half"]) == "compiled"
    with pytest.raises(ValueError, match="needs a baseline"):
        metrics.fastest_plain(results, exclude=["half", "eager", "compiled"])


def test_baseline_must_cover_every_prompt():
    results = [prompt("a", {"eager": [timing(10, 1.0)]}), prompt("b", {})]
    with pytest.raises(ValueError, match="'b' has no timing of the plain setting 'eager'"):
        metrics.fastest_plain(results)


def test_time_share_is_none_where_parts_were_not_timed():
    untimed = prompt("a", {}, [timing(10, 1.0)])
    assert metrics.time_share([untimed]) == {"draft": None, "verify": None, "rest": None}
    timed = prompt("a", {}, [Timing(10, 1.0, 2.0, draft_s=0.5, verify_s=1.0)])
    assert metrics.time_share([timed]) == pytest.approx({"draft": 0.25, "verify": 0.5, "rest": 0.25})
