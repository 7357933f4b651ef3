"""The frozen target shared out over the processes with FSDP2: each keeps a part of every decoder block.

Embeddings, final norm and LM head stay whole, since heads read their rows. A block is put together where it runs and
let go behind it, so all processes must run the target equally often: the micro-batches of a step see to that in
training, and while tau is measured every process decodes the same prompts.
"""

import logging
from dataclasses import replace

from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from heads.target import Target, TargetConfig, dtype_name, load_target

logger = logging.getLogger(__name__)


def share_out(config: TargetConfig, accelerator: Accelerator) -> Target:
    """Load the target into CPU memory and keep this process's part, on its device.

    The processes of a node do so one after the other, so that its CPU memory holds one whole target at a time.

    Raises:
        ValueError: if the target cannot be loaded, or there is nobody to share it with.
    """
    state, device = accelerator.state, accelerator.device
    if accelerator.num_processes == 1:
        raise ValueError(
            "trainer.shard_target=true shares the target out over processes, but there is one; launch several with "
            "--num_processes, or spread it over the GPUs of one process by model.device_map=auto"
        )
    config = replace(config, dtype=dtype_name(config.dtype_on(device)))  # it is loaded elsewhere first
    mesh = init_device_mesh(device.type, (accelerator.num_processes,))
    target = None
    for turn in range(accelerator.num_processes):
        if turn == state.local_process_index:
            target = load_target(config, "cpu", pack=False)
            assert isinstance(target.decoder.layers, nn.ModuleList)
            for block in target.decoder.layers:
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            target.model.to(device)
        accelerator.wait_for_everyone()
    assert target is not None
    parameters = list(target.model.parameters())
    held = sum(held_part(parameter).numel() for parameter in parameters)
    logger.info("this process holds %d of the target's %d parameters", held, sum(p.numel() for p in parameters))
    return target


def held_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor that may be shared out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
