"""Training throughput and memory, ours beside the naive form of the same loss (train/naive_losses.py).

python scripts/bench_training.py                              # SmolLM2's shape, random weights: no download
python scripts/bench_training.py sweep=heads families=[medusa] output=outputs/training-cost
python scripts/bench_training.py ablation=true                # beside ours without each saving (train/savings.py)
python scripts/bench_training.py options=[compile,gradient_checkpointing]  # ours with each of them, beside ours without
python scripts/bench_training.py sweep=processes              # one process and two, each pinned to a core

All forms run in processes of their own and take their steps in turns, A B A B; numbers are medians.
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
from train.process_speed import measure_processes
from train.provenance import circumstances
from train.savings import SAVINGS
from train.step_cost import DEPTH, FORMS, NAIVE, OPTIONS, OURS, PHASES, Case
from train.throughput import check_equal, linearity, measure

SWEEPS = {
    "tokens": [256, 512, 1024, 2048],
    "heads": [1, 3, 5],
    "steps": [1, 3, 5, 7],
    "vocabulary": [8192, 32768, 131072],
    "processes": [1, 2],
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
    ablation: bool = False
    options: list[str] = field(default_factory=list)
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
        self._check_sweep()
        for case in self.cases():
            if case.tokens * case.supervised < case.depth + 2:
                raise ValueError(f"tokens={case.tokens} leaves no label for depth {case.depth}; give more tokens")

    def _check_sweep(self) -> None:
        if self.sweep is not None and self.sweep not in SWEEPS:
            raise ValueError(f"sweep={self.sweep} must be one of {', '.join(SWEEPS)}")
        if self.sweep == "tokens" and len(self.values or SWEEPS["tokens"]) < 3:
            raise ValueError(f"values={self.values} must be at least three, or any line fits them; give more")
        if unknown := sorted(set(self.options) - set(OPTIONS)):
            raise ValueError(f"options={unknown} must be among {', '.join(OPTIONS)}")
        compared = [self.ablation, bool(self.options), self.sweep == "processes"]
        if sum(compared) > 1:
            raise ValueError("ablation=true, options=[...] and sweep=processes exclude each other; choose one")

    def cases(self) -> list[Case]:
        """What is measured: every family, or those that the sweep is about at each of its values."""
        plain = [self._case(family) for family in self.families]
        if self.sweep is None or self.sweep == "processes":
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
    "tokens/s": lambda row: f"{row[OURS]['tokens_per_s']:.1f}",
    "naive tokens/s": lambda row: f"{row[NAIVE]['tokens_per_s']:.1f}",
    "faster": lambda row: f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]",
    "without target": lambda row: f"{row['speedup_without_target']:.2f}",
    "peak GB (step)": lambda row: f"{row[OURS]['peak_gb']:.2f} ({row[OURS]['step_gb']:.2f})",
    "naive GB (step)": lambda row: f"{row[NAIVE]['peak_gb']:.2f} ({row[NAIVE]['step_gb']:.2f})",
}
SAVED: Columns = {
    "heads": COST["heads"],
    "without": lambda row: row["without"],
    "step s": lambda row: f"{row[OURS]['step_s']:.2f}",
    "step s without": lambda row: f"{row[row['without']]['step_s']:.2f}",
    "longer": COST["faster"],
    "peak GB": lambda row: f"{row[OURS]['peak_gb']:.2f}",
    "peak GB without": lambda row: f"{row[row['without']]['peak_gb']:.2f}",
}
WITH: Columns = {
    "heads": COST["heads"],
    "with": lambda row: row["with"],
    "step s": lambda row: f"{row[OURS]['step_s']:.2f}",
    "step s with": lambda row: f"{row[row['with']]['step_s']:.2f}",
    "longer": COST["faster"],
    "tokens/s": COST["tokens/s"],
    "tokens/s with": lambda row: f"{row[row['with']]['tokens_per_s']:.1f}",
    "peak GB (step)": COST["peak GB (step)"],
    "peak GB with (step)": lambda row: f"{row[row['with']]['peak_gb']:.2f} ({row[row['with']]['step_gb']:.2f})",
}
PROCESSES: Columns = {
    "heads": COST["heads"],
    "processes": lambda row: str(row["processes"]),
    "step s": lambda row: f"{row['step_s']:.2f}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:.1f}",
    "gain": lambda row: f"{row['gain']:.2f}",
}
NOTES = """\
tokens/s: supervised tokens. faster: than naive, with [the extremes of the turns]; without target: had the target's
forward, which is the same in both, been free. GB: the peak of the process, in brackets its growth from before the first
step. loss %: ours computes the gradients of the logits there, the naive form in the backward.
"""


def report(rows: list[dict[str, Any]], model: str) -> str:
    """What was measured, as Markdown."""
    if "processes" in rows[0]:
        parts = [_table(PROCESSES, rows)]
    elif "without" in rows[0]:
        parts = [_table(SAVED, rows)]
    elif "with" in rows[0]:
        parts = [_table(WITH, rows)]
    else:
        parts = [_table(COST, rows), _shares(rows), *growth(rows), NOTES]
    return "\n\n".join([f"## Training steps on {model}", *parts])


def _table(columns: Columns, rows: list[dict[str, Any]]) -> str:
    return table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def _shares(rows: list[dict[str, Any]]) -> str:
    return table(
        ["heads", "form", "step s", *(f"{phase} %" for phase in PHASES)],
        [
            [COST["heads"](row), form, f"{row[form]['step_s']:.2f}"]
            + [f"{100 * row[form]['share'][phase]:.0f}" for phase in PHASES]
            for row in rows
            for form in FORMS
        ],
    )


def growth(rows: list[dict[str, Any]]) -> list[str]:
    """How straight the lines of our seconds and memory over tokens are, for each family that was swept over them."""
    lines = []
    for name in dict.fromkeys(COST["heads"](row) for row in rows):
        swept = [row for row in rows if COST["heads"](row) == name]
        if len({row["tokens"] for row in swept}) < 3:
            continue
        tokens = [row["rows"] * row["tokens"] for row in swept]
        seconds, memory = ([row[OURS][key] for row in swept] for key in ("step_s", "step_gb"))
        lines.append(
            f"{name}, over {tokens[0]} to {tokens[-1]} tokens: R2 of a straight line {linearity(tokens, seconds):.4f} "
            f"for the seconds of a step, {linearity(tokens, memory):.4f} for its memory"
        )
    return lines


def bench(config: BenchConfig, console: Console) -> list[dict[str, Any]]:
    """Measure all cases under a progress bar."""
    rows = []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=count_turns(config))

        def advance(text: str) -> None:
            progress.update(task, advance=1, description=text)

        for case in config.cases():
            if config.sweep == "processes":
                rows += measure_processes(case, config.values or SWEEPS["processes"], config.rounds, advance)
            elif config.ablation:
                for name in savings_of(case):
                    rows.append({"without": name, **measure(case, config.rounds, advance, name)})
            elif config.options:
                for name in config.options:
                    rows.append({"with": name, **measure(case, config.rounds, advance, name)})
            else:
                advance(f"{case.family}: compare the losses")
                with own_process() as call:
                    loss, gradients = call(check_equal, case)
                differ = f"ours and naive differ by {loss:.0e} in the loss and {gradients:.0e} in the gradients"
                progress.console.print(f"{case.family} {case.depth}: {differ}", highlight=False)
                difference = {"loss_difference": loss, "gradient_difference": gradients}
                rows.append({**measure(case, config.rounds, advance), **difference})
    return rows


def savings_of(case: Case) -> list[str]:
    """The savings that concern a family."""
    return [name for name, saving in SAVINGS.items() if case.family in saving.families]


def count_turns(config: BenchConfig) -> int:
    """How often `bench` advances its bar."""
    turns = config.rounds + 2
    if config.sweep == "processes":
        return len(config.cases()) * len(config.values or SWEEPS["processes"]) * turns
    if config.ablation:
        return sum(len(savings_of(case)) for case in config.cases()) * 2 * turns
    if config.options:
        return len(config.cases()) * len(config.options) * 2 * turns
    return len(config.cases()) * (1 + 2 * turns)


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
