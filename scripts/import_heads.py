"""Read heads that were exported for a serving engine, here or elsewhere, into our own format.

python scripts/import_heads.py source=downloads/medusa model=vicuna-7b format=fasterdecoding output=heads
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console

from eval.config import from_hydra
from heads.export.medusa_formats import find_format
from heads.export.medusa_reader import import_heads
from heads.identity import identify
from heads.layout import save_heads
from heads.target import TargetConfig, load_target


@dataclass(frozen=True)
class ImportConfig:
    """`conf/import.yaml`."""

    model: TargetConfig
    source: str
    format: str
    output: str

    def __post_init__(self):
        find_format(self.format)


def run_import(config: ImportConfig) -> None:
    """Import, save and print where."""
    target = load_target(config.model, "cpu")
    heads = import_heads(Path(config.source), target, config.format)
    identity = identify(target)
    save_heads(heads, config.output, identity, {"imported_from": config.format})
    console = Console(soft_wrap=True, highlight=False)
    count, layers, lm_head = heads.config.num_heads, heads.config.num_layers, heads.config.lm_head
    console.print(f"wrote {config.output}: {count} heads of {layers} layers, LM head {lm_head}", markup=False)
    console.print(
        f"note: the files do not tell which target they were trained on; taken to be {identity.name}, "
        "evaluate them before you rely on it",
        style="yellow",
        markup=False,
    )


@hydra.main(version_base="1.3", config_path="../conf", config_name="import")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run_import(from_hydra(ImportConfig, composed))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
