"""Several processes are one: two of them, launched as users launch them, train the heads that one trains.

Engines also go on with each other's checkpoints, in another number of processes:

    step                        0 ------ 2 ------ 4 ------ 6
    one process                 =========================>       the reference, never stopped
    two, first engine           =========================>
    one, from its step 2                 ================>
    two, other engine, from 4                     =======>
"""

import json
import os
import re
import shutil
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


def start(arguments: list[str], launcher: str = "ddp", *options: str) -> subprocess.Popen[str]:
    """Launch training by conf/accelerate/<launcher>.yaml, on the CPU."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    settings = ["--config_file", str(CHECKOUT / "conf" / "accelerate" / f"{launcher}.yaml"), "--num_processes", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*command, *settings, *options, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def launch(arguments: list[str], launcher: str = "ddp") -> tuple[int, str]:
    """Train in two processes; returns the exit code and what they said."""
    process = start(arguments, launcher, "--main_process_port", str(free_port()))
    said = process.communicate(timeout=300)[1]
    return process.returncode, said


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
    code, said = launch([*ENTRY, *as_overrides(values)])
    assert code == 0, said
    one, two = (load_file(tmp_path / name / "heads" / "model.safetensors") for name in ("one", "two"))
    for name in ("block_weight", "block_bias", "lm_head_weight"):
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-6)
    for alone, together in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        for name in alone.keys() - {"train/supervised_tokens_per_s", "train/memory_gb"}:
            assert alone[name] == pytest.approx(together[name], abs=1e-5, rel=1e-6), name
    config = OmegaConf.load(tmp_path / "two" / "config.yaml")
    assert config.trainer.batch_size == 8
    assert said.count("heads: step-") == 1  # one process speaks


@pytest.mark.slow
def test_two_processes_refuse_together_and_go_on_with_the_run_of_one(make_config, make_values, tmp_path):
    settings = ("trainer.steps=2", "trainer.max_seconds=600")
    train(make_config(*settings))
    arguments = [*ENTRY, *as_overrides(make_values(*settings)), "++trainer.steps=3"]
    code, said = launch(arguments)
    assert code != 0
    assert said.count("is not empty; go on with that run by resume=true") == 1
    code, said = launch([*arguments, "++resume=true"])
    assert code == 0, said
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def forget_after(run: Path, step: int) -> None:
    """Leave the run as if it had been killed between `step` and its next checkpoint."""
    for directory in (run / "checkpoints").glob("step-*"):
        if int(directory.name.removeprefix("step-")) > step:
            shutil.rmtree(directory)


def assert_same_rows(one: Path, other: Path) -> None:
    """What was logged of each step agrees, but for times."""
    for alone, together in zip(rows(one), rows(other), strict=True):
        assert alone.keys() == together.keys()
        for name in alone.keys() - {"train/supervised_tokens_per_s", "train/memory_gb"}:
            assert alone[name] == pytest.approx(together[name], abs=1e-5), (alone["step"], name)


def assert_same_run(one: Path, other: Path) -> None:
    """What was logged of each step, the weights and the moments agree."""
    assert_same_rows(one, other)
    for name, tolerance in (("model.safetensors", 2e-6), ("optimizer.safetensors", 2e-7)):
        left, right = (load_file(run / "checkpoints" / "step-000006" / name) for run in (one, other))
        torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


# Each of two processes has three micro-batches; rows differ in length, and every gradient is clipped.
ENGINES = (
    "heads.draft_vocab_size=301",
    "trainer.batch_size=12",
    "trainer.save_every=2",
    "trainer.keep_last=3",
    "trainer.eval_prompts=2",
    "trainer.clip_norm=0.2",
    "trainer.weight_decay=0.1",
    "data.packing=false",
)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("zero1", "zero2"), ("zero3", "fsdp2"), ("fsdp2", "zero3")])
def test_engines_train_the_heads_of_one_process_and_go_on_with_its_run(first, then, make_config, make_values, tmp_path):
    train(make_config(*ENGINES, f"output_dir={tmp_path}/one"))
    assert min(row["train/grad_norm"] for row in rows(tmp_path / "one") if "train/loss" in row) > 0.2
    run = tmp_path / "run"
    arguments = [*ENTRY, *as_overrides(make_values(*ENGINES))]
    code, said = launch(arguments, first)
    assert code == 0, said
    assert_same_run(tmp_path / "one", run)

    forget_after(run, 2)
    train(make_config(*ENGINES, "resume=true"))
    forget_after(run, 4)
    code, said = launch([*arguments, "++resume=true"], then)
    assert code == 0, said
    assert_same_run(tmp_path / "one", run)
    assert len(json.loads((run / "run.json").read_text())["starts"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ddp", "fsdp2"])
def test_a_target_that_two_processes_share_out_teaches_as_a_whole_one(launcher, make_config, make_values, tmp_path):
    """In turns with measuring tau, which every process then does."""
    settings = (*ENGINES, "trainer.eval_every=2")
    train(make_config(*settings, f"output_dir={tmp_path}/one"))
    arguments = [*ENTRY, *as_overrides(make_values(*settings)), "++trainer.shard_target=true"]
    code, said = launch(arguments, launcher)
    assert code == 0, said
    assert_same_run(tmp_path / "one", tmp_path / "run")
    assert said.count("heads: step-") == 1
    held = re.findall(r"this process holds (\d+) of the target's (\d+) parameters", said)
    assert [2 * int(part) < 1.5 * int(whole) for part, whole in held] == [True]  # embeddings and LM head are whole


def test_a_target_is_not_shared_out_where_that_cannot_work(make_config):
    with pytest.raises(ValueError, match="but there is one; launch several"):
        train(make_config("trainer.shard_target=true"))
    with pytest.raises(ValueError, match=r"shares the target out, but model\.device_map=auto spreads it already"):
        make_config("trainer.shard_target=true", "model.device_map=auto")


@pytest.mark.slow
def test_two_nodes_train_the_heads_of_one_process(make_config, make_values, tmp_path):
    train(make_config(*ENGINES, f"output_dir={tmp_path}/one"))
    arguments = [*ENTRY, *as_overrides(make_values(*ENGINES))]
    main = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()), "--machine_rank")
    nodes = [start(arguments, "multinode", *main, rank) for rank in ("0", "1")]
    said = [node.communicate(timeout=300)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert_same_run(tmp_path / "one", tmp_path / "run")


def test_gradients_that_differ_between_processes_are_noticed():
    def processes(*norms: float) -> Any:
        return SimpleNamespace(num_processes=2, gather=lambda norm: torch.tensor(norms))

    check_synchronised(torch.tensor(1.0), processes(1.0, 1.0))
    with pytest.raises(AssertionError, match=r"gradients differ between processes: \[1\.0, 2\.0\]"):
        check_synchronised(torch.tensor(1.0), processes(1.0, 2.0))
    with pytest.raises(AssertionError, match="gather reached other processes"):
        check_synchronised(torch.tensor(1.0), processes(1.0))
