"""What a step costs here: plain, verify by tokens, draft, and the engine's own overhead.

python scripts/bench_decode_cost.py heads=outputs/eagle-smollm2-135m model.dtype=float32
"""

import sys

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from eval.benchmark import PROBE_TREE, run_benchmark
from eval.config import from_hydra, heads_as_source
from eval.cost import DRAFT, LEVEL, PLAIN, measure_costs
from eval.drafting import build_drafter, for_serving
from eval.evaluation import EvalConfig
from eval.metrics import time_share
from eval.prompts import load_prompts
from eval.tree import Tree
from heads.layout import heads_directory, load_heads
from heads.target import load_target

SIZES = (1, 2, 4, 8, 16, 32, 64)


def bench(config: EvalConfig) -> Table:
    """Measure and return the table."""
    target = load_target(config.model)
    heads = for_serving(load_heads(heads_directory(config.source), target), target)
    prompts = load_prompts(config.prompts, target, config.limit or 8)
    drafter = build_drafter(heads, Tree.from_choices(PROBE_TREE).pruned(heads.depth))
    costs = measure_costs(target, drafter, SIZES, rounds=15)
    results = list(run_benchmark(target, drafter, list(enumerate(prompts)), config.benchmark))
    cycles = sum(len(result.cycles) for result in results)
    seconds = sum(timing.decode_s for result in results for timing in result.heads)
    share = time_share(results)
    table = Table(
        "step", "ms", "of a plain step", title=f"{config.model.name}, {target.dtype}, batch 1, 256 cached tokens"
    )
    for name, cost in costs.items():
        label = {PLAIN: "plain step", DRAFT: "draft", LEVEL: "draft, each further level"}.get(name, name + " tokens")
        table.add_row(label, f"{cost:.1f}", f"{cost / costs[PLAIN]:.2f}")
    overhead = (share["rest"] or 0.0) * 1000 * seconds / cycles
    table.add_row("engine overhead", f"{overhead:.1f}", f"{100 * (share['rest'] or 0.0):.1f} % of a cycle")
    return table


@hydra.main(version_base="1.3", config_path="../conf", config_name="eval")
def main(composed: DictConfig) -> None:
    try:
        Console().print(bench(from_hydra(EvalConfig, composed)))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    sys.argv = heads_as_source(sys.argv)
    main()
