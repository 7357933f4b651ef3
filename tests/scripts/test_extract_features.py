"""The extraction as users run it: one closing line, nothing twice, and a clean message for what cannot be done."""

import json
import re
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir

from data import disk, progress
from scripts.extract_features import ExtractConfig, extract
from tests.test_configs import CONF
from train.config import with_heads


@pytest.fixture
def overrides(tmp_path) -> list[str]:
    talk = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "one two three " * (1 + i % 3)}]
        for i in range(12)
    ]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in talk))
    return [
        "model=tiny",
        "heads=eagle3",
        f"data.train=[{chats}]",
        "data.heldout=[]",
        f"data.cache_dir={tmp_path / 'cache'}",
        "precision=int8",
        "shard_mb=0.02",
        "threads=1",
    ]


def composed(overrides: list[str]) -> ExtractConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return with_heads(ExtractConfig, compose("extract", overrides=overrides))


def test_features_are_written_once_and_the_last_line_says_what_they_take(
    overrides, tmp_path, capsys, caplog, monkeypatch
):
    config = composed([*overrides, f"output={tmp_path / 'features'}"])
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    caplog.set_level("INFO")
    directory = extract(config)
    said = [message for message in caplog.messages if message.startswith("extracting: ")]
    assert len(said) == 12
    assert re.match(r"extracting: ([\d,]+) of \1 tokens \(100%\).* \d\.\d\d GB", said[-1])
    line = capsys.readouterr().out.splitlines()[-1]
    size = sum(file.stat().st_size for file in directory.iterdir())
    found = re.fullmatch(
        r"12 documents, ([\d,]+) tokens \(([\d,]+) supervised\), 0\.\d+ GB in (\S+): ([\d,]+) bytes for each "
        r"supervised token, ([\d.]+)% of a dump of all positions in 16 bits; train with trainer\.features=(\S+)",
        line,
    )
    assert found, line
    tokens, supervised, place, each, share, again = (part.replace(",", "") for part in found.groups())
    assert place == again == str(directory)
    assert int(each) == round(size / int(supervised))
    assert float(share) == pytest.approx(100 * size / (int(tokens) * 3 * 32 * 2), abs=0.1)  # 2 taps and final_norm
    assert len(list(directory.glob("*.safetensors"))) > 2
    before = {file: file.stat().st_mtime_ns for file in directory.glob("shard-*")}
    assert extract(config) == directory
    assert {file: file.stat().st_mtime_ns for file in directory.glob("shard-*")} == before


def test_a_full_disk_is_refused_before_anything_is_written(overrides, tmp_path, monkeypatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"^the features need 0\.00 GB in .* give another output="):
        extract(composed([*overrides, f"output={tmp_path / 'features'}"]))
    assert not (tmp_path / "features").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("precision=fp8", "precision=fp8 must be one of float32, bfloat16, int8"),
        ("shard_mb=0", "shard_mb=0.0 must be above 0; use 256"),
        ("heads.num_heads=3", "unknown setting heads.num_heads"),
    ],
)
def test_a_wrong_setting_is_named(overrides, override, said):
    override = f"+{override}" if "heads" in override else override
    with pytest.raises(ValueError, match=re.escape(said)):
        composed([*overrides, override])
