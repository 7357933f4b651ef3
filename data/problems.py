"""Rows that cannot be used: why, how many, and when they are too many."""

from collections import Counter
from dataclasses import dataclass, field


class RowError(ValueError):
    """A row that cannot be used. `reason` is common to all rows with this fault; `detail` is this row's."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass
class Problems:
    """Counts the rows read and the rows that could not be used, so that none is dropped in silence."""

    num_shown: int = 5
    num_rows: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str]] = field(default_factory=list)

    def add(self, origin: str, error: RowError) -> None:
        """Records that the row at `origin` ("file:line") is left out because of `error`."""
        self.counts[error.reason] += 1
        if len(self.examples) < self.num_shown:
            self.examples.append((origin, str(error)))

    def check(self, max_bad_share: float) -> None:
        """Raises ValueError, with the first few rows, if the share of bad rows exceeds `max_bad_share`."""
        num_bad = self.counts.total()
        if num_bad <= max_bad_share * self.num_rows:
            return
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.counts.most_common())
        shown = "".join(f"\n  {origin}: {text}" for origin, text in self.examples)
        raise ValueError(
            f"{num_bad} of {self.num_rows} rows ({num_bad / self.num_rows:.1%}) cannot be used, more than "
            f"max_bad_share={max_bad_share}; mend the rows or raise max_bad_share ({reasons}). "
            f"The first are:{shown}"
        )
