"""Engines as processes: waited for, and gone afterwards, whatever happened."""

import json
import os
import sys
import time
from pathlib import Path

import httpx
import pytest

from eval.serving.engine_process import EngineFailed, Launch, running

FAKE = str(Path(__file__).with_name("fake_engine.py"))


@pytest.fixture
def fake(tmp_path):
    """fake(fault) -> how to start an engine with that fault; its process ids go to tmp_path / "pids"."""

    def launch(fault: str | None = None) -> Launch:
        plan = {
            "answers": {"with": {}, "without": {}},
            "fault": fault,
            "log": ["loading", "no room for weights"],
            "pids": str(tmp_path / "pids"),
        }
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        return Launch("Fake", [sys.executable, "-SE", FAKE], {"FAKE_ENGINE": str(tmp_path / "plan.json")})

    return launch


def alive(pids: list[int]) -> list[int]:
    """Of these processes, those that still run; a zombie does not."""
    found = []
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            found.append(pid)
    return found


def gone(pids: list[int]) -> bool:
    for _ in range(300):
        if not alive(pids):
            return True
        time.sleep(0.1)
    return False


def started_pids(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "pids").read_text().split()]


def test_an_engine_answers_on_this_machine_only_and_is_stopped(fake, tmp_path):
    with running(fake(), tmp_path / "log", 60) as address:
        assert address.startswith("http://127.0.0.1:")
        assert httpx.get(f"{address}/version", trust_env=False).json()["version"] == "1.2.3"
        pids = started_pids(tmp_path)
        assert alive(pids) == pids
    assert gone(pids)
    assert "started with --host 127.0.0.1 --port " in (tmp_path / "log").read_text()


@pytest.mark.parametrize("interruption", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_workers_go_too_when_the_check_breaks_off(fake, tmp_path, interruption):
    def use():
        with running(fake("worker"), tmp_path / "log", 60):
            raise interruption

    with pytest.raises(interruption):
        use()
    pids = started_pids(tmp_path)
    assert len(pids) == 2
    assert gone(pids)


def test_a_crash_at_the_start_shows_the_end_of_the_log(fake, tmp_path):
    message = r"Fake ended with 3 while it started; the end of .*log:\n  loading\n  no room for weights\n  started with"
    with pytest.raises(EngineFailed, match=message), running(fake("crash"), tmp_path / "log", 60):
        pytest.fail("it never answers")


def test_one_that_opens_no_port_is_given_up_and_stopped(tmp_path):
    launch = Launch("Fake", ["sh", "-c", f"echo $$ > {tmp_path}/pids; echo loading; exec sleep 600"], {})
    message = r"Fake was not ready after start_timeout_s=0\.5; the end of .*:\n  loading"
    with pytest.raises(EngineFailed, match=message), running(launch, tmp_path / "log", 0.5):
        pytest.fail("it never answers")
    assert gone(started_pids(tmp_path))


def test_one_that_says_it_is_not_ready_is_waited_for(fake, tmp_path):
    with pytest.raises(EngineFailed, match="was not ready"), running(fake("never ready"), tmp_path / "log", 0.5):
        pytest.fail("its health is 503")


def test_our_packages_do_not_shine_through(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    launch = Launch("Fake", [sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH'))"], {})
    with pytest.raises(EngineFailed, match=r"\n  None$"), running(launch, tmp_path / "log", 60):
        pytest.fail("it ends at once")
    assert os.environ["PYTHONPATH"] == "/ours"
