"""Read heads that were exported for a serving engine, here or elsewhere, into our own format.

python scripts/import_heads.py source=downloads/medusa model=vicuna-7b format=fasterdecoding output=heads
python scripts/import_heads.py source=downloads/eagle3 model=llama3-8b kind=eagle3 format=safeailab output=heads

Several kinds of heads have a format of the same name; then `kind=` says which heads the files hold.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console

from eval.config import from_hydra
from heads.export.formats import check_kind, kinds_of
from heads.export.kinds import read_heads
from heads.family import DraftHeads
from heads.identity import identify
from heads.layout import save_heads
from heads.medusa import MedusaHeads
from heads.target import TargetConfig, load_target


@dataclass(frozen=True)
class ImportConfig:
    """`conf/import.yaml`."""

    model: TargetConfig
    source: str
    format: str
    output: str
    kind: str | None = None  # None: the only one that the format takes

    def __post_init__(self):
        kinds = kinds_of(self.format)
        if self.kind is not None:
            check_kind(self.kind, self.format, "kind= says")
        elif len(kinds) > 1:
            raise ValueError(f"format={self.format} exists for {', '.join(kinds)} heads; say which with kind=...")


def run_import(config: ImportConfig) -> None:
    """Import, save and print where."""
    target = load_target(config.model, "cpu")
    kind = config.kind or kinds_of(config.format)[0]
    heads = read_heads(Path(config.source), target, kind, config.format)
    identity = identify(target)
    save_heads(heads, config.output, identity, {"imported_from": config.format})
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"wrote {config.output}: {summary(heads)}", markup=False)
    console.print(
        f"note: the files do not tell which target they were trained on; taken to be {identity.name}, "
        "evaluate them before you rely on it",
        style="yellow",
        markup=False,
    )


def summary(heads: DraftHeads) -> str:
    """Say in a few words what was read."""
    if isinstance(heads, MedusaHeads):
        config = heads.config
        return f"{config.num_heads} heads of {config.num_layers} layers, LM head {config.lm_head}"
    taps = ", ".join(heads.taps)
    return f"{heads.kind} heads over {taps}, {len(heads.d2t)} of {heads.vocab_size} token ids can be drafted"


@hydra.main(version_base="1.3", config_path="../conf", config_name="import")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run_import(from_hydra(ImportConfig, composed))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
