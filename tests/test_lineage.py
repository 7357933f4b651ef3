"""What W&B is told of heads: which run trained them and what was made of them; offline runs are read back from disk."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from eval import lineage
from eval.lineage import Item, check_tracker, find_origin, heads_item, is_online, log_job
from tests.wandb_files import read_run
from train.config import from_hydra
from train.loop import train

ROOT = Path(__file__).parents[1]
MODEL = {"name": "tiny", "path": "random:llama"}
pytestmark = pytest.mark.usefixtures("logged_out")


@pytest.fixture
def trained(tmp_path):
    """trained(tracker): the directory of a run that recorded this tracker, with files in the place of heads."""

    def make(tracker: str) -> Path:
        run = tmp_path / "my run"
        (run / "heads").mkdir(parents=True)
        (run / "heads" / "model.safetensors").write_text("weights")
        (run / "run.json").write_text(json.dumps({"id": "abc", "starts": []}))
        (run / "config.yaml").write_text(f"output_dir: outputs/my run\ntrainer: {{tracker: {tracker}}}\n")
        return run

    return make


class FakeRun:
    """Stands for an online run of W&B, and keeps what it is told."""

    offline, url, dir = False, "https://wandb.example/run", "there"

    def __init__(self):
        self.options, self.used, self.logged, self.summary = {}, [], [], {}

    def __call__(self, **options):
        self.options = options
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def use_artifact(self, artifact):
        self.used.append(artifact)

    def log_artifact(self, artifact):
        self.logged.append(artifact)


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    fake = FakeRun()
    monkeypatch.setattr(wandb, "init", fake)
    return fake


def log_report(run: Path, tracker: str) -> None:
    (run / "report.json").write_text("{}")
    (run / "other.json").write_text("{}")
    report = Item("report", "report", run, ("report.json",))
    log_job("evaluation", tracker, heads_item(run / "heads"), report, {"tau": 1.5})


def test_online_the_heads_are_used_by_their_content_and_the_report_is_logged(trained, online):
    run = trained("wandb")
    log_report(run, "auto")
    options = online.options
    assert (options["project"], options["group"], options["job_type"]) == ("headstart", "my run", "evaluation")
    assert "mode" not in options
    (used,), (logged,) = online.used, online.logged
    assert (used.name, used.type, list(used.manifest.entries)) == ("my-run-heads", "heads", ["model.safetensors"])
    assert (logged.name, logged.type, list(logged.manifest.entries)) == ("my-run-report", "report", ["report.json"])
    facts = {"heads_run": "abc", "uses": "my-run-heads", "uses_sha256": used.metadata["sha256"]}
    assert options["config"] == facts
    assert logged.metadata == {**facts, "tau": 1.5, "sha256": Item("", "", run, ("report.json",)).digest()}
    assert online.summary == {"tau": 1.5}


@pytest.mark.parametrize(("recorded", "tracker"), [("none", "auto"), ("tensorboard", "auto"), ("wandb", "none")])
def test_nothing_is_logged_unless_the_training_run_was(trained, online, recorded, tracker):
    log_report(trained(recorded), tracker)
    assert online.options == {}


def test_auto_never_opens_an_offline_run(trained, online, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    run = trained("wandb")
    log_report(run, "auto")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    log_report(run, "auto")
    assert online.options == {}
    monkeypatch.delenv("WANDB_MODE")
    log_report(run, "auto")
    assert online.options


def test_heads_from_elsewhere_are_logged_only_when_asked_for(trained, online, tmp_path):
    run = trained("wandb")
    assert find_origin(run / "heads") == find_origin(run)
    (run / "run.json").unlink()
    assert find_origin(run / "heads") is None
    log_report(run, "auto")
    assert online.options == {}
    log_report(run, "wandb")
    assert online.options["config"]["heads_run"] == ""
    assert online.options["group"] == "heads"


def test_the_digest_is_what_sha256sum_says(tmp_path):
    (tmp_path / "b").write_text("2")
    (tmp_path / "a").write_text("1")
    listing = subprocess.run(["sha256sum", "a", "b"], cwd=tmp_path, capture_output=True, check=True).stdout
    said = subprocess.run(["sha256sum"], input=listing, capture_output=True, check=True).stdout.split()[0]
    assert Item("heads", "heads", tmp_path).digest() == said.decode()


def test_a_refusal_of_wandb_is_one_line(trained, online, monkeypatch):
    def refuse(**_):
        raise wandb.errors.CommError("no permission")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"W&B did not take the evaluation \(no permission\); its files are written"):
        log_report(trained("wandb"), "wandb")


def test_a_tracker_that_cannot_be_followed_is_named(monkeypatch):
    with pytest.raises(ValueError, match="tracker=tensorboard must be one of auto, wandb, none"):
        check_tracker("tensorboard")
    monkeypatch.setattr(lineage.importlib.util, "find_spec", lambda name: None)
    check_tracker("auto")
    with pytest.raises(ValueError, match="tracker=wandb is not installed; run `pip install wandb`"):
        check_tracker("wandb")


@pytest.fixture
def command(tmp_path, monkeypatch):
    """command(script, *overrides) runs one of our commands on the tiny target, in tmp_path."""
    monkeypatch.chdir(tmp_path)

    def run(script: str, *overrides: str) -> None:
        monkeypatch.setattr(sys, "argv", [script, "model=tiny", *overrides])
        runpy.run_path(str(ROOT / script), run_name="__main__")

    return run


@pytest.mark.slow
def test_offline_every_artifact_names_the_one_that_it_was_made_of(command, tmp_path):
    rows = [{"messages": [{"role": role, "content": "one two"} for role in ("user", "assistant")]}] * 8
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say one"}\n{"prompt": "say two"}\n')
    train(
        from_hydra(
            {
                "model": MODEL,
                "heads": {"kind": "medusa", "num_heads": 2, "init": "target"},
                "data": {"train": ["chats.jsonl"], "max_length": 128, "cache_dir": "cache"},
                "trainer": {"steps": 1, "batch_size": 2, "eval_prompts": 0, "tracker": "wandb"},
                "run_name": "r",
                "output_dir": "outputs/r",
            }
        )
    )
    command("scripts/export_heads.py", "heads=outputs/r", "format=vllm", "tracker=wandb")
    command("scripts/verify_export.py", "export=outputs/r/export-vllm", "tracker=wandb")
    command(
        "eval/eval_heads.py", "heads=outputs/r", "prompts=[prompts.jsonl]", "benchmark.max_new_tokens=8",
        "benchmark.probe_prompts=1", "tree.source=choices", "tree.choices=[[0],[0,0]]", "tracker=wandb",
    )  # fmt: skip
    wandb.teardown()  # the files of a run that is finished are still being written until W&B's process has ended
    found = [read_run(path) for path in (tmp_path / "outputs/r/wandb").glob("offline-run-*/*.wandb")]
    assert {run.project for run in found} == {"headstart"}
    assert {run.group for run in found} == {"r"}
    jobs = {run.job_type: run for run in found}
    assert len(found) == len(jobs) == 4
    training = jobs["training"]
    heads, export = training.artifacts["r-heads"], jobs["export"].artifacts["r-export-vllm"]
    parity, report = jobs["parity"].artifacts["r-parity-vllm"], jobs["evaluation"].artifacts["r-report"]
    assert heads["files"] == ["config.json", "model.safetensors"]
    assert heads["metadata"]["sha256"] == heads_item(tmp_path / "outputs/r/heads").digest()
    for made, used, name in ((export, heads, "r-heads"), (report, heads, "r-heads"), (parity, export, "r-export-vllm")):
        assert made["metadata"]["heads_run"] == heads["metadata"]["heads_run"] == training.id
        assert (made["metadata"]["uses"], made["metadata"]["uses_sha256"]) == (name, used["metadata"]["sha256"])
    assert {"config.json", "README.md", "SHA256SUMS", "model.safetensors"} < set(export["files"])
    assert (report["files"], parity["files"]) == (["report.html", "report.json"], ["parity.json"])
    assert jobs["parity"].summary["verdict"] == "equal"
    summary = json.loads((tmp_path / "outputs/r/report.json").read_text())
    assert jobs["evaluation"].summary["tau"] == report["metadata"]["tau"] == summary["tau"]
    assert jobs["evaluation"].summary["speedup_median"] == summary["speedup"]["median"]
    assert jobs["evaluation"].config["heads_run"] == training.id


def test_wandb_mode_decides_before_the_login(monkeypatch):
    assert not is_online()
    monkeypatch.setenv("WANDB_MODE", "online")
    assert is_online()
