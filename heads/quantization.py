"""Quantised targets: which library makes them, and a clear word where it is not installed.

Checkpoints that are quantised already (GPTQ, AWQ) need no setting: transformers knows them by their config.
"""

import importlib.util

import torch
from transformers import BitsAndBytesConfig

QUANTIZATIONS = ("bitsandbytes-4bit", "bitsandbytes-8bit")


def check_quantization(name: str | None) -> None:
    """Raise ValueError for an unknown value of `model.quantization`."""
    if name is not None and name not in QUANTIZATIONS:
        raise ValueError(
            f"model.quantization={name} must be null or one of {', '.join(QUANTIZATIONS)}; a GPTQ or AWQ checkpoint "
            "needs null, it says itself what it is"
        )


def quantization_config(name: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """What transformers is told to quantise while it loads; products are computed in `dtype`.

    4 bits are NF4 with doubly quantised scales, as in QLoRA (arXiv 2305.14314).

    Raises:
        ValueError: if bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"model.quantization={name} needs the package bitsandbytes; install it with `pip install bitsandbytes`, or "
            "set model.quantization=null"
        )
    if name == "bitsandbytes-8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
