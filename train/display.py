"""What a person sees of a run: on a terminal a bar with speed, loss, tau and time left, elsewhere log lines."""

import logging

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

logger = logging.getLogger(__name__)

console = Console(stderr=True)


def configure_logging(main_process: bool) -> None:
    """Log through the console that also holds the bar; processes other than the main one only warn."""
    bar_aware = RichHandler(console=console, show_path=False, show_level=False, log_time_format="%H:%M:%S")
    # In a file, rich would break lines at 80 columns.
    handler = bar_aware if console.is_terminal else logging.StreamHandler()
    logging.basicConfig(
        level=logging.INFO if main_process else logging.WARNING, format="%(message)s", handlers=[handler]
    )


class Display:
    """The progress of a run, on the main process."""

    def __init__(self, num_steps: int, main_process: bool):
        self.num_steps, self.text, self.tau = num_steps, "", ""
        self.shown = main_process and console.is_terminal
        self.logs = main_process and not console.is_terminal
        columns = (
            BarColumn(bar_width=8),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self.bar = Progress(*columns, console=console, disable=not self.shown)
        self.task = self.bar.add_task("training", total=1.0, text="")

    def __enter__(self) -> "Display":
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def advance(self, step: int, fraction: float) -> None:
        """`step` steps and `fraction` of the run are done."""
        text = f"step {step}/{self.num_steps}{self.tau}{self.text}"
        self.bar.update(self.task, completed=min(fraction, 1.0), text=text)

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Show the latest numbers."""
        if "eval/tau" in metrics:
            self.tau = f" tau {metrics['eval/tau']:.3f}"
        if "init/tokens" in metrics:
            self.text = f" forecast from {metrics['init/tokens']:,.0f} supervised tokens"
        if "train/loss" in metrics:
            speed = metrics.get("train/supervised_tokens_per_s", 0.0)
            self.text = f" loss {metrics['train/loss']:.4f} {speed:,.0f} supervised tokens/s"
        if self.logs:
            logger.info("step %d/%d%s%s", step, self.num_steps, self.tau, self.text)
