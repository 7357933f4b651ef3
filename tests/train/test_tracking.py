"""Trackers work without a network and without an account; metrics.jsonl never depends on them."""

import json

import pytest

from eval.lineage import wandb_logged_in
from train import tracking
from train.loop import train
from train.tracking import check_tracker, flat, wandb_options

pytestmark = pytest.mark.usefixtures("logged_out")


def test_wandb_is_offline_unless_logged_in(monkeypatch, tmp_path):
    assert not wandb_logged_in()
    assert wandb_options(tmp_path, "abc") == {
        "name": tmp_path.name,
        "group": tmp_path.name,
        "job_type": "training",
        "dir": str(tmp_path),
        "id": "abc",
        "resume": "allow",
        "mode": "offline",
    }
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_logged_in()
    assert "mode" not in wandb_options(tmp_path, "abc")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not wandb_logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert wandb_logged_in()


def test_the_users_wandb_mode_stands(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert "mode" not in wandb_options(tmp_path, "abc")


@pytest.mark.parametrize(
    ("tracker", "pattern"),
    [
        pytest.param("wandb", "wandb/offline-run-*/*.wandb", marks=pytest.mark.slow),
        ("tensorboard", "headstart/**/events.*"),
    ],
)
def test_a_tracked_run_writes_its_files_and_the_same_metrics(make_config, tmp_path, tracker, pattern):
    for name in ("none", tracker):
        train(make_config("trainer.steps=2", f"trainer.tracker={name}", f"output_dir={tmp_path}/{name}"))
    assert list((tmp_path / tracker).glob(pattern))
    plain, tracked = (
        [json.loads(line)["train/loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("none", tracker)
    )
    assert plain == tracked


def test_a_tracker_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"trainer\.tracker=tensorboard is not installed; run `pip install tensorboard`"
    ):
        check_tracker("tensorboard")


def test_settings_are_flat_for_tensorboard():
    assert flat({"seed": 0, "data": {"train": ["a"], "limit": None}}) == {
        "seed": 0,
        "data.train": "['a']",
        "data.limit": "None",
    }
