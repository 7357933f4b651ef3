"""Write trained heads as a serving engine reads them, with a model card and checksums.

python scripts/export_heads.py heads=outputs/medusa-smollm2-135m format=vllm
python scripts/export_heads.py heads=outputs/run/heads model=qwen3-8b format=fasterdecoding output=for-tgi
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console

from eval.config import from_hydra, heads_as_source
from heads.export.medusa_formats import find_format
from heads.export.medusa_writer import export_heads
from heads.layout import heads_directory
from heads.target import TargetConfig, load_target


@dataclass(frozen=True)
class ExportConfig:
    """`conf/export.yaml`; `source` is a directory of heads, or a run directory with one named `heads`."""

    model: TargetConfig
    source: str
    format: str
    output: str | None = None
    dtype: str | None = None
    expand_vocabulary: bool = False
    allow_other_weights: bool = False

    def __post_init__(self):
        find_format(self.format)


def export(config: ExportConfig) -> None:
    """Export and print what was written, how to serve it and what to expect."""
    source = heads_directory(config.source)
    output = Path(config.output or source.parent / f"export-{config.format}")
    done = export_heads(
        source,
        output,
        load_target(config.model, "cpu"),
        config.format,
        dtype=config.dtype,
        expand_vocabulary=config.expand_vocabulary,
        allow_other_weights=config.allow_other_weights,
    )
    console = Console(soft_wrap=True, highlight=False)
    for file in done.files:
        console.print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)", markup=False)
    for limit in done.limits:
        console.print(f"note: {limit}", style="yellow", markup=False)
    console.print(f"serve with: {done.command}", markup=False)


@hydra.main(version_base="1.3", config_path="../conf", config_name="export")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        export(from_hydra(ExportConfig, composed))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    sys.argv = heads_as_source(sys.argv)
    main()
