"""The report's two readable forms: Markdown for a pull request, one self-contained HTML file."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval.markdown_table import cell, number, table
from eval.plots import svg_figures

Summary = dict[str, Any]

WIDE = ("tree",)  # figures that take the page's whole width
MOST_DIVERGENCES = 20


def html_page(summary: Summary) -> str:
    """The report as one HTML file: inline style and figures, no script, nothing from outside."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, interval=interval, share=share)
    return environment.get_template("report.html.jinja").render(
        summary=summary,
        figures=[(name, title, svg) for name, (title, svg) in svg_figures(summary).items()],
        wide=WIDE,
        divergences=summary["equality"]["divergences"][:MOST_DIVERGENCES],
        equality=equality_sentence(summary),
        noise=_noise(summary),
        settings=json.dumps(summary["settings"], indent=2, ensure_ascii=False),
    )


def markdown_page(summary: Summary) -> str:
    """The report as GitHub-flavoured Markdown."""
    speedup, predicted = summary["speedup"], summary["predicted_tau"]
    rates, counts = summary["tokens_per_s"], zip(summary["alpha"], summary["alpha_counts"], strict=True)
    headline = [summary["tau"], speedup["median"], interval(speedup), rates["plain"], rates["heads"]]
    any_dtype = summary["speedup_any_dtype"]
    blocks = [
        f"# {cell(summary['kind'])} heads on {cell(summary['target'])}",
        cell(summary["verdict"]),
        table(
            ["tau", "speedup", "95% interval", "plain tokens/s", "heads tokens/s", "greedy output equal"],
            [[*headline, _equal(summary)]],
        ),
        _definitions(summary),
        "## Acceptance",
        table(
            ["k", "alpha_k", "accepted", "offered"],
            [[str(k), rate, str(accepted), str(offered)] for k, (rate, (accepted, offered)) in enumerate(counts, 1)],
        ),
        f"Predicted tau: {number(predicted['chain'])} from the alpha_k. {_constant_alpha(predicted)}",
        "## Categories",
        table(
            [
                "category",
                "speedup",
                "95% interval",
                "tau",
                "plain tokens/s",
                "heads tokens/s",
                "prompts",
                "tokens",
            ],
            [_category_row(name, row) for name, row in summary["categories"].items()],
        ),
        "## Plain decoding",
        table(["setting", "tokens/s"], [[name, rate] for name, rate in summary["plain_settings"].items()]),
        f"Against the fastest of any dtype: {number(any_dtype['median'])}x {interval(any_dtype)}.",
        *_other_runs(summary),
        "## Equality with plain greedy decoding",
        equality_sentence(summary),
        _divergences(summary),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def equality_sentence(summary: Summary) -> str:
    """How many outputs equal plain greedy decoding, and the largest top-2 margin where one does not."""
    equality = summary["equality"]
    if not equality["compared"]:
        return f"Not compared: {summary['acceptance']} acceptance draws its tokens."
    sentence = f"{equality['equal']} of {equality['compared']} prompts equal, token for token."
    if equality["divergences"]:
        sentence += f" Largest top-2 logit margin at a divergence: {number(equality['largest_margin'])}."
    return sentence


def interval(speedup: dict[str, float | None]) -> str:
    return f"[{number(speedup['low'])}, {number(speedup['high'])}]"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _noise(summary: Summary) -> float | None:
    """Median over prompts of how far apart repeats lie, the worse side; None with single repeats."""
    if all(row["repeats"][side] < 2 for row in summary["prompts"] for side in ("plain", "heads")):
        return None
    return median(max(row["spread"].values()) for row in summary["prompts"])


def _definitions(summary: Summary) -> str:
    return (
        "tau: tokens emitted per target forward, the target's own token included, prefill excluded. Speedup: "
        "ratio of pooled decoding rates to the fastest plain setting of the same run "
        f"({cell(summary['fastest_plain'])}); the interval resamples prompts. "
        f"Repeats of a prompt lie {share(_noise(summary))} apart (median)."
    )


def _constant_alpha(predicted: Summary) -> str:
    return (
        f"From one pooled alpha of {number(predicted['pooled_alpha'])}, as if every depth had it: "
        f"{number(predicted['constant_alpha'])}. Measured: {number(predicted['measured'])}."
    )


def _equal(summary: Summary) -> str:
    return {True: "yes", False: "NO", None: "not compared"}[summary["greedy_equal"]]


def _category_row(name: str, row: Summary) -> list[str | float | None]:
    rates, speedup = row["tokens_per_s"], row["speedup"]
    counts = [str(row["prompts"]), str(row["tokens"])]
    return [name, speedup["median"], interval(speedup), row["tau"], rates["plain"], rates["heads"], *counts]


def _other_runs(summary: Summary) -> list[str]:
    if not summary["other_runs"]:
        return []
    rows = []
    for row in summary["other_runs"]:
        speedup, plain, same = row["speedup"], row["tokens_per_s"]["plain"], "yes" if row["same_prompts"] else "no"
        rows.append([row["run"], row["kind"], row["tau"], speedup["median"], interval(speedup), plain, same])
    head = ["run", "kind", "tau", "speedup", "95% interval", "plain tokens/s", "same prompts"]
    note = "Each measured in a run of its own: scripts/compare_heads.py decodes several in turns."
    return ["## Other runs on this target", table(head, rows), note]


def _divergences(summary: Summary) -> str:
    rows = summary["equality"]["divergences"]
    if not rows:
        return ""
    names = ["prompt", "position", "plain_token", "heads_token"]
    shown = [[*(str(row[name]) for name in names), row["margin"]] for row in rows[:MOST_DIVERGENCES]]
    shown_table = table(["prompt", "position", "plain token", "heads token", "margin"], shown)
    left = len(rows) - len(shown)
    return shown_table + (f"\n\n{left} more in report.json." if left else "")
