"""The figure of a serving bench: what users get, what the server gives in all, and how drafts fare, by concurrency."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval import panels
from eval.serving.records import OFF, ON

Row = dict[str, Any]

LOOKS = {OFF: (panels.PLAIN, "s", "without heads"), ON: (panels.HEADS, "o", "with heads")}


def bench_figure(summary: dict[str, Any], path: Path) -> None:
    """Save a PNG at `path`; a panel without data says so."""
    rows = [*summary["rows"], *summary.get("earlier", ())]
    drafting = [row for row in rows if row["arm"] == ON and row["acceptance"] and row["acceptance"]["alpha"]]
    with rc_context(panels.STYLE):
        figure = Figure(figsize=(13, 4), layout="constrained")
        user, total, first, alpha = figure.subplots(1, 4)
        _by_concurrency(user, rows, "Tokens/s of one user", lambda row: row["user_tokens_per_s"])
        _by_concurrency(total, rows, "Tokens/s in total", lambda row: row["tokens_per_s"])
        _by_concurrency(
            first, rows, "Time to first token, p50, ms", lambda row: row["ttft_s"] and row["ttft_s"]["p50"] * 1000
        )
        _speedup_labels(user, rows, summary["speedups"])
        if drafting:
            panels.draw_alpha(alpha, drafting[0]["acceptance"])
            alpha.set_title(f"alpha_k at concurrency {drafting[0]['concurrency']}")
        else:
            _no_data(alpha, "alpha_k")
        figure.savefig(path, dpi=120, format="png", facecolor="white")


def _by_concurrency(axes: Axes, rows: Sequence[Row], title: str, value: Any) -> None:
    shown = False
    for arm, (color, marker, label) in LOOKS.items():
        points = sorted(
            (row["concurrency"], value(row)) for row in rows if row["arm"] == arm and value(row) is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, linewidth=2, label=label)
            shown = True
    if not shown:
        _no_data(axes, title)
        return
    ticks = sorted({row["concurrency"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.margins(x=0.14, y=0.14)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("concurrency")
    axes.set_title(title)
    axes.legend(loc="best")


def _speedup_labels(axes: Axes, rows: Sequence[Row], speedups: Sequence[Row]) -> None:
    """The ratio beside each point of the arm with heads."""
    heights = {row["concurrency"]: row["user_tokens_per_s"] for row in rows if row["arm"] == ON}
    for row in speedups:
        if row["user"]:
            point = (row["concurrency"], heights[row["concurrency"]])
            axes.annotate(f"{row['user']['median']:.2f}x", point, (0, 7), textcoords="offset points", ha="center")


def _no_data(axes: Axes, title: str) -> None:
    axes.set_axis_off()
    axes.set_title(title)
    axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes, color=panels.QUIET)
