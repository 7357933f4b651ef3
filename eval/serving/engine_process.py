"""An engine as a process of ours: started on a free port of this machine, waited for, and stopped whatever happens."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
POLL_S = 0.2
PATIENCE_S = 5.0  # with one question after its health
SAY_EVERY_S = 15.0
STOP_S = 15.0  # what an engine gets to end by itself
TAIL, WIDTH = 15, 300  # lines of a log in a message, and characters of each
# What belongs to our environment and not to the engine's.
OURS = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}


class EngineFailed(RuntimeError):  # noqa: N818
    """An engine that did not start, died, or did not answer; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Launch:
    """How an engine is started; `--host` and `--port` come behind the command."""

    name: str  # in messages
    command: list[str]
    environment: Mapping[str, str]


@contextlib.contextmanager
def running(launch: Launch, log: Path, timeout_s: float) -> Iterator[str]:
    """Give the address of an engine that answers; on leaving, in whatever way, its whole process group is ended.

    Raises:
        EngineFailed: if it ends by itself, or is not healthy within `timeout_s`.
        OSError: if the command cannot be run.
    """
    address = f"http://{HOST}:{(port := free_port())}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*launch.command, "--host", HOST, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**without_ours(), **launch.environment},
            start_new_session=True,  # its workers die with it, and a ctrl-C comes to us alone
        )
    try:
        _wait(process, launch, address, log, timeout_s)
        yield address
    finally:
        _stop(process)


def without_ours() -> dict[str, str]:
    """The environment variables for a program that has Python packages of its own."""
    return {name: value for name, value in os.environ.items() if name not in OURS}


def tail(log: Path) -> list[str]:
    """The last lines of a log that say something."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [line[:WIDTH] for line in lines if line.strip()][-TAIL:]


def free_port() -> int:
    """A port of this machine at which nothing listens."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _wait(process: subprocess.Popen, launch: Launch, address: str, log: Path, timeout_s: float) -> None:
    started = said = time.monotonic()
    # Without trust_env a proxy of this machine would be asked for its own loopback.
    with httpx.Client(base_url=address, trust_env=False, timeout=PATIENCE_S) as client:
        while not _is_healthy(client):
            waited_s = time.monotonic() - started
            if process.poll() is not None:
                raise EngineFailed(_told(f"{launch.name} ended with {process.returncode} while it started", log))
            if waited_s > timeout_s:
                raise EngineFailed(_told(f"{launch.name} was not ready after start_timeout_s={timeout_s:g}", log))
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                logger.info("%s is starting, %.0f s so far: %s", launch.name, waited_s, *(tail(log)[-1:] or ["silent"]))
            time.sleep(POLL_S)
    logger.info("%s answers at %s after %.0f s", launch.name, address, time.monotonic() - started)


def _is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False  # nobody listens yet, or the engine is too busy to answer


def _told(what: str, log: Path) -> str:
    return "\n  ".join([f"{what}; the end of {log}:", *tail(log)])


def _stop(process: subprocess.Popen) -> None:
    """End the process group: asked first, then killed, since workers can outlive the process that we know."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    finally:  # also after an impatient second ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
