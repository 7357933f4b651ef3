"""Check exported heads against what the trained heads said, recorded in their parity certificate.

python scripts/verify_export.py export=outputs/eagle3-llama3-8b/export-vllm model=llama3-8b
python scripts/verify_export.py export=[export-vllm,export-sglang] model=qwen3-8b

The drafter is rebuilt from the exported files alone, as their engine reads them. Exit code 1 where anything differs;
the first line then names the fault.
"""

import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from eval.config import from_hydra
from eval.lineage import Item, check_tracker, log_job
from eval.parity.certificate import PARITY_FILE
from eval.parity.exported import Finding
from eval.parity.verify import verify
from heads.export.files import read_json
from heads.target import TargetConfig, load_target


@dataclass(frozen=True)
class VerifyConfig:
    """`conf/verify.yaml`."""

    model: TargetConfig
    export: list[str]
    tracker: str = "auto"

    def __post_init__(self):
        check_tracker(self.tracker)


def run_verify(config: VerifyConfig, console: Console) -> bool:
    """Verify every directory, print what was found, and return whether all is as it was trained."""
    target = load_target(config.model, "cpu")
    right = True
    for directory in config.export:
        findings = verify(Path(directory), target)
        report(console, directory, findings)
        right &= not any(finding.cause for finding in findings)
        log_verdict(config, Path(directory), findings)
    return right


def log_verdict(config: VerifyConfig, directory: Path, findings: Sequence[Finding]) -> None:
    """Log the certificate and what became of it to the tracker that `config` names."""
    faults = [finding.check for finding in findings if finding.cause]
    form = read_json(directory / PARITY_FILE)["format"]
    results = {"verdict": "differs" if faults else "equal", "faults": len(faults), "first_fault": (faults or [""])[0]}
    parity = Item("parity", f"parity-{form}", directory, (PARITY_FILE,))
    log_job("parity", config.tracker, Item("export", f"export-{form}", directory), parity, results)


def report(console: Console, directory: str, findings: Sequence[Finding]) -> None:
    """Print the faults, the one to mend first on the first line, and the table of all checks."""
    faults = [f"{finding.check}: {finding.cause}" for finding in findings if finding.cause]
    for mark, fault in zip(["FAULT", *[" also"] * len(faults)], faults, strict=False):
        console.print(f"{mark} {fault}", style="red")
    columns = Column("check", no_wrap=True), Column("expected", overflow="fold"), Column("found", overflow="fold")
    table = Table(*columns, "verdict", title=directory, title_justify="left")
    for finding in findings:
        verdict = Text("differs", "red") if finding.cause else Text("equal" if finding.ran else "not run")
        table.add_row(finding.check, finding.expected, finding.found, verdict)
    console.print(table)
    if not faults:
        console.print(f"{directory}: the files draft what the trained heads draft", style="green")


def one_as_list(arguments: list[str]) -> list[str]:
    """Let `export=DIRECTORY` mean `export=[DIRECTORY]`."""
    return [re.sub(r"^export=([^\[].*)$", r"export=[\1]", argument) for argument in arguments]


@hydra.main(version_base="1.3", config_path="../conf", config_name="verify")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        console = Console(soft_wrap=True, highlight=False, markup=False)
        right = run_verify(from_hydra(VerifyConfig, composed), console)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.argv = one_as_list(sys.argv)
    main()
