"""The log of a bench: a JSONL file that gains a line whenever something is measured, so that a kill loses nothing.

Its lines are told apart by "row":
    run       once, first: settings, the plan of blocks, prompts of each block
    request   a finished request, with the index of its block
    block     the end of a block: seconds and what the server counted
    end       once, last: why the bench stopped, null if it is whole. A killed bench has none
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.regenerate import AnswerLog
from eval.serving.counters import Counters
from eval.serving.records import Block, BlockResult, RequestResult, Run

LOG_FILE = "requests.jsonl"
KILLED = "it was killed: its log has no end"


class BenchLog:
    """Writes the log of one bench into `directory`; `with` it.

    Raises:
        ValueError: if the directory holds a log already.
    """

    def __init__(self, directory: Path):
        require_unused(directory)
        self._rows = AnswerLog(directory / LOG_FILE)

    def __enter__(self) -> "BenchLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self._rows.__exit__(*exception)

    def run(self, settings: dict[str, Any], plan: Sequence[Block], prompts: int) -> None:
        """What will be measured and how."""
        self._write("run", settings=settings, plan=[asdict(block) for block in plan], prompts=prompts)

    def request(self, block: Block, result: RequestResult) -> None:
        """A request that has ended."""
        self._write("request", block=block.index, **asdict(result))

    def block(self, result: BlockResult) -> None:
        """A block that has ended, or was broken off."""
        self._write("block", **asdict(result))

    def end(self, stopped: str | None) -> None:
        """The end, and why it came early if it did."""
        self._write("end", stopped=stopped)

    def _write(self, row: str, **content: Any) -> None:
        self._rows.append([{"row": row, **content}])


def require_unused(directory: Path) -> None:
    """Raises ValueError if `directory` holds a bench, which another would overwrite."""
    if (path := directory / LOG_FILE).exists():
        raise ValueError(f"output={directory} holds a bench; give another output=, or remove {path}")


def read_log(directory: Path) -> Run:
    """A bench from its log, whole or broken off.

    Raises:
        ValueError: if there is no log in `directory`, or it ends before its first line.
    """
    path = directory / LOG_FILE
    if not path.exists():
        raise ValueError(f"{directory} holds no {LOG_FILE}; give the output= directory of a bench")
    with AnswerLog(path) as log:
        rows = log.rows
    if not rows or rows[0].pop("row") != "run":
        raise ValueError(f"{path} does not begin with the settings of a bench; nothing can be made of it")
    ends = [row["stopped"] for row in rows[1:] if row["row"] == "end"]
    return Run(
        settings=rows[0]["settings"],
        plan=[Block(**block) for block in rows[0]["plan"]],
        prompts=rows[0]["prompts"],
        requests=[_request(row) for row in rows[1:] if row["row"] == "request"],
        blocks=[_block(row) for row in rows[1:] if row["row"] == "block"],
        stopped=ends[-1] if ends else KILLED,
    )


def _request(row: dict[str, Any]) -> tuple[int, RequestResult]:
    return row["block"], RequestResult(**{name: value for name, value in row.items() if name not in ("row", "block")})


def _block(row: dict[str, Any]) -> BlockResult:
    content = {name: value for name, value in row.items() if name != "row"}
    counted = content["counters"]
    return BlockResult(**{**content, "block": Block(**content["block"]), "counters": counted and _counters(counted)})


def _counters(counted: dict[str, Any]) -> Counters:
    positions = counted["accepted_per_position"]
    return Counters(**{**counted, "accepted_per_position": None if positions is None else tuple(positions)})
