"""Write trained heads as a serving engine reads them, with a model card, a parity certificate and checksums.

python scripts/export_heads.py heads=outputs/eagle3-llama3-8b model=llama3-8b format=vllm
python scripts/export_heads.py heads=outputs/run/heads model=qwen3-8b format=fasterdecoding output=for-tgi
python scripts/export_heads.py heads=outputs/eagle3-qwen3-8b model=qwen3-8b format=sglang
python scripts/export_heads.py heads=outputs/eagle3-qwen3-8b model=qwen3-8b format=llama.cpp target_gguf=qwen3-8b.gguf

The kind of the saved heads decides what a format means: `format=vllm` exists for Medusa, EAGLE-1 and EAGLE-3.
The certificate holds what the trained heads say of a few prompts; scripts/verify_export.py compares the files with it.
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console

from data.disk import writing
from eval.config import from_hydra, heads_as_source
from eval.lineage import Item, check_tracker, heads_item, log_job
from eval.parity.certificate import GOLDEN_FILE, PARITY_FILE
from eval.parity.golden import certify
from heads.export.formats import check_kind, kinds_of
from heads.export.kinds import WRITERS
from heads.export.package import Companion
from heads.layout import heads_directory, load_heads, read_config
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
    target_gguf: str | None = None
    tracker: str = "auto"

    def __post_init__(self):
        check_tracker(self.tracker)
        kinds_of(self.format)
        if self.target_gguf is not None and self.format != "llama.cpp":
            raise ValueError(f"target_gguf={self.target_gguf} is for format=llama.cpp, not for format={self.format}")
        if self.model.adapter is not None:
            raise ValueError(
                f"model.adapter={self.model.adapter} is merged in memory only, and engines serve a directory; write it "
                "with scripts/merge_adapter.py and give that as model.path"
            )


def export(config: ExportConfig) -> None:
    """Export and print what was written, how to serve it and what to expect."""
    source = heads_directory(config.source)
    kind = read_config(source)["kind"]
    check_kind(kind, config.format, f"{source} holds")
    output = Path(config.output or source.parent / f"export-{config.format}")
    target = load_target(config.model, "cpu")

    def write_certificate(folder: Path) -> None:
        logging.info("recording what the trained heads say of a few prompts, for the parity certificate")
        heads = load_heads(source, target, allow_other_weights=config.allow_other_weights)
        certify(folder, heads, target, config.format)

    with writing(output, "export again; heads that were there before stay"):
        done = WRITERS[kind](
            source,
            output,
            target,
            config.format,
            dtype=config.dtype,
            expand_vocabulary=config.expand_vocabulary,
            allow_other_weights=config.allow_other_weights,
            companion=Companion((PARITY_FILE, GOLDEN_FILE), write_certificate),
            **({} if config.target_gguf is None else {"target_gguf": Path(config.target_gguf)}),
        )
    console = Console(soft_wrap=True, highlight=False)
    for file in done.files:
        console.print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)", markup=False)
    for limit in done.limits:
        console.print(f"note: {limit}", style="yellow", markup=False)
    separator = "\n" if "\n" in done.command else " "
    console.print(f"serve with:{separator}{done.command}", markup=False)
    written = Item("export", f"export-{config.format}", output)
    log_job("export", config.tracker, heads_item(source), written, {"kind": kind, "format": config.format})


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
