"""Training throughput and memory, ours beside the naive form of the same loss (train/naive_losses.py).

python scripts/bench_training.py                              # SmolLM2's shape, random weights: no download
python scripts/bench_training.py sweep=heads families=[medusa] output=outputs/training-cost

Both forms run in processes of their own and take their steps in turns, A B A B; numbers are medians.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

from eval.config import from_hydra
from eval.markdown_table import table
from heads import HEADS
from heads.target import TargetConfig
from train.own_process import own_process
from train.provenance import circumstances
from train.step_cost import DEPTH, FORMS, PHASES, Case
from train.throughput import check_equal, measure

SWEEPS = {
    "tokens": [256, 512, 1024, 2048],
    "heads": [1, 3, 5],
    "steps": [1, 3, 5, 7],
    "vocabulary": [8192, 32768, 131072],
}
Columns = dict[str, Callable[[dict[str, Any]], str]]


@dataclass(frozen=True)
class BenchConfig:
    """`conf/bench_training.yaml`."""

    model: TargetConfig
    families: list[str] = field(default_factory=lambda: list(HEADS))
    depths: dict[str, int] = field(default_factory=dict)
    vocabulary: int | None = None
    rows: int = 2
    tokens: int = 512
    supervised: float = 0.64
    rounds: int = 5
    sweep: str | None = None
    values: list[int] = field(default_factory=list)
    output: str | None = None
    threads: int | None = None

    def __post_init__(self):
        if unknown := sorted({*self.families, *self.depths} - set(HEADS)):
            raise ValueError(f"families={unknown} must be among {', '.join(HEADS)}")
        if missing := sorted(set(self.families) - set(self.depths)):
            raise ValueError(f"depths has no {missing[0]}; give its heads or steps: +depths.{missing[0]}=4")
        for name, value in {**self.depths, "rows": self.rows, "rounds": self.rounds}.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 < self.supervised <= 1:
            raise ValueError(f"supervised={self.supervised} must be above 0 and at most 1; it is a share")
        if self.sweep is not None and self.sweep not in SWEEPS:
            raise ValueError(f"sweep={self.sweep} must be one of {', '.join(SWEEPS)}")
        for case in self.cases():
            if case.tokens * case.supervised < case.depth + 2:
                raise ValueError(f"tokens={case.tokens} leaves no label for depth {case.depth}; give more tokens")

    def cases(self) -> list[Case]:
        """What is measured: every family, or those that the sweep is about at each of its values."""
        plain = [self._case(family) for family in self.families]
        if self.sweep is None:
            return plain
        return [case for value in self.values or SWEEPS[self.sweep] for case in self._swept(plain, value)]

    def _case(self, family: str) -> Case:
        return Case(
            family, self.depths[family], self.model, self.vocabulary,
            self.rows, self.tokens, self.supervised, self.threads,
        )  # fmt: skip

    def _swept(self, cases: list[Case], value: int) -> list[Case]:
        if self.sweep == "tokens":
            return [replace(case, tokens=value) for case in cases]
        if self.sweep == "vocabulary":
            return [replace(case, vocabulary=value) for case in cases]
        swept = [replace(case, depth=value) for case in cases if DEPTH[case.family] == f"num_{self.sweep}"]
        if not swept:
            raise ValueError(f"sweep={self.sweep} concerns none of families={self.families}")
        return swept


COST: Columns = {
    "heads": lambda row: f"{row['family']} {row['depth']}",
    "tokens": lambda row: f"{row['rows']} x {row['tokens']}",
    "vocabulary": lambda row: str(row["vocabulary"] or "its own"),
    "tokens/s": lambda row: f"{row['ours']['tokens_per_s']:.1f}",
    "naive tokens/s": lambda row: f"{row['naive']['tokens_per_s']:.1f}",
    "faster": lambda row: f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]",
    "without target": lambda row: f"{row['speedup_without_target']:.2f}",
    "peak GB (step)": lambda row: f"{row['ours']['peak_gb']:.2f} ({row['ours']['step_gb']:.2f})",
    "naive GB (step)": lambda row: f"{row['naive']['peak_gb']:.2f} ({row['naive']['step_gb']:.2f})",
}


NOTES = """\
tokens/s: supervised tokens. faster: than naive, with [the extremes of the turns]; without target: had the target's
forward, which is the same in both, been free. GB: the peak of the process, in brackets its growth from before the first
step. loss %: ours computes the gradients of the logits there, the naive form in the backward.
"""


def report(rows: list[dict[str, Any]], model: str) -> str:
    """Speed and memory of both forms, and where the time of a step goes, as Markdown."""
    costs = table(list(COST), [[cell(row) for cell in COST.values()] for row in rows])
    shares = table(
        ["heads", "form", "step s", *(f"{phase} %" for phase in PHASES)],
        [
            [COST["heads"](row), form, f"{row[form]['step_s']:.2f}"]
            + [f"{100 * row[form]['share'][phase]:.0f}" for phase in PHASES]
            for row in rows
            for form in FORMS
        ],
    )
    return f"## Training steps on {model}\n\n{costs}\n\n{shares}\n\n{NOTES}"


def bench(config: BenchConfig, console: Console) -> list[dict[str, Any]]:
    """Measure all cases under a progress bar, each after a check that both forms are the same loss."""
    cases, rows = config.cases(), []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(cases) * (1 + 2 * (config.rounds + 2)))

        def advance(text: str) -> None:
            progress.update(task, advance=1, description=text)

        for case in cases:
            advance(f"{case.family}: compare the losses")
            with own_process() as call:
                loss, gradients = call(check_equal, case)
            differ = f"ours and naive differ by {loss:.0e} in the loss and {gradients:.0e} in the gradients"
            progress.console.print(f"{case.family} {case.depth}: {differ}", highlight=False)
            difference = {"loss_difference": loss, "gradient_difference": gradients}
            rows.append({**measure(case, config.rounds, advance), **difference})
    return rows


@hydra.main(version_base="1.3", config_path="../conf", config_name="bench_training")
def main(composed: DictConfig) -> None:
    console = Console(width=140)
    try:
        config = from_hydra(BenchConfig, composed)
        rows = bench(config, console)
    except ValueError as error:
        sys.exit(f"error: {error}")
    text = report(rows, config.model.name)
    console.print(Markdown(text))
    if config.output is not None:
        output = Path(config.output)
        output.mkdir(parents=True, exist_ok=True)
        content = {"circumstances": circumstances(), "rows": rows}
        (output / "training_cost.json").write_text(json.dumps(content, indent=2) + "\n")
        (output / "training_cost.md").write_text(text)


if __name__ == "__main__":
    main()
