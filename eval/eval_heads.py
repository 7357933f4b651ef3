"""Entry: measure what heads are worth. accelerate launch eval/eval_heads.py heads=outputs/eagle-smollm2-135m"""

import logging
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eval.config import from_hydra, heads_as_source
from eval.evaluation import EvalConfig, evaluate
from eval.lineage import Item, heads_item, log_job
from eval.report import Summary, last_line
from eval.threads import use_threads
from heads.layout import heads_directory


@hydra.main(version_base="1.3", config_path="../conf", config_name="eval")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    try:
        config = from_hydra(EvalConfig, composed)
        use_threads(config.threads)
        summary = evaluate(config)
        if summary is not None:
            directory = Path(config.output or config.source)
            sys.stdout.write(f"{summary['verdict']}\nreport {directory}/report.html\n{last_line(summary)}\n")
            log_report(config, directory, summary)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def log_report(config: EvalConfig, directory: Path, summary: Summary) -> None:
    """Log the report in `directory` to the tracker that `config` names."""
    speedup = {f"speedup_{name}": summary["speedup"][name] for name in ("median", "low", "high")}
    heads = heads_item(heads_directory(config.source))
    report = Item("report", "report", directory, ("report.json", "report.html"))
    log_job("evaluation", config.tracker, heads, report, {"tau": summary["tau"], **speedup})


if __name__ == "__main__":
    sys.argv = heads_as_source(sys.argv)
    main()
