"""With heads against without, in numbers: ratios with their intervals, from one bench or from two."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from eval import metrics
from eval.records import Timing
from eval.serving.records import OFF, ON

Row = dict[str, Any]
Summary = dict[str, Any]


def compare(on: Sequence[Row], off: Sequence[Row], same_run: bool = True) -> list[Row]:
    """One row for each concurrency that both sides have; empty where a side is missing.

    user: tokens per second of one user after the first token, pooled over the prompts that both sides answered, with
    a 95 % bootstrap interval over prompts. total: tokens per second of all users, the median over repeats, with the
    smallest and largest of the pairs of one repeat (None in two runs, whose blocks have no partners).
    """
    without = {row["concurrency"]: row for row in off if row["arm"] == OFF}
    pairs = [(row, without[row["concurrency"]]) for row in on if row["arm"] == ON and row["concurrency"] in without]
    return [
        {
            "concurrency": with_heads["concurrency"],
            "user": _user_ratio(with_heads["prompts"], plain["prompts"]),
            "total": _total_ratio(with_heads, plain, same_run),
            **_answers(with_heads["prompts"], plain["prompts"]),
        }
        for with_heads, plain in pairs
    ]


def join(now: Summary, earlier: Summary) -> list[Row]:
    """The speedups between a bench of one arm and an earlier bench of the other. Raises as `require_comparable`."""
    require_comparable(now["settings"], earlier)
    if ON in now["settings"]["arms"]:
        return compare(now["rows"], earlier["rows"], same_run=False)
    return compare(earlier["rows"], now["rows"], same_run=False)


def require_comparable(settings: dict[str, Any], earlier: Summary) -> None:
    """Check that a bench of one arm with these settings has a ratio with `earlier`.

    Raises:
        ValueError: if `earlier` measured other work or another engine, or has no such arm or concurrency.
    """
    before = earlier["settings"]
    for name, asked in settings["work"].items():
        if (asked_before := before["work"].get(name)) != asked:
            raise ValueError(
                f"compare= measured {name}={asked_before}, this bench {asked}; a ratio needs the same work"
            )
    engines = {arm["engine"] for arms in (settings["arms"], before["arms"]) for arm in arms.values()} - {None}
    if len(engines) > 1:
        raise ValueError(f"compare= measured another engine: {' and '.join(sorted(engines))}; use the same")
    wanted = OFF if ON in settings["arms"] else ON
    if wanted not in before["arms"]:
        raise ValueError(f"compare= has no server with heads={wanted}; one bench must be of heads on, the other off")
    if not set(settings["concurrency"]) & set(before["concurrency"]):
        raise ValueError(f"compare= was at concurrency={before['concurrency']}, of which this bench has none")


def read_bench(path: Path) -> Summary:
    """The summary that an earlier bench left. `ValueError` if `path` is not one."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        settings = summary["settings"]
        if not (summary["rows"] and settings["work"] and settings["arms"] and settings["concurrency"]):
            raise ValueError(f"compare={path} is a bench that measured nothing; give another")
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"compare={path} is not the bench.json of a bench ({error!r}); give its path") from error
    return summary


def _user_ratio(on: Sequence[Row], off: Sequence[Row]) -> Row | None:
    plain = {prompt["name"]: prompt["timing"] for prompt in off if prompt["timing"]}
    both = [prompt for prompt in on if prompt["timing"] and prompt["name"] in plain]
    if not both:
        return None
    ratio = metrics.bootstrap_ratio(
        [Timing(**prompt["timing"]) for prompt in both], [Timing(**plain[prompt["name"]]) for prompt in both]
    )
    return {**asdict(ratio), "prompts": len(both)}


def _total_ratio(on: Row, off: Row, same_run: bool) -> Row | None:
    if on["tokens_per_s"] is None or off["tokens_per_s"] is None:
        return None
    if not same_run:
        return {"median": on["tokens_per_s"] / off["tokens_per_s"], "low": None, "high": None}
    plain = {block["repeat"]: block["tokens_per_s"] for block in off["blocks"]}
    ratios = [block["tokens_per_s"] / plain[block["repeat"]] for block in on["blocks"] if block["repeat"] in plain]
    return {"median": median(ratios), "low": min(ratios), "high": max(ratios)} if ratios else None


def _answers(on: Sequence[Row], off: Sequence[Row]) -> Row:
    """How many prompts got the same text: under greedy decoding all, but for near-ties that rounding decides."""
    plain = {prompt["name"]: prompt["answer"] for prompt in off}
    both = [prompt for prompt in on if prompt["name"] in plain]
    same = sum(prompt["answer"] == plain[prompt["name"]] for prompt in both)
    return {"same_answers": same, "compared_answers": len(both)}
