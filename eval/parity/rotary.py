"""Rotary embeddings as engines compute them, from the parameters in config.json."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Shapes: N positions, d head size, H heads

KNOWN = ("default", "linear", "dynamic", "llama3", "yarn")


def rotate(states_HNd: Tensor, angles_Nd: Tensor, gain: float) -> Tensor:
    """Turn the first half of each head against the second, by the angles of the positions; gain: see `frequencies`."""
    first, second = states_HNd.chunk(2, -1)
    return (states_HNd * angles_Nd.cos() + torch.cat([-second, first], -1) * angles_Nd.sin()) * gain


def frequencies(rope: Mapping[str, Any], d: int) -> tuple[Tensor, float]:
    """Radians per position [d], both halves alike, and what rotated states are multiplied by.

    Raises:
        ValueError: for a kind of rotary embedding that is not known here.
    """
    kind, gain = rope["rope_type"], 1.0
    if kind not in KNOWN:
        raise ValueError(f"rope_type={kind} cannot be replayed; known are {', '.join(KNOWN)}")
    half = rope["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    if kind == "linear":
        half = half / rope["factor"]
    if kind == "llama3":
        half = _llama3(rope, half)
    if kind == "yarn":
        half, gain = _yarn(rope, half, d)
    # "dynamic" scales only beyond the trained context, which no prompt of a certificate leaves.
    return half.float().repeat(2), gain


def _llama3(rope: Mapping[str, Any], base: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    blend = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
    return torch.lerp(base / rope["factor"], base, blend.clamp(0, 1))


def _yarn(rope: Mapping[str, Any], base: Tensor, d: int) -> tuple[Tensor, float]:
    """Blended by how often a wave turns within the trained context (arXiv 2309.00071), with louder attention."""
    context, factor = rope["original_max_position_embeddings"], rope["factor"]

    def dimension(turns: float) -> float:
        return d * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    ramp = (torch.arange(d // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    return torch.lerp(base, base / factor, ramp.clamp(0, 1)), rope.get("attention_factor") or 0.1 * math.log(factor) + 1
