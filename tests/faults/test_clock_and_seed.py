"""A clock that jumps changes nothing: times are taken from the monotonic one, and files are named by steps."""

import itertools
import json
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


OTHER = {
    "seed=1": "seed: 0 before, 1 now",
    "sampling.temperature=0.7": "sampling.temperature: 0.3 before, 0.7 now",
    "max_new_tokens=13": "max_new_tokens: 12 before, 13 now",
    "model.path=random:qwen3": "model.path: random:llama before, random:qwen3 now",
}


@pytest.mark.slow
@pytest.mark.parametrize("change", OTHER)
def test_answers_of_two_settings_are_not_mixed(change, chats, tmp_path):
    run = Regeneration(tmp_path / "run", chats)
    run.finish()
    path = run.root / "answers.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))  # as if it had been killed
    kept = path.read_text()
    ended = run_fork(Regeneration(run.root, chats, change).command())
    assert ended.code == 1
    assert f"holds 5 rows that were made by other settings ({OTHER[change]}); restore these" in ended.said
    assert "Traceback" not in ended.said
    assert path.read_text() == kept
    run.finish()


@pytest.mark.slow
def test_nor_are_those_of_a_server(chats, tmp_path):
    with FaultyServer(whole=said_by_server) as server:
        run = Served(tmp_path / "run", chats, f"url={server.url}")
        run.finish()
        asked = len(server.bodies)
        ended = run_fork(Served(run.root, chats, f"url={server.url}", "+extra_body.min_p=0.1").command())
        assert ended.code == 1
        assert "(extra_body: {} before, {'min_p': 0.1} now)" in ended.said
        assert len(server.bodies) == asked


@pytest.mark.slow
def test_nor_are_invented_prompts(chats, tmp_path):
    run = Regeneration(tmp_path / "run", chats, "invent=2")
    prompts, note = (run.root / f"answers.prompts.jsonl{suffix}" for suffix in ("", ".settings.json"))
    rows = [{"id": f"invented-{i}", "category": "invented", "prompt": f"say {i}", "draw": i} for i in range(2)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = run_fork(run.command())
    assert ended.code == 1
    note.write_text(ended.said.rpartition(f"write these into {note}: ")[2])
    run.finish()
    ended = run_fork(Regeneration(run.root, chats, "invent=2", "prompt_sampling.temperature=0.9").command())
    assert ended.code == 1
    assert "holds 2 rows that were made by other settings (prompt_sampling.temperature: 1.0 before, 0.9 now)" in (
        ended.said
    )
