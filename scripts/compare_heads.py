"""Train several heads under one budget, decode all on the same prompts in one alternated run, print one table.

python scripts/compare_heads.py families=[medusa,hydra,eagle3] 'train=["trainer.max_seconds=600","trainer.epochs=4"]'
python scripts/compare_heads.py comparison=eagle3_losses 'train=["trainer.max_seconds=600"]'  # one family, other losses
python scripts/compare_heads.py runs=[outputs/a,outputs/b]                                    # what is trained already
python scripts/compare_heads.py runs=[outputs/a,outputs/b] checkpoints=true                   # their learning curves
"""

import json
import logging
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from eval.benchmark import BenchmarkConfig, drafter_for
from eval.comparison import compare, decode_all, draw_comparison, draw_learning, label_runs
from eval.config import from_hydra
from eval.drafting import for_serving
from eval.prompts import load_prompts
from eval.threads import use_threads
from eval.tree_choice import TreeConfig, given_tree, measure_and_choose
from heads.layout import heads_directory, load_heads
from heads.target import Target, TargetConfig, load_target
from train import checkpoint

TRAIN = str(Path(__file__).parents[1] / "train" / "train_heads.py")


@dataclass(frozen=True)
class Entry:
    """Heads to train: `heads` is a name of conf/heads/, `label` their name here, `overrides` their own settings."""

    heads: str
    label: str
    overrides: list[str] = field(default_factory=list)

    def __post_init__(self):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.label):
            raise ValueError(
                f"families label {self.label!r} must be of letters, digits, '.', '_' and '-'; it becomes a folder"
            )


@dataclass(frozen=True)
class CompareConfig:
    """`conf/compare.yaml`.

    families: heads to train; each a name of conf/heads/, or {label, heads, overrides} for settings of its own.
    train: overrides of conf/train.yaml that all of them share.
    runs: directories of runs, or of heads, that are there already.
    checkpoints: each run stands for all checkpoints that it kept (trainer.save_every, keep_last): its learning curve.
    """

    model: TargetConfig
    prompts: list[str]
    families: list[Any] = field(default_factory=list)
    train: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    checkpoints: bool = False
    limit: int | None = None
    output: str = "outputs/comparison"
    tree: TreeConfig = field(default_factory=TreeConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    threads: int | None = None

    def __post_init__(self):
        if not self.families and not self.runs:
            raise ValueError(
                "nothing to compare; give families=[medusa,eagle3] to train, or runs=[outputs/a,outputs/b]"
            )
        labels = [entry.label for entry in self.entries()]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(
                f"two of families are called {twice[0]}; tell them apart: {{label: other, heads: {twice[0]}}}"
            )

    def entries(self) -> list[Entry]:
        """The heads to train, each with its label."""
        return [_entry(family) for family in self.families]


def _entry(family: Any) -> Entry:
    values = {"heads": family} if isinstance(family, str) else family
    if not isinstance(values, dict) or "heads" not in values:
        raise ValueError(f"families has {family}; give a name of conf/heads/, or {{label, heads, overrides}}")
    return from_hydra(Entry, {"label": values["heads"], **values})


def train_all(config: CompareConfig) -> dict[str, Path]:
    """Train each entry in a process of its own; a run that is there already is resumed. Returns all runs by label."""
    trained = {entry.label: Path(config.output) / entry.label for entry in config.entries()}
    known = label_runs(config.runs, trained)
    for entry in config.entries():
        run = trained[entry.label]
        place = [f"run_name={entry.label}", f"output_dir={run}", "resume=true"]
        settings = [*_model_overrides(config.model), f"heads={entry.heads}", *config.train, *entry.overrides]
        subprocess.run([sys.executable, TRAIN, *place, *settings], check=True)
    return {**known, **trained}


def _model_overrides(model: TargetConfig) -> list[str]:
    """The same target for a training process, whatever preset it came from."""
    return ["model=custom", *(f"++model.{name}={_hydra(value)}" for name, value in asdict(model).items())]


def _hydra(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_hydra(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value)


def kept_checkpoints(runs: dict[str, Path]) -> dict[str, Path]:
    """The checkpoints of all runs, in their order, each by its run's label and its own name.

    Raises:
        ValueError: if a run kept none.
    """
    kept = {}
    for label, run in runs.items():
        found = checkpoint.checkpoints(run / "checkpoints")
        if not found or not (run / "metrics.jsonl").exists():
            raise ValueError(f"checkpoints=true: {run} holds no checkpoints; give the directory of a training run")
        kept |= {f"{label} {path.name}": path for path in found}
    return kept


def compare_runs(config: CompareConfig, runs: dict[str, Path]) -> list[dict[str, Any]]:
    """Decode the heads of all runs, or checkpoints of them, on the same prompts; rows for the table."""
    target = load_target(config.model)
    prompts = load_prompts(config.prompts, target, config.limit)
    drafters = {name: _drafter(config, target, run) for name, run in runs.items()}
    rows = compare(
        decode_all(target, drafters, prompts, config.benchmark),
        {name: drafter.depth for name, drafter in drafters.items()},
    )
    return [{**row, **_training(runs[row["heads"]])} for row in rows]


def _drafter(config: CompareConfig, target: Target, run: Path):
    heads = for_serving(load_heads(heads_directory(run), target), target)
    tree = given_tree(config.tree, heads)
    if tree is None:
        tree, _ = measure_and_choose(config.tree, target, heads)
    return drafter_for(heads, tree, config.benchmark)


def _training(directory: Path) -> dict[str, Any]:
    """What a run's own files say of its training up to this checkpoint; empty for heads that came from elsewhere."""
    run = directory.parents[1] if directory.parent.name == "checkpoints" else directory
    if not (run / "metrics.jsonl").exists():
        return {}
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    facts = json.loads((run / "run.json").read_text())
    state = checkpoint.read_state(directory if run != directory else checkpoint.checkpoints(run / "checkpoints")[-1])
    return {
        "parameters": facts["starts"][-1]["parameters"],
        "train_tokens": state.tokens,
        "train_seconds": state.seconds,
        "memory_gb": max(row.get("train/memory_gb", 0.0) for row in logged),
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The comparison as a table."""
    speedup = f"speedup over {rows[0]['fastest_plain']}"  # the fastest plain setting
    table = Table(
        "heads", "tau", "alpha_k", speedup, "over engine", "parameters", "trained on", "in s", "peak GB", "equal"
    )
    for row in rows:
        table.add_row(
            row["heads"],
            f"{row['tau']:.2f} [{row['tau_low']:.2f}, {row['tau_high']:.2f}]",
            " ".join("-" if rate is None else f"{rate:.2f}" for rate in row["alpha"]),
            f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]",
            f"{row['speedup_engine']:.2f}",
            f"{row['parameters'] / 1e6:.1f} M" if "parameters" in row else "",
            f"{row['train_tokens'] / 1e3:,.0f}k" if row.get("train_tokens") else "",
            f"{row['train_seconds']:.0f}" if "train_seconds" in row else "",
            f"{row['memory_gb']:.1f}" if "memory_gb" in row else "",
            {True: "all", False: "not all", None: ""}[row["equal"]],
        )
    return table


@hydra.main(version_base="1.3", config_path="../conf", config_name="compare")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        config = from_hydra(CompareConfig, composed)
        use_threads(config.threads)
        runs = train_all(config)
        rows = compare_runs(config, kept_checkpoints(runs) if config.checkpoints else runs)
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "comparison.json").write_text(json.dumps(rows, indent=2) + "\n")
    draw = draw_learning if config.checkpoints else draw_comparison
    draw(rows, output / "comparison.png")
    Console(width=150).print(table_of(rows))
    Console().print(f"{output}/comparison.json, {output}/comparison.png")


if __name__ == "__main__":
    main()
