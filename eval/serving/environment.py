"""A Python environment for one engine: built on first use from pinned versions, reused while they stay the same.

<cache>/engines/<name>/        the environment
                      complete   written last: a digest of the versions, so half an installation is built again
<cache>/engines/<name>.log     what pip said
"""

import contextlib
import fcntl
import hashlib
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from eval.serving.engine_process import without_ours
from heads.embedded import cache_root

logger = logging.getLogger(__name__)

# How pip says that what was asked for is not to be had here, as opposed to failing in any other way.
NOT_AVAILABLE = (
    "No matching distribution found",
    "Could not find a version",
    "Failed to establish a new connection",
    "is not a supported wheel on this platform",
    "conflicting dependencies",
)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class EngineUnavailable(ValueError):  # noqa: N818
    """This machine cannot have the engine: pip does not get one of its packages."""


def environment_python(name: str, requirements: Path, check: str) -> Path:
    """The interpreter of the environment `name`, which holds exactly the pinned `requirements` (a pip file).

    check: code that must run in the environment once it is built, such as `import vllm`.

    Raises:
        EngineUnavailable: if pip cannot get one of the packages.
        ValueError: if the installation fails in another way, or `check` fails.
    """
    directory = cache_root() / "engines" / name
    directory.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    with _alone(directory):
        if not _works(directory, digest):
            _build(directory, requirements, check)
            (directory / "complete").write_text(digest)
    return _python(directory)


def _python(directory: Path) -> Path:
    return directory / "bin" / "python"


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process builds, others wait for it."""
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _works(directory: Path, digest: str) -> bool:
    stamp = directory / "complete"
    if not stamp.is_file() or stamp.read_text() != digest:
        return False
    # The interpreter is a link, and the one that it points to may have gone.
    return _python(directory).exists()


def _build(directory: Path, requirements: Path, check: str) -> None:
    log = directory.parent / f"{directory.name}.log"
    logger.info("installing %s, once: %s (log %s)", directory.name, directory, log)
    started = time.monotonic()
    shutil.rmtree(directory, ignore_errors=True)
    log.unlink(missing_ok=True)
    _run([sys.executable, "-m", "venv", str(directory)], log)
    pip = [str(_python(directory)), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    _run([*pip, "--no-deps", "-r", str(requirements)], log)
    _run([str(_python(directory)), "-c", check], log)
    logger.info("installed %s in %.0f s", directory.name, time.monotonic() - started)


def _run(command: Sequence[str], log: Path) -> None:
    with log.open("a") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=without_ours(), check=False)
    if done.returncode == 0:
        return
    said = [line for line in log.read_text().splitlines() if line.strip()]
    message = f"{' '.join(command[1:4])} ended with {done.returncode}; see {log}. It said: {' / '.join(said[-3:])}"
    if any(sign in line for sign in NOT_AVAILABLE for line in said):
        raise EngineUnavailable(f"{message}. CPU builds of torch: PIP_EXTRA_INDEX_URL={TORCH_CPU_INDEX}")
    raise ValueError(message)
