"""Check heads by a real serving engine: does it emit the tokens, and accept the drafts, that our decoder does?

python scripts/serve_check.py engine=vllm heads=outputs/eagle-smollm2-135m/export-vllm
python scripts/serve_check.py engine=vllm heads=outputs/eagle3-llama3-8b model=llama3-8b limit=10
python scripts/serve_check.py engine=vllm heads=outputs/eagle3-llama3-8b model=llama3-8b format=speculators
python scripts/serve_check.py engine=llamacpp heads=outputs/run server=bin/llama-server converter=convert_hf_to_gguf.py
python scripts/serve_check.py engine=llamacpp heads=outputs/run server=bin/llama-server target_gguf=target.gguf

The first run with vLLM installs it, in an environment of its own: 0.32, the last release with Medusa. Greedy decoding,
chains of drafts (for Medusa the best guess of each head), float32. The exit code is 1, with the reason by name, when
texts or counters differ.
"""

import logging
import signal
import sys

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from eval.config import from_hydra, heads_as_source
from eval.serving.check_config import ServeCheckConfig
from eval.serving.conformance_report import COLUMNS, prompt_cells, sentence, total_cells
from eval.serving.engine_check import check_engine
from eval.serving.engine_process import EngineFailed
from eval.serving.environment import EngineUnavailable
from eval.threads import use_threads


def show(summary: dict, console: Console) -> None:
    """Print both tables and the verdict."""
    prompts = Table(*COLUMNS, title="where two numbers stand, the engine's first")
    for prompt in summary["prompts"]:
        prompts.add_row(*prompt_cells(prompt))
    totals = Table("", summary["settings"]["engine"], "here")
    for cells in total_cells(summary):
        totals.add_row(*cells)
    console.print(prompts, totals)
    lines = [(f"note, {note['name']}: {note['text']}", "yellow") for note in summary["notes"]]
    lines += [(f"{failure['name']}: {failure['text']}", "red") for failure in summary["failures"]]
    for line, style in [*lines, (sentence(summary), "bold")]:
        console.print(line, style=style, markup=False, soft_wrap=True)


def end_in_order(number: int, frame: object) -> None:
    """A request to end must pass through the code that stops the engines."""
    raise SystemExit(128 + number)


@hydra.main(version_base="1.3", config_path="../conf", config_name="serve_check")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, end_in_order)
    try:
        config = from_hydra(ServeCheckConfig, composed)
        use_threads(config.threads)
        summary = check_engine(config)
    except EngineUnavailable as error:
        sys.exit(f"skipped: {error}")
    except (ValueError, OSError, EngineFailed) as error:
        sys.exit(f"error: {error}")
    show(summary, Console(highlight=False))
    sys.stdout.write(f"report {config.directory}/report.md\n")
    sys.exit(0 if summary["passed"] else 1)


if __name__ == "__main__":
    sys.argv = heads_as_source(sys.argv)
    main()
