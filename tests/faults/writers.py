"""Every writer of the project: how it writes version 1 or 2 of something, and which version its reader finds."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.disk import write_whole
from data.features import FeatureStore, fault_of
from data.prepared import PreparedData, Summary
from data.regenerate import AnswerLog
from heads.identity import TargetIdentity, identify
from heads.layout import load_heads, save_heads
from heads.medusa import MedusaConfig, MedusaHeads
from heads.target import Target, TargetConfig, load_target
from tests.data.test_features import TAPS, fill, make_store_plan, some_samples
from tests.faults.harness import Ended, Work, run_fork
from train import checkpoint
from train.checkpoint import RunState
from train.tracking import cut_rows


@dataclass(frozen=True)
class Writer:
    """One writer. Its versions come one after the other: what of version 1 must last is there when 2 is written.

    read: the version that a reader finds, None for nothing; fails if it would find a half.
    then: what a message about a failed write ends with.
    may_lack: whether a kill may leave nothing, since whoever needs it makes it again.
    """

    write: Callable[[Path, int], object]
    read: Callable[[Path], int | None]
    then: str
    may_lack: bool = False


@functools.cache
def target() -> Target:
    return load_target(TargetConfig("tiny", "random:llama"), "cpu")


@functools.cache
def identity() -> TargetIdentity:
    return identify(target())


@functools.cache
def heads(version: int) -> MedusaHeads:
    made = MedusaHeads(MedusaConfig(num_heads=1), target().hidden_size, target().vocab_size, torch.arange(10, 200))
    made.bind(target()).initialise()
    made.block_bias.data.fill_(version)
    return made


def save_checkpoint(root: Path, version: int, step: int) -> None:
    moments = {"block_bias/exp_avg": torch.full((3,), float(version))}
    state = RunState(step, 1.0, tau=float(version), window={}, fixed={"data": "d"})
    checkpoint.save(root, heads(version), moments, state, identity())
    checkpoint.prune(root, keep_last=1)


def read_checkpoint(root: Path) -> int | None:
    """The version of the newest checkpoint, as a resumed run finds it; none may be damaged."""
    checkpoint.set_aside_damaged(root)
    assert not list(root.glob("damaged-*"))
    found = checkpoint.checkpoints(root)
    if not found:
        return None
    version = checkpoint.read_state(found[-1]).tau
    moments = load_file(found[-1] / checkpoint.OPTIMIZER_FILE)["block_bias/exp_avg"]
    assert (moments == version).all()
    assert (load_heads(found[-1], target()).state_dict()["block_bias"] == version).all()
    return int(version or 0)


def save_prepared(root: Path, version: int) -> None:
    ids = torch.full((4,), version, dtype=torch.int32)
    summary = Summary(1, 1, 4, 4, 0, 0, 0, 0, {})
    ones = torch.ones(4, dtype=torch.uint8)
    data = PreparedData(ids, ones, torch.tensor([0, 4]), torch.zeros(1, dtype=torch.int32), [""], summary, "digest")
    data.save(root, {})


def read_prepared(root: Path) -> int | None:
    stored = PreparedData.load(root, "digest")
    return None if stored is None else int(stored.ids_N.unique().item())


def fill_store(root: Path, version: int) -> None:
    """Version 1 is the first shard, version 2 the others too."""
    plan = make_store_plan("float32", some_samples(4))
    if version == 1:
        plan = make_store_plan("float32", some_samples(4)[:2])
    fill(root / f"store-{version}", plan)


def read_store(root: Path) -> int | None:
    """2 if the second store is complete. A shard under its own name is whole, whatever else is there."""
    for shard in (root / "store-2").glob("shard-*.safetensors"):
        assert fault_of(shard) is None
    plan = make_store_plan("float32", some_samples(4))
    shards = len(list((root / "store-2").glob("shard-*.safetensors")))
    if shards < plan.index.shards:
        return 1
    assert not list((root / "store-2").glob(".*"))
    FeatureStore(root / "store-2").read(plan.ids(plan.shards[-1][0]), TAPS, torch.float32)
    return 2


def append_answers(root: Path, version: int) -> None:
    with AnswerLog(root / "answers.jsonl") as log:
        if len(log.rows) < version:
            log.append([{"id": version, "text": "say " * 500}])


def read_answers(root: Path) -> int | None:
    with AnswerLog(root / "answers.jsonl") as log:
        versions = [row["id"] for row in log.rows]
    assert versions == [*range(1, len(versions) + 1)]
    return versions[-1] if versions else None


def save_report(root: Path, version: int) -> None:
    write_whole(root / "report.json", json.dumps({"version": version}), "run again")


def read_report(root: Path) -> int | None:
    return json.loads((root / "report.json").read_text())["version"]


def read_heads(root: Path) -> int | None:
    if not (root / "heads").exists():
        return None
    return int(load_heads(root / "heads", target()).state_dict()["block_bias"].unique().item())


def cut_metrics(root: Path, version: int) -> None:
    """Version 1 has 50 rows more than a resumed run keeps."""
    path = root / "metrics.jsonl"
    if version == 1:
        path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 101)))
    cut_rows(path, 100 // version)


def read_metrics(root: Path) -> int | None:
    rows = [json.loads(line)["step"] for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert rows == [*range(1, len(rows) + 1)]
    return 100 // len(rows)


RESUME = "then go on with resume=true"
EXTRACT = "then run scripts/extract_features.py again"
WRITERS = {
    "checkpoint": Writer(lambda root, version: save_checkpoint(root, version, step=version), read_checkpoint, RESUME),
    "the same step": Writer(lambda root, version: save_checkpoint(root, version, step=7), read_checkpoint, RESUME),
    "prepared data": Writer(save_prepared, read_prepared, "then run again", may_lack=True),
    "features": Writer(fill_store, read_store, EXTRACT),
    "answers": Writer(append_answers, read_answers, "then run again to go on"),
    "report": Writer(save_report, read_report, "then run again"),
    "metrics": Writer(cut_metrics, read_metrics, RESUME),
    "heads": Writer(
        lambda root, version: save_heads(heads(version), root / "heads", identity()), read_heads, "", may_lack=True
    ),
}
SIZES = (0, 1, 100, 1000, 3000)  # bytes of a file
SLOW = {"checkpoint", "the same step", "prepared data", "features", "heads"}  # they change many files
each_writer = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in WRITERS]
)


def for_each_change(writer: Writer, folder: Path, fault: Callable[[int], Work]) -> Iterator[tuple[Path, Ended]]:
    """Where and how writing ended under `fault` at the n-th change of a file, for every n until it ends well."""
    for number in itertools.count():
        root, ended = _write_under(writer, folder / str(number), fault(number))
        if ended.code == 0:
            return
        yield root, ended


def for_each_size(writer: Writer, folder: Path, fault: Callable[[int], Work]) -> Iterator[tuple[Path, Ended]]:
    """Where and how writing ended under `fault` at each of SIZES."""
    for size in SIZES:
        yield _write_under(writer, folder / str(size), fault(size))


def _write_under(writer: Writer, root: Path, fault: Work) -> tuple[Path, Ended]:
    """Version 1 is written; version 2 meets `fault`."""
    root.mkdir()
    writer.write(root, 1)
    return root, run_fork(lambda: writer.write(root, 2), fault)
