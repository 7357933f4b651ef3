"""How many CPU threads a process computes with."""

import os

import torch


def use_threads(count: int | None) -> None:
    """Compute with `count` threads; None shares the cores among this machine's processes.

    `accelerate launch` sets OMP_NUM_THREADS=1 unless told otherwise, which silently halves a run on two cores.
    """
    if count is None:
        count = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(count)
