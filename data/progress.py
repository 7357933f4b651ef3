"""How far a long command is: on a terminal a bar, elsewhere a log line now and then, so that a log file says it too."""

import logging
from collections.abc import Iterable, Iterator
from datetime import timedelta
from time import monotonic
from typing import Self, TypeVar

import rich.progress
from rich.console import Console

Item = TypeVar("Item")

logger = logging.getLogger(__name__)

EVERY_S = 30.0  # at least, between two lines
AT_ONCE_S = 1.0  # what is counted in this time was there before, and says nothing of the speed


class Progress:
    """`total` units of work (None: nobody knows), `done` of them in an earlier run; `with` it, and call `advance`.

    what: names the work. unit: what is counted, in the plural. shown: False in all processes but one.
    """

    def __init__(self, what: str, unit: str, total: int | None, done: int = 0, shown: bool = True):
        console = Console(stderr=True)
        self.what, self.unit, self.total, self.done = what, unit, total, done
        self.logs = shown and not console.is_terminal
        columns = (rich.progress.TextColumn(what), rich.progress.BarColumn(bar_width=20))
        text = rich.progress.TextColumn("{task.fields[text]}")
        self.bar = rich.progress.Progress(*columns, text, console=console, disable=self.logs or not shown)
        self.task = self.bar.add_task(what, total=total, completed=done, text="")
        self.began = self.counted_from = self.said = monotonic()
        self.at_first = done

    def __enter__(self) -> Self:
        self.began = self.counted_from = self.said = monotonic()
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    @property
    def seconds(self) -> float:
        """Since the work began."""
        return monotonic() - self.began

    def advance(self, units: int, note: str = "") -> None:
        """`units` more are done; `note` stands beside their numbers."""
        now = monotonic()
        self.done += units
        if now - self.began < AT_ONCE_S:
            self.counted_from, self.at_first = now, self.done
        text = self._text(now - self.counted_from, note)
        self.bar.update(self.task, completed=self.done, text=text)
        if self.logs and now - self.said >= EVERY_S:
            self.said = now
            logger.info("%s: %s", self.what, text)

    def _text(self, seconds: float, note: str) -> str:
        rate = (self.done - self.at_first) / seconds if seconds else 0.0
        speed = [f"{rate:,.{0 if rate >= 10 else 2}f}/s"] if rate else []
        notes = [note] if note else []
        if self.total is None:
            return ", ".join([f"{self.done:,} {self.unit}", *speed, *notes])
        done = f"{self.done:,} of {self.total:,} {self.unit} ({self.done / self.total:.0%})"
        left = [f"{timedelta(seconds=round(max(0, self.total - self.done) / rate))} left"] if rate else []
        return ", ".join([done, *speed, *notes, *left])


def track(items: Iterable[Item], what: str, unit: str, total: int, shown: bool = True) -> Iterator[Item]:
    """The same items; each is done when the next one is asked for."""
    with Progress(what, unit, total, shown=shown) as progress:
        for item in items:
            yield item
            progress.advance(1)
