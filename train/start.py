"""What a run needs before its first step: data, prompts, heads."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast

from data.batches import BatchLoader
from data.prepared import PreparedData
from data.shards import prepare
from eval.prompts import EvalPrompt, load_prompts
from heads import HEADS, vocabulary
from heads.family import DraftHeads
from heads.target import DTYPES, Target, load_target, preferred_dtype
from train import checkpoint
from train.config import TrainConfig, TrainerConfig
from train.parallel import FullySharded, Parallel, Replicated
from train.zero import Zero

logger = logging.getLogger(__name__)

SHARDED = {DistributedType.DEEPSPEED: Zero, DistributedType.FSDP: FullySharded}


def load_frozen_target(config: TrainConfig, accelerator: Accelerator) -> Target:
    """Load the target whose chat template gets the data's options on top of the model's, for tau's prompts too."""
    template_kwargs = {**config.model.template_kwargs, **config.data.template_kwargs}
    return load_target(replace(config.model, template_kwargs=template_kwargs), accelerator.device)


def load_data(config: TrainConfig, target: Target, accelerator: Accelerator) -> PreparedData:
    """The training split; the first process of each node renders it, the others read what that stored."""
    data = replace(config.data, template_kwargs=target.config.template_kwargs)
    with accelerator.local_main_process_first():
        return prepare(data.train, data, target.tokenizer, target.eos_ids, progress=accelerator.is_main_process)


def load_probes(config: TrainConfig, target: Target) -> list[EvalPrompt]:
    """The held-out prompts that tau is measured on."""
    if config.trainer.eval_prompts == 0:
        return []
    return load_prompts(config.data.heldout, target, config.trainer.eval_prompts)


def build_heads(config: TrainConfig, target: Target, prepared: PreparedData) -> DraftHeads:
    """New heads on `target`, over the token ids that the data supervises most."""
    torch.manual_seed(config.seed)
    counts_V = prepared.token_counts(target.vocab_size)
    size = config.heads.draft_vocab_size
    if size is None:
        draft_ids = torch.arange(target.vocab_size)
    else:
        draft_ids = vocabulary.most_frequent(counts_V, size, target.eos_ids)
        share = vocabulary.coverage(counts_V, draft_ids)
        logger.info("draft vocabulary: %d of %d ids, %.2f%% of the tokens", size, target.vocab_size, 100 * share)
    family = HEADS[config.kind]
    heads = family(family.resolve(config.heads, target), target.hidden_size, target.vocab_size, draft_ids)
    return heads.bind(target).initialise()


def parallelise(heads: DraftHeads, config: TrainerConfig, accelerator: Accelerator) -> Parallel:
    """Hand whole heads to the engine that the processes were launched with."""
    return SHARDED.get(accelerator.distributed_type, Replicated)(heads, config, accelerator)


def build_loader(config: TrainConfig, target: Target, prepared: PreparedData, accelerator: Accelerator) -> BatchLoader:
    """The batches of this process."""
    pad_id = target.tokenizer.pad_token_id
    return BatchLoader(
        prepared,
        batch_size=config.trainer.batch_size,
        micro_batch_size=config.trainer.micro_batch_size,
        max_length=config.data.max_length,
        packing=config.data.packing,
        pad_id=target.eos_ids[0] if pad_id is None else pad_id,
        seed=config.seed,
        world_size=accelerator.num_processes,
        rank=accelerator.process_index,
    )


def count_steps(config: TrainConfig, loader: BatchLoader) -> int:
    """Optimiser steps of the run."""
    if config.trainer.steps is not None:
        return config.trainer.steps
    return max(1, math.ceil(config.trainer.epochs * loader.steps_per_epoch))


def compute_dtype(precision: str, target: Target) -> torch.dtype:
    """What heads compute in; "auto" is what they will be served in, but float16 gradients would underflow."""
    if precision != "auto":
        return DTYPES[precision]
    return preferred_dtype(target.device) if target.dtype == torch.float16 else target.dtype


def fixed_settings(config: TrainConfig, prepared: PreparedData) -> dict[str, Any]:
    """What a resumed run must share with its start: other values would mean other heads or other batches."""
    return {
        "heads": config.resolved()["heads"],
        "data": prepared.digest,
        "data.packing": config.data.packing,
        "trainer.features": config.trainer.features and Path(config.trainer.features).name,
        "trainer.batch_size": config.trainer.batch_size,
        "seed": config.seed,
    }


def newest_checkpoint(root: Path, accelerator: Accelerator) -> Path | None:
    """The checkpoint to go on from, None if there is none yet; the main process sets damaged ones aside."""
    if accelerator.is_main_process:
        checkpoint.set_aside_damaged(root)
    accelerator.wait_for_everyone()
    found = checkpoint.checkpoints(root)[-1:]
    logger.info("resuming from %s", found[0] if found else "the start: there is no checkpoint yet")
    return found[0] if found else None


def from_main(value: float, accelerator: Accelerator) -> float:
    """The main process's value, in all processes."""
    if accelerator.num_processes == 1:
        return value
    sent = broadcast(torch.tensor(value, dtype=torch.float64, device=accelerator.device))
    assert isinstance(sent, torch.Tensor)
    return sent.item()
