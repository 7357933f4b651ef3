"""Everything that wants a GPU, in one table: does it compute what the CPU does, and what do steps cost there?

python scripts/gpu_check.py                      # on a GPU: the largest size that its free memory holds, eight minutes
python scripts/gpu_check.py --size toy --sections agreement training

Each section runs in a process of its own with a share of the time. One that fails or runs out of it is named, and the
others go on. What was found is in --output after every section, and of a killed one what it had found by then. Exit
code 1 if a comparison or a test failed or was not made.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown

from data.disk import write_whole
from eval.markdown_table import table
from train.gpu_sections import SECTIONS, SIZES, Row, largest_size
from train.provenance import circumstances

DONE, FAILED, LATE = "done", "failed", "ran out of time"
JUDGED = ("agreement", "device tests", "fast tests")  # sections that compare; the others measure
NOTES = """\
Times are medians at batch 1 with synchronisation after every step; targets have random weights, so tau says nothing
here. Decoding in this repository runs eager steps; the other forms show what the launches of their kernels cost, and
their drafts hold for the measured length alone. Model FLOP utilisation: train/utilisation.py has the formula.
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, help="default: by the free memory of the GPU; toy on a CPU")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything together")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu-check"))
    parser.add_argument("--inside", choices=SECTIONS, help=argparse.SUPPRESS)  # this process runs one section
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes} must be above 0; 8 is the default")
    return options


def rows_file(output: Path, section: str) -> Path:
    return output / f"{section.replace(' ', '-')}.jsonl"


def run_inside(section: str, size: str, output: Path) -> None:
    """Run one section in this process: every row goes to the terminal and to its file at once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(width=160)
    with rows_file(output, section).open("w", buffering=1) as file:
        for row in SECTIONS[section][0](SIZES[size], device):
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            console.print("  " + " ".join(cells(row)), markup=False, highlight=False)


def run_section(section: str, size: str, output: Path, limit_s: float) -> dict[str, Any]:
    """Run one section in a process of its own: how it ended, its seconds, and the rows that it found."""
    rows_file(output, section).unlink(missing_ok=True)
    log = rows_file(output, section).with_suffix(".log")
    command = [sys.executable, str(Path(__file__).resolve()), "--inside", section, "--size", size]
    began = time.monotonic()
    with log.open("w") as errors:
        # Of a session of its own, so that its test workers and compilers end with it.
        process = subprocess.Popen([*command, "--output", str(output)], stderr=errors, start_new_session=True)
        try:
            status = DONE if process.wait(limit_s) == 0 else FAILED
        except subprocess.TimeoutExpired:
            status = LATE
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = rows_file(output, section).read_text().splitlines() if rows_file(output, section).exists() else []
    whole = [line for line in lines if line.endswith("}")]  # a kill can cut the last one
    reason = log.read_text().strip().splitlines()[-1:] if status == FAILED else []
    return {
        "status": status,
        "reason": "".join(reason),
        "seconds": time.monotonic() - began,
        "rows": [json.loads(line) for line in whole],
    }


def cells(row: Row) -> list[str]:
    """A row for reading; a difference in digits, not rounded to nothing."""
    value = "-" if row.value is None else f"{row.value:.3g}" if abs(row.value) < 1000 else f"{row.value:,.0f}"
    verdict = {None: "", True: "ok", False: "FAILED"}[row.ok]
    return [row.what, value, row.unit, row.note, verdict]


def verdict(results: dict[str, dict[str, Any]]) -> bool:
    """Whether every comparison and test was made and passed, and no measurement broke off with an error."""
    good = all(row["ok"] is not False for result in results.values() for row in result["rows"])
    made = all(result["status"] == DONE for section, result in results.items() if section in JUDGED)
    return good and made and all(result["status"] != FAILED for result in results.values())


def report(results: dict[str, dict[str, Any]], size: str, device: str) -> str:
    """The table of all sections, as Markdown."""
    lines: list[list[str]] = []
    for section, result in results.items():
        ended = Row("whole section", result["seconds"], "s", f"{result['status']} {result['reason']}".strip())
        lines += [[section, *cells(row)] for row in (ended, *(Row(**row) for row in result["rows"]))]
    text = table(["section", "what", "value", "unit", "note", "verdict"], lines)
    return f"## GPU check on {device}, size {size}\n\n{text}\n\n{NOTES}"


def write(results: dict[str, dict[str, Any]], size: str, device: str, output: Path) -> str:
    """Write gpu_check.json and gpu_check.md; returns the report."""
    text = report(results, size, device)
    content = {"circumstances": circumstances(), "device": device, "size": size, "passed": verdict(results)}
    write_whole(output / "gpu_check.json", json.dumps({**content, "sections": results}, indent=2) + "\n", "run again")
    write_whole(output / "gpu_check.md", text, "run again")
    return text


def check(options: argparse.Namespace) -> bool:
    """Run the sections one after the other and print the table; returns `verdict`."""
    console = Console(width=160)
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "CPU"
    size = options.size or largest_size(torch.device("cuda" if cuda else "cpu"))
    options.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    results: dict[str, dict[str, Any]] = {}
    text = ""
    for place, section in enumerate(options.sections):
        shares = [SECTIONS[later][1] for later in options.sections[place:]]
        limit_s = max(1.0, (deadline - time.monotonic()) * shares[0] / sum(shares))
        console.print(f"{section}: on {device}, size {size}, at most {limit_s:.0f} s", markup=False, highlight=False)
        results[section] = run_section(section, size, options.output, limit_s)
        if results[section]["status"] != DONE:
            console.print(f"{section}: {results[section]['status']} {results[section]['reason']}", markup=False)
        text = write(results, size, device, options.output)
    console.print(Markdown(text))
    return verdict(results)


def main() -> None:
    options = parse(sys.argv[1:])
    # A terminated check must not leave a section behind on the GPU: an exception lets `run_section` end it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    if options.inside is not None:
        run_inside(options.inside, options.size, options.output)
    else:
        sys.exit(not check(options))


if __name__ == "__main__":
    main()
