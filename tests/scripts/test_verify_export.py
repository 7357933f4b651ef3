"""The command verifies what the export command wrote; what differs is named on the first line, with exit code 1."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from heads.eagle3 import Eagle3Config
from heads.identity import identify
from heads.layout import save_heads
from heads.target import TargetConfig, load_target
from tests.eval.parity.conftest import refresh
from tests.heads.test_eagle import make

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(script, *overrides) -> (exit code or message, what it printed), in a directory with a run `run`."""
    target = load_target(TargetConfig("tiny", "random:llama"), "cpu")
    heads = make(target, Eagle3Config(num_steps=3, taps=[0, 1, 2]), draft_ids=torch.arange(300))
    save_heads(heads, tmp_path / "run" / "heads", identify(target))
    monkeypatch.chdir(tmp_path)

    def run_(script: str, *overrides: str) -> tuple[str | int | None, str]:
        monkeypatch.setattr(sys, "argv", [script, "model=tiny", *overrides])
        try:
            runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
        except SystemExit as stopped:
            return stopped.code, capsys.readouterr().out
        return 0, capsys.readouterr().out

    return run_


def test_what_the_export_command_writes_verifies(run, tmp_path):
    _, printed = run("export_heads", "heads=run", "format=vllm", "dtype=bfloat16")
    assert "wrote run/export-vllm/parity.json" in printed
    assert "wrote run/export-vllm/parity.tensors" in printed
    run("export_heads", "heads=run", "format=sglang")
    code, printed = run("verify_export", "export=[run/export-vllm,run/export-sglang]")
    assert code == 0
    for text in ("rounding to bfloat16", "taps of vLLM", "taps of SGLang", "tau of a greedy chain"):
        assert text in printed
    assert printed.count("the files draft what the trained heads draft") == 2
    assert "FAULT" not in printed
    assert "differs" not in printed
    listed = (tmp_path / "run" / "export-vllm" / "SHA256SUMS").read_text()
    assert {line.split()[1] for line in listed.splitlines()} == {
        "README.md", "config.json", "model.safetensors", "parity.json", "parity.tensors",
    }  # fmt: skip


def test_a_fault_is_named_on_the_first_line(run, tmp_path):
    run("export_heads", "heads=run", "format=modelopt", "output=out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rope_theta": 1e6}))
    refresh(tmp_path / "out")
    code, printed = run("verify_export", "export=out")
    assert code == 1
    first, second, *_ = printed.splitlines()
    assert first.startswith("FAULT logits of training, by step: RoPE base or scaling: trained with the target's")
    assert second.startswith(" also logits of drafting")
    assert "differs" in printed
    assert "the files draft what" not in printed


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["export=run"], "error: run has no parity.json: it was exported without a certificate; export it again"),
        ([], "error: export has no value; give it on the command line: export=..."),
    ],
)
def test_mistakes_are_one_line(run, overrides, message):
    assert run("verify_export", *overrides)[0] == message
