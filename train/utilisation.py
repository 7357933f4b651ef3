"""Model FLOP utilisation: the arithmetic that a training step needs, over what the GPU could have done in its time.

A product of R rows with a weight W costs 2 R |W| operations forward, as many for the gradient of the weight and as
many for that of the input. Counted is what each family needs; recomputed or masked-out work is not.

    target, no gradient     2 |decoder| tokens + 2 layers H d T tokens        (causal attention: half of all pairs)
    Medusa, N anchors       (6 L - 2) K D^2 N + 6 K Vd D N                    (the features have no gradient)
    EAGLE-3, N anchors      4 |fc| tokens + 6 |k, v| (tokens + (S - 1) N)     (keys of step 0 at every position)
                            + 6 |q, o, MLP| S N + 12 H d T S N + 6 Vd D S N + 2 Vd D N    (the last is the teacher)
"""

import gc
import statistics
from typing import Any

import torch

from heads.alignment import find_anchors
from heads.eagle3 import Eagle3Heads
from heads.family import DraftHeads
from heads.medusa import MedusaHeads
from heads.target import Target
from train.metrics import memory_gb
from train.step_cost import OURS, Case, TrainingStep
from train.throughput import summary

# Shapes: N anchors, T tokens of a row, K heads, S unrolled steps, L blocks of a head, D hidden, Vd draft vocabulary,
# H attention heads of size d

# Dense bfloat16 TFLOP/s by a part of the device's name, from NVIDIA's data sheets (SXM parts of the H100 alone).
PEAK_TFLOPS = {"H200": 989.0, "H100 80GB HBM3": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.0}


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations in a second; None for a device that the table lacks."""
    return next((1e12 * peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def target_flops(target: Target, rows: int, tokens: int) -> float:
    """The forward over `rows` rows of `tokens` tokens, without an LM head."""
    config = target.text_config.to_dict()
    weights = sum(parameter.numel() for parameter in target.decoder.parameters()) - target.embedding.weight.numel()
    heads = config["num_attention_heads"]
    width = heads * (config.get("head_dim") or target.hidden_size // heads)
    return rows * tokens * (2.0 * weights + 2.0 * target.num_layers * width * tokens)


def heads_flops(heads: DraftHeads, rows: int, tokens: int, anchors: int) -> float:
    """Forward and backward of Medusa or EAGLE-3 heads, their loss included."""
    D, Vd = heads.hidden_size, len(heads.d2t)
    if isinstance(heads, MedusaHeads):
        K, L = heads.config.num_heads, heads.config.num_layers
        vocabulary = 6.0 if heads.config.lm_head == "own" else 4.0
        return K * D * anchors * ((6.0 * L - 2.0) * D + vocabulary * Vd)
    assert isinstance(heads, Eagle3Heads), "no formula for another family"
    layer, S = heads.layer, heads.depth
    keys_values = layer.k_proj.weight.numel() + layer.v_proj.weight.numel()
    others = sum(
        part.weight.numel() for part in (layer.q_proj, layer.o_proj, layer.gate_proj, layer.up_proj, layer.down_proj)
    )
    everywhere = rows * tokens * (4.0 * heads.fc.weight.numel() + 6.0 * keys_values)
    attention = 12.0 * layer.num_heads * layer.head_dim * tokens
    at_anchors = (S - 1) * 6.0 * keys_values + S * (6.0 * others + attention + 6.0 * Vd * D) + 2.0 * Vd * D
    return everywhere + anchors * at_anchors


def measure_training(case: Case, rounds: int) -> dict[str, Any]:
    """Speed, shares, memory and utilisation of our training step: medians of `rounds` steps after two of warm-up."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    step = TrainingStep(case, OURS)
    batch, held = step.batch, memory_gb()
    seconds = [dict(step()) for _ in range(rounds + 2)][2:]
    anchors = len(find_anchors(batch.ids_BT, batch.supervised_BT, batch.documents_BT, case.depth).rows_N)
    flops = target_flops(step.target, case.rows, case.tokens)
    flops += heads_flops(step.heads, case.rows, case.tokens, anchors)
    seconds_per_step = statistics.median(sum(phases.values()) for phases in seconds)
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    result = {
        **summary(seconds, batch.num_supervised, held, memory_gb()),
        "tflop": flops / 1e12,
        "tflop_per_s": flops / 1e12 / seconds_per_step,
        "mfu": None if peak is None else flops / seconds_per_step / peak,
    }
    del step
    gc.collect()  # the loss is wrapped by the step's own watch: a cycle that holds the target's memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result
