"""SHA-256 of tensors, and of the parts of the target that engines lend to heads."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from heads.target import Target


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """One for each tensor, over its bytes."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def shared_digests(target: Target) -> dict[str, str]:
    """Of the whole embedding and LM head, which the target's identity only samples.

    In bfloat16, the coarsest dtype in which targets are held: float32 rounds to it the same everywhere.
    """
    parts = {"embedding": target.embedding.weight, "lm_head": target.lm_head.weight}
    return {name: _digest(weight.detach().to(torch.bfloat16)) for name, weight in parts.items()}


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(content.numpy().data).hexdigest()
