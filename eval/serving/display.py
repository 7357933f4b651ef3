"""What a person sees of a bench: a bar over all requests, with the block under way and what it gives."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eval.serving.records import Block, RequestResult


class ProgressDisplay:
    """A bar of `total` requests; tokens per second are those of the block under way."""

    def __init__(self, total: int, repeats: int):
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.repeats, self.failures, self.tokens, self.began = repeats, 0, 0, 0.0
        self.bar = self.progress.add_task("warm-up", total=total, text="")

    def __enter__(self) -> "ProgressDisplay":
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def block(self, block: Block) -> None:
        """A block begins."""
        self.tokens, self.began = 0, time.perf_counter()
        name = f"heads {block.arm}, concurrency {block.concurrency}, repeat {block.repeat + 1}/{self.repeats}"
        self.progress.update(self.bar, description=name)

    def request(self, result: RequestResult) -> None:
        """A request has ended."""
        self.tokens += result.completion_tokens or 0
        self.failures += result.failure is not None
        rate = self.tokens / (time.perf_counter() - self.began)
        failures = f", {self.failures} failed" if self.failures else ""
        self.progress.update(self.bar, advance=1, text=f"{rate:.1f} tokens/s{failures}")
