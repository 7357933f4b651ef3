"""Runs that no fault meets, made once: what the others must equal."""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.harness import count_changes, run_fork
from tests.faults.runs import LongRun
from tests.train.conftest import chats, make_config, make_values  # noqa: F401  fixtures of the same short chats


class Straight:
    """A run that goes through: its result, its seconds, its changes of files and how many of them need room."""

    def __init__(self, run: LongRun):
        changes, growing = (multiprocessing.get_context("fork").Value("i") for _ in range(2))
        began = time.monotonic()
        ended = run_fork(run.command(), count_changes(changes, growing))
        self.seconds = time.monotonic() - began
        assert ended.code == 0, ended.said
        self.result, self.changes, self.growing = run.result(), changes.value, growing.value


@pytest.fixture(scope="session")
def straight(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Straight]:  # noqa: F811
    """`straight(Training)`."""
    made: dict[type[LongRun], Straight] = {}

    def make(kind: type[LongRun], *changes: str) -> Straight:
        if kind not in made:
            made[kind] = Straight(kind(tmp_path_factory.mktemp(kind.__name__), chats, *changes))
        return made[kind]

    return make
