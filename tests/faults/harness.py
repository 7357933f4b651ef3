"""The fault suite: what a kill, a full disk, damage or a wrong number costs. Nothing but the work under way.

    kill -9                          test_killed_runs.py     training, extraction, regeneration, as users start them
    kill -9 at each change of a file test_killed_writes.py   every writer of the project
    full disk, read-only disk        test_refusing_disk.py   every writer
                                     test_refused_runs.py    each command line
    truncated, flipped bits          test_damaged_files.py   what each command says of each file, and what mends it
    NaN in a batch                   test_skipped_steps.py   skipped, counted, stopped above a share
    a rank that dies                 test_dead_rank.py       the others end, one process goes on with the run
    clock, seed                      test_clock_and_seed.py  a clock that jumps changes nothing, another seed is refused

A damaged checkpoint beside a good one, and what each reader says of a damaged file, is tested beside the reader:
tests/train/test_checkpoint.py, tests/train/test_loop.py, tests/data/, tests/heads/test_layout.py.

Work runs in a fork of this process, since importing torch and transformers anew would take longer than the work. The
fork computes with one thread on the CPU: threads do not outlive a fork, and a device does not either. A fault is a
function that the fork calls before its work:

    kill_at(n)        SIGKILL in place of the n-th change of a file: creating, renaming, removing, syncing
    torn_at(n)        SIGXFSZ, which kills as surely, at the n-th byte of a file
    full_from(n)      the n-th change that needs room and all after it fail with ENOSPC
    full_beyond(n)    no file takes more than n bytes (EFBIG), so that a write stops in its midst
    read_only()       every change fails with EROFS
"""

import errno
import itertools
import logging
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

CHECKOUT = Path(__file__).parents[2]
KILLED, TORN = -signal.SIGKILL, -signal.SIGXFSZ
# Audit events of the interpreter, and two calls that it does not audit.
GROWING = {"open", "os.mkdir", "safetensors"}
CHANGES = {*GROWING, "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.fsync"}

Work = Callable[[], object]


@dataclass(frozen=True)
class Ended:
    """How a fork ended: its exit code, minus the signal if it was killed, and all that it said."""

    code: int
    said: str


def run_fork(
    work: Work, fault: Work = lambda: None, kill_after_s: float | None = None, patience_s: float = 120
) -> Ended:
    """Run `work` under `fault` in a fork, and kill it after `kill_after_s` if it still runs."""
    if torch.cuda.is_available():
        pytest.skip("a device does not outlive a fork; run these tests with CUDA_VISIBLE_DEVICES=")
    with tempfile.TemporaryFile("w+") as log:
        fork = multiprocessing.get_context("fork").Process(target=_live, args=(work, fault, log.fileno()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads do not outlive a fork: it needs none
            fork.start()
        fork.join(patience_s if kill_after_s is None else kill_after_s)
        hangs = kill_after_s is None and fork.is_alive()
        fork.kill()
        fork.join()
        log.seek(0)
        said = log.read()
        assert not hangs, f"the fork still runs after {patience_s} s; it said: {said}"
        assert fork.exitcode is not None
        return Ended(fork.exitcode, said)


def _live(work: Work, fault: Work, log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    logging.getLogger().handlers.clear()  # pytest's, which would keep the messages
    sys.dont_write_bytecode = True
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    fault()
    try:
        work()
    finally:  # what is said of a failure has room
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def command(script: str, *arguments: str) -> Work:
    """A script of the checkout as `python script arguments...` runs it."""

    def work() -> None:
        sys.argv = [str(CHECKOUT / script), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")

    return work


def kill_at(number: int) -> Work:
    """Die in place of the n-th change of a file, from 0."""

    def die(count: int, event: str, path: object) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: _on_changes(CHANGES, die)


def full_from(number: int) -> Work:
    """Have no room for the n-th change that needs some, from 0, and all after it."""

    def refuse(count: int, event: str, path: object) -> None:
        if count >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    return lambda: _on_changes(GROWING, refuse)


def read_only() -> None:
    """Change no file."""

    def refuse(count: int, event: str, path: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    _on_changes(CHANGES, refuse)


def torn_at(size: int) -> Work:
    """Die when a file is to grow beyond `size` bytes, which are written."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        full_beyond(size)()

    return limit


def full_beyond(size: int) -> Work:
    """No file takes more than `size` bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def count_changes(changes: Any, growing: Any) -> Work:
    """Count the changes of files, and those that need room, into two shared integers."""

    def note(count: int, event: str, path: object) -> None:
        changes.value += 1
        growing.value += event in GROWING

    return lambda: _on_changes(CHANGES, note)


def _on_changes(events: Collection[str], act: Callable[[int, str, object], None]) -> None:
    """Call `act` with a running number, the event and its path before each of `events`, until this process ends."""
    numbers = itertools.count()

    def meet(event: str, path: object) -> None:
        if event in events:
            act(next(numbers), event, path)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES and (event != "open" or _opens_to_write(*arguments)):
            meet(event, arguments[0])

    def sync(descriptor: int, original: Callable[[int], None] = os.fsync) -> None:
        meet("os.fsync", None)
        original(descriptor)

    def serialise(
        tensors: Any, path: Any, *rest: Any, original: Any = safetensors.torch.serialize_file, **more: Any
    ) -> Any:
        meet("safetensors", path)
        return original(tensors, path, *rest, **more)

    os.fsync, safetensors.torch.serialize_file = sync, serialise
    sys.addaudithook(audit)


def _opens_to_write(path: Any, mode: str | None, flags: int) -> bool:
    named = isinstance(path, str | bytes | os.PathLike) and not os.fsdecode(path).startswith(("/dev/", "/proc/"))
    return named and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
