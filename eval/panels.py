"""The panels of a report's figures: each draws one aspect of a summary into given axes."""

import re
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

Summary = dict[str, Any]

# Okabe and Ito's palette: told apart with any colour vision, and by lightness in print.
PLAIN, HEADS, DRAFT, REST = "#9aa0a6", "#0072b2", "#e69f00", "#cfd3d8"
INK, QUIET, TAU = "#1f2328", "#6b7280", "#b34d00"
RATES = LinearSegmentedColormap.from_list("rates", ["#e3eef6", HEADS, "#002b45"])
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.color": INK,
    "text.parse_math": False,  # a prompt category may hold dollar signs
    "axes.edgecolor": QUIET,
    "axes.labelcolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it can be searched, read aloud, and set in any script
    "svg.hashsalt": "headstart",
}
PATCH = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
MAX_NAME = 22
FEW_ROWS = 3


def draw_rates(axes: Axes, summary: Summary) -> None:
    """(a) Tokens per second, plain and with heads, overall and per category; whiskers carry the interval."""
    rows = rate_rows(summary)
    for place, (_, row) in enumerate(rows):
        plain, heads, speedup = row["tokens_per_s"]["plain"], row["tokens_per_s"]["heads"], row["speedup"]
        axes.barh(place - 0.19, plain, 0.36, color=PLAIN, label="plain" if place == 0 else None)
        axes.barh(place + 0.19, heads, 0.36, color=HEADS, label="with heads" if place == 0 else None)
        if speedup["median"] is None:
            continue
        ends = (speedup["low"] * plain, speedup["high"] * plain)
        axes.plot(ends, [place + 0.19] * 2, color=INK, linewidth=1.4, marker="|", markersize=6)
        weight = "normal" if place else "bold"
        _label(axes, f"{speedup['median']:.2f}x", (max(heads, *ends), place + 0.19), fontweight=weight)
    axes.set_yticks(range(len(rows)), [_short(name) for name, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    room = max(0, FEW_ROWS - len(rows)) / 2  # keeps the bars of a single category from filling the panel
    axes.set_ylim(len(rows) - 0.4 + room, -0.6 - room)
    axes.margins(x=0.16)
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens per second while decoding")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0, handlelength=1)


def draw_alpha(axes: Axes, summary: Summary) -> None:
    """(b) alpha_k, and the number of cycles that it rests on."""
    counts = zip(summary["alpha"], summary["alpha_counts"], strict=True)
    for k, (rate, (_, offered)) in enumerate(counts, 1):
        axes.bar(k, rate or 0, 0.62, color=HEADS)
        label = "never\noffered" if rate is None else f"{rate:.2f}\nof {offered}"
        axes.text(k, (rate or 0) + 0.02, label, ha="center", va="bottom", fontsize=9)
    depth = len(summary["alpha"])
    axes.set_xticks(range(1, depth + 1))
    axes.set_xlim(0.4, depth + 0.6)
    axes.set_ylim(0, 1.18)
    axes.set_yticks([0, 0.5, 1])
    axes.set_xlabel("draft token k, once 1..k-1 stood")


def draw_tree(axes: Axes, summary: Summary, label: str = "{rank}: {rate}") -> None:
    """(c) The draft tree; each node with its rank and how often it stood where it was offered.

    `label` is the text beside a node; an empty one leaves the rate to the colour.
    """
    nodes = nodes_of(summary)
    rates = dict(zip(nodes, (row["rate"] for row in summary["tree"]), strict=True))
    places = _tree_places(nodes)
    top = max((rate for rate in rates.values() if rate is not None), default=1.0) or 1.0
    leaves = leaf_count(nodes)
    size = min(120.0, (3000 if label else 1400) / leaves)
    for node, rate in rates.items():
        (x0, y0), (x, y) = places[node[:-1]], places[node]
        axes.plot([x0, x], [y0, y], color=REST, linewidth=1 + 3 * (rate or 0), zorder=1)
        color = "white" if rate is None else RATES(rate / top)
        axes.scatter(x, y, size, color=color, edgecolors=HEADS, linewidths=0.8, zorder=2)
        text = label.format(rank=node[-1], rate="-" if rate is None else f"{rate:.0%}")
        if text:
            _label(axes, text, (x, y), gap=3 + size**0.5 / 2, fontsize=8.5, zorder=1.5, bbox=PATCH)
    axes.scatter(*places[()], size, color=INK, zorder=2)
    depth = depth_of(summary)
    axes.set_xticks(range(depth + 1), ["root", *map(str, range(1, depth + 1))])
    axes.set_xlim(-0.2, depth + (0.8 if label else 0.2))
    axes.set_ylim(leaves - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("depth; label: rank, share of cycles" if label else "depth; darker stood more often")


def draw_histogram(axes: Axes, summary: Summary) -> None:
    """(d) How many cycles emitted how many tokens; the line is tau."""
    counts: dict[int, int] = {}
    for row in summary["prompts"]:
        for tokens, cycles in enumerate(row["emitted"]):
            counts[tokens] = counts.get(tokens, 0) + cycles
    total = sum(counts.values())
    counts = {tokens: cycles for tokens, cycles in counts.items() if cycles or tokens}
    axes.bar(list(counts), [cycles / total for cycles in counts.values()], 0.72, color=HEADS)
    axes.axvline(summary["tau"], color=TAU, linewidth=2)
    axes.set_title(f"tau {summary['tau']:.2f}", loc="right", fontweight="normal", fontsize=11, color=TAU)
    axes.set_xticks(list(counts))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.locator_params(axis="y", nbins=4)
    axes.set_xlabel("tokens emitted by one cycle")
    axes.set_ylabel("share of cycles")


def draw_shares(axes: Axes, summary: Summary) -> None:
    """(e) Where the decoding time with heads goes."""
    left = 0.0
    for name, color in (("draft", DRAFT), ("verify", HEADS), ("rest", REST)):
        share = summary["time_share"][name]
        axes.barh(0, share, 1, left=left, color=color, label=f"{name} {share:.0%}")
        left += share
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=3, borderaxespad=0, handlelength=1)


def draw_cost(axes: Axes, summary: Summary) -> None:
    """(f) Milliseconds of one target forward by the tokens it verifies, beside a plain one and a draft."""
    costs = summary["cost_ms"]
    points = verify_costs(costs)
    axes.plot(*zip(*points, strict=True), color=HEADS, marker="o", label="verify")
    for name, color, style in (("plain", QUIET, "--"), ("draft", DRAFT, ":")):
        if name in costs:
            axes.axhline(costs[name], color=color, linestyle=style, linewidth=2, label=name)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the draft tree, root included")
    axes.set_ylabel("milliseconds")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0)


def draw_loss(axes: Axes, summary: Summary) -> None:
    """(g) The training loss, each point the mean since the one before."""
    axes.plot(summary["training"]["steps"], summary["training"]["loss"], color=HEADS, linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("optimiser step")


def draw_learning(axes: Axes, summary: Summary) -> None:
    """(h) alpha_k on training data, named at its end, and tau wherever held-out prompts were decoded."""
    training = summary["training"]
    steps = training["steps"]
    for k, rates in enumerate(training["alpha"], 1):
        shade = RATES(1 - 0.7 * (k - 1) / max(1, len(training["alpha"]) - 1))
        axes.plot(steps, rates, color=shade, linewidth=1.8, label=f"alpha_{k}")
    for step, tau in training["measured"]:
        axes.axvline(step, color=TAU, linewidth=1, linestyle=":")
        place = {"xy": (step, 1), "xycoords": ("data", "axes fraction"), "xytext": (-3, -2)}
        axes.annotate(
            f"tau {tau:.2f}", **place, textcoords="offset points", ha="right", va="top", color=TAU, fontsize=9
        )
    axes.set_ylim(0, 1)
    axes.set_xlabel("optimiser step")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0, handlelength=1, fontsize=9)


def has_curves(summary: Summary) -> bool:
    """Whether the run that trained the heads logged enough for a line."""
    return summary["training"] is not None and len(summary["training"]["steps"]) > 1


def _label(axes: Axes, text: str, point: tuple[float, float], gap: float = 6, **style: Any) -> None:
    """Text `gap` typographic points to the right of `point`; SVG would swallow leading spaces."""
    axes.annotate(text, point, (gap, 0), textcoords="offset points", va="center", **style)


def rate_rows(summary: Summary) -> list[tuple[str, Summary]]:
    categories = summary["categories"].items()
    return [("all prompts", summary), *(categories if len(categories) > 1 else ())]


def nodes_of(summary: Summary) -> list[tuple[int, ...]]:
    return [tuple(row["node"]) for row in summary["tree"]]


def depth_of(summary: Summary) -> int:
    return max(map(len, nodes_of(summary)), default=0)


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def verify_costs(costs: dict[str, float]) -> list[tuple[int, float]]:
    """(tokens, milliseconds) of the entries "verify <tokens>"."""
    found = ((re.fullmatch(r"verify (\d+)", name), cost) for name, cost in costs.items())
    return sorted((int(match[1]), cost) for match, cost in found if match)


def leaf_count(nodes: Sequence[tuple[int, ...]]) -> int:
    parents = {node[:-1] for node in nodes}
    return max(1, sum(node not in parents for node in nodes))


def _tree_places(nodes: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[float, float]]:
    """(depth, row) of each node and the root: leaves on rows 0, 1, ..., every parent amid its children."""
    parents = {node[:-1] for node in nodes}
    rows: dict[tuple[int, ...], float] = {}
    for node in sorted(nodes):
        if node not in parents:
            rows[node] = len(rows)
    for parent in sorted(parents, key=len, reverse=True):
        children = [rows[node] for node in nodes if node[:-1] == parent]
        rows[parent] = sum(children) / len(children)
    return {node: (len(node), row) for node, row in rows.items()}
