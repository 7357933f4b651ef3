"""The command ends with 0 or 1, prints both tables, and says what went wrong in one message."""

import runpy
import signal
import sys
from pathlib import Path

import pytest

from eval.serving import engine_check
from eval.serving.conformance import problems
from eval.serving.conformance_report import summarise
from eval.serving.engine_process import EngineFailed
from eval.serving.environment import EngineUnavailable
from scripts.serve_check import end_in_order
from tests.eval.serving.test_conformance import SETTINGS, answer, row

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_check.py"


@pytest.fixture
def command(monkeypatch, capsys):
    """command(outcome, *overrides) -> (exit code or message, what was printed, config) of a check with that outcome."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(outcome, *overrides: str):
        given = []

        def check(config):
            given.append(config)
            if isinstance(outcome, Exception):
                raise outcome
            return summarise(outcome, problems(outcome, "vLLM", exact=True), [], SETTINGS)

        monkeypatch.setattr(engine_check, "check_engine", check)
        monkeypatch.setattr(sys, "argv", ["serve_check.py", "threads=1", *overrides])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ended.value.code, capsys.readouterr().out, given

    return run


def test_it_ends_with_0_when_the_engine_does_the_same(command):
    code, out, (config,) = command([row("a"), row("b")], "heads=outputs/run", "output=out")
    assert code == 0
    assert "vLLM serves these heads as they decode here: texts equal on 2 of 2 prompts, counters on 2 of 2" in out
    assert "report out/report.md" in out
    assert (config.engine, config.source, config.model.dtype) == ("vllm", "outputs/run", "float32")
    assert config.prompts == ["data/demo/heldout.jsonl"]


def test_it_ends_with_1_and_the_reason_when_it_does_not(command):
    code, out, _ = command([row("a"), row("b", engine_heads=answer(drafts=5))], "heads=outputs/run")
    assert code == 1
    assert "counters_differ: vLLM accepts other drafts than our decoder on 1 of 2 prompts, first on b" in out
    assert "report outputs/run/serve-check-vllm/report.md" in out


@pytest.mark.parametrize(
    ("outcome", "overrides", "message"),
    [
        ([], ["heads=x", "engine=onnx"], "error: engine=onnx must be one of vllm, llamacpp"),
        ([], [], "error: source has no value"),
        ([], ["heads=x", "model=tiny"], "error: model.path=random:llama lives in memory only"),
        (EngineUnavailable("no llama-server on PATH"), ["heads=x"], "skipped: no llama-server on PATH"),
        (EngineFailed("vLLM ended with 3"), ["heads=x"], "error: vLLM ended with 3"),
    ],
)
def test_what_goes_wrong_is_one_message(command, outcome, overrides, message):
    assert command(outcome, *overrides)[0].startswith(message)


def test_a_request_to_end_passes_through_the_clean_up():
    with pytest.raises(SystemExit) as ended:
        end_in_order(signal.SIGTERM, None)
    assert ended.value.code == 143
