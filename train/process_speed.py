"""What more processes gain: optimiser steps over the same rows, by one process and by several, each pinned to a core.

Every process has one core, so that two of them are compared with half of what they have, not with all of it.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from data.batches import BatchLoader
from eval.serving.engine_process import free_port
from heads import HEADS
from train.config import TrainerConfig
from train.features import FeatureSource
from train.own_process import own_process
from train.parallel import Parallel, Replicated
from train.step import accumulate_gradients, check_synchronised
from train.step_cost import Case, batch_loader, load_or_make_target, make_heads


@dataclass(frozen=True)
class _Member:
    """One process of a team."""

    source: FeatureSource
    parallel: Parallel
    loader: BatchLoader


_member: list[_Member] = []  # of this process


def join(case: Case, rank: int, count: int, core: int, port: int) -> int:
    """Join a team of `count` processes, on one core; returns the supervised tokens of a step of the team."""
    os.sched_setaffinity(0, {core})
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    accelerator = Accelerator(
        cpu=True, mixed_precision="no", kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)]
    )
    torch.set_num_threads(1)
    target = load_or_make_target(case.model, case.vocabulary, torch.device("cpu"))
    heads = make_heads(case, target, HEADS)
    source = FeatureSource(target, heads.training_taps, target.dtype, keep=False)
    parallel = Replicated(heads, TrainerConfig(), accelerator)
    loader = batch_loader(case, target.vocab_size, micro_batch_size=1, world_size=count, rank=rank)
    _member.append(_Member(source, parallel, loader))
    return loader.step(0).whole.num_supervised


def take(number: int) -> float:
    """Take one step with the team; returns its seconds."""
    member, began = _member[0], time.perf_counter()
    accumulate_gradients(member.loader.step(number), member.source, member.parallel)
    check_synchronised(member.parallel.update(), member.parallel.accelerator)
    return time.perf_counter() - began


def measure_processes(
    case: Case, counts: Sequence[int], rounds: int, advance: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Supervised tokens per second of teams of these sizes, which take their steps in turns.

    `advance` is told what comes next, `len(counts) * (rounds + 2)` times.

    Raises:
        ValueError: if a team is larger than the machine has cores or the case has rows to share.
    """
    cores = sorted(os.sched_getaffinity(0))
    for count in counts:
        if count > len(cores) or case.rows % count:
            raise ValueError(
                f"values={list(counts)} must be at most {len(cores)}, the cores of this machine, and divide "
                f"rows={case.rows}; change values or rows"
            )
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    tokens = 0
    with contextlib.ExitStack() as stack:
        teams = {count: [stack.enter_context(own_process()) for _ in range(count)] for count in counts}
        threads = stack.enter_context(ThreadPoolExecutor(max(counts)))
        for count, calls in teams.items():
            advance(f"{case.family}: {count} processes meet")
            port = free_port()
            places = [(join, case, rank, count, cores[rank], port) for rank in range(count)]
            tokens = max(threads.map(lambda call, place: call(*place), calls, places))
        for turn in range(rounds + 1):
            for count, calls in teams.items():
                advance(f"{case.family}: {count} processes, step {turn} of {rounds}")
                taken = list(threads.map(lambda call, number=turn: call(take, number), calls))
                if turn:  # the first warms up
                    seconds[count].append(max(taken))
    medians = {count: statistics.median(taken) for count, taken in seconds.items()}
    return [
        {**asdict(replace(case, threads=1)), "processes": count, "step_s": median, "tokens_per_s": tokens / median}
        | {"gain": medians[counts[0]] / median}
        for count, median in medians.items()
    ]
