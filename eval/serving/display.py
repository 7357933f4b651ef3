"""What a person sees of a bench: how many requests are done, with the block under way and what it gives."""

import time

from data.progress import Progress
from eval.serving.records import Block, RequestResult


class ProgressDisplay:
    """Progress over `total` requests; tokens per second are those of the block under way."""

    def __init__(self, total: int, repeats: int):
        self.progress, self.repeats = Progress("bench", "requests", total), repeats
        self.name, self.failures, self.tokens, self.began = "", 0, 0, 0.0

    def __enter__(self) -> "ProgressDisplay":
        self.progress.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.__exit__(*exception)

    def block(self, block: Block) -> None:
        """A block begins."""
        self.tokens, self.began = 0, time.perf_counter()
        self.name = f"heads {block.arm}, concurrency {block.concurrency}, repeat {block.repeat + 1}/{self.repeats}"
        self.progress.advance(0, self.name)

    def request(self, result: RequestResult) -> None:
        """A request has ended."""
        self.tokens += result.completion_tokens or 0
        self.failures += result.failure is not None
        rate = self.tokens / (time.perf_counter() - self.began)
        failures = f", {self.failures} failed" if self.failures else ""
        self.progress.advance(1, f"{self.name}: {rate:.1f} tokens/s{failures}")
