"""Tables of GitHub-flavoured Markdown."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str | float | None]]) -> str:
    """A table; numbers are written for reading, text so that it cannot break the table."""
    lines = [
        " | ".join(cell(value) if isinstance(value, str) else number(value) for value in line)
        for line in [head, ["---"] * len(head), *rows]
    ]
    return "\n".join(f"| {line} |" for line in lines)


def cell(text: str) -> str:
    """`text` without line break, cell border or HTML: names come from files and servers."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", r"\|")


def number(value: float | None) -> str:
    """A measured value for reading: two decimals below 100, two digits below 0.1; a dash for None."""
    if value is None:
        return "-"
    if value and abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
