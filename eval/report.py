"""From an evaluation to its report: one JSON-able summary, one honest sentence, three files."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from data.disk import write_whole
from eval import metrics
from eval.records import Evaluation, PromptResult, Timing
from eval.report_page import html_page, markdown_page
from eval.run_record import other_reports, training_curves
from eval.verdict import verdict

Summary = dict[str, Any]
AGAIN = "run again"


def summarise(evaluation: Evaluation) -> Summary:
    """The numbers of an evaluation as plain JSON types; rates in tokens/s, times in s, costs in ms.

    `settings["other_dtype_settings"]` lists plain settings in another dtype than the heads' run: they appear
    in `plain_settings` and `speedup_any_dtype`, never in the headline `speedup`.

    Raises:
        ValueError: if there are no results, no token after a first one, or no timed baseline.
    """
    results = evaluation.results
    if not results:
        raise ValueError("the evaluation has no results; give at least one prompt")
    cycles = [cycle for result in results for cycle in result.cycles]
    measured_tau = metrics.tau(cycles)
    counts = metrics.alpha(cycles, evaluation.depth)
    others = list(evaluation.settings.get("other_dtype_settings") or ())
    section = _section(results, evaluation.depth, others)
    if section["speedup"]["median"] is None:
        raise ValueError("no plain decoding emitted a token after its first; a speedup needs longer answers")
    deepest = max(cycle.offered for cycle in cycles)
    summary = {
        "heads": evaluation.heads,
        "kind": evaluation.kind,
        "target": evaluation.target,
        "acceptance": evaluation.acceptance,
        "lossless": evaluation.lossless,
        "tau": measured_tau,
        "alpha": section["alpha"],
        "alpha_counts": [list(pair) for pair in counts],
        "predicted_tau": {
            "pooled_alpha": metrics.pooled_alpha(counts),
            "depth": deepest,
            "constant_alpha": metrics.expected_tokens(metrics.pooled_alpha(counts), deepest),
            "chain": metrics.expected_tokens_chain(section["alpha"]),
            "measured": measured_tau,
        },
        "speedup": section["speedup"],
        "speedup_any_dtype": _speedup(results, metrics.fastest_plain(results)),
        "tokens_per_s": section["tokens_per_s"],
        "fastest_plain": section["fastest_plain"],
        "plain_settings": metrics.plain_rates(results),
        "categories": _categories(results, evaluation.depth, others),
        "time_share": metrics.time_share(results),
        "prefill": _prefill(results, section["fastest_plain"]),
        **_equality(results),
        "tree": [
            {"node": list(node), "offered": offered, "accepted": accepted, "rate": _ratio(accepted, offered)}
            for node, accepted, offered in metrics.node_acceptance(cycles, evaluation.tree)
        ],
        "cost_ms": dict(evaluation.cost_ms),
        "settings": {"dtype": evaluation.dtype, **evaluation.settings},
        "prompts": [_prompt_row(result, section["fastest_plain"]) for result in results],
    }
    return _plain_json({**summary, "verdict": verdict(summary)})


def last_line(summary: Summary) -> str:
    """The line that an evaluation prints last: `tau=1.83 speedup=1.31 [1.25, 1.38]`."""
    speedup = summary["speedup"]
    interval = f"[{speedup['low']:.2f}, {speedup['high']:.2f}]"
    return f"tau={summary['tau']:.2f} speedup={speedup['median']:.2f} {interval}"


def write_report(evaluation: Evaluation, directory: str | Path) -> Summary:
    """Write report.json, report.md and report.html into `directory`, each whole or not at all.

    Returns what report.json holds.

    Raises:
        ValueError: as `summarise` does; nothing is written then.
    """
    folder = Path(directory)
    summary = summarise(evaluation)
    summary["training"] = training_curves(Path(evaluation.heads))
    summary["other_runs"] = other_reports(folder, evaluation.target, [row["name"] for row in summary["prompts"]])
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(
        folder / "report.json", json.dumps(summary, indent=2, allow_nan=False, ensure_ascii=False) + "\n", AGAIN
    )
    write_whole(folder / "report.md", markdown_page(summary), AGAIN)
    write_whole(folder / "report.html", html_page(summary), AGAIN)
    return summary


def merge(evaluations: Sequence[Evaluation]) -> Evaluation:
    """One evaluation from the parts that several processes measured, its results in prompt order.

    Ordered by `PromptResult.index`, then by the order given: counts equal those of a single process. Settings
    and cost come from the first part.

    Raises:
        ValueError: if there is no part, parts differ in what they measured, or two hold the same prompt.
    """
    if not evaluations:
        raise ValueError("there is no evaluation to merge; give one per process")
    first = evaluations[0]
    for name in ("heads", "kind", "target", "acceptance", "lossless", "depth", "tree", "dtype"):
        values = {repr(asdict(part)[name]) for part in map(_without_results, evaluations)}
        if len(values) > 1:
            shown = " and ".join(sorted(values))
            raise ValueError(f"parts of one evaluation differ in {name}: {shown}; measure them alike")
    seen: set[tuple[int, str]] = set()
    for part in evaluations:
        held = {(result.index, result.name) for result in part.results}
        if held & seen:
            name = min(held & seen)[1]
            raise ValueError(f"prompt {name!r} was measured by two processes; give each its own prompts")
        seen |= held
    results = [result for part in evaluations for result in part.results]
    return replace(first, results=sorted(results, key=lambda result: result.index))


def _section(results: Sequence[PromptResult], depth: int, others: Sequence[str]) -> Summary:
    cycles = [cycle for result in results for cycle in result.cycles]
    setting = metrics.fastest_plain(results, others)
    return {
        "prompts": len(results),
        "tokens": sum(result.new_tokens for result in results),
        "tau": metrics.tau(cycles) if cycles else None,
        "alpha": metrics.alpha_rates(metrics.alpha(cycles, depth)),
        "speedup": _speedup(results, setting),
        "tokens_per_s": {
            "plain": metrics.tokens_per_s(metrics.plain_timings(results, setting)),
            "heads": metrics.tokens_per_s(metrics.heads_timings(results)),
        },
        "fastest_plain": setting,
    }


def _categories(results: Sequence[PromptResult], depth: int, others: Sequence[str]) -> Summary:
    groups: dict[str, list[PromptResult]] = {}
    for result in results:
        groups.setdefault(result.category, []).append(result)
    return {name: _section(group, depth, others) for name, group in groups.items()}


def _speedup(results: Sequence[PromptResult], setting: str) -> dict[str, float | None]:
    heads, plain = metrics.heads_timings(results), metrics.plain_timings(results, setting)
    if not metrics.tokens_per_s(heads) or not metrics.tokens_per_s(plain):
        return {"median": None, "low": None, "high": None}
    return asdict(metrics.bootstrap_ratio(heads, plain))


def _prefill(results: Sequence[PromptResult], setting: str) -> Summary:
    tokens = sum(result.prompt_tokens for result in results)
    plain, heads = metrics.plain_timings(results, setting), metrics.heads_timings(results)
    plain_s, heads_s = sum(timing.prefill_s for timing in plain), sum(timing.prefill_s for timing in heads)
    return {
        "tokens": tokens,
        "plain_s": plain_s,
        "heads_s": heads_s,
        "plain_tokens_per_s": _ratio(tokens, plain_s),
        "heads_tokens_per_s": _ratio(tokens, heads_s),
        "end_to_end_tokens_per_s": {"plain": _end_to_end(plain), "heads": _end_to_end(heads)},
    }


def _end_to_end(timings: Sequence[Timing]) -> float | None:
    """All new tokens, the one that prefill gives included, over prefill and decoding seconds."""
    seconds = sum(timing.prefill_s + timing.decode_s for timing in timings)
    return _ratio(sum(timing.tokens + 1 for timing in timings), seconds)


def _equality(results: Sequence[PromptResult]) -> Summary:
    compared = [result for result in results if result.equal is not None]
    divergences = [
        {"prompt": result.name, **asdict(result.divergence)} for result in compared if result.divergence is not None
    ]
    return {
        "greedy_equal": all(result.equal for result in compared) if compared else None,
        "equality": {
            "equal": sum(bool(result.equal) for result in compared),
            "compared": len(compared),
            "divergences": divergences,
            "largest_margin": max((row["margin"] for row in divergences), default=None),
        },
    }


def _prompt_row(result: PromptResult, setting: str) -> Summary:
    plain, heads = result.plain[setting], result.heads
    rates = {"plain": metrics.tokens_per_s([metrics.typical(plain)])}
    rates["heads"] = metrics.tokens_per_s([metrics.typical(heads)])
    emitted = [cycle.emitted for cycle in result.cycles]
    return {
        "name": result.name,
        "category": result.category,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": result.new_tokens,
        "cycles": len(emitted),
        "emitted": [emitted.count(n) for n in range(max(emitted, default=-1) + 1)],
        "tau": metrics.tau(result.cycles) if result.cycles else None,
        "tokens_per_s": rates,
        "speedup": _ratio(rates["heads"], rates["plain"]),
        "repeats": {"plain": len(plain), "heads": len(heads)},
        "spread": {"plain": metrics.spread(plain), "heads": metrics.spread(heads)},
        "equal": result.equal,
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _without_results(evaluation: Evaluation) -> Evaluation:
    return replace(evaluation, results=[], settings={}, cost_ms={})


def _plain_json(value: Any) -> Any:
    """JSON has no infinity, tuple or path; settings may hold any, and the numbers must be saved."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_json(item) for key, item in value.items()}
    if isinstance(value, Sequence | set):
        return [_plain_json(item) for item in value]
    return str(value)
