"""The GPU check at toy size on the CPU: its rows, its files, its verdict, and what it does with sections that fail."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import scripts.gpu_check as gpu_check
from scripts.gpu_check import FAILED, LATE, check, parse, run_inside, run_section, verdict
from scripts.missing_packages import problems
from train import agreement, gpu_sections
from train.gpu_sections import SECTIONS, SIZES, largest_size, unavailable

CHECKOUT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def in_this_process(monkeypatch):
    """Run sections without a process of their own: starting one takes seconds."""

    def run(section, size, output, limit_s):
        run_inside(section, size, output)
        lines = gpu_check.rows_file(output, section).read_text().splitlines()
        return {"status": "done", "reason": "", "seconds": 1.0, "rows": [json.loads(line) for line in lines]}

    monkeypatch.setattr(gpu_check, "run_section", run)
    monkeypatch.setattr(agreement, "SETTINGS", {"medusa": {"num_heads": 3}})
    monkeypatch.setattr(gpu_sections, "SETTINGS", {"medusa": {"num_heads": 3}})


def toy(output: Path, *sections: str):
    return parse(["--size", "toy", "--output", str(output), "--sections", *sections])


def test_one_table_of_everything(in_this_process, tmp_path, capsys):
    assert check(toy(tmp_path, "agreement", "decode", "training"))
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert (written["passed"], written["size"], written["device"]) == (True, "toy", "CPU")
    rows = {row["what"]: row for section in written["sections"].values() for row in section["rows"]}
    for what in ("plain step, eager", "verify 2 tokens, eager", "verify 4 tokens, eager", "medusa: draft, eager",
                 "eagle3: draft, eager", "eagle3: overhead of a cycle, eager", "medusa 4: supervised tokens",
                 "eagle3 7: peak memory", "eagle3 7: arithmetic"):  # fmt: skip
        assert rows[what]["value"] > 0, what
    assert rows["medusa: gradients"]["ok"] is True
    assert rows["CUDA graph"]["note"] == "left out: needs a CUDA device"
    assert rows["eagle3 7: model FLOP utilisation"]["value"] is None
    text = (tmp_path / "gpu_check.md").read_text()
    assert all(f"| {what} |" in text for what in rows)
    assert "verify 4 tokens, eager" in capsys.readouterr().out


def test_a_device_that_computes_something_else_fails_the_check(in_this_process, tmp_path, monkeypatch):
    right, scales = agreement.training, iter([1.0, 1.001])  # the CPU's side first

    def scaled(*inputs):
        scale = next(scales)
        return {name: value * scale for name, value in right(*inputs).items()}

    monkeypatch.setattr(agreement, "training", scaled)
    assert not check(toy(tmp_path, "agreement"))
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert written["passed"] is False
    assert "| agreement | medusa: loss | 0.001 |  | limit 1e-05 | FAILED |" in (tmp_path / "gpu_check.md").read_text()


def result(status="done", **row):
    return {"status": status, "reason": "", "seconds": 1.0, "rows": [{"ok": None, **row}]}


@pytest.mark.parametrize(
    ("results", "passed"),
    [
        ({"agreement": result(ok=True), "decode": result()}, True),
        ({"agreement": result(ok=False)}, False),
        ({"agreement": result(LATE, ok=True)}, False),  # comparisons that were not made
        ({"agreement": result(ok=True), "decode": result(LATE)}, True),
        ({"agreement": result(ok=True), "decode": result(FAILED)}, False),
    ],
)
def test_the_verdict(results, passed):
    assert verdict(results) is passed


def fake_section(monkeypatch, tmp_path, body: str) -> None:
    """Let `run_section` start a script that writes two rows and then does `body`."""
    script = tmp_path / "section.py"
    script.write_text(
        "import sys, time\n"
        "out = sys.argv[sys.argv.index('--output') + 1]\n"
        "file = open(out + '/decode.jsonl', 'w', buffering=1)\n"
        'file.write(\'{"what": "plain step", "value": 1.0}\\n{"what": "ver\')\n' + body
    )
    monkeypatch.setattr(gpu_check, "__file__", str(script))


def test_a_section_that_fails_is_named_and_keeps_what_it_found(monkeypatch, tmp_path):
    fake_section(monkeypatch, tmp_path, "raise RuntimeError('no kernel image is available')\n")
    found = run_section("decode", "toy", tmp_path, 20)
    assert (found["status"], found["reason"]) == (FAILED, "RuntimeError: no kernel image is available")
    assert [row["what"] for row in found["rows"]] == ["plain step"]


def test_a_section_that_runs_out_of_time_is_ended_with_its_children(monkeypatch, tmp_path):
    child = f"[{sys.executable!r}, '-c', 'import time; time.sleep(60)', {str(tmp_path)!r}]"
    fake_section(monkeypatch, tmp_path, f"import subprocess\nsubprocess.Popen({child})\ntime.sleep(60)\n")
    began = time.monotonic()
    assert run_section("decode", "toy", tmp_path, 1.0)["status"] == LATE
    assert time.monotonic() - began < 10
    running = subprocess.run(["ps", "axo", "stat,args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in running.splitlines() if str(tmp_path) in line and not line.startswith("Z")]


def test_time_that_is_left_over_goes_to_later_sections(monkeypatch, tmp_path):
    limits = []

    def at_once(section, size, output, limit_s):
        limits.append(limit_s)
        return {**result(), "rows": []}

    monkeypatch.setattr(gpu_check, "run_section", at_once)
    assert check(parse(["--size", "toy", "--output", str(tmp_path), "--minutes", "8"]))
    assert limits[0] == pytest.approx(480 * 40 / sum(share for _, share in SECTIONS.values()), rel=0.01)
    assert limits[-1] == pytest.approx(480, rel=0.01)  # nothing was used up


@pytest.mark.slow  # pytest starts workers of its own
def test_the_tests_of_the_suite_are_counted(tmp_path):
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert False\n@pytest.mark.skip\ndef test_left(): pass\n"
    )
    passed, failed = gpu_sections.tests(SIZES["toy"], CPU, paths=(str(tmp_path),))
    assert (passed.value, passed.note, failed.value, failed.ok) == (1, "1 skipped", 1, False)
    assert failed.note.endswith("test_three.test_bad")


def test_sizes_and_forms_that_the_machine_lacks(monkeypatch):
    assert largest_size(CPU) == "toy"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(24e9), int(24e9)))
    assert largest_size(torch.device("cuda")) == "small"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(140e9), int(140e9)))
    assert largest_size(torch.device("cuda")) == "8b"
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert unavailable("compiled", torch.device("cuda")) == "triton needs a C compiler; install gcc"
    assert unavailable("compiled", CPU).startswith("needs a CUDA device")
    assert unavailable("eager", CPU) is None


def test_a_missing_package_is_named(monkeypatch):
    assert problems([]) == []
    versions = {"torch": "2.5.0+cu121", "rich": "15.0"}
    monkeypatch.setattr("scripts.missing_packages.version", versions.__getitem__)
    assert problems(["torch", "rich"]) == ["torch>=2.6: found 2.5.0+cu121"]
    with pytest.raises(ValueError, match="tourch: not among the dependencies"):
        problems(["tourch"])


@pytest.mark.slow
def test_the_script_at_toy_size(tmp_path):
    command = ["bash", "scripts/gpu_check.sh", "--size", "toy", "--output", str(tmp_path), "--minutes", "20"]
    command += ["--sections", "agreement", "compiled decode"]
    environment = {**os.environ, "PYTHON": sys.executable}
    ran = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [found["status"] for found in written["sections"].values()] == ["done", "done"]
    assert "needs a CUDA device" in written["sections"]["compiled decode"]["rows"][0]["note"]
