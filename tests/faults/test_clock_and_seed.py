"""A clock that jumps changes nothing: times are taken from the monotonic one, and files are named by steps."""

import itertools
import time

import pytest

from tests.eval.serving.faulty_server import FaultyServer
from tests.faults.harness import run_fork
from tests.faults.runs import Extraction, Regeneration, Served, Training, said_by_server

DAY_S = 24 * 3600


def jumping(seconds: float):
    """The time of day jumps by `seconds` and back whenever somebody looks."""
    original, looks = time.time, itertools.count()

    def jump() -> None:
        time.time = lambda: original() + seconds * (next(looks) % 2)

    return jump


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [DAY_S, -DAY_S])
@pytest.mark.parametrize("kind", [Training, Extraction, Regeneration])
def test_a_clock_that_jumps_by_a_day_changes_nothing(kind, seconds, straight, chats, tmp_path):
    budget = ["trainer.max_seconds=3600"] if kind is Training else []
    run = kind(tmp_path / "jumped", chats, *budget)
    ended = run_fork(run.command(), jumping(seconds))
    assert ended.code == 0, ended.said
    assert run.result() == straight(kind).result


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [DAY_S, -DAY_S])
def test_nor_do_answers_of_a_server_time_out(seconds, straight, chats, tmp_path):
    with FaultyServer(whole=said_by_server) as server:
        run = Served(tmp_path / "jumped", chats, f"url={server.url}", "timeout_s=60")
        ended = run_fork(run.command(), jumping(seconds))
        assert ended.code == 0, ended.said
        assert run.result() == straight(Served, f"url={server.url}").result


@pytest.mark.slow
def test_another_seed_is_refused_by_name(chats, tmp_path):
    run = Training(tmp_path / "run", chats)
    run.finish()
    result = run.result()
    ended = run_fork(Training(tmp_path / "run", chats, "seed=1").command())
    assert ended.code == 2
    assert "error: resume=true, but these settings are not those of the run (seed: 0 before, 1 now)" in ended.said
    assert "restore them, or start another run with another run_name" in ended.said
    assert run.result() == result
