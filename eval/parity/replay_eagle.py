"""EAGLE heads rebuilt from exported files, in plain torch: no module, no cache, nothing of heads/.

position p: (fused[p], e(x[p+1])) -> layer -> state[p]          keys: all positions up to p
draft step j behind anchor t: (fed state, e(draft j)) -> layer   at position t + j; keys: those up to t, and own
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.parity.certificate import GoldenPrompt
from eval.parity.layouts import EagleSpec
from eval.parity.replay import Entered
from eval.parity.rotary import frequencies, rotate

# Shapes: F featured positions, N rows, K drafted steps, S keys, D hidden, H heads, G key/value heads, d head size,
# Ve ids that the engine drafts, C columns


@dataclass(frozen=True)
class Schedule:
    """What is read when. The defaults are every engine's; others exist to put a name to a fault.

    token_shift, prompt_shift: the token beside the feature of position p is x[p + shift]; before the first anchor,
    the second counts. stride: positions between draft steps. jump: positions skipped before the first. mask_shift: keys
    of the sequence that each further step no longer sees.
    """

    token_shift: int = 1
    prompt_shift: int = 1
    stride: int = 1
    jump: int = 0
    mask_shift: int = 0


@dataclass(frozen=True)
class EagleReplay:
    """weights: by the names of `expected`. ids_E: the token ids that the engine's draft logits stand for."""

    spec: EagleSpec
    weights: dict[str, Tensor]
    embedding_VD: Tensor
    lm_head_ED: Tensor
    ids_E: Tensor
    taps: tuple[str, ...]
    schedule: Schedule = field(default_factory=Schedule)

    @cached_property
    def frequencies(self) -> tuple[Tensor, float]:
        return frequencies(self.spec.rope, self.spec.head_dim)

    def sequence(self, prompt: GoldenPrompt) -> "Sequence":
        """Enter all positions of a prompt and its continuation."""
        fused_FD = self.fuse(prompt)
        positions_F = torch.arange(len(fused_FD))
        beside = self.schedule.token_shift
        tokens_F = prompt.ids_T[positions_F + beside]
        before = prompt.prompt_length - 1  # the token beside the last prompt position came out of the prefill
        tokens_F[:before] = prompt.ids_T[positions_F[:before] + min(beside, self.schedule.prompt_shift)]
        inputs_FI, residual_FD = self.enter(tokens_F, fused_FD)
        query_HFd, key_GFd, value_GFd = self.project(inputs_FI, positions_F)
        visible_FF = self.sees(positions_F[:, None], positions_F)
        states_FD = self.finish(residual_FD, self.attend(query_HFd, key_GFd, value_GFd, visible_FF))
        return Sequence(self, prompt, states_FD, key_GFd, value_GFd)

    def fuse(self, prompt: GoldenPrompt) -> Tensor:
        """The features [F, D] that stand in for a state of the drafter."""
        parts = [prompt.features[tap] for tap in self.taps]
        if self.spec.kind == "eagle":
            return parts[0]
        if self.spec.fc_norm:
            parts = [self.norm(part, f"fc_norm.{tap}.weight") for tap, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        return self.linear(self.norm(joined, "input_norm.weight") if self.spec.norm_before_fc else joined, "fc")

    def enter(self, tokens_N: Tensor, feature_ND: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads, and the residual stream."""
        embedding_ND = self.embedding_VD[tokens_N]
        if self.spec.kind == "eagle":
            joined_ND = self.linear(torch.cat([embedding_ND, feature_ND], -1), "fc")
            return joined_ND, joined_ND
        normed_ND = self.norm(feature_ND, "layer.hidden_norm.weight")
        inputs = torch.cat([self.norm(embedding_ND, "layer.input_layernorm.weight"), normed_ND], -1)
        return inputs, normed_ND if self.spec.norm_before_residual else feature_ND

    def project(self, inputs_NI: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [H, N, d] and keys [G, N, d], and values [G, N, d]."""
        query, key, value = (
            self.linear(inputs_NI, f"layer.self_attn.{part}_proj")
            .unflatten(-1, (-1, self.spec.head_dim))
            .transpose(0, 1)
            for part in "qkv"
        )
        if self.spec.qk_norm:
            query, key = (self.norm(x, f"layer.self_attn.{p}_norm.weight") for x, p in ((query, "q"), (key, "k")))
        radians_d, gain = self.frequencies
        angles_Nd = positions_N[:, None] * radians_d
        return rotate(query, angles_Nd, gain), rotate(key, angles_Nd, gain), value

    def attend(self, query_HNd: Tensor, key_GSd: Tensor, value_GSd: Tensor, visible_NS: Tensor) -> Tensor:
        """Causal attention, several query heads to a key head: [N, H * d]."""
        repeats = self.spec.num_heads // self.spec.num_kv_heads
        key_HSd, value_HSd = key_GSd.repeat_interleave(repeats, 0), value_GSd.repeat_interleave(repeats, 0)
        scores_HNS = (query_HNd @ key_HSd.mT / math.sqrt(self.spec.head_dim)).masked_fill(~visible_NS, -math.inf)
        return (scores_HNS.softmax(-1) @ value_HSd).transpose(0, 1).flatten(1)

    def sees(self, query: Tensor | int, key: Tensor) -> Tensor:
        """Whether a query's position sees a key's."""
        visible = key <= query
        return visible if self.spec.window is None else visible & (query - key < self.spec.window)

    def finish(self, residual_ND: Tensor, mixed_NJ: Tensor) -> Tensor:
        """The states [N, D] behind attention and MLP."""
        hidden_ND = residual_ND + self.linear(mixed_NJ, "layer.self_attn.o_proj")
        normed_ND = self.norm(hidden_ND, "layer.post_attention_layernorm.weight")
        gated = F.silu(self.linear(normed_ND, "layer.mlp.gate_proj")) * self.linear(normed_ND, "layer.mlp.up_proj")
        return hidden_ND + self.linear(gated, "layer.mlp.down_proj")

    def read(self, state_ND: Tensor) -> Tensor:
        """What the LM head reads."""
        for _ in range(self.spec.norms):
            state_ND = self.norm(state_ND, "norm.weight")
        return state_ND

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.eps) * self.weights[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.bias(name))

    def bias(self, name: str) -> Tensor | None:
        """A bias, where the engine has a place for it."""
        given = self.spec.fc_bias if name == "fc" else self.spec.attention_bias and name.startswith("layer.self_attn")
        return self.weights.get(f"{name}.bias") if given else None


@dataclass(frozen=True)
class Sequence(Entered):
    """A prompt and its continuation, entered: states [F, D], and keys and values [G, F, d]."""

    replay: EagleReplay
    prompt: GoldenPrompt
    states_FD: Tensor
    key_GFd: Tensor
    value_GFd: Tensor

    def drafts(self, anchor: int, forced_K: Tensor | None = None, columns: Tensor | None = None) -> Iterator[Tensor]:
        replay, t = self.replay, self.prompt.place(anchor)
        lm_head_ED = replay.lm_head_ED if columns is None else replay.lm_head_ED[columns]
        ids_E = replay.ids_E if columns is None else replay.ids_E[columns]
        state_1D, keys, values = self.states_FD[t : t + 1], [self.key_GFd], [self.value_GFd]
        for step in count(1):
            logits_1E = replay.read(state_1D) @ lm_head_ED.T
            yield logits_1E
            token_1 = ids_E[logits_1E.argmax(-1)] if forced_K is None else forced_K[step - 1 : step]
            fed_1D = replay.read(state_1D) if replay.spec.norm_output else state_1D
            inputs_1I, residual_1D = replay.enter(token_1, fed_1D)
            position_1 = torch.tensor([t + replay.schedule.jump + step * replay.schedule.stride])
            query_H1d, key_G1d, value_G1d = replay.project(inputs_1I, position_1)
            keys.append(key_G1d)
            values.append(value_G1d)
            visible_1S = self.visible(t, step, position_1)[None]
            mixed_1J = replay.attend(query_H1d, torch.cat(keys, 1), torch.cat(values, 1), visible_1S)
            state_1D = replay.finish(residual_1D, mixed_1J)

    def visible(self, t: int, step: int, position_1: Tensor) -> Tensor:
        """Which keys a draft step sees: those of the sequence up to its anchor, then its own chain's."""
        places_F = torch.arange(len(self.states_FD))
        sequence_F = places_F <= t - step * self.replay.schedule.mask_shift
        own_S = self.replay.sees(t + step, t + torch.arange(1, step + 1))
        return torch.cat([sequence_F & self.replay.sees(position_1, places_F), own_S])
