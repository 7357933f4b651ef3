"""The processes of a run: joined as `accelerate launch` started them, or refused.

accelerate falls back without a word where it cannot do what it was asked: one process instead of two, plain DDP instead
of ZeRO, processes that never exchange a gradient. So what was asked is compared with what runs.
"""

import os
from datetime import timedelta

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    is_deepspeed_available,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from train.config import TrainConfig

# While the main process measures tau, the others wait in a collective operation.
PATIENCE = timedelta(hours=2)
SHARDED = {"ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED, "ACCELERATE_USE_FSDP": DistributedType.FSDP}


def join_processes(config: TrainConfig) -> Accelerator:
    """Join the processes of the launch.

    Raises:
        ValueError: if the launcher's processes would train apart, or otherwise than it was asked.
    """
    asked = sharding_asked_for()
    group = InitProcessGroupKwargs(timeout=PATIENCE)
    cpu = not torch.cuda.is_available()
    if cpu:
        _shard_on_cpu(asked, group)
    tracker = config.trainer.tracker
    accelerator = Accelerator(
        cpu=cpu and asked != DistributedType.DEEPSPEED,
        mixed_precision="no",  # heads choose their compute dtype themselves, over float32 masters
        log_with=None if tracker == "none" else tracker,
        project_dir=config.output_dir,
        kwargs_handlers=[
            # The buffers are the target's own rows: equal everywhere, and too large to send at each step.
            DistributedDataParallelKwargs(broadcast_buffers=False),
            group,
        ],
    )
    if asked == DistributedType.DEEPSPEED:
        # With this config transformers would split the target under ZeRO-3, even without zero3_init_flag.
        unset_hf_deepspeed_config()
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    check_processes(accelerator.num_processes, accelerator.distributed_type, expected, asked)
    if asked == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        assert plugin is not None
        check_fsdp(plugin)
    if expected > 1 and config.model.device_map is not None:
        raise ValueError(
            f"model.device_map={config.model.device_map} spreads one target over all GPUs, which {expected} "
            "processes would each do; start one process, or set model.device_map=null"
        )
    return accelerator


def sharding_asked_for() -> DistributedType | None:
    """DEEPSPEED or FSDP if the launcher asks for it, None for whole heads in each process.

    Raises:
        ValueError: if the launcher is missing, or DeepSpeed is.
    """
    asked = [name for name in SHARDED if os.environ.get(name, "false").lower() == "true"]
    if not asked:
        return None
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(f"{asked[0]}=true, but no launcher runs; start with `accelerate launch --config_file ...`")
    if asked[0] == "ACCELERATE_USE_DEEPSPEED" and not is_deepspeed_available():
        raise ValueError("ZeRO needs the package deepspeed; install it with `pip install -e '.[deepspeed]'`")
    return SHARDED[asked[0]]


def _shard_on_cpu(asked: DistributedType | None, group: InitProcessGroupKwargs) -> None:
    """Let accelerate shard without a GPU, where its own CPU setting would give plain DDP, for tests and dry runs."""
    if asked == DistributedType.DEEPSPEED:
        import deepspeed

        group.backend = "gloo"
        # An empty list of compiled operators: DeepSpeed's collectives for CPUs take a minute to compile, gloo has all.
        deepspeed.ops.__compatible_ops__ = {}  # pyright: ignore[reportAttributeAccessIssue]
    if asked == DistributedType.FSDP:
        # accelerate knows FSDP as a way to use several GPUs; the process group and the device stay gloo and cpu.
        PartialState(cpu=True, timeout=PATIENCE).distributed_type = DistributedType.MULTI_GPU


def check_processes(processes: int, running: DistributedType, expected: int, asked: DistributedType | None) -> None:
    """Raise ValueError if the processes do not work together, or do not shard as they were asked."""
    if asked is not None and running != asked:
        raise ValueError(
            f"the launcher asks for {asked.value}, but accelerate runs {running.value}; remove use_cpu and "
            "ACCELERATE_USE_CPU, and start with one of conf/accelerate/{zero1,zero2,zero3,fsdp2}.yaml"
        )
    alone = asked is None and running == DistributedType.NO
    if processes != expected or (asked is None and alone != (expected == 1)):
        raise ValueError(
            f"WORLD_SIZE={expected}, but accelerate runs {processes} process(es) as {running}: they would not share "
            f"gradients; start with `accelerate launch --multi_gpu --num_processes {expected} train/train_heads.py`"
        )


def check_fsdp(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raise ValueError for settings of FSDP under which heads or target would not be what they should."""
    for name, value, right, reason in (
        ("fsdp_version", plugin.fsdp_version, 2, "version 1 flattens parameters and loses their names"),
        ("fsdp_cpu_ram_efficient_loading", plugin.cpu_ram_efficient_loading, False, "only one process has a target"),
        ("fsdp_activation_checkpointing", plugin.activation_checkpointing, False, "it renames the heads' parameters"),
    ):
        if value != right:
            raise ValueError(f"{name}={value} must be {right}, else {reason}; see conf/accelerate/fsdp2.yaml")
