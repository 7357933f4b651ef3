"""The usual mistakes: each as the change to a replay that makes it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eval.parity.exported import Exported, Replay
from eval.parity.layouts import NORM_FLAGS, EagleSpec
from eval.parity.replay_eagle import EagleReplay, Schedule
from eval.parity.replay_medusa import MedusaReplay

Hypothesis = tuple[str, Replay]

SCHEDULES = {
    "the token beside a feature is its own, not the next one": Schedule(token_shift=0),
    "the token beside a feature is the next but one": Schedule(token_shift=2),
    "tokens of the prompt are not shifted: the first position after the prefill is wrong": Schedule(prompt_shift=0),
    "RoPE position: all draft steps stand at the same one": Schedule(stride=0),
    "RoPE position: draft steps are two apart": Schedule(stride=2),
    "RoPE position: the first draft step is one too far": Schedule(jump=1),
    "RoPE position: the first draft step is one too near": Schedule(jump=-1),
    "mask shift: each draft step loses sight of one more position": Schedule(mask_shift=1),
}
NORM_WEIGHTS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
BASES = (1e4, 1e5, 5e5, 1e6, 5e6)


def hypotheses(exported: Exported) -> Iterator[Hypothesis]:
    """A sentence for each mistake, and the replay of a drafter that makes it."""
    replay = exported.replay
    if isinstance(replay, MedusaReplay):
        yield from _medusa(replay)
        return
    for name, schedule in SCHEDULES.items():
        yield name, replace(replay, schedule=schedule)
    for name, spec in [*_norms(exported, replay.spec), *_settings(exported, replay.spec)]:
        yield name, replace(replay, spec=spec)
    for name, changed in _weights(replay):
        yield name, replace(replay, weights=replay.weights | changed)
    yield from _shared(exported, replay)


def _norms(exported: Exported, spec: EagleSpec) -> Iterator[tuple[str, EagleSpec]]:
    """Norms elsewhere, where the file has their weights."""
    if spec.kind == "eagle":
        return
    for flag in NORM_FLAGS:
        value = getattr(spec, flag)
        if value or NORM_WEIGHTS.get(flag, "norm.weight") in exported.tensors:
            yield f"{flag} was {not value} in training, config.json says {value}", replace(spec, **{flag: not value})
    yield "the final norm was left out in training", replace(spec, norms=0)
    yield "the final norm was applied twice in training", replace(spec, norms=2)


def _settings(exported: Exported, spec: EagleSpec) -> Iterator[tuple[str, EagleSpec]]:
    """Another rotary embedding, epsilon or window, and biases that are there or not."""
    for name, rope in _ropes(exported, spec.rope):
        yield f"RoPE base or scaling: trained with {name}, config.json says {spec.rope}", replace(spec, rope=rope)
    for eps in (exported.target.text_config.to_dict()["rms_norm_eps"], 1e-5, 1e-6):
        yield f"rms_norm_eps was {eps:g} in training, config.json says {spec.eps:g}", replace(spec, eps=eps)
    layer = exported.config.get("transformer_layer_config", exported.config)
    if spec.window is not None:
        yield f"sliding_window={spec.window} was not there in training", replace(spec, window=None)
    elif type(window := layer.get("sliding_window")) is int:
        yield f"sliding_window={window} was there in training, layer_types lacks it", replace(spec, window=window)
    if spec.fc_bias:
        yield "fc.bias is not part of the trained heads", replace(spec, fc_bias=False)


def _ropes(exported: Exported, rope: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    given = exported.target.text_config.to_dict()["rope_parameters"]
    theirs = {"rope_type": "default", "rope_theta": 1e4, **given.get("full_attention", given)}
    yield f"the target's {theirs}", theirs
    yield "no scaling", {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    for base in BASES:
        yield f"rope_theta={base:g}", {**rope, "rope_theta": base}


def _weights(replay: EagleReplay) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Weights in another order."""
    width, weights = replay.spec.hidden_size, replay.weights
    blocks = weights["fc.weight"].split(width, 1)
    if len(blocks) > 1:
        what = "halves" if len(blocks) == 2 else "blocks"
        yield f"the {what} of fc.weight are swapped", {"fc.weight": torch.cat(blocks[::-1], 1)}
        for shift in range(1, len(blocks)):
            yield f"the {what} of fc.weight are rotated", {"fc.weight": weights["fc.weight"].roll(shift * width, 1)}
    if replay.spec.kind == "eagle3":
        names = [f"layer.self_attn.{part}_proj.weight" for part in "qkv"]
        swapped = {name: weights[name].roll(width, 1) for name in names}
        yield "embedding and feature are swapped in q, k and v", swapped
    gate, up = "layer.mlp.gate_proj.weight", "layer.mlp.up_proj.weight"
    yield "gate_proj and up_proj are swapped", {gate: weights[up], up: weights[gate]}
    yield from _transposed(weights)


def _transposed(weights: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    square = {name: weight.T for name, weight in weights.items() if weight.ndim == 2 and len(weight) == weight.shape[1]}
    if len(square) > 1:
        yield "all square weights are transposed", square
    for name, weight in square.items():
        yield f"{name} is transposed", {name: weight}


def _shared(exported: Exported, replay: EagleReplay) -> Iterator[Hypothesis]:
    """The target's embedding or LM head in place of the file's."""
    if "embed_tokens.weight" in exported.tensors:
        embedding_VD = exported.target.embedding.weight.detach().cpu().float()
        yield "embed_tokens.weight is not the embedding of training", replace(replay, embedding_VD=embedding_VD)
    lm_head_VD = exported.target.lm_head.get_parameter("weight").detach().cpu().float()
    if "lm_head.weight" in exported.tensors and lm_head_VD.shape == replay.lm_head_ED.shape:
        yield "lm_head.weight is not the LM head of training, the target's", replace(replay, lm_head_ED=lm_head_VD)


def _medusa(replay: MedusaReplay) -> Iterator[Hypothesis]:
    spec, count = replay.spec, replay.spec.num_heads
    if spec.biases:
        yield "the biases are not part of the trained heads", replace(replay, spec=replace(spec, biases=False))
    for shift in (-1, 1):
        order = tuple((head + shift) % count for head in range(count))
        yield f"the heads are in another order: head k drafts as head k {shift:+d}", replace(replay, order=order)
    yield "the heads are in reverse order", replace(replay, order=tuple(reversed(range(count))))
    yield "the heads read the feature one position early", replace(replay, anchor_shift=-1)
    for name, changed in _transposed(replay.weights):
        yield name, replace(replay, weights=replay.weights | changed)
