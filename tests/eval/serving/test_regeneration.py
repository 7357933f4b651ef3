"""Answers by a server that answers right, wrongly, late or not at all: every prompt has one answer, or is named."""

import asyncio
import json
import os
import signal
import threading
import time
import warnings
import zlib

import pytest

from data.conversations import Conversation
from data.problems import Problems
from data.regenerate import AnswerLog, Prompt, answer, open_jobs
from data.render import render_prompt
from data.samples import SampleBuilder
from eval.sampling import SamplingConfig
from eval.serving.answering import AnsweringClient, ServerConfig, request_fields
from eval.serving.failures import RetryConfig
from eval.serving.load import ServerGone
from eval.serving.regeneration import Intake, answer_by_server
from heads.tiny import tiny_tokenizer
from tests.eval.serving.faulty_server import FaultyServer

EOS = 258
TOKENIZER = tiny_tokenizer()
PROMPTS = [Prompt(f"p{i}", "qa", [{"role": "user", "content": f"say {i}"}]) for i in range(10)]
NAMES = [f"p{i}#0" for i in range(10)]
FAST = RetryConfig(attempts=3, first_wait_s=0.01)
GREEDY = SamplingConfig()
OTHER = Prompt("other", "qa", [{"role": "system", "content": "be brief"}, *PROMPTS[0].messages])


def speak(seed: int) -> list[int]:
    """What the target says with a seed: some of it cut, some of it in no tokens of the tokenizer's."""
    said = TOKENIZER.encode(f"seed {seed}")
    return [[*said, EOS], said, [*said, TOKENIZER.encode("é")[0], EOS]][seed % 3]


def whole(body, **changes) -> dict:
    """What vLLM answers."""
    said = speak(body["seed"])
    prompt_ids = render_prompt(body["messages"], TOKENIZER, {})
    text = TOKENIZER.decode(said, skip_special_tokens=True)
    choice = {
        "message": {"content": text},
        "finish_reason": "stop" if said[-1] == EOS else "length",
        "token_ids": said,
        **changes,
    }
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(said)}
    return {"choices": [choice], "usage": usage, "prompt_token_ids": prompt_ids}


def run(path, server, prompts=PROMPTS, samples=1, sampling=GREEDY, options=None, **settings) -> Intake:
    config = ServerConfig(**{"url": server.url, "retry": FAST, "timeout_s": 30.0, "concurrency": 3, **settings})
    fields = request_fields(config, sampling, 64, options or {})

    async def ask(jobs, intake):
        async with AnsweringClient(config, fields, "tiny") as client:
            await answer_by_server(client, jobs, intake)

    with AnswerLog(path) as log:
        intake = Intake(log, TOKENIZER, [EOS], len(prompts) * samples, config.max_failed_share)
        asyncio.run(ask(open_jobs(prompts, log, TOKENIZER, {}, samples, 7), intake))
    return intake


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_order(rows) -> list[dict]:
    return sorted(rows, key=lambda row: row["id"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers.jsonl"


def test_training_cannot_tell_a_servers_rows_from_ours(path, tmp_path):
    with FaultyServer(whole=whole) as server:
        intake = run(path, server, samples=2)
    with AnswerLog(tmp_path / "ours.jsonl") as log:
        answer(PROMPTS, log, lambda ids, seeds: [speak(seed) for seed in seeds], TOKENIZER, [EOS], {}, 4, 2, 7)
    assert in_order(rows_of(path)) == in_order(log.rows)
    assert {row["finish"] for row in log.rows} == {"stop", "length"}
    assert any("answer_ids" in row for row in log.rows)
    assert intake.closing() == ""
    assert len({body["seed"] for body in server.bodies}) == 20
    assert server.most_asking <= 3


def test_a_request_asks_for_what_is_deployed(path):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}
    messages = [*OTHER.messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages.append({"role": "tool", "content": "wet"})
    prompt = Prompt("p", "qa", messages, tools=[{"type": "function"}])
    with FaultyServer(whole=whole) as server:
        sampling = SamplingConfig(0.6, top_k=20, top_p=0.9)
        run(path, server, [prompt], 1, sampling, {"enable_thinking": False}, extra_body={"min_p": 0.1})
        run(path, server, PROMPTS[:1], token_ids=False)
    sent, plain = server.bodies
    assert [row.get("tools") for row in rows_of(path)] == [prompt.tools, None]
    assert sent.pop("messages")[2]["tool_calls"][0]["function"]["arguments"] == '{"at": "sea"}'
    assert sent == {
        "model": "tiny",
        "seed": zlib.crc32(b"7:p#0"),
        "max_tokens": 64,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [{"type": "function"}],
        "return_token_ids": True,
        "return_prompt_token_ids": True,
        "min_p": 0.1,
    }
    assert set(plain) == {"model", "messages", "seed", "max_tokens", "temperature", "top_p"}


def test_every_trouble_that_passes_ends_in_one_answer_each(path):
    faults = ["busy", "unavailable", "broken", "refuse", "drop", "stall", "malformed", "not a chunk"]
    with FaultyServer(dict(enumerate(faults)), whole=whole) as server:
        intake = run(path, server, timeout_s=1.0, retry=RetryConfig(attempts=8, first_wait_s=0.01))
    assert sorted(row["id"] for row in rows_of(path)) == NAMES
    assert intake.closing() == ""
    assert len(server.bodies) >= 10 + len(faults)


def test_the_server_says_how_long_to_wait(path):
    with FaultyServer({0: "busy"}, retry_after="0.4", whole=whole) as server:
        began = time.perf_counter()
        run(path, server, PROMPTS[:1])
    assert time.perf_counter() - began >= 0.4


def test_a_failed_answer_is_named_counted_and_asked_again(path, caplog):
    with FaultyServer({4: "refused"}, whole=whole) as server:
        intake = run(path, server, concurrency=1, max_failed_share=0.1)
    assert len(rows_of(path)) == 9
    assert intake.closing() == "1 failed (status 400: 1); run again to ask for them again"
    assert "p4#0 failed, status 400: too much, after 0 retries" in caplog.text
    with FaultyServer(whole=whole) as server:
        run(path, server)
    assert len(server.bodies) == 1
    assert sorted(row["id"] for row in rows_of(path)) == NAMES


def test_too_many_failures_stop_the_run(path):
    with (
        FaultyServer(dict.fromkeys(range(2, 99), "unavailable"), whole=whole) as server,
        pytest.raises(ValueError, match=r"2 of 10 answers failed, more than max_failed_share=0\.1") as error,
    ):
        run(path, server, concurrency=1, max_failed_share=0.1)
    assert "p2#0: status 503: too much, after 3 retries" in str(error.value)
    assert len(rows_of(path)) == 2
    assert len(server.bodies) == 2 + 2 * (1 + FAST.attempts)


def test_a_server_that_dies_costs_nothing_that_it_answered(path):
    with FaultyServer({3: "die"}, whole=whole) as server, pytest.raises(ServerGone, match="takes no connections"):
        run(path, server, concurrency=1)
    assert len(rows_of(path)) == 3


def test_another_chat_template_is_refused_at_the_first_answer(path):
    def other(body):
        return {**whole(body), "prompt_token_ids": render_prompt(OTHER.messages, TOKENIZER, {})}

    with FaultyServer(whole=other) as server, pytest.raises(ValueError, match=r"prompt p0: .* another prompt") as error:
        run(path, server, concurrency=1)
    assert "from token 1 on: '<|im_start|>system" in str(error.value)
    assert rows_of(path) == []
    assert len(server.bodies) == 1


def test_without_ids_the_lengths_of_prompts_are_compared(path, caplog):
    def other(body):
        return {**whole(body), "prompt_token_ids": None, "usage": {"prompt_tokens": 99, "completion_tokens": 3}}

    with FaultyServer(whole=other) as server, pytest.raises(ValueError, match="it has 99 tokens there and"):
        run(path, server)
    with FaultyServer(whole=lambda body: {**whole(body), "prompt_token_ids": None, "usage": None}) as server:
        run(path, server)
    assert caplog.text.count("its chat template is not checked") == 1


def test_an_answer_without_ids_is_kept_as_text(path):
    with FaultyServer(whole=lambda body: whole(body, token_ids=None)) as server:
        intake = run(path, server)
    ours = [speak(body["seed"]) for body in server.bodies]
    assert sorted(row["tokens"] for row in rows_of(path)) == sorted(map(len, ours))
    assert {row["finish"] for row in rows_of(path)} == {"stop", "length"}
    odd = sum(TOKENIZER.encode("é")[0] in said for said in ours)
    assert f"{odd} may have been said in other tokens" in intake.closing()


def test_a_cut_answer_is_not_supervised_to_end(path):
    cut = {"finish_reason": "length", "token_ids": TOKENIZER.encode("and so on")}
    with FaultyServer(whole=lambda body: whole(body, **cut)) as server:
        run(path, server, PROMPTS[:1])
    (row,) = rows_of(path)
    builder = SampleBuilder(TOKENIZER, [EOS], {}, max_length=200)
    builder.add(Conversation(row["messages"], finished=row["finish"] != "length"), Problems())
    ids, supervised = builder.finish(Problems(), "").sample(0)
    assert TOKENIZER.decode(ids[supervised].tolist()) == "and so on"


@pytest.mark.parametrize("stop", [{"stop_reason": EOS}, {"matched_stop": EOS}])
def test_an_end_that_the_server_keeps_to_itself_is_put_back(path, stop):
    ids = TOKENIZER.encode("fine")
    changes = {"finish_reason": "stop", "token_ids": None, "response_token_ids": ids, **stop}
    with FaultyServer(whole=lambda body: whole(body, **changes)) as server:
        run(path, server, PROMPTS[:1])
    (row,) = rows_of(path)
    assert (row["finish"], row["tokens"], row["messages"][-1]["content"]) == ("stop", len(ids) + 1, "fine")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"finish_reason": "content_filter"}, "finish content_filter"),
        ({"finish_reason": "abort"}, "finish abort"),
        ({"finish_reason": "stop", "token_ids": [65], "stop_reason": "###"}, "no end of turn"),
        ({"finish_reason": "length", "token_ids": []}, "no tokens"),
        ({"token_ids": ["A"]}, "malformed answer"),
    ],
)
def test_an_end_that_is_not_the_targets_own_is_a_failure(path, changes, kind):
    with (
        FaultyServer(whole=lambda body: whole(body, **changes)) as server,
        pytest.raises(ValueError, match=f"1 of 2 answers failed(.|\n)*{kind}"),
    ):
        run(path, server, PROMPTS[:2], concurrency=1)
    assert rows_of(path) == []


@pytest.mark.parametrize("taken", [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"tool_calls": [{}]}])
def test_what_a_parser_takes_out_is_in_the_ids_or_refused(path, taken):
    said = [*TOKENIZER.encode("<think>hm</think>so"), EOS]
    changes = {"message": {"content": "so", **taken}, "finish_reason": "tool_calls", "token_ids": said}
    with FaultyServer(whole=lambda body: whole(body, **changes)) as server:
        run(path, server, PROMPTS[:1])
    (row,) = rows_of(path)
    assert row["messages"][-1]["content"] == "<think>hm</think>so"
    with (
        FaultyServer(whole=lambda body: whole(body, **{**changes, "token_ids": None})) as server,
        pytest.raises(ValueError, match=f"p1#0: the server takes {next(iter(taken))} out of the text"),
    ):
        run(path, server, PROMPTS[1:2])


def test_a_server_that_nobody_can_use_is_said_at_once(path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with FaultyServer(whole=whole, key="sesame") as server:
        for name in (None, "tiny"):  # refused in the list of models, and in an answer
            with pytest.raises(ValueError, match=r"wants a key.*export OPENAI_API_KEY"):
                run(path, server, served_model=name)
        monkeypatch.setenv("OPENAI_API_KEY", "sesame")
        run(path, server, PROMPTS[:1])
    with (
        FaultyServer({0: "unknown"}, whole=whole) as server,
        pytest.raises(ValueError, match=r"does not serve huge.*served_model"),
    ):
        run(path, server, served_model="huge", concurrency=1)
    with FaultyServer(models=("a", "b")) as server, pytest.raises(ValueError, match=r"say which with served_model"):
        run(path, server)
    with pytest.raises(ValueError, match=r"does not answer .*start one \(vllm serve tiny\)"):
        run(path, server)  # closed by now


class Killer:
    """Kills a process, without warning, when the server has its n-th request. pid: filled in once it is known."""

    def __init__(self, number: int):
        self.number, self.pid, self.known = number, 0, threading.Event()

    def on_request(self, number: int) -> None:
        if number == self.number:
            self.known.wait()
            os.kill(self.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [0, 3, 9])
def test_a_killed_run_goes_on_without_loss_or_doubles(path, number):
    killer = Killer(number)
    with FaultyServer(whole=whole, on_request=killer.on_request) as server:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads do not outlive a fork: the child needs none
            killer.pid = os.fork()
        if killer.pid == 0:
            try:
                run(path, server)
            finally:
                os._exit(1)
        killer.known.set()
        assert os.waitstatus_to_exitcode(os.waitpid(killer.pid, 0)[1]) == -signal.SIGKILL
        with path.open("a") as file:
            file.write('{"id": "p9#0", "mess')  # as if in the midst of a line
        run(path, server)
    assert sorted(row["id"] for row in rows_of(path)) == NAMES
    assert {body["messages"][0]["content"] for body in server.bodies} == {f"say {i}" for i in range(10)}
    assert len(server.bodies) <= 10 + 3  # only what was under way is asked again
