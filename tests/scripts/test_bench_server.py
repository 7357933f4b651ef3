"""The command benches a server; what goes wrong is one line, and what was measured is on disk whatever happens."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eval.serving.log import LOG_FILE
from tests.eval.serving.faulty_server import FaultyServer

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_server.py"
FEW = ("concurrency=[2]", "warmup=1", "limit=4", "settle_s=0")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(*overrides) -> what it printed; the report goes to the directory `bench`."""
    demo = Path(__file__).parents[2] / "data" / "demo" / "heldout.jsonl"
    monkeypatch.chdir(tmp_path)

    def run_(*overrides: str) -> str:
        arguments = ["bench_server", f"prompts=[{demo}]", "output=bench", "repeats=1", *FEW, *overrides]
        monkeypatch.setattr(sys, "argv", arguments)
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out

    return run_


def test_one_server_then_the_other(run, tmp_path):
    with FaultyServer(drafts=False) as server:
        printed = run(f"url={server.url}", "heads=off", "output=off")
    assert "report off/bench.md\nTokens per second of one user: " in printed
    with FaultyServer() as server:
        printed = run(f"url={server.url}/v1", "heads=on", "compare=off/bench.json")
    assert "report bench/bench.md\nTokens per second of one user, with heads over without: " in printed
    assert printed.rstrip().endswith("; tau 3.00.")
    assert "the speedups join two benches" in (tmp_path / "bench" / "bench.md").read_text()
    assert json.loads((tmp_path / "bench" / "bench.json").read_text())["speedups"][0]["concurrency"] == 2
    assert (tmp_path / "bench" / "bench.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "error: give url= of a server to measure"),
        (("url=http://127.0.0.1:9", "retry.attempts=0"), "error: http://127.0.0.1:9/v1/models does not answer"),
        (("heads=maybe", "url=http://x"), "error: setting with_heads: Value 'maybe' is not a valid bool"),
        (("source=nowhere",), "error: nowhere holds no requests.jsonl"),
        (("url=http://x", "max_tokens=0"), "error: max_tokens=0 must be at least 2"),
    ],
)
def test_mistakes_are_one_line(run, tmp_path, overrides, message):
    with pytest.raises(SystemExit) as error:
        run(*overrides)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("sign", "code"), [("die", 1), ("SIGTERM", 143)])
def test_what_was_measured_is_reported_though_it_ended_early(run, tmp_path, capsys, sign, code):
    def end(number: int) -> None:
        if sign == "SIGTERM" and number == 6:
            os.kill(os.getpid(), signal.SIGTERM)
            server.over.wait(0.2)

    with FaultyServer({6: sign}, on_request=end) as server, pytest.raises(SystemExit) as error:
        run(f"url={server.url}", "repeats=3", "retry.attempts=1", "retry.first_wait_s=0.01")
    assert error.value.code == code
    said = capsys.readouterr()
    assert "BROKEN OFF" in said.out
    assert "the report holds what was measured until then" in said.err
    row = json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"][0]
    assert row["requests"]["answered"] >= 4
    assert row["requests"]["not_run"] >= 4
    assert row["tokens_per_s"] > 0


@pytest.mark.slow
def test_nothing_measured_is_lost_to_a_kill(run, tmp_path):
    with FaultyServer(chunk_s=0.02) as server:
        demo = Path(__file__).parents[2] / "data" / "demo" / "heldout.jsonl"
        command = [sys.executable, str(SCRIPT), f"url={server.url}", f"prompts=[{demo}]", "output=bench", "repeats=99"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
        log = tmp_path / "bench" / LOG_FILE
        while not log.exists() or log.read_bytes().count(b"\n") < 12:
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
        process.wait()
    answered = log.read_bytes().count(b'"row": "request"')
    assert "BROKEN OFF: it was killed" in run("source=bench")
    report = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert sum(row["requests"]["answered"] for row in report["rows"]) == answered >= 11
