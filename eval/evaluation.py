"""One evaluation from heads on disk to a report: costs, calibration, draft tree, benchmark, merge."""

import logging
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from data.progress import track
from eval.benchmark import ENGINE, GENERATE, BenchmarkConfig, drafter_for, probe_plain, run_benchmark
from eval.drafting import for_serving
from eval.level_drafter import DynamicTree
from eval.lineage import check_tracker
from eval.plots import summary_figure
from eval.prompts import EvalPrompt, load_prompts
from eval.records import Evaluation
from eval.report import Summary, merge, write_report
from eval.tree import Tree
from eval.tree_choice import AUTO, TreeConfig, measure_and_choose
from heads.family import DraftHeads
from heads.layout import heads_directory, load_heads
from heads.target import Target, TargetConfig, dtype_name, load_target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalConfig:
    """`conf/eval.yaml`. source: a run directory (its `heads/` is taken) or a directory of saved heads."""

    model: TargetConfig
    source: str
    prompts: list[str]
    limit: int | None = None
    output: str | None = None  # default: the run directory
    tree: TreeConfig = field(default_factory=TreeConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    other_dtypes: list[str] = field(default_factory=list)  # plain decoding in these dtypes is timed for comparison
    threads: int | None = None
    allow_other_weights: bool = False
    tracker: str = "auto"  # how eval_heads.py logs the report, see `eval.lineage`

    def __post_init__(self):
        check_tracker(self.tracker)
        if self.tree.source == AUTO and not self.tree.calibration:
            raise ValueError("tree.source=auto needs tree.calibration, prompts to measure the heads on")


def evaluate(config: EvalConfig) -> Summary | None:
    """Run an evaluation, shared by all processes; rank 0 writes the report and returns its summary.

    Raises:
        ValueError: for heads that do not belong to the target, a tree that they cannot fill, or unusable prompts.
    """
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    target = load_target(config.model, accelerator.device)
    directory = Path(config.source)
    heads = load_heads(heads_directory(directory), target, allow_other_weights=config.allow_other_weights)
    heads = for_serving(heads, target)
    prompts = load_prompts(config.prompts, target, config.limit)
    shared: list[Any] = [None]
    others: dict[str, Target] = {}
    if accelerator.is_main_process:
        shared[0], others = _prepare(config, target, heads, prompts)
    tree, costs, rates = broadcast_object_list(shared)[0]
    if not accelerator.is_main_process:
        others = {name: _in_dtype(name, config, target) for name in _winners(config, target, rates)}
    drafter = drafter_for(heads, tree, config.benchmark)
    mine = list(enumerate(prompts))[accelerator.process_index :: accelerator.num_processes]
    rows = run_benchmark(target, drafter, mine, config.benchmark, _same_dtype_winner(rates) == GENERATE, others)
    part = Evaluation(
        heads=directory.as_posix(),
        kind=heads.kind,
        target=config.model.name,
        acceptance=config.benchmark.acceptance.rule,
        lossless=config.benchmark.acceptance.lossless,
        depth=tree.depth,
        tree=[] if isinstance(tree, DynamicTree) else tree.choices(),
        results=list(track(rows, "decoding", "prompts", len(mine), shown=accelerator.is_main_process)),
        settings=_settings(config, target, tree, rates),
        cost_ms=costs,
        dtype=dtype_name(target.dtype),
    )
    others.clear()  # a second target is not held while processes wait for one another
    parts = gather_object([part])
    summary = None
    if accelerator.is_main_process:
        output = Path(config.output or directory)
        summary = write_report(merge(parts), output)
        summary_figure(summary, output / "summary.png")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return summary


def _prepare(
    config: EvalConfig, target: Target, heads: DraftHeads, prompts: Sequence[EvalPrompt]
) -> tuple[tuple[Tree | DynamicTree, dict[str, float], dict[str, float]], dict[str, Target]]:
    """What all processes share: the tree, step costs, and tokens per second of the plain settings; and apart from it
    the target in another dtype, if that is the fastest setting.

    The settings take turns, so all are in memory at once, but only here.
    """
    tree, costs = measure_and_choose(config.tree, target, heads)
    nodes = tree.nodes if isinstance(tree, DynamicTree) else tree.size - 1
    logger.info("draft tree of %d nodes, depth %d", nodes, tree.depth)
    others = {name: _in_dtype(name, config, target) for name in _other_settings(config, target)}
    rates = probe_plain({ENGINE: target, **others}, prompts, config.benchmark)
    logger.info("plain decoding: %s", ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in rates.items()))
    return (tree, costs, rates), {name: others[name] for name in _winners(config, target, rates)}


def _winners(config: EvalConfig, target: Target, rates: dict[str, float]) -> list[str]:
    """The fastest of all plain settings if it is in another dtype: it is timed on every prompt."""
    fastest = max(rates, key=lambda name: rates[name])
    return [fastest] if fastest in _other_settings(config, target) else []


def _other_settings(config: EvalConfig, target: Target) -> list[str]:
    """Names of the plain settings in other dtypes."""
    return [f"{ENGINE}, {name}" for name in config.other_dtypes if name != dtype_name(target.dtype)]


def _in_dtype(setting: str, config: EvalConfig, target: Target) -> Target:
    return load_target(replace(config.model, dtype=setting.removeprefix(f"{ENGINE}, ")), target.device)


def _same_dtype_winner(rates: dict[str, float]) -> str:
    return max((name for name in rates if name in (ENGINE, GENERATE)), key=lambda name: rates[name])


def _settings(config: EvalConfig, target: Target, tree: Tree | DynamicTree, rates: dict[str, float]) -> dict[str, Any]:
    return {
        "other_dtype_settings": _other_settings(config, target),
        "dynamic_tree": asdict(tree) if isinstance(tree, DynamicTree) else None,
        "plain_probe_tokens_per_s": rates,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()} {platform.processor()}".strip(),
        "device": str(target.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "config": asdict(config),
    }
