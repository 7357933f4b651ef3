"""Linear layers with weights laid out once for the CPU's matrix kernels.

A verify multiplies every weight with a handful of rows, the shape that general BLAS serves worst: on two AVX2 cores
SmolLM2's matrices take 40 ms for one row and 65 ms for eight from row-major weights, 32 ms and 39 ms from oneDNN's
blocked layout. torch.compile reaches the same kernels through "freezing", after a minute of C++ compilation for
each shape; calling them directly costs nothing and gives the same numbers for plain and for speculative decoding.
"""

import torch
from torch import Tensor, nn

from heads.scaled_linear import ScaledLinear


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference whose weight lies in oneDNN's blocked layout, with its own row-major copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has matrix kernels for `dtype` on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module) -> None:
    """Replace every `nn.Linear` and `ScaledLinear` below `model` by a `PackedLinear` that shares its parameters."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child.weight, child.bias))
            elif isinstance(child, ScaledLinear):
                setattr(module, name, PackedLinear(child.unscaled, child.bias))
