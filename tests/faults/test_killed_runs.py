"""kill -9 at twenty moments of training, extraction and regeneration: all end as if they had never been killed.

Even moments are random in time, odd ones random changes of a file, which a time seldom hits.
Each is drawn from its number.
"""

import random

import pytest

from tests.eval.serving.faulty_server import FaultyServer
from tests.faults.harness import KILLED, kill_at, run_fork
from tests.faults.runs import ANSWERS, Extraction, LongRun, Regeneration, Served, Training, said_by_server

pytestmark = pytest.mark.slow

MOMENTS = range(20)


def check_killed(run: LongRun, straight, number: int) -> None:
    """Kill the run at the moment of this number, then let it end."""
    draw = random.Random(number)
    if number % 2:
        change = draw.randrange(straight.changes)
        moment = f"killed in place of change {change} of {straight.changes}"
        ended = run_fork(run.command(), kill_at(change))
        assert ended.code == KILLED, f"{moment}: {ended.said}"
    else:
        seconds = draw.uniform(0.2, 1) * straight.seconds
        moment = f"killed after {seconds:.3f} of {straight.seconds:.3f} s"
        ended = run_fork(run.command(), kill_after_s=seconds)
        assert ended.code in (KILLED, 0), f"{moment}: {ended.said}"  # this time it was faster
    kept = run.kept()
    run.finish()
    assert kept.items() <= run.kept().items(), moment
    assert run.result() == straight.result, moment


@pytest.mark.parametrize("kind", [Training, Extraction, Regeneration])
@pytest.mark.parametrize("number", MOMENTS)
def test_a_killed_run_ends_as_if_it_never_was(kind, number, straight, chats, tmp_path):
    check_killed(kind(tmp_path / "killed", chats), straight(kind), number)


@pytest.mark.parametrize("number", MOMENTS)
def test_a_killed_client_of_a_server_too(number, straight, chats, tmp_path):
    with FaultyServer(whole=said_by_server) as server:
        never = straight(Served, f"url={server.url}")
        asked = len(server.bodies)
        check_killed(Served(tmp_path / "killed", chats, f"url={server.url}"), never, number)
        assert len(server.bodies) - asked <= ANSWERS + 2  # only what was under way is asked for again
