"""A process of one's own, for measurements: the peak memory of a process never falls."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch


@contextlib.contextmanager
def own_process() -> Iterator[Callable[..., Any]]:
    """Start a fresh process; `call(function, *arguments)` runs there, one call after the other.

    Raises:
        ValueError: if its memory does not suffice.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield lambda function, *arguments: pool.submit(function, *arguments).result()
        except (BrokenProcessPool, torch.OutOfMemoryError) as error:
            raise ValueError(
                "a measured process was killed, most likely for lack of memory; lower rows, tokens or vocabulary"
            ) from error
