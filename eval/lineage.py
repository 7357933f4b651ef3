"""What was made of heads, in Weights & Biases: which run trained them, what they are worth, where they were exported.

    job_type      uses      logs: type and name of the artifact
    training                heads    <run>-heads              the run's `heads` directory
    evaluation    heads     report   <run>-report             report.json, report.html
    export        heads     export   <run>-export-<format>    every file
    parity        export    parity   <run>-parity-<format>    parity.json

Online, W&B draws the graph run -> heads -> report, export -> parity, from `use_artifact`. An artifact is used by
handing in its files: W&B knows them by their content, so that the version is the right one whatever was logged since.
Offline, W&B has no `use_artifact` (it raises). There, and online as well, the run's config and the metadata of what it
logs name the training run, the artifact that was used and its digest, which that artifact carries as `sha256`; `wandb
sync` uploads all of it, but draws no edge. Nothing is copied: an offline run must be synced before its files change.

A job is logged once it is done, so that W&B's own processes are never beside a measurement.
"""

import hashlib
import importlib.util
import json
import logging
import netrc
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from omegaconf import OmegaConf

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

PROJECT = "headstart"
TRACKERS = ("auto", "wandb", "none")
RUN_FILE, CONFIG_FILE, METRICS_FILE = "run.json", "config.yaml", "metrics.jsonl"  # in a training run's directory
NO_NAME = re.compile(r"[^\w.-]")  # W&B takes little else in the name of an artifact


@dataclass(frozen=True)
class Origin:
    """The run that trained heads, as its directory records it. tracker: its `trainer.tracker`."""

    directory: Path
    name: str
    id: str
    tracker: str


@dataclass(frozen=True)
class Item:
    """Files of a directory that are one artifact, `<run>-<label>`. names: () for all files."""

    type: str
    label: str
    directory: Path
    names: tuple[str, ...] = ()

    @property
    def files(self) -> list[Path]:
        names = self.names or [entry.name for entry in self.directory.iterdir() if entry.is_file()]
        return [self.directory / name for name in sorted(names)]

    def digest(self) -> str:
        """The SHA-256 that `sha256sum * | sha256sum` prints in the directory (in the C locale)."""
        lines = []
        for file in self.files:
            with file.open("rb") as opened:
                lines.append(f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.name}\n")
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def artifact(self, run_name: str, **metadata: Any) -> "wandb.Artifact":
        """The artifact of these files as they are now."""
        import wandb  # takes a second, and most runs are not tracked

        facts = {"sha256": self.digest(), **metadata}
        artifact = wandb.Artifact(self.name(run_name), type=self.type, metadata=facts)
        for file in self.files:
            artifact.add_file(str(file), policy="immutable", skip_cache=True)  # no copies in the user's home
        return artifact

    def name(self, run_name: str) -> str:
        """The artifact's name in W&B."""
        return NO_NAME.sub("-", f"{run_name}-{self.label}")


def heads_item(directory: Path) -> Item:
    """Trained heads."""
    return Item("heads", "heads", directory)


def check_tracker(tracker: str) -> None:
    """Raise ValueError unless `tracker` is a choice that can be followed here."""
    if tracker not in TRACKERS:
        raise ValueError(f"tracker={tracker} must be one of {', '.join(TRACKERS)}; auto does as the training run did")
    if tracker == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ValueError("tracker=wandb is not installed; run `pip install wandb`, or set tracker=none")


def log_job(job: str, tracker: str, uses: Item, makes: Item, results: Mapping[str, float | str]) -> None:
    """Log a job that is done as a W&B run of its own, in the project and the group of the run that trained the heads.

    tracker: "auto" logs online if the training run was tracked by W&B, and nothing where W&B is offline: opening a
        run takes seconds there, and nobody asked for it. "wandb" logs in any case, "none" never.
    results: the summary of the W&B run.

    Raises:
        ValueError: if W&B does not take the run; the job's own files are not touched.
    """
    origin = find_origin(uses.directory)
    if not _wanted(tracker, origin):
        return
    import wandb

    run_name = origin.name if origin else uses.directory.resolve().name
    facts = {"heads_run": origin.id if origin else "", "uses": uses.name(run_name), "uses_sha256": uses.digest()}
    try:
        with wandb.init(
            project=PROJECT,
            name=f"{run_name}-{makes.label}",
            group=run_name,
            job_type=job,
            dir=str(origin.directory) if origin else None,
            config=facts,
            settings=wandb.Settings(silent=True, console="off"),
            **offline_mode(),
        ) as run:
            if not run.offline:
                run.use_artifact(uses.artifact(run_name))
            run.log_artifact(makes.artifact(run_name, **facts, **results))
            run.summary.update(dict(results))
            logger.info("W&B: %s, %s", job, f"offline: wandb sync {Path(run.dir).parent}" if run.offline else run.url)
    except wandb.Error as error:
        raise ValueError(f"W&B did not take the {job} ({error}); its files are written; or set tracker=none") from error


def find_origin(directory: Path) -> Origin | None:
    """The run whose directory this is, or holds it; None for heads from elsewhere."""
    for folder in (directory.resolve(), directory.resolve().parent):
        if (folder / RUN_FILE).is_file() and (folder / CONFIG_FILE).is_file():
            config = OmegaConf.load(folder / CONFIG_FILE)
            run_id = json.loads((folder / RUN_FILE).read_text())["id"]
            return Origin(folder, Path(config.output_dir).name, run_id, config.trainer.tracker)
    return None


def _wanted(tracker: str, origin: Origin | None) -> bool:
    if tracker == "auto":
        return origin is not None and origin.tracker == "wandb" and is_online()
    return tracker == "wandb"


def is_online() -> bool:
    """Whether runs are uploaded as they go: as WANDB_MODE says, else if the user is logged in."""
    return os.environ.get("WANDB_MODE", "online" if wandb_logged_in() else "offline") == "online"


def offline_mode() -> dict[str, Any]:
    """What `wandb.init` must be told: offline unless the user is logged in or says otherwise by WANDB_MODE."""
    return {} if "WANDB_MODE" in os.environ or wandb_logged_in() else {"mode": "offline"}


def wandb_logged_in() -> bool:
    """Whether a key for Weights & Biases lies where its client looks for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return host is not None and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
