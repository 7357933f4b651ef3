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
from heads.family import DraftHeads
from heads.layout import load_heads
from heads.target import DTYPES, Target, load_target, preferred_dtype
from train import checkpoint
from train.adapted_features import AdaptedFeatures
from train.adapter import Adapter
from train.checkpoint import RunState
from train.compiling import check_compiling, compile_target
from train.config import TrainConfig, TrainerConfig
from train.features import FeatureSource
from train.first_heads import first_heads
from train.joint import Joint
from train.metrics import Window
from train.parallel import FullySharded, Parallel, Replicated
from train.sharded_target import share_out
from train.stored_features import open_source
from train.zero import Zero

logger = logging.getLogger(__name__)

SHARDED = {DistributedType.DEEPSPEED: Zero, DistributedType.FSDP: FullySharded}


def load_frozen_target(config: TrainConfig, accelerator: Accelerator) -> Target:
    """Load the target whose chat template gets the data's options on top of the model's, for tau's prompts too.

    Raises:
        ValueError: if the target cannot be loaded, was to be trained in parts, or cannot be compiled here.
    """
    if config.adapter is not None and accelerator.distributed_type in SHARDED:
        raise ValueError(
            f"adapter: {accelerator.distributed_type.value} would shard the heads but not the adapter that is trained "
            "with them; launch with conf/accelerate/ddp.yaml, or leave out adapter="
        )
    if config.trainer.compile:
        check_compiling(accelerator)
    template_kwargs = {**config.model.template_kwargs, **config.data.template_kwargs}
    model = replace(config.model, template_kwargs=template_kwargs)
    if config.trainer.shard_target:
        target = share_out(model, accelerator)
    else:
        # Packed layers give no gradients, and a compiler cannot look into them.
        pack = config.adapter is None and not config.trainer.compile
        target = load_target(model, accelerator.device, pack)
    if config.trainer.compile:
        compile_target(target)
    return target


def build_adapter(config: TrainConfig, target: Target) -> Adapter | None:
    """A new adapter on `target`, if the run trains one."""
    if config.adapter is None:
        return None
    adapter = Adapter(target, config.adapter, config.seed)
    size = sum(parameter.numel() for parameter in adapter.parameters.values())
    logger.info(
        "an adapter of %d parameters is trained on the target, which so becomes another model: what the heads fit, and "
        "what must be served, is the adapted target (scripts/merge_adapter.py)",
        size,
    )
    return adapter


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


def open_heads(
    config: TrainConfig,
    target: Target,
    adapter: Adapter | None,
    prepared: PreparedData,
    resumed: Path | None,
    fixed: dict[str, Any],
) -> tuple[DraftHeads, RunState]:
    """The run's first heads, or those of the checkpoint `resumed` on the target as it then was; where the run stands.

    Raises:
        ValueError: if the checkpoint is of another run, or the heads to start from are not such as the run trains.
    """
    if resumed is None:
        heads = first_heads(config, target, prepared)
        return heads, RunState(0, 0.0, None, Window.empty(heads.depth).to_json(), fixed)
    state = checkpoint.read_state(resumed)
    checkpoint.check_fixed(state.fixed, fixed)
    if adapter is not None:
        adapter.load(resumed)
    return load_heads(resumed, target), state


def build_source(
    config: TrainConfig, target: Target, adapter: Adapter | None, heads: DraftHeads, prepared: PreparedData
) -> FeatureSource:
    """Where the features for training `heads` come from.

    Raises:
        ValueError: if they were to come from a store that is not one for this target, these heads and this data.
    """
    dtype, trainer = compute_dtype(config.trainer.precision, target), config.trainer
    if adapter is not None:
        return AdaptedFeatures(target, heads.training_taps, dtype, adapter)
    return open_source(target, heads, prepared, dtype, trainer.keep_features, trainer.features)


def parallelise(
    heads: DraftHeads, adapter: Adapter | None, config: TrainerConfig, accelerator: Accelerator
) -> Parallel:
    """Hand whole heads to the engine that the processes were launched with."""
    if adapter is not None:
        return Joint(heads, adapter, config, accelerator)
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
    resolved = config.resolved()
    return {
        "heads": resolved["heads"],
        "adapter": resolved["adapter"],
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
