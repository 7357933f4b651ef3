"""A bench's report: bench.json, bench.md and bench.png beside its log, and one sentence."""

import json
from pathlib import Path

from data.disk import write_whole
from eval.markdown_table import cell, number, table
from eval.report_page import interval
from eval.serving.figure import bench_figure
from eval.serving.log import LOG_FILE, read_log
from eval.serving.records import ON
from eval.serving.speedup import Row, join, read_bench
from eval.serving.summary import Summary, summarise

HEAD = [
    *("heads", "concurrency", "answered", "TTFT p50", "p90", "p99", "per token p50", "p90", "p99"),
    *("tokens/s of a user", "tokens/s in total", "tau"),
]
NO_RATIO: dict[str, float | None] = {"median": None, "low": None, "high": None}
JSON_FILE, MARKDOWN_FILE, FIGURE_FILE = "bench.json", "bench.md", "bench.png"
DEFINITIONS = (
    "Time to first token (TTFT): from sending to the first chunk with tokens. Time per token: from there to the end of "
    "the answer, over the tokens after the first; a user's tokens/s are the same, pooled over prompts at each prompt's "
    "median. Total: all tokens of a block over its seconds, its last answers included, while which not every user is "
    "busy. Token counts are the server's. Every block asks the same prompts, so a server with a prefix cache knows "
    "them from the second on. tau: tokens per target forward that verified a draft, the target's own included. "
    "alpha_k: acceptance of the k-th draft token where those before it stood."
)


def write_report(directory: Path, earlier: Path | None = None) -> Summary:
    """Make the report of the bench whose log lies in `directory`, against the bench.json `earlier` if given.

    Raises:
        ValueError: if there is no log, or `earlier` is no bench or not comparable.
    """
    summary = summarise(read_log(directory))
    if earlier is not None:
        other = read_bench(earlier)
        summary["speedups"] = join(summary, other)
        summary["notes"].append(
            f"the speedups join two benches ({earlier}): the machine may have changed between them, so they prove "
            "less than turns in one bench (url_off=)"
        )
        summary["earlier"] = other["rows"]
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(directory / JSON_FILE, text, "run again")
    write_whole(directory / MARKDOWN_FILE, markdown(summary), "run again")
    bench_figure(summary, directory / FIGURE_FILE)
    return summary


def sentence(summary: Summary) -> str:
    """What the bench found, in one sentence that does not flatter."""
    found = [_speedup_words(row) for row in summary["speedups"] if row["user"]]
    if found:
        said = "Tokens per second of one user, with heads over without: " + ", ".join(found)
    else:
        rates = [
            f"{number(row['user_tokens_per_s'])} at concurrency {row['concurrency']} (heads {row['arm']})"
            for row in summary["rows"]
            if row["user_tokens_per_s"]
        ]
        said = "Tokens per second of one user: " + (", ".join(rates) or "none measured")
        said += "; no speedup, which needs url_off= or compare="
    return (
        said + f"; tau {_tau_range(summary)}" + (f". BROKEN OFF: {summary['stopped']}." if summary["stopped"] else ".")
    )


def _tau_range(summary: Summary) -> str:
    drafting = [row["acceptance"] for row in summary["rows"] if row["arm"] == ON and row["acceptance"]]
    taus = [acceptance["tau"] for acceptance in drafting if acceptance["tau"] is not None]
    if not taus:
        return "unknown"
    low, high = number(min(taus)), number(max(taus))
    return low if low == high else f"{low} to {high}"


def markdown(summary: Summary) -> str:
    """The report as GitHub-flavoured Markdown."""
    arms, work = summary["settings"]["arms"], summary["settings"]["work"]
    models = " and ".join(dict.fromkeys(cell(arm["model"]) for arm in arms.values()))
    served = "; ".join(
        f"heads {name}: {cell(arm['url'])}, {arm['engine'] or 'engine unknown'}" for name, arm in arms.items()
    )
    asked = ", ".join(f"{name} {cell(str(value))}" for name, value in work.items())
    blocks = [
        f"# Serving bench of {models}",
        cell(sentence(summary)),
        table(
            HEAD,
            [_row(row) for row in summary["rows"]],
        ),
        "Times in milliseconds.",
        _speedups(summary["speedups"]),
        _acceptance(summary["rows"]),
        "\n".join(["## Notes", "", *(f"- {cell(note)}" for note in summary["notes"])]) if summary["notes"] else "",
        "## What was measured",
        DEFINITIONS,
        f"Servers: {served}. Work: {asked}. Every request: {LOG_FILE}.",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _row(row: Row) -> list[str | float | None]:
    times = [
        None if values is None else values[name] * 1000
        for values in (row["ttft_s"], row["tpot_s"])
        for name in ("p50", "p90", "p99")
    ]
    answered = f"{row['requests']['answered']} of {row['requests']['planned']}"
    tau = row["acceptance"]["tau"] if row["acceptance"] else None
    return [row["arm"], str(row["concurrency"]), answered, *times, row["user_tokens_per_s"], row["tokens_per_s"], tau]


def _speedups(rows: list[Row]) -> str:
    if not rows:
        return ""
    shown = []
    for row in rows:
        user, total = row["user"] or NO_RATIO, row["total"] or NO_RATIO
        same = f"{row['same_answers']} of {row['compared_answers']}"
        shown.append([str(row["concurrency"]), user["median"], interval(user), total["median"], interval(total), same])
    head = ["concurrency", "a user's tokens/s", "95% interval", "total tokens/s", "range of repeats", "same answers"]
    return "\n\n".join(["## With heads over without", table(head, shown)])


def _acceptance(rows: list[Row]) -> str:
    shown = [
        [str(row["concurrency"]), str(k), rate, str(accepted), str(offered)]
        for row in rows
        if row["acceptance"] and row["arm"] == ON
        for k, (rate, (accepted, offered)) in enumerate(
            zip(row["acceptance"]["alpha"], row["acceptance"]["alpha_counts"], strict=True), 1
        )
    ]
    if not shown:
        return ""
    return "\n\n".join(["## Acceptance", table(["concurrency", "k", "alpha_k", "accepted", "offered"], shown)])


def _speedup_words(row: Row) -> str:
    return f"{number(row['user']['median'])}x {interval(row['user'])} at concurrency {row['concurrency']}"
