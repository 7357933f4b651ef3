"""Entry: measure what heads are worth. accelerate launch eval/eval_heads.py heads=outputs/eagle-smollm2-135m"""

import logging
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eval.config import from_hydra, heads_as_source
from eval.evaluation import EvalConfig, evaluate
from eval.report import last_line
from eval.threads import use_threads


@hydra.main(version_base="1.3", config_path="../conf", config_name="eval")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    try:
        config = from_hydra(EvalConfig, composed)
        use_threads(config.threads)
        summary = evaluate(config)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if summary is not None:
        directory = Path(config.output or config.source)
        sys.stdout.write(f"{summary['verdict']}\nreport {directory}/report.html\n{last_line(summary)}\n")


if __name__ == "__main__":
    sys.argv = heads_as_source(sys.argv)
    main()
