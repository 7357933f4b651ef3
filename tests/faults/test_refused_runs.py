"""A disk that is full or read-only, met by whole commands: one clean message, and the same command then ends well."""

import random
import re
import shutil

import pytest

from tests.faults.harness import Ended, command, full_from, read_only, run_fork
from tests.faults.runs import Extraction, LongRun, Regeneration, Training

pytestmark = pytest.mark.slow
CODES = {Training: 2, Extraction: 1, Regeneration: 1}
FIX = r"\d+\.\d GB are free there\. Make room, or allow writing there, then (go on with resume=true|run)"
FORBIDDEN = {
    Training: r"error: output_dir=.*run cannot be made \(.*Read-only.*\); give a directory that may be written to",
    Extraction: rf"error: .*cache could not be written \(.*Read-only.*\); {FIX} again, or give another data\.cache_dir",
    Regeneration: rf"error: .*answers\.jsonl could not be written \(.*Read-only file system.*\); {FIX} again to go on",
}


def said_once(ended: Ended, code: int) -> str:
    """The one message of a command that could not be run."""
    assert ended.code == code, ended.said
    assert "Traceback" not in ended.said
    (message,) = (line for line in ended.said.splitlines() if line.startswith("error: "))
    return message


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kind", CODES)
def test_a_disk_that_fills_up_stops_a_run_that_then_ends_as_if_it_had_not(kind, number, straight, chats, tmp_path):
    """Full at a random change, drawn from its number."""
    run: LongRun = kind(tmp_path / "full", chats)
    change = random.Random(number).randrange(straight(kind).growing)
    message = said_once(run_fork(run.command(), full_from(change)), CODES[kind])
    assert "No space left on device" in message
    assert str(tmp_path) in message
    assert re.search(FIX + "|give a directory", message), message
    kept = run.kept()
    run.finish()
    assert kept.items() <= run.kept().items()
    assert run.result() == straight(kind).result


@pytest.mark.parametrize("kind", CODES)
def test_a_read_only_disk_is_named_before_any_work(kind, chats, tmp_path):
    run: LongRun = kind(tmp_path / "refused", chats)
    assert re.search(FORBIDDEN[kind], said_once(run_fork(run.command(), read_only), CODES[kind]))
    run.finish()


def test_an_export_that_found_no_room_leaves_the_one_before(chats, tmp_path):
    run = Training(tmp_path / "run", chats)
    run.finish()
    export = command("scripts/export_heads.py", "model=tiny", f"heads={run.directory}", "format=vllm", "tracker=none")
    assert run_fork(export).code == 0
    directory = run.directory / "export-vllm"
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    message = said_once(run_fork(export, full_from(2)), 1)
    assert re.search(r"export-vllm could not be written \(.*No space left.*Make room.*then export again", message)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    shutil.rmtree(directory)
    assert run_fork(export).code == 0
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
