"""A checkpoint is whole or it is not used; what is kept is the last few and the best."""

import contextlib
import json
import logging
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heads.identity import TargetIdentity, identify
from heads.layout import load_heads
from heads.medusa import MedusaConfig, MedusaHeads
from heads.target import Target, TargetConfig, load_target
from train import checkpoint
from train.checkpoint import RunState, SaveError

STATE = RunState(step=3, seconds=1.5, tau=None, window={"loss": 0.1}, fixed={"data": "abc", "seed": 0})
OPTIMIZER = {"block_weight/exp_avg": torch.arange(6.0).view(2, 3), "block_weight/step": torch.tensor(3.0)}


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig("tiny", "random:llama"))


@pytest.fixture(scope="module")
def identity(target: Target) -> TargetIdentity:
    return identify(target)


@pytest.fixture(scope="module")
def heads(target: Target) -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig(num_heads=2), target.hidden_size, target.vocab_size, torch.arange(10, 200))
    return heads.bind(target).initialise()


@pytest.fixture
def save(tmp_path: Path, heads: MedusaHeads, identity: TargetIdentity):
    def write(step: int, tau: float | None = None) -> Path:
        return checkpoint.save(tmp_path, heads, OPTIMIZER, replace(STATE, step=step, tau=tau), identity)

    return write


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Writes beyond 10 kB fail, those of pytest's own log too: so only around the save itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_what_was_saved_comes_back(save, heads, target):
    directory = save(3, tau=1.25)
    assert directory.name == "step-000003"
    assert names(directory) == ["config.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    state = checkpoint.read_state(directory)
    assert replace(state, hashes={}) == replace(STATE, tau=1.25)
    loaded = load_heads(directory, target)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in heads.state_dict().items())
    assert loaded.block_weight.dtype == torch.float32
    tensors = load_file(directory / "optimizer.safetensors")
    assert all(torch.equal(value, tensors[name]) for name, value in OPTIMIZER.items())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "missing"])
def test_a_damaged_checkpoint_is_not_used(save, tmp_path, caplog, name, how):
    save(3)
    path = save(6) / name
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :])
    else:
        path.unlink()
    checkpoint.set_aside_damaged(tmp_path)
    assert names(tmp_path) == ["damaged-step-000006", "step-000003"]
    assert "step-000006 is damaged" in caplog.text
    if name != "state.json":
        assert name in caplog.text


def test_whole_checkpoints_are_left_alone(save, tmp_path, caplog):
    save(3)
    checkpoint.set_aside_damaged(tmp_path)
    assert names(tmp_path) == ["step-000003"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_unfinished_write_is_no_checkpoint_and_is_cleared(save, tmp_path):
    save(3)
    (tmp_path / ".writing-step-000006").mkdir()
    (tmp_path / ".writing-step-000006" / "model.safetensors").write_bytes(b"half")
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000003"]
    save(9)
    assert names(tmp_path) == ["step-000003", "step-000009"]


def test_a_full_disk_is_a_clear_error_and_keeps_the_checkpoint_before(save, tmp_path):
    message = r"step-000003 could not be written.*from the start: there is no checkpoint"
    with pytest.raises(SaveError, match=message), full_disk():
        save(3)
    assert names(tmp_path) == []


def test_a_full_disk_names_the_checkpoint_to_go_on_from(save, tmp_path):
    save(3)
    message = r"step-000006 could not.*GB are free.*resume=true from .*step-000003"
    with pytest.raises(SaveError, match=message), full_disk():
        save(6)
    assert names(tmp_path) == ["step-000003"]
    assert checkpoint.damage(tmp_path / "step-000003") is None


def test_the_last_and_the_best_are_kept(save, tmp_path):
    for step, tau in ((1, 1.5), (2, 1.9), (3, None), (4, 1.7), (5, None)):
        save(step, tau)
        checkpoint.prune(tmp_path, keep_last=2)
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    best = checkpoint.best(tmp_path)
    assert best is not None
    assert best.name == "step-000002"


def test_the_best_without_tau_is_the_last_and_of_equal_ones_the_latest(save, tmp_path):
    assert checkpoint.best(tmp_path) is None
    save(999_999)
    save(1_000_000)  # a wider name sorts before by letters
    assert checkpoint.best(tmp_path) == tmp_path / "step-1000000"
    save(1_000_001, tau=2.0)
    save(1_000_002, tau=2.0)
    save(1_000_003)
    assert checkpoint.best(tmp_path) == tmp_path / "step-1000002"


def test_saving_a_step_again_replaces_it(save):
    save(3, tau=1.0)
    assert checkpoint.read_state(save(3, tau=2.0)).tau == 2.0


def test_heads_are_copied_without_the_training_state(save, tmp_path, target):
    destination = tmp_path / "heads"
    for step in (3, 6):
        checkpoint.copy_heads(save(step), destination)
    assert names(destination) == ["config.json", "model.safetensors"]
    load_heads(destination, target)


def test_nothing_is_pickled(save):
    directory = save(3)
    json.loads((directory / "state.json").read_text())
    assert {path.suffix for path in directory.iterdir()} == {".json", ".safetensors"}


def test_other_settings_cannot_resume_a_run():
    checkpoint.check_fixed({"data": "abc", "seed": 0}, {"data": "abc", "seed": 0})
    with pytest.raises(ValueError, match=r"data: abc before, abd now; seed: 0 before, 1 now\); restore them, or start"):
        checkpoint.check_fixed({"data": "abc", "seed": 0}, {"data": "abd", "seed": 1})
