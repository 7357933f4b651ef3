"""Measure a server with heads, and without: tokens per second under load, time to first token, tau and alpha_k.

python scripts/bench_server.py url=http://127.0.0.1:8000 url_off=http://127.0.0.1:8001      # in turns, with a speedup
python scripts/bench_server.py url=http://127.0.0.1:8000 heads=off output=outputs/off       # one server, two runs
python scripts/bench_server.py url=http://127.0.0.1:8000 output=outputs/on compare=outputs/off/bench.json
python scripts/bench_server.py source=outputs/on      # the report of a bench that was killed
"""

import asyncio
import logging
import re
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.markdown import Markdown

from eval.config import from_hydra
from eval.serving.bench import BenchConfig, bench
from eval.serving.load import ServerGone
from eval.serving.log import LOG_FILE
from eval.serving.report import MARKDOWN_FILE, sentence, write_report
from train.provenance import circumstances

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """SIGTERM ends the bench as Ctrl-C does: what was measured is reported."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


def measure(config: BenchConfig) -> tuple[int, str]:
    """Run the bench; returns the exit code and, if it broke off, why."""
    try:
        asyncio.run(_until_terminated(bench(config, circumstances())))
    except ServerGone as error:
        return 1, str(error)
    except KeyboardInterrupt:
        return INTERRUPTED, "interrupted"
    except asyncio.CancelledError:
        return TERMINATED, "terminated"
    return 0, ""


def heads_as_flag(arguments: list[str]) -> list[str]:
    """Let `heads=on` mean `with_heads=on`: to Hydra, `heads=` chooses from conf/heads/."""
    return [re.sub("^heads=", "with_heads=", argument) for argument in arguments]


@hydra.main(version_base="1.3", config_path="../conf", config_name="bench_server")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every request
    try:
        config = from_hydra(BenchConfig, composed)
        code, broken_off = (0, "") if config.source else measure(config)
        directory = Path(config.source or config.output)
        if not (directory / LOG_FILE).exists() and broken_off:
            sys.exit(code)
        summary = write_report(directory, Path(config.compare) if config.compare else None)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    Console(width=140).print(Markdown((directory / MARKDOWN_FILE).read_text(encoding="utf-8")))
    print(f"report {directory}/{MARKDOWN_FILE}\n{sentence(summary)}")
    if broken_off:
        print(f"error: {broken_off}; the report holds what was measured until then", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    sys.argv = heads_as_flag(sys.argv)
    main()
