"""Several heads on the same prompts in one alternated run: which family is worth more, and by how much."""

from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from data.progress import track
from eval.benchmark import ENGINE, GENERATE, Bench, BenchmarkConfig, measure_prompt, probe_plain
from eval.drafters import Drafter
from eval.metrics import alpha, alpha_rates, bootstrap_ratio, fastest_plain, heads_timings, plain_timings, tau
from eval.prompts import EvalPrompt
from eval.records import PromptResult
from heads.target import Target

LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # Okabe and Ito's palette


def decode_all(
    target: Target, drafters: dict[str, Drafter], prompts: Sequence[EvalPrompt], config: BenchmarkConfig
) -> dict[str, list[PromptResult]]:
    """Decode every prompt with each drafter, and plainly beside each, in an order that moves on with the prompts.

    Where transformers' generate is the faster plain setting on the first few prompts, it is timed on all as well.
    """
    rates = probe_plain({ENGINE: target}, prompts, config)
    with_generate = max(rates, key=lambda name: rates[name]) == GENERATE
    longest = max(len(prompt.ids) for prompt in prompts)
    benches = {name: Bench(target, drafter, config, longest) for name, drafter in drafters.items()}
    results: dict[str, list[PromptResult]] = {name: [] for name in benches}
    names = list(benches)
    for name in names:
        measure_prompt(benches[name], prompts[0], 0)  # warms up
    for number, prompt in enumerate(track(prompts, "decoding", "prompts", len(prompts))):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            results[name].append(measure_prompt(benches[name], prompt, number, with_generate))
    return results


def compare(results: dict[str, list[PromptResult]], depths: dict[str, int]) -> list[dict[str, Any]]:
    """One row for each drafter: tau with its interval over prompts, alpha_k, speedup with interval, equality.

    "speedup" is over the plain setting that was fastest beside all of the drafters, "speedup_engine" over this
    engine's plain decoding.
    """
    rows = []
    baseline = fastest_plain(list(chain.from_iterable(results.values())))
    for name, found in results.items():
        cycles = [cycle for result in found for cycle in result.cycles]
        speedups = {
            "speedup": bootstrap_ratio(heads_timings(found), plain_timings(found, baseline)),
            "speedup_engine": bootstrap_ratio(heads_timings(found), plain_timings(found, ENGINE)),
        }
        low, high = tau_interval(found)
        rows.append(
            {
                "heads": name,
                "tau": tau(cycles),
                "tau_low": low,
                "tau_high": high,
                "alpha": alpha_rates(alpha(cycles, depths[name])),
                "fastest_plain": baseline,
                **{key: speedup.median for key, speedup in speedups.items()},
                **{f"{key}_low": speedup.low for key, speedup in speedups.items()},
                **{f"{key}_high": speedup.high for key, speedup in speedups.items()},
                "equal": all(result.equal for result in found) if found[0].equal is not None else None,
            }
        )
    return rows


def tau_interval(results: Sequence[PromptResult], draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of tau when prompts are drawn anew."""
    counts_P2 = torch.tensor([[sum(c.emitted for c in r.cycles), len(r.cycles)] for r in results]).double()
    picks = torch.randint(len(results), (draws, len(results)), generator=torch.Generator().manual_seed(seed))
    sums_D2 = counts_P2[picks].sum(1)
    low, high = (sums_D2[:, 0] / sums_D2[:, 1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def label_runs(runs: Sequence[str], taken: Collection[str] = ()) -> dict[str, Path]:
    """Each run's directory under the shortest end of its path that no other run has and that is not `taken`.

    Raises:
        ValueError: if a directory is named twice.
    """
    paths = [Path(run).resolve() for run in runs]
    ends = [["/".join(path.parts[-n:]) for n in range(1, len(path.parts) + 1)] for path in paths]
    labelled: dict[str, Path] = {}
    for place, run in enumerate(runs):
        others = {*taken, *chain.from_iterable(ends[:place] + ends[place + 1 :])}
        label = next((end for end in ends[place] if end not in others), None)
        if label is None:
            raise ValueError(f"runs names {run} twice; name each run once")
        labelled[label] = Path(run)
    return labelled


def draw_comparison(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Save tau and speedup of each row, with their intervals, as one PNG at `path`."""
    figure = Figure(figsize=(9, 1.2 + 0.5 * len(rows)), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row["heads"] for row in rows]
    for axes, key, unit in (
        (left, "tau", "tau (tokens per target forward)"),
        (right, "speedup", "speedup over fastest plain"),
    ):
        values = [row[key] for row in rows]
        below = [row[key] - row[f"{key}_low"] for row in rows]
        above = [row[f"{key}_high"] - row[key] for row in rows]
        axes.barh(names, values, color="#0072b2", height=0.55, xerr=[below, above], ecolor="#444444", capsize=3)
        axes.axvline(1.0, color="#9aa0a6", linewidth=1)
        for place, value in enumerate(values):
            axes.annotate(f"{value:.2f}", (0.03, place), va="center", color="white", fontsize=9)
        axes.set_xlabel(unit)
        axes.spines[["top", "right"]].set_visible(False)
    left.invert_yaxis()
    figure.savefig(path)


def draw_learning(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Save tau of checkpoints by the supervised tokens they learned from, with intervals, as one PNG at `path`.

    rows: of `compare`, with the "train_tokens" of each; their "heads" are "<run> <checkpoint>", and each run is a line.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault(row["heads"].rsplit(" ", 1)[0], []).append(row)
    for place, (run, points) in enumerate(runs.items()):
        tokens = [row["train_tokens"] / 1e6 for row in points]
        colour = LINES[place % len(LINES)]
        axes.plot(tokens, [row["tau"] for row in points], color=colour, marker="o", markersize=4, label=run)
        ends = [row["tau_low"] for row in points], [row["tau_high"] for row in points]
        axes.fill_between(tokens, *ends, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("supervised tokens learned from, in millions")
    axes.set_ylabel("tau (tokens per target forward)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)
