"""Figures of a report's summary: inline SVG for its page, one PNG for a README."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from eval import panels

Summary = dict[str, Any]

WIDTH = 4.6  # inches: a phone shows it at 0.8 of its size, so that its text stays readable
FEW_LEAVES = 3
MOST_LABELLED_LEAVES, MOST_LABELLED_DEPTH = 18, 6


class Plot(NamedTuple):
    title: str
    draw: Callable[[Axes, Summary], None]
    size: Callable[[Summary], tuple[float, float]]  # inches
    has_data: Callable[[Summary], bool]


PLOTS = {
    "rates": Plot(
        "Tokens per second",
        panels.draw_rates,
        lambda s: (WIDTH, 1 + 0.5 * max(panels.FEW_ROWS, len(panels.rate_rows(s)))),
        lambda s: True,
    ),
    "alpha": Plot(
        "Acceptance (alpha_k)",
        panels.draw_alpha,
        lambda s: (max(WIDTH, 0.7 * len(s["alpha"])), 2.7),
        lambda s: bool(s["alpha"]),
    ),
    "histogram": Plot("Tokens per cycle", panels.draw_histogram, lambda s: (WIDTH, 2.6), lambda s: True),
    "shares": Plot(
        "Decoding time with heads",
        panels.draw_shares,
        lambda s: (WIDTH, 1.0),
        lambda s: s["time_share"]["verify"] is not None,
    ),
    "cost": Plot(
        "Cost of a forward",
        panels.draw_cost,
        lambda s: (WIDTH, 2.7),
        lambda s: bool(panels.verify_costs(s["cost_ms"])),
    ),
    "loss": Plot("Training loss", panels.draw_loss, lambda s: (WIDTH, 2.6), panels.has_curves),
    "learning": Plot("Acceptance while training", panels.draw_learning, lambda s: (WIDTH, 2.9), panels.has_curves),
    "tree": Plot(
        "Draft tree",
        panels.draw_tree,
        lambda s: (max(WIDTH, 0.8 + panels.depth_of(s)), 0.8 + 0.24 * panels.leaf_count(panels.nodes_of(s))),
        lambda s: bool(s["tree"]),
    ),
}


def svg_figures(summary: Summary) -> dict[str, tuple[str, str]]:
    """name -> (title, SVG element) of each figure that the summary has data for, with no outside resource."""
    shown = {name: plot for name, plot in PLOTS.items() if plot.has_data(summary)}
    return {name: (plot.title, _svg(name, plot, summary)) for name, plot in shown.items()}


def summary_figure(summary: Summary, path: str | Path) -> None:
    """Save the speedup, alpha_k, tokens per cycle and the draft tree as one 1600 x 700 PNG at `path`."""
    with rc_context(panels.STYLE), _any_script():
        figure = Figure(figsize=(11.43, 5), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
        flat = panels.leaf_count(panels.nodes_of(summary)) <= FEW_LEAVES
        mosaic = figure.subplot_mosaic(
            [["rates", "alpha", "histogram"], ["rates", "tree", "tree"]]
            if flat
            else [["rates", "alpha", "tree"], ["rates", "histogram", "tree"]],
            height_ratios=[2, 1] if flat else [1, 1],
            width_ratios=[1.05, 0.95, 1.1],
        )
        for name, axes in mosaic.items():
            if PLOTS[name].has_data(summary):
                draw = partial(panels.draw_tree, label=_tree_label(summary)) if name == "tree" else PLOTS[name].draw
                draw(axes, summary)
                axes.set_title(PLOTS[name].title, pad=24 if name == "rates" else 8)
            else:
                axes.set_axis_off()
        speedup = summary["speedup"]
        figure.suptitle(
            f"{summary['kind']} heads on {summary['target']}\ntau {summary['tau']:.2f}, "
            f"{speedup['median']:.2f}x [{speedup['low']:.2f}, {speedup['high']:.2f}] the speed of "
            f"plain decoding ({summary['fastest_plain']})",
            x=0.01,
            ha="left",
            fontsize=13,
        )
        figure.savefig(path, dpi=140, format="png", facecolor="white")


def _svg(name: str, plot: Plot, summary: Summary) -> str:
    with rc_context(panels.STYLE), _any_script():
        figure = Figure(figsize=plot.size(summary), layout="constrained")
        plot.draw(figure.subplots(), summary)
        buffer = StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    element = text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{plot.title}"', 1)
    # Several figures share one page, where ids must be unique.
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", element)


def _tree_label(summary: Summary) -> str:
    """What a third of a figure has room for beside each node."""
    leaves, depth = panels.leaf_count(panels.nodes_of(summary)), panels.depth_of(summary)
    if leaves > MOST_LABELLED_LEAVES or depth > MOST_LABELLED_DEPTH:
        return ""
    return "{rank}: {rate}" if depth < MOST_LABELLED_DEPTH - 1 or leaves <= FEW_LEAVES else "{rate}"


def _any_script() -> warnings.catch_warnings:
    """Names may be in a script that the drawing font lacks; a browser has it, and a PNG shows boxes."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
