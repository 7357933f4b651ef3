"""The README.md of an export: what the heads are, what they were measured to give, how to serve them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.export.files import CHECKSUM_FILE
from heads.identity import TargetIdentity

REPORT_FILE = "report.json"
# Heads are worth less with another chat template or fine-tune: the card says what they were trained with.
DIGESTS = ("tokenizer_sha256", "template_sha256", "weights_sha256")
CHECKS = (
    f"The files: `sha256sum --check {CHECKSUM_FILE}`. What they say, against what the trained heads said: "
    "`python scripts/verify_export.py export=<this directory>`, in Headstart. The target that the heads belong to, by "
    "SHA-256:"
)


@dataclass(frozen=True)
class Measured:
    """What a report says that these heads gave; the speedup has a confidence interval [low, high]."""

    acceptance: str
    tau: float
    speedup: float
    low: float
    high: float


def read_report(source: Path) -> Measured | None:
    """Read the report.json that an evaluation left beside the heads or in the run's directory, if any.

    Raises:
        ValueError: if the report is damaged or lacks tau, the speedup or the acceptance rule.
    """
    for path in (source / REPORT_FILE, source.resolve().parent / REPORT_FILE):
        if not path.is_file():
            continue
        try:
            report = json.loads(path.read_text())
            speedup = report["speedup"]
            numbers = (report["tau"], speedup["median"], speedup["low"], speedup["high"])
            return Measured(str(report["acceptance"]), *map(float, numbers))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} does not give tau and speedup as numbers ({error!r}); evaluate again or move it away"
            ) from error
    return None


def model_card(
    title: str,
    facts: Mapping[str, Any],
    target: TargetIdentity,
    licence: str,
    draft_vocab_size: int,
    dtype: str,
    extra: Mapping[str, Any],
    measured: Measured | None,
    command: str,
    limits: Sequence[str],
) -> str:
    """Write the card in Markdown.

    title: what the heads are. facts: rows of the table that only this family has.
    target: the one that the heads were trained on.
    extra: of the saved heads; `coverage` (share of training tokens that can be drafted), `data_digest`.
    """
    shape = f"{target.model_type}, {target.num_layers} blocks, width {target.hidden_size}"
    tau = speedup = "not measured"
    if measured is not None:
        tau = f"{measured.tau:.2f}"
        speedup = f"{measured.speedup:.2f} [{measured.low:.2f}, {measured.high:.2f}]"
    rows = {
        "target": f"{target.name} ({shape})",
        "target's licence": licence,
        **facts,
        "trained draft vocabulary": _vocabulary(draft_vocab_size, target.vocab_size, extra.get("coverage")),
        "dtype": dtype,
        "training data digest": extra.get("data_digest", "not recorded"),
        "tau (tokens per target forward)": tau,
        "speedup over plain decoding": speedup,
    }
    digests = [f"- {name}: `{getattr(target, name) or 'none'}`" for name in DIGESTS]
    lines = [
        f"# {title} for {target.name}",
        "",
        "Trained with Headstart on the frozen target. The heads only draft: the target checks every token.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        *([f"Measured with Headstart's draft tree and {measured.acceptance} acceptance.", ""] if measured else []),
        "## Serve",
        "",
        "```bash",
        command,
        "```",
        "",
        f"- `{target.name}` is the target's hub id, or a folder of that name where the command runs",
        *(f"- {limit}" for limit in limits),
        "",
        "## Check",
        "",
        CHECKS,
        "",
        *digests,
    ]
    return "\n".join(lines) + "\n"


def _vocabulary(size: int, vocab_size: int, coverage: float | None) -> str:
    text = f"{size} of {vocab_size} token ids" if size < vocab_size else "all token ids"
    return text if coverage is None else f"{text}, which cover {coverage:.2%} of the training tokens"
