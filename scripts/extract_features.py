"""Write the target's features of the training data to disk, once, for many trainings from them (trainer.features=).

python scripts/extract_features.py model=smollm2-135m heads=eagle3 data=demo precision=int8
accelerate launch train/train_heads.py model=smollm2-135m heads=eagle3 data=demo trainer.features=outputs/features/...

Stop it at any moment and run it again to go on. What is stored depends on the heads: their taps, at the positions
that training reads (heads/reads.py). Every document is run alone, which gives the features that it has in training
with trainer.keep_features=true, to the bit.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from data.feature_plan import Plan
from data.feature_precision import check_precision
from data.prepared import PreparedData
from data.progress import Progress
from data.shards import DataConfig, prepare
from eval.threads import use_threads
from heads import HEADS
from heads.family import DraftHeads
from heads.target import Target, TargetConfig, load_target
from train.config import with_heads
from train.stored_features import fill_store, naive_bytes, plan_store, store_directory


@dataclass(frozen=True)
class ExtractConfig:
    """`conf/extract.yaml`. `heads` is the config of one family."""

    model: TargetConfig
    heads: Any
    data: DataConfig
    output: str
    precision: str = "bfloat16"
    shard_mb: float = 256.0
    threads: int | None = None

    def __post_init__(self):
        check_precision(self.precision)
        if self.shard_mb <= 0:
            raise ValueError(f"shard_mb={self.shard_mb} must be above 0; use 256")


def extract(config: ExtractConfig) -> Path:
    """Write the features that are not there yet, say what they take, and return their directory."""
    # As in training: the chat template gets the data's options on top of the model's.
    template_kwargs = {**config.model.template_kwargs, **config.data.template_kwargs}
    target = load_target(replace(config.model, template_kwargs=template_kwargs))
    data = replace(config.data, template_kwargs=template_kwargs)
    prepared = prepare(data.train, data, target.tokenizer, target.eos_ids, progress=True)
    plan = plan_store(target, outline_of(config.heads, target), prepared, config.precision, config.shard_mb * 1e6)
    directory = store_directory(Path(config.output), plan.index)
    with Progress("extracting", "tokens", plan.tokens) as progress:
        size = 0

        def on_documents(tokens: int, their_bytes: int) -> None:
            nonlocal size
            size += their_bytes
            progress.advance(tokens, f"{size / 1e9:.2f} GB")

        fill_store(directory, plan, target, on_documents)
    print(closing_line(plan, prepared, directory))
    return directory


def outline_of(config: Any, target: Target) -> DraftHeads:
    """Heads over a single token id: their taps and positions do not depend on the draft vocabulary, their size does."""
    family = next(family for family in HEADS.values() if family.config_class is type(config))
    return family(family.resolve(config, target), target.hidden_size, target.vocab_size, torch.zeros(1).long())


def closing_line(plan: Plan, prepared: PreparedData, directory: Path) -> str:
    """What the features take, for each supervised token and beside the usual dump."""
    size = sum(file.stat().st_size for file in directory.iterdir())
    tokens, supervised = sum(prepared.lengths), prepared.supervised_tokens
    return (
        f"{plan.index.documents:,} documents, {tokens:,} tokens ({supervised:,} supervised), {size / 1e9:.3f} GB "
        f"in {directory}: {size / supervised:,.0f} bytes for each supervised token, {size / naive_bytes(plan):.1%} of "
        f"a dump of all positions in 16 bits; train with trainer.features={directory}"
    )


@hydra.main(version_base="1.3", config_path="../conf", config_name="extract")
def main(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        config = with_heads(ExtractConfig, composed)
        use_threads(config.threads)
        extract(config)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
