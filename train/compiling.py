"""torch.compile, which `trainer.compile` asks for: of what costs most in a step and is one program at every batch.

Of the frozen target these are the decoder blocks, each by itself: they are alike and share one program, so that a deep
target is compiled as fast as a shallow one. Of heads it is what their family names. Shapes are symbols from the start:
another length is no other program.

What is compiled is the function inside a block: the hooks around it, which take taps and put parts of a block together,
stay outside, and no parameter gets another name. Decoding stays as it is (`decoding`): its caches are not one program.
"""

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config
from accelerate import Accelerator
from accelerate.utils import DistributedType

from heads.family import DraftHeads
from heads.target import Target

Backend = str | Callable[..., Any]


def check_compiling(accelerator: Accelerator) -> None:
    """Raise ValueError if the processes work by hooks inside of what is compiled, or this machine lacks a compiler."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin = accelerator.state.deepspeed_plugin
        assert plugin is not None
        if plugin.zero_stage == 3:
            raise ValueError(
                "trainer.compile=true: ZeRO-3 fetches the weights of each layer by hooks inside of what is compiled; "
                "launch with conf/accelerate/fsdp2.yaml, which shards as much, or set trainer.compile=false"
            )
    check_compiler(accelerator.device)


def check_compiler(device: torch.device) -> None:
    """Raise ValueError, saying what to install, if this machine lacks what torch.compile needs for `device`."""
    problem = ""
    if device.type == "cuda":
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        if importlib.util.find_spec("triton") is None:
            problem = "the package triton; install it with `pip install triton`"
    else:
        compilers = [os.environ.get("CXX", "g++")]
    if not problem and not any(shutil.which(name) for name in compilers):
        problem = f"a compiler, and there is no {' or '.join(compilers)}; install gcc and g++"
    if problem:
        raise ValueError(f"compile: torch.compile needs {problem}, or leave it out")


def compile_target(target: Target, backend: Backend = "inductor") -> None:
    """Compile the decoder blocks, at their first run; a target that processes share must be shared out before."""
    for block in target.decoder.get_submodule("layers").children():
        block.forward = _compiled(block.forward, backend)


def compile_heads(heads: DraftHeads, backend: Backend = "inductor") -> None:
    """Compile the training of heads, at its first run."""
    for part in heads.compiled_parts:
        path, _, name = part.rpartition(".")
        module = heads.get_submodule(path)
        setattr(module, name, _compiled(getattr(module, name), backend))


def _compiled(function: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    settings = torch._dynamo.config
    # DDP would have a program cut where its buckets end, which cannot be done inside of a checkpoint.
    settings.optimize_ddp = False
    # The epsilon of a norm is a constant. As a symbol it is one thing in two checkpoints, which the compiler refuses.
    settings.specialize_float = True
    # Sizes that happen to be equal in the first batch, say rows and key heads, are not one size in the next.
    torch.fx.experimental._config.use_duck_shape = False
    return torch.compile(function, dynamic=True, backend=backend)


def decoding() -> contextlib.AbstractContextManager[Any]:
    """Inside, nothing is compiled, and nothing that was is used."""
    return torch.compiler.set_stance("force_eager")
