"""Whole benches against servers whose answers, counts and deaths are known: right figures, no hang, no loss."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from eval.config import from_hydra
from eval.serving.bench import BenchConfig, bench
from eval.serving.load import ServerGone
from eval.serving.log import LOG_FILE, read_log
from eval.serving.report import markdown, sentence
from eval.serving.speedup import join, read_bench
from eval.serving.summary import summarise
from tests.eval.serving.faulty_server import FaultyServer, chunk_sizes

NAMES = [f"{kind}-{place}" for place in range(3) for kind in ("chat", "code")]


@pytest.fixture
def measure(tmp_path):
    """measure(server, server_off=None, ...) -> the summary of a bench of six prompts, warmed up with one."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": name, "category": name[:4], "prompt": f"say {name}"} for name in sorted(NAMES)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(server, server_off=None, **settings):
        given = {
            "url": server.url,
            "url_off": server_off.url if server_off else None,
            "prompts": [str(prompts)],
            "output": str(tmp_path / "bench"),
            "concurrency": [1, 3],
            "repeats": 2,
            "warmup": 1,
            "settle_s": 0.0,
            "retry": {"attempts": 1, "first_wait_s": 0.01},
            **settings,
        }
        config = from_hydra(BenchConfig, given)
        asyncio.run(bench(config, {}))
        return summarise(read_log(tmp_path / "bench"))

    return run


def rows_of(summary) -> dict:
    return {(row["arm"], row["concurrency"]): row for row in summary["rows"]}


def test_the_truth_comes_out(measure):
    six, pause = (lambda n: 6), {"on": 0.005, "off": 0.02}
    with (
        FaultyServer(chunk_s=pause["on"], tokens=six) as on,
        FaultyServer(chunk_s=pause["off"], tokens=six, drafts=False) as off,
    ):
        summary = measure(on, off)
    sizes, cycles = chunk_sizes(6, drafts=True)
    assert (sizes, cycles) == ([1, 4, 1], [3, 0])
    rows = rows_of(summary)
    assert list(rows) == [("off", 1), ("on", 1), ("off", 3), ("on", 3)]
    for (arm, _), row in rows.items():
        counts = {"planned": 12, "answered": 12, "failed": 0, "not_run": 0, "retries": 0, "untimed": 0}
        assert row["requests"] == counts
        assert (row["tokens"], row["prompt_tokens"], row["cached_tokens"]) == (72, 84, 48)
        least_s = pause[arm] * (len(sizes) - 1 if arm == "on" else 5)
        assert 0 < row["tpot_s"]["p50"] <= row["tpot_s"]["p90"] <= row["tpot_s"]["p99"]
        assert least_s <= row["latency_s"]["p50"] < max(block["seconds"] for block in row["blocks"])
        assert 0 < row["ttft_s"]["p50"] < row["latency_s"]["p50"]
        assert row["tokens_per_s"] <= 6 * row["concurrency"] / least_s
    accepted = rows["on", 1]["acceptance"]
    assert accepted["tau"] == 1 + sum(cycles) / len(cycles)
    assert accepted["drafts"] == 12 * len(cycles)
    stood = [12 * sum(cycle >= k for cycle in cycles) for k in range(4)]
    assert accepted["alpha_counts"] == [[stood[1], stood[0]], [stood[2], stood[1]], [stood[3], stood[2]]]
    assert rows["off", 1]["acceptance"] is None
    for speedup in summary["speedups"]:
        users = [rows[arm, speedup["concurrency"]]["user_tokens_per_s"] for arm in ("on", "off")]
        assert speedup["user"]["median"] == pytest.approx(users[0] / users[1])
        assert speedup["user"]["low"] <= speedup["user"]["median"] <= speedup["user"]["high"]
        assert speedup["user"]["prompts"] == 6
        assert speedup["total"]["low"] <= speedup["total"]["median"] <= speedup["total"]["high"]
        assert (speedup["same_answers"], speedup["compared_answers"]) == (
            0,
            6,
        )  # the servers cut their text differently
    assert summary["stopped"] is None
    assert [note for note in summary["notes"] if "prefix cache" not in note] == []
    assert "| on | 3 | 12 of 12 |" in markdown(summary)
    assert sentence(summary).startswith("Tokens per second of one user, with heads over without: ")


def test_both_servers_do_the_same_work_under_the_same_load(measure):
    together = {arm: threading.Barrier(3, timeout=60) for arm in ("on", "off")}

    def wait(arm: str):
        """At three users, the first three requests (after one to warm up and six of one user) come together."""
        return lambda number: together[arm].wait() if number in (7, 8, 9) else None

    with (
        FaultyServer(drafts=False, on_request=wait("on")) as on,
        FaultyServer(drafts=False, on_request=wait("off")) as off,
    ):
        summary = measure(on, off, repeats=1)
    assert [(row["same_answers"], row["compared_answers"]) for row in summary["speedups"]] == [(6, 6), (6, 6)]
    assert (on.most_asking, off.most_asking) == (3, 3)
    asked = [[body["messages"][0]["content"] for body in server.bodies] for server in (on, off)]
    assert sorted(asked[0]) == sorted(asked[1])
    assert asked[0][1:7] == [f"say {name}" for name in NAMES]  # categories in turn, after the warm-up


def test_the_servers_take_turns(measure):
    order = []
    note = {name: (lambda n, name=name: order.append(name)) for name in ("on", "off")}
    with FaultyServer(on_request=note["on"]) as on, FaultyServer(drafts=False, on_request=note["off"]) as off:
        measure(on, off, concurrency=[1], limit=2)
    assert order == ["off", "on"] + (["off"] * 2 + ["on"] * 2) * 2


def test_failures_are_counted_and_the_rest_is_measured(measure):
    with FaultyServer({1: "drop", 3: "malformed", 5: "busy"}) as server:
        summary = measure(server, concurrency=[2], repeats=1)
    (row,) = summary["rows"]
    assert row["requests"] == {"planned": 6, "answered": 4, "failed": 2, "not_run": 0, "retries": 1, "untimed": 0}
    assert {kind: failure["count"] for kind, failure in row["failures"].items()} == {
        "connection lost": 1,
        "malformed chunk": 1,
    }
    assert row["tokens"] == 40
    assert any("malformed chunk; the first said" in note for note in summary["notes"])
    assert "no speedup, which needs url_off= or compare=" in sentence(summary)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_server_that_dies_leaves_what_was_measured(measure, tmp_path, concurrency):
    with FaultyServer({9: "die"}, chunk_s=0.005) as server, pytest.raises(ServerGone, match="takes no connections"):
        measure(server, concurrency=[concurrency], repeats=3)
    summary = summarise(read_log(tmp_path / "bench"))
    (row,) = summary["rows"]
    requests = row["requests"]
    assert requests["planned"] == 18
    assert requests["answered"] + requests["failed"] + requests["not_run"] == 18
    assert requests["answered"] >= 9 - concurrency
    assert 1 <= requests["failed"] <= 2 * concurrency  # those under way, and one more try of each user
    assert requests["not_run"] >= 6
    assert len(row["blocks"]) == 1  # the first repeat is whole, and its figures stand
    assert row["acceptance"]["tau"] > 1
    assert "takes no connections" in summary["stopped"]
    assert "BROKEN OFF" in sentence(summary)
    assert any("requests of 18 were not run" in note for note in summary["notes"])
    assert any("broken off before the counters" in note for note in summary["notes"])


def test_a_server_that_is_not_there_is_said_at_once(measure, tmp_path):
    with FaultyServer() as server:
        pass
    with pytest.raises(ValueError, match=r"does not answer .*; start the server, or correct url="):
        measure(server)
    with FaultyServer({0: "broken"}) as server, pytest.raises(ValueError, match="warm-up request chat-0 failed"):
        measure(server)
    with FaultyServer({0: "no usage"}) as server, pytest.raises(ValueError, match="no token counts"):
        measure(server)
    assert not (tmp_path / "bench").exists()


def test_an_interrupt_leaves_what_was_measured(measure, tmp_path):
    """Cancelled amid the eighth request: six make a whole block, the seventh is kept too."""
    loop_task: list = []

    async def cancelled(config):
        loop_task.append((asyncio.get_running_loop(), asyncio.current_task()))
        await bench(config, {})

    def cancel(number: int) -> None:
        if number == 8:
            loop, task = loop_task[0]
            loop.call_soon_threadsafe(task.cancel)
            threading.Event().wait(0.2)

    with FaultyServer(on_request=cancel) as server:
        config = from_hydra(
            BenchConfig,
            {
                **{"url": server.url, "prompts": [str(tmp_path / "prompts.jsonl")], "output": str(tmp_path / "bench")},
                **{"concurrency": [1], "repeats": 2, "warmup": 1, "settle_s": 0.0},
            },
        )
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled(config))
    run = read_log(tmp_path / "bench")
    assert (len(run.requests), run.stopped) == (7, "it was interrupted")
    assert [block.complete for block in run.blocks] == [True, False]
    assert summarise(read_log(tmp_path / "bench"))["rows"][0]["requests"]["not_run"] == 5


def test_a_killed_bench_is_reported_from_its_log(measure, tmp_path):
    with FaultyServer() as server:
        measure(server, concurrency=[1])
    path = tmp_path / "bench" / LOG_FILE
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:10]) + whole[10][:40])  # run, six requests, block, two requests and half a line
    summary = summarise(read_log(tmp_path / "bench"))
    assert summary["rows"][0]["requests"]["answered"] == 8
    assert summary["rows"][0]["acceptance"]["drafts"] == 24
    assert summary["stopped"] == "it was killed: its log has no end"
    with FaultyServer() as server, pytest.raises(ValueError, match="holds a bench; give another output="):
        measure(server)


def test_missing_metrics_are_said_and_times_are_measured(measure):
    with FaultyServer(metrics=False) as server:
        summary = measure(server, concurrency=[1], repeats=1)
    (row,) = summary["rows"]
    assert row["acceptance"] is None
    assert row["user_tokens_per_s"] > 0
    assert any("/metrics answers 404" in note for note in summary["notes"])
    assert "tau unknown" in sentence(summary)


def test_a_baseline_that_cannot_be_checked_is_said(measure):
    with FaultyServer(metrics=False) as server:
        summary = measure(server, with_heads=False, concurrency=[1], repeats=1)
    assert any(note.startswith("off, concurrency 1: http") and "answers 404" in note for note in summary["notes"])


def test_servers_that_are_not_what_they_are_said_to_be(measure):
    with FaultyServer(drafts=False) as on, FaultyServer() as off:
        summary = measure(on, off, concurrency=[1], repeats=1)
    assert "off, concurrency 1: the server verified 24 drafts, so it is not plain decoding" in summary["notes"]
    assert any("does not show vllm:spec_decode_num_drafts_total" in note for note in summary["notes"])


def test_foreign_requests_are_noticed(measure):
    def foreign(number: int) -> None:
        if number == 4:
            server.count([3], 4)

    with FaultyServer(on_request=foreign) as server:
        summary = measure(server, concurrency=[1], repeats=1)
    assert any("counted 7 requests where 6 were sent" in note for note in summary["notes"])


@pytest.mark.slow
def test_two_runs_are_joined(measure, tmp_path):
    with FaultyServer(drafts=False, chunk_s=0.03) as server:
        off = measure(server, with_heads=False, concurrency=[1, 2], repeats=1)
    (tmp_path / "bench").rename(tmp_path / "off")
    earlier = str(tmp_path / "off" / "bench.json")
    Path(earlier).write_text(json.dumps(off))
    with FaultyServer(chunk_s=0.005) as server:
        on = measure(server, concurrency=[1], compare=earlier)
        assert on["speedups"] == []
        (speedup,) = join(on, read_bench(Path(earlier)))
        assert speedup == join(off, on)[0]
        rates = [summary["rows"][0]["user_tokens_per_s"] for summary in (on, off)]
        assert speedup["user"]["median"] == rates[0] / rates[1]
        assert speedup["total"]["low"] is None
        (tmp_path / "bench").rename(tmp_path / "on")
        for settings, message in (
            ({"max_tokens": 17}, "measured max_tokens=256, this bench 17"),
            ({"with_heads": False}, "no server with heads=on"),
            ({"concurrency": [3]}, "was at concurrency=\\[1, 2\\]"),
            ({"limit": 5}, "measured prompts_digest="),
        ):
            with pytest.raises(ValueError, match=message):
                measure(server, compare=earlier, **settings)
        with pytest.raises(ValueError, match=r"is not the bench\.json of a bench"):
            measure(server, compare=str(tmp_path / "prompts.jsonl"))
    assert not (tmp_path / "bench").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrency": [9]}, r"concurrency=\[9\] needs as many prompts, of which there are 6"),
        ({"concurrency": []}, r"concurrency=\[\] must be different numbers"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"limit": 0}, "limit=0 must be at least 1, or null"),
        ({"max_tokens": 1}, "max_tokens=1 must be at least 2"),
        ({"extra_body": {"stream": False}}, "extra_body.stream is set by the bench"),
        ({"timeout": {"total_s": 0}}, "timeout.total_s=0.0 must be above 0"),
        ({"retry": {"attempts": -1}}, "retry.attempts=-1 must not be negative"),
        ({"source": "x"}, "give url= of a server to measure, or source="),
        ({"url_off": "http://x", "with_heads": False}, "leaves no server with heads"),
        ({"url_off": "http://x", "compare": "x"}, "two baselines"),
        ({"concurency": [1]}, "unknown setting concurency .did you mean concurrency"),
    ],
)
def test_mistakes_are_named(measure, settings, message):
    with FaultyServer() as server, pytest.raises(ValueError, match=message):
        measure(server, **settings)
