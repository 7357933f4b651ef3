"""A file that lost its end or a bit: the command that needs it names it, and makes it again or says what does."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.harness import Work, command, run_fork
from tests.faults.runs import Extraction, Training

pytestmark = pytest.mark.slow
Maker = Callable[[Path, Path], Work]  # from the folder of the runs and that of the chats


def cut(path: Path) -> None:
    """Lose the second half."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """One bit, near the end, where tensors are."""
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def train(root: Path, chats: Path) -> Work:
    """Go on with the run that is there."""
    return Training(root, chats).command()


def train_from_features(root: Path, chats: Path) -> Work:
    """Start another run from the features that are there."""
    other = root / "other"
    shutil.rmtree(other, ignore_errors=True)
    features = Extraction(root, chats).directory()
    return Training(other, chats, f"data.cache_dir={root / 'cache'}", f"trainer.features={features}").command()


def train_anew(root: Path, chats: Path) -> Work:
    """Start another run from the prepared data that is there."""
    return Training(root / "other", chats, f"data.cache_dir={root / 'cache'}").command()


def extract(root: Path, chats: Path) -> Work:
    """Extract what is missing."""
    return Extraction(root, chats).command()


def export(root: Path, chats: Path) -> Work:
    """Export the heads of the run."""
    run = Training(root, chats).directory
    return command("scripts/export_heads.py", "model=tiny", f"heads={run}", "format=vllm", "tracker=none")


@dataclass(frozen=True)
class Case:
    """A damaged file, the command that needs it, its exit code and what it says, and what makes the file again."""

    pattern: str
    reader: Maker
    code: int
    said: str
    mender: Maker | None = None


AGAIN = r"run scripts/extract_features\.py again with the settings that made it: it writes only what is missing"
CHECKPOINT = "run/checkpoints/step-000008"
CASES = {
    "prepared data": Case("cache/*.safetensors", train_anew, 0, r"prepared data .* is damaged \(.*it is built again"),
    "moments": Case(f"{CHECKPOINT}/optimizer.safetensors", train, 0, r"000008 is damaged \(optimizer.*: not used"),
    "weights": Case(f"{CHECKPOINT}/model.safetensors", train, 0, r"000008 is damaged \(model\.safe.*: not used"),
    "features": Case(
        "features/*/shard-00001.safetensors",
        train_from_features,
        2,
        rf"error: .*shard-00001.* is damaged.*{AGAIN}",
        extract,
    ),
}
HEADS = Case("run/heads/model.safetensors", export, 1, r"model\.safetensors is truncated or damaged .*copy or", train)


@pytest.fixture(scope="module")
def made(chats, tmp_path_factory) -> Path:
    """A run, its prepared data and features."""
    root = tmp_path_factory.mktemp("made")
    Training(root, chats).finish()
    Extraction(root, chats).finish()
    return root


def check(case: Case, damage: Callable[[Path], None], made: Path, chats: Path, root: Path) -> None:
    """Damage the file in a copy of `made`, read it and mend it: in the end it is what it was."""
    shutil.copytree(made, root)
    (file,) = root.glob(case.pattern)
    before = file.read_bytes()
    damage(file)
    ended = run_fork(case.reader(root, chats))
    assert ended.code == case.code, ended.said
    assert re.search(case.said, ended.said)
    assert "Traceback" not in ended.said
    if case.mender is not None:
        assert run_fork(case.mender(root, chats)).code == 0
        assert run_fork(case.reader(root, chats)).code == 0
    assert file.read_bytes() == before


@pytest.mark.parametrize("damage", [cut, flip])
@pytest.mark.parametrize("name", CASES)
def test_damage_is_named_and_mended(name, damage, made, chats, tmp_path):
    check(CASES[name], damage, made, chats, tmp_path / "damaged")


def test_heads_that_lost_their_end_are_handed_out_again(made, chats, tmp_path):
    """Heads have no checksum before they are exported: a flipped bit shows in the export's certificate alone."""
    check(HEADS, cut, made, chats, tmp_path / "damaged")
