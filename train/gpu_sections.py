"""What the GPU check finds out, section by section: rows of its table, yielded as they become known."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from eval.benchmark import PROBE_TREE
from eval.cost import COMPILED, DRAFT, EAGER, GRAPH, LEVEL, PLAIN, loop_overhead, measure_costs
from eval.drafters import Drafter
from eval.drafting import build_drafter, for_serving
from eval.level_drafter import DynamicTree
from eval.tree import Tree
from heads import HEADS
from heads.target import Target, TargetConfig
from train.agreement import SETTINGS, compare
from train.step_cost import Case, load_or_make_target, make_heads
from train.utilisation import measure_training

CHECKOUT = Path(__file__).parents[1]
TREES: dict[str, Tree | DynamicTree] = {
    "medusa": Tree.from_choices(PROBE_TREE),
    "eagle3": DynamicTree(nodes=7, depth=3, width=4),
}
# The promises on the device of the machine: decoding, losses, steps, and a run that goes on bit for bit.
DEVICE_TESTS = ("tests/test_device.py", "tests/train/test_loop.py")


@dataclass(frozen=True)
class Row:
    """One line of the table. `ok` is None for a measurement, which cannot fail."""

    what: str
    value: float | None
    unit: str = ""
    note: str = ""
    ok: bool | None = None


@dataclass(frozen=True)
class Size:
    """What is measured. Targets have random weights, in bfloat16 on a GPU.

    free_gb: memory that a GPU needs for it. rows, tokens: of the training batch. context: cached tokens of a decoding
    step. sizes: tokens of a verify. new_tokens: of a decoding run. depths: Medusa heads and EAGLE-3 steps in training.
    """

    model: TargetConfig
    free_gb: float
    rows: int
    tokens: int
    draft_vocabulary: int
    context: int = 256
    sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    rounds: int = 15
    new_tokens: int = 64
    depths: dict[str, int] = field(default_factory=lambda: {"medusa": 4, "eagle3": 7})

    def case(self, family: str) -> Case:
        """The training step of `family`."""
        return Case(
            family, self.depths[family], self.model, None,
            self.rows, self.tokens, 0.64, None, self.draft_vocabulary,
        )  # fmt: skip


SIZES = {
    "toy": Size(TargetConfig("toy", "random:llama"), 0, 1, 40, 100, 32, (2, 4), 2, 8),
    "small": Size(TargetConfig("llama3-1b-shape", "random:llama3-1b-shape"), 20, 2, 1024, 32000),
    "8b": Size(TargetConfig("llama3-8b-shape", "random:llama3-8b-shape"), 60, 2, 2048, 32000),
}


def largest_size(device: torch.device) -> str:
    """The largest of SIZES that the free memory of a GPU holds; "toy" on a CPU."""
    if device.type != "cuda":
        return "toy"
    free_gb = torch.cuda.mem_get_info(device)[0] / 1e9
    return [name for name, size in SIZES.items() if size.free_gb <= free_gb][-1]


def agreement(size: Size, device: torch.device) -> Iterator[Row]:
    """The CPU against `device`, for every family."""
    for family in SETTINGS:
        for found in compare(family, device):
            yield Row(f"{family}: {found.name}", found.difference, "", f"limit {found.limit:.0e}", found.holds)


def decode(size: Size, device: torch.device, forms: tuple[str, ...]) -> Iterator[Row]:
    """The decode cost table: plain and verify steps, draft steps, and the loop around them."""
    target = load_or_make_target(size.model, None, device)
    for form in forms:
        if (missing := unavailable(form, device)) is not None:
            yield Row(form, None, note=f"left out: {missing}")
            continue
        for family, tree in TREES.items():
            heads = for_serving(make_heads(size.case(family), target, HEADS), target)
            yield from _costs(size, target, family, build_drafter(heads, tree), form)


def _costs(size: Size, target: Target, family: str, drafter: Drafter, form: str) -> Iterator[Row]:
    first = family == next(iter(TREES))  # plain and verify steps are the same for all
    costs = measure_costs(target, drafter, size.sizes if first else (1,), size.context, size.rounds, form)
    for name, cost in costs.items():
        if name in (DRAFT, LEVEL):
            what = f"{family}: draft" if name == DRAFT else f"{family}: each further level"
            yield Row(f"{what}, {form}", cost, "ms")
        elif first:
            what = "plain step" if name == PLAIN else f"{name} tokens"
            yield Row(f"{what}, {form}", cost, "ms", f"{cost / costs[PLAIN]:.2f} plain steps")
    if form == EAGER:
        overhead = loop_overhead(target, drafter, size.context, size.new_tokens)
        yield Row(f"{family}: overhead of a cycle, {form}", overhead, "ms", "acceptance, commit and the host's part")


def unavailable(form: str, device: torch.device) -> str | None:
    """What `form` needs and this machine lacks."""
    if form == GRAPH and device.type != "cuda":
        return "needs a CUDA device"
    if form == COMPILED and device.type != "cuda":
        return "needs a CUDA device; on a CPU layers are packed for oneDNN, which torch.compile cannot look into"
    if form == COMPILED and importlib.util.find_spec("triton") is None:
        return "torch.compile needs the package triton"
    if form == COMPILED and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler; install gcc"
    return None


def training(size: Size, device: torch.device) -> Iterator[Row]:
    """Throughput, memory and model FLOP utilisation of our training step."""
    for family, depth in size.depths.items():
        found = measure_training(size.case(family), size.rounds)
        what = f"{family} {depth}"
        phases = ", ".join(f"{phase} {100 * share:.0f} %" for phase, share in found["share"].items())
        yield Row(f"{what}: supervised tokens", found["tokens_per_s"], "1/s", f"{size.rows} x {size.tokens} tokens")
        yield Row(f"{what}: step", 1000 * found["step_s"], "ms", phases)
        yield Row(f"{what}: peak memory", found["peak_gb"], "GB", f"{found['step_gb']:.2f} above the weights")
        yield Row(f"{what}: arithmetic", found["tflop_per_s"], "TFLOP/s", f"{found['tflop']:.3g} TFLOP a step")
        mfu = None if found["mfu"] is None else 100 * found["mfu"]
        yield Row(
            f"{what}: model FLOP utilisation", mfu, "%", "" if mfu is not None else "no peak known of this device"
        )


def tests(size: Size, device: torch.device, paths: tuple[str, ...]) -> Iterator[Row]:
    """The fast tests of `paths`, on the device that the program itself would choose."""
    if importlib.util.find_spec("pytest") is None:
        yield Row("fast tests", None, note="left out: needs the package pytest", ok=False)
        return
    # In place of the options of pyproject.toml: other packages than the pinned ones may warn, and xdist be missing.
    workers = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    options = ["-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", *options, "-q", "-m", "not slow", f"--junitxml={report}", *workers]
        subprocess.run([*command, *paths], cwd=CHECKOUT, check=False)
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest wrote a report without a suite"
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    wrong = counts["failures"] + counts["errors"]
    failed = [f"{case.get('classname')}.{case.get('name')}" for case in suite if len(case) and case[0].tag != "skipped"]
    passed = counts["tests"] - wrong - counts["skipped"]
    yield Row("tests passed", passed, "", f"{counts['skipped']} skipped", passed > 0)
    yield Row("tests failed", wrong, "", " ".join(failed[:5]), wrong == 0)


Section = Callable[[Size, torch.device], Iterator[Row]]
# In this order, each with its share of the time; what one leaves over goes to those behind it.
SECTIONS: dict[str, tuple[Section, int]] = {
    "agreement": (agreement, 40),
    "device tests": (partial(tests, paths=DEVICE_TESTS), 80),
    "decode": (partial(decode, forms=(EAGER, GRAPH)), 110),
    "training": (training, 90),
    "compiled decode": (partial(decode, forms=(COMPILED,)), 80),
    "fast tests": (partial(tests, paths=("tests",)), 80),
}
