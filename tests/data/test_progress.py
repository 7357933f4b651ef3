"""A long command tells how far it is: to a person by a bar, to a file by a line at most every half minute."""

import io
from functools import partial

import pytest
from rich.console import Console

from data import progress
from data.progress import Progress, track


class Clock:
    """Tells the seconds that it is set to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "monotonic", clock)
    return clock


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch, caplog):
    monkeypatch.setattr(progress, "Console", partial(Console, force_terminal=False))
    caplog.set_level("INFO")


def test_without_a_terminal_there_is_a_line_every_half_minute(clock, caplog):
    with Progress("extracting", "tokens", 100_000) as shown:
        for _ in range(100):  # 100 tokens a second for 100 s
            clock.now += 1
            shown.advance(100, "0.12 GB")
    assert caplog.messages == [
        "extracting: 3,000 of 100,000 tokens (3%), 100/s, 0.12 GB, 0:16:10 left",
        "extracting: 6,000 of 100,000 tokens (6%), 100/s, 0.12 GB, 0:15:40 left",
        "extracting: 9,000 of 100,000 tokens (9%), 100/s, 0.12 GB, 0:15:10 left",
    ]


def test_what_was_there_before_says_nothing_of_the_speed(clock, caplog):
    with Progress("extracting", "tokens", 1000) as shown:
        shown.advance(500)  # found on disk
        clock.now += 50
        shown.advance(50)
    with Progress("answering", "answers", 1000, done=900) as shown:
        clock.now += 40
        shown.advance(0, "9 tokens")
        clock.now += 160
        shown.advance(10)
    assert caplog.messages == [
        "extracting: 550 of 1,000 tokens (55%), 1.00/s, 0:07:30 left",
        "answering: 900 of 1,000 answers (90%), 9 tokens",
        "answering: 910 of 1,000 answers (91%), 0.05/s, 0:30:00 left",
    ]


def test_work_of_unknown_length_is_counted(clock, caplog):
    with Progress("rendering", "conversations", None) as shown:
        clock.now += 30
        shown.advance(1200)
    assert caplog.messages == ["rendering: 1,200 conversations, 40/s"]


def test_items_are_counted_when_they_are_done(clock, caplog):
    for _ in track(range(3), "decoding", "prompts", 3):
        assert f"decoding: {len(caplog.messages)} of 3" in (caplog.messages or ["decoding: 0 of 3"])[-1]
        clock.now += 60
    assert caplog.messages[-1] == "decoding: 3 of 3 prompts (100%), 0.02/s, 0:00:00 left"


def test_one_process_shows_it_for_all(clock, caplog, capsys):
    for _ in track(range(3), "decoding", "prompts", 3, shown=False):
        clock.now += 60
    assert caplog.messages == []
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_there_is_a_bar_instead(clock, caplog, monkeypatch):
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    with Progress("extracting", "tokens", 1000) as shown:
        clock.now += 60
        shown.advance(600)
    assert "extracting" in written.getvalue()
    assert "600 of 1,000 tokens (60%), 10/s, 0:00:40 left" in written.getvalue()
    assert caplog.messages == []
