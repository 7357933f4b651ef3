"""Several processes are one: two of them, launched as users launch them, train the heads that one trains."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from train.loop import train
from train.step import check_synchronised

CHECKOUT = Path(__file__).parents[2]
ENTRY = [str(CHECKOUT / "train" / "train_heads.py"), "model=tiny", "data=sharegpt"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(arguments: list[str], processes: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    settings = [
        "--config_file",
        str(CHECKOUT / "conf" / "accelerate" / "ddp.yaml"),
        "--num_processes",
        str(processes),
    ]
    command = [*launcher, *settings, "--main_process_port", str(free_port()), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)


def as_overrides(values: dict[str, Any], prefix: str = "++") -> list[str]:
    """{"trainer": {"lr": 1}} -> ["++trainer.lr=1"], for all but the target, which `model=tiny` gives."""
    overrides = []
    for name, value in values.items():
        if isinstance(value, dict):
            overrides += as_overrides(value, f"{prefix}{name}.") if name != "model" else []
        else:
            overrides.append(f"{prefix}{name}={json.dumps(value)}")
    return overrides


def rows(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_processes_train_the_same_heads_as_one(make_config, make_values, tmp_path):
    settings = (
        "trainer.batch_size=8",
        "trainer.micro_batch_size=2",
        "data.packing=false",
        "trainer.eval_prompts=2",
    )
    more = ("trainer.save_every=3", "trainer.eval_every=2", "heads.objective.kl_weight=0.5", "trainer.log_every=2")
    train(make_config(*settings, *more, f"output_dir={tmp_path}/one"))
    values = make_values(*settings, *more, f"output_dir={tmp_path}/two")
    done = launch([*ENTRY, *as_overrides(values)])
    assert done.returncode == 0, done.stderr
    one, two = (load_file(tmp_path / name / "heads" / "model.safetensors") for name in ("one", "two"))
    for name in ("block_weight", "block_bias", "lm_head_weight"):
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-6)
    for alone, together in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        for name in alone.keys() - {"train/supervised_tokens_per_s", "train/memory_gb"}:
            assert alone[name] == pytest.approx(together[name], abs=1e-5, rel=1e-6), name
    config = OmegaConf.load(tmp_path / "two" / "config.yaml")
    assert config.trainer.batch_size == 8
    assert done.stderr.count("heads: step-") == 1  # one process speaks


@pytest.mark.slow
def test_two_processes_refuse_together_and_go_on_with_the_run_of_one(make_config, make_values, tmp_path):
    settings = ("trainer.steps=2", "trainer.max_seconds=600")
    train(make_config(*settings))
    arguments = [*ENTRY, *as_overrides(make_values(*settings)), "++trainer.steps=3"]
    refused = launch(arguments)
    assert refused.returncode != 0
    assert refused.stderr.count("is not empty; go on with that run by resume=true") == 1
    resumed = launch([*arguments, "++resume=true"])
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def test_gradients_that_differ_between_processes_are_noticed():
    def processes(*norms: float) -> Any:
        return SimpleNamespace(num_processes=2, gather=lambda norm: torch.tensor(norms))

    check_synchronised(torch.tensor(1.0), processes(1.0, 1.0))
    with pytest.raises(AssertionError, match=r"gradients differ between processes: \[1\.0, 2\.0\]"):
        check_synchronised(torch.tensor(1.0), processes(1.0, 2.0))
    with pytest.raises(AssertionError, match="gather reached other processes"):
        check_synchronised(torch.tensor(1.0), processes(1.0))
