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
from rich.progress import track

from eval.benchmark import ENGINE, GENERATE, BenchmarkConfig, probe_plain, run_benchmark
from eval.calibrate import measure_accuracy
from eval.cost import SIZES, interpolated, measure_costs, relative_costs
from eval.drafters import MedusaDrafter
from eval.plots import summary_figure
from eval.prompts import EvalPrompt, load_prompts
from eval.published_trees import published_tree
from eval.records import Evaluation
from eval.report import Summary, merge, write_report
from eval.sampling import TorchCoin
from eval.tree import Tree
from eval.tree_search import best_tree, search_tree
from heads.layout import heads_directory, load_heads
from heads.medusa import MedusaHeads
from heads.target import Target, TargetConfig, load_target

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class TreeConfig:
    """The draft tree. `source`: "auto" (searched), the name of a published tree, or "choices"."""

    source: str = AUTO
    choices: list[list[int]] = field(default_factory=list)
    nodes: int | None = None  # draft nodes of a searched tree; None: as many as pay on this machine
    max_nodes: int = 15
    width: int = 8
    calibration: list[str] = field(default_factory=list)  # sources of calibration prompts, never those evaluated
    calibration_prompts: int = 24
    calibration_tokens: int = 48

    def __post_init__(self):
        if self.source == "choices" and not self.choices:
            raise ValueError("tree.source=choices needs tree.choices, e.g. tree.choices=[[0],[1],[0,0]]")


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

    def __post_init__(self):
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
    heads = (
        load_heads(heads_directory(directory), target, allow_other_weights=config.allow_other_weights)
        .to(target.dtype)
        .eval()
    )
    prompts = load_prompts(config.prompts, target, config.limit)
    shared: list[Any] = [None]
    if accelerator.is_main_process:
        shared = [_prepare(config, target, heads, prompts)]
    tree, costs, rates = broadcast_object_list(shared)[0]
    sampled = config.benchmark.acceptance.drafts == "sampled"
    drafter = MedusaDrafter(
        heads,
        Tree.from_choices(tree),
        config.benchmark.acceptance.sampling if sampled else None,
        TorchCoin(torch.Generator(target.device).manual_seed(config.benchmark.seed)),
    )
    mine = list(enumerate(prompts))[accelerator.process_index :: accelerator.num_processes]
    rows = run_benchmark(target, drafter, mine, config.benchmark, _same_dtype_winner(rates) == GENERATE)
    part = Evaluation(
        heads=directory.as_posix(),
        kind=heads.kind,
        target=config.model.name,
        acceptance=config.benchmark.acceptance.rule,
        lossless=config.benchmark.acceptance.lossless,
        depth=heads.depth,
        tree=tree,
        results=list(track(rows, "decoding", total=len(mine), disable=not accelerator.is_main_process)),
        settings=_settings(config, target, rates),
        cost_ms=costs,
        dtype=str(target.dtype).removeprefix("torch."),
    )
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
    config: EvalConfig, target: Target, heads: MedusaHeads, prompts: Sequence[EvalPrompt]
) -> tuple[list[list[int]], dict[str, float], dict[str, float]]:
    """What all processes share: tree choices, step costs, and tokens per second of the plain settings."""
    costs = measure_costs(target, heads, [size for size in SIZES if size <= config.tree.max_nodes + 1] or [2])
    tree = choose_tree(config.tree, target, heads, costs)
    logger.info("draft tree of %d nodes, depth %d", tree.size - 1, tree.depth)
    others = {
        f"{ENGINE}, {dtype}": load_target(replace(config.model, dtype=dtype), target.device)
        for dtype in config.other_dtypes
        if dtype != str(target.dtype).removeprefix("torch.")
    }
    rates = probe_plain({ENGINE: target, **others}, prompts, config.benchmark)
    logger.info("plain decoding: %s", ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in rates.items()))
    return tree.choices(), costs, rates


def choose_tree(config: TreeConfig, target: Target, heads: MedusaHeads, costs: dict[str, float]) -> Tree:
    """Return the configured tree, or search the one that pays best at the measured costs.

    Raises:
        ValueError: if the heads cannot fill the tree.
    """
    if config.source == "choices":
        tree = Tree.from_choices(config.choices)
    elif config.source != AUTO:
        tree = published_tree(config.source)
    else:
        prompts = load_prompts(config.calibration, target, config.calibration_prompts)
        accuracy_KW = measure_accuracy(
            target, heads, [prompt.ids for prompt in prompts], config.calibration_tokens, config.width
        )
        if config.nodes is not None:
            return search_tree(accuracy_KW, config.nodes)
        verify, draft = relative_costs(costs)
        sizes = range(1, max(verify))
        tree, predicted = best_tree(accuracy_KW, {n + 1: interpolated(verify, n + 1) for n in sizes}, draft, sizes)
        logger.info("calibration predicts a speedup of %.2f", predicted)
    tree.check(num_heads=heads.depth, top_k=len(heads.d2t))
    return tree


def _same_dtype_winner(rates: dict[str, float]) -> str:
    return max((name for name in rates if name in (ENGINE, GENERATE)), key=lambda name: rates[name])


def _settings(config: EvalConfig, target: Target, rates: dict[str, float]) -> dict[str, Any]:
    return {
        "plain_probe_tokens_per_s": rates,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()} {platform.processor()}".strip(),
        "device": str(target.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "config": asdict(config),
    }
