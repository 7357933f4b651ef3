"""In which numbers features are stored: as they are, rounded to bfloat16, or as 8-bit integers with a scale per row."""

from collections.abc import Mapping

import torch
from torch import Tensor

# Shapes: N rows (one token at one tap), D hidden

VALUES, SCALES = "values", "scales"
LARGEST = 127  # symmetric: -128 is not used
STORED_AS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
SCALE_DTYPE = torch.float32


def check_precision(precision: str) -> None:
    """Raises ValueError for a precision that is not in `STORED_AS`."""
    if precision not in STORED_AS:
        raise ValueError(f"precision={precision} must be one of {', '.join(STORED_AS)}")


def bytes_per_row(precision: str, width: int) -> int:
    """Bytes that one row of `width` numbers takes."""
    scale = SCALE_DTYPE.itemsize if precision == "int8" else 0
    return width * STORED_AS[precision].itemsize + scale


def encode(rows_ND: Tensor, precision: str) -> dict[str, Tensor]:
    """What is stored of `rows_ND`, by part.

    float32 and bfloat16 are casts, so exact for rows of that dtype. int8 is round(x / scale) with one scale for each
    row, its largest magnitude over 127: x is missed by half a scale at most.
    """
    if precision != "int8":
        return {VALUES: rows_ND.to(STORED_AS[precision])}
    rows_ND = rows_ND.float()
    scales_N = (rows_ND.abs().amax(1) / LARGEST).to(SCALE_DTYPE)
    # A row of zeros has scale 0, and so has one whose largest number is so small that the division underflows.
    divisors_N1 = torch.where(scales_N > 0, scales_N, 1.0)[:, None]
    values_ND = (rows_ND / divisors_N1).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return {VALUES: values_ND, SCALES: scales_N}


def decode(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The rows [N, D] of what `encode` made, in `dtype`; the product of int8 is rounded once, from float32."""
    if SCALES not in parts:
        return parts[VALUES].to(dtype)
    return (parts[VALUES].float() * parts[SCALES][:, None]).to(dtype)
