"""What heads are worth, counted from recorded cycles and timings: tau, alpha_k, tokens per second, speedup.

Pure functions. Counts are pooled over cycles, rates over tokens ("micro"): a long answer weighs more than a
short one, and nothing is a mean of means. Prefill never enters a decoding rate.

Rounds that accept [3, 0, 2, 3, 1] drafts of K = 3 give tau 14/5 (the target's own token counts), 9/5 drafts
accepted per round, and alpha_1..3 = 4/5, 3/4, 2/3: of the 4 rounds whose first draft stood, 3 saw the second
stand, and so on. The unconditional 4/5, 3/5, 2/5 are the running products.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median, median_low

import torch
from torch import Tensor

from eval.records import Cycle, PromptResult, Timing
from eval.tree import Node, Tree

DRAWS = 2000


@dataclass(frozen=True)
class Speedup:
    """Ratio of pooled tokens per second, heads over plain decoding.

    median: the ratio of the pooled rates, each prompt standing with its median over repeats.
    low, high: 2.5 and 97.5 percentiles of the ratio over resampled prompts.
    """

    median: float
    low: float
    high: float


def tau(cycles: Sequence[Cycle]) -> float:
    """Tokens emitted per target forward, the target's own token included, prefill excluded.

    Pooled over all cycles, so prompts weigh by their number of cycles. `ValueError` when there are none.
    """
    if not cycles:
        raise ValueError("tau needs at least one decoding cycle; no prompt emitted a token after its first")
    return sum(cycle.emitted for cycle in cycles) / len(cycles)


def alpha(cycles: Sequence[Cycle], depth: int) -> list[tuple[int, int]]:
    """(accepted, offered) of the k-th draft token, for k = 1..depth, conditional on drafts 1..k-1.

    Offered where drafts 1..k-1 were accepted and the tree was at least k deep. In a tree whose branches end
    at different depths a path that ends early counts as offered and not accepted: the loss is the tree's,
    and `node_acceptance` shows where. Source: n-alpha of EAGLE, arXiv 2401.15077.
    """
    return [
        (
            sum(cycle.accepted >= k for cycle in cycles),
            sum(cycle.accepted >= k - 1 and cycle.offered >= k for cycle in cycles),
        )
        for k in range(1, depth + 1)
    ]


def alpha_rates(counts: Sequence[tuple[int, int]]) -> list[float | None]:
    """accepted / offered of each k; None where the k-th draft was never offered."""
    return [accepted / offered if offered else None for accepted, offered in counts]


def pooled_alpha(counts: Sequence[tuple[int, int]]) -> float:
    """One acceptance rate for all depths: drafts accepted over drafts offered; 0 when none were offered."""
    offered = sum(offered for _, offered in counts)
    return sum(accepted for accepted, _ in counts) / offered if offered else 0.0


def expected_tokens(rate: float, depth: int) -> float:
    """Tokens per target forward of a chain of `depth` drafts that each stand with probability `rate`.

    (1 - a^(K+1)) / (1 - a), Leviathan et al., arXiv 2211.17192. Written as its sum, which holds at a = 1 too.
    """
    return sum(rate**i for i in range(depth + 1))


def expected_tokens_chain(rates: Sequence[float | None]) -> float:
    """Tokens per target forward from the conditional alpha_k: 1 + sum over k of alpha_1 * ... * alpha_k.

    Ends at the first None (a depth that was never offered).
    """
    total = reach = 1.0
    for rate in rates:
        if rate is None:
            break
        reach *= rate
        total += reach
    return total


def node_acceptance(cycles: Sequence[Cycle], choices: Sequence[Sequence[int]]) -> list[tuple[Node, int, int]]:
    """(node, accepted, offered) for each node of the tree without its root, in node order.

    Accepted: cycles whose accepted path goes through the node. Offered: cycles whose tree, pruned to
    `Cycle.offered`, held it. One plus the sum of the rates is the expected tokens per forward.
    """
    nodes = Tree.from_choices(choices).nodes
    rows: list[tuple[Node, int, int]] = []
    for node in nodes[1:]:
        depth = len(node)
        accepted = sum(nodes[cycle.node][:depth] == node for cycle in cycles)
        rows.append((node, accepted, sum(cycle.offered >= depth for cycle in cycles)))
    return rows


def typical(repeats: Sequence[Timing]) -> Timing:
    """The median of repeated timings of one prompt; seconds in, seconds out.

    `decode_s` is the median time per token times the median length: the median time itself where the repeats
    have one length, and still a fair rate where sampling gave them several.
    """
    if not repeats:
        raise ValueError("a prompt has no timing; measure at least one repeat of plain decoding and of heads")
    tokens = median_low(timing.tokens for timing in repeats)
    return Timing(
        tokens=tokens,
        prefill_s=median(timing.prefill_s for timing in repeats),
        decode_s=median(timing.decode_s / max(timing.tokens, 1) for timing in repeats) * max(tokens, 1),
        draft_s=median(timing.draft_s for timing in repeats),
        verify_s=median(timing.verify_s for timing in repeats),
    )


def tokens_per_s(timings: Sequence[Timing]) -> float:
    """Total tokens over total decoding seconds, prefill and the token it gives apart; 0 without tokens."""
    tokens = sum(timing.tokens for timing in timings)
    return tokens / sum(timing.decode_s for timing in timings) if tokens else 0.0


def spread(repeats: Sequence[Timing]) -> float:
    """(largest - smallest) / median of the tokens per second of one prompt's repeats; 0 for a single one."""
    rates = [tokens_per_s([timing]) for timing in repeats]
    middle = median(rates)
    return (max(rates) - min(rates)) / middle if middle else 0.0


def heads_timings(results: Sequence[PromptResult]) -> list[Timing]:
    """Each prompt's median timing with heads."""
    return [typical(result.heads) for result in results]


def plain_timings(results: Sequence[PromptResult], setting: str) -> list[Timing]:
    """Each prompt's median timing under one plain setting. `ValueError` names a prompt that lacks it."""
    for result in results:
        if setting not in result.plain:
            raise ValueError(
                f"prompt {result.name!r} has no timing of the plain setting {setting!r}, which others have; "
                "a baseline must cover the same prompts as the heads"
            )
    return [typical(result.plain[setting]) for result in results]


def plain_rates(results: Sequence[PromptResult]) -> dict[str, float]:
    """Pooled tokens per second of every plain setting, by name."""
    names = dict.fromkeys(name for result in results for name in result.plain)
    return {name: tokens_per_s(plain_timings(results, name)) for name in names}


def fastest_plain(results: Sequence[PromptResult], exclude: Collection[str] = ()) -> str:
    """Name of the plain setting with the highest pooled tokens per second: the baseline of the speedup.

    `exclude` names settings that are informative only (another dtype). `ValueError` when none is left.
    """
    rates = {name: rate for name, rate in plain_rates(results).items() if name not in exclude}
    if not rates:
        raise ValueError(
            "no plain decoding in the dtype of the heads' run was timed; "
            "a speedup needs a baseline of the same run, so time one"
        )
    return max(rates, key=lambda name: rates[name])


def bootstrap_ratio(heads: Sequence[Timing], plain: Sequence[Timing], *, draws: int = DRAWS, seed: int = 0) -> Speedup:
    """Pooled tokens per second of `heads` over `plain`, one timing per prompt and side, in the same order.

    Prompts are resampled with replacement, both sides together, so the interval speaks of other prompts like
    these on this machine. One prompt gives an interval of width zero, which says nothing. `ValueError` when a
    side has no tokens.
    """
    if not tokens_per_s(heads) or not tokens_per_s(plain):
        raise ValueError("a speedup needs tokens on both sides; raise max_new_tokens above 1")
    assert len(heads) == len(plain), "paired resampling takes one timing per prompt from each side"
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(heads), (draws, len(heads)), generator=generator)
    ratios = _rates(heads, picks) / _rates(plain, picks)
    # A draw can hold only prompts that ended at their first token: 0 / 0, no ratio.
    ratios = ratios[ratios.isfinite()]
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Speedup(tokens_per_s(heads) / tokens_per_s(plain), low, high)


def _rates(timings: Sequence[Timing], picks: Tensor) -> Tensor:
    tokens = torch.tensor([timing.tokens for timing in timings], dtype=torch.float64)
    seconds = torch.tensor([timing.decode_s for timing in timings], dtype=torch.float64)
    return tokens[picks].sum(1) / seconds[picks].sum(1)


def time_share(results: Sequence[PromptResult]) -> dict[str, float | None]:
    """Shares of the decoding time with heads, over all repeats; None each where parts were not timed."""
    timings = [timing for result in results for timing in result.heads]
    total = sum(timing.decode_s for timing in timings)
    draft = sum(timing.draft_s for timing in timings)
    verify = sum(timing.verify_s for timing in timings)
    if not draft + verify or not total:
        return {"draft": None, "verify": None, "rest": None}
    return {"draft": draft / total, "verify": verify / total, "rest": 1 - (draft + verify) / total}
