"""Where EAGLE-3 heads start: as a linear forecast of the target's next feature, inside a layer that seems to forbid it.

EAGLE-3's residual stream is the feature alone; the next token enters through the attention. So a head must attend to
its own position before the token that it reads counts for anything, which small data teaches late. Here one query
head of each key/value group does so from the start:

    q, k   one constant, through the projection of embeddings that is closest to 1 (1.00 +- 0.06 for SmolLM2), on the
           fastest rotary pairs: the score s^2 sum_i cos(w_i (t - t')) / sqrt(d) peaks at t' = t
    o v    R [norm(e(x[t+1])); norm(u)], the reduced-rank regression of g[t+1] - g[t], where g is the target's last
           state before its final norm, at unit scale
    fc     the u_0 that this layer turns into the best g[t+1]

The other query heads and the MLP add nothing yet. On SmolLM2's unseen greedy answers the first guess is right for 23 %
before any step, as for EAGLE-1's linear start.
"""

import math

import torch
from torch import Tensor

from heads.eagle_layer import EagleLayer
from heads.warm_start import LinearForecast, ridge

# Shapes: D hidden, X joined taps, d head size, G key/value heads, H query heads, P rotary pairs, I = 2D layer inputs

SHARPNESS = 6.0  # by how much a head's own position outscores any other, in nats
FARTHEST = 4096  # positions looked back to make sure of that
DAMPING = 1e-2  # of the least squares that fc solves, where the layer nearly forgets a direction


class Moments:
    """Second moments of [norm(e(x[t+1])); taps[t]; g[t]; 1], and with y = g[t+1], from a forecast's sums."""

    def __init__(self, forecast: LinearForecast, final_norm_D: Tensor):
        size, constant = len(final_norm_D), len(forecast.gram_KEE[0]) - 1
        self.embedding, self.constant = slice(0, size), constant
        self.taps, self.state = slice(size, constant - size), slice(constant - size, constant)
        # The sums are of final_norm features; a weight near 0 hides its coordinate from the LM head, too.
        weight_D = final_norm_D.double()
        scale_D = torch.where(weight_D.abs() < 1e-3, 0.0, 1 / weight_D)
        scale_E = torch.ones(constant + 1).to(scale_D)
        scale_E[self.state] = scale_D
        self.gram_EE = forecast.gram_KEE[0] * scale_E * scale_E[:, None]
        self.cross_ED = forecast.cross_KED[0] * scale_D * scale_E[:, None]


def start_layer(layer: EagleLayer, moments: Moments) -> Tensor:
    """Let `layer` add R [norm(e); norm(u)] to its residual stream; return fc's weight [D, X]."""
    attend_to_self(layer, constant_direction(moments))
    basis_DM, reduced_MI = reduced_rank_regression(moments, layer.num_kv_heads * layer.head_dim)
    layer.v_proj.weight.copy_(reduced_MI)
    layer.o_proj.weight.zero_()
    layer.down_proj.weight.zero_()
    d, per_group = layer.head_dim, layer.num_heads // layer.num_kv_heads
    for group in range(layer.num_kv_heads):
        own = group * per_group
        layer.o_proj.weight[:, own * d : (own + 1) * d] = basis_DM[:, group * d : (group + 1) * d]
    return fused_map(moments, basis_DM @ reduced_MI)


def constant_direction(moments: Moments) -> Tensor:
    """The [D] whose product with a normed embedding is as close to 1 as it gets."""
    rows = moments.embedding
    return ridge(moments.gram_EE[rows, rows], moments.gram_EE[rows, moments.constant, None])[:, 0]


def attend_to_self(layer: EagleLayer, constant_D: Tensor) -> None:
    """Make the first query head of each group attend to its own position; the others keep off its key channels."""
    d, D, per_group = layer.head_dim, len(constant_D), layer.num_heads // layer.num_kv_heads
    pairs = min(max(4, d // 8), d // 2)
    channels = torch.cat([torch.arange(pairs), torch.arange(pairs) + d // 2])
    strength = math.sqrt(SHARPNESS * math.sqrt(d) / self_gap(layer, pairs))
    for head in range(layer.num_heads):
        group, rows = head // per_group, channels + head * d
        if head % per_group == 0:
            layer.q_proj.weight[head * d : (head + 1) * d] = 0.0
            layer.q_proj.weight[rows[:pairs], :D] = strength * constant_D.float()
            layer.k_proj.weight[channels + group * d] = 0.0
            layer.k_proj.weight[channels[:pairs] + group * d, :D] = strength * constant_D.float()
        else:
            layer.q_proj.weight[rows] = 0.0


def self_gap(layer: EagleLayer, pairs: int) -> float:
    """By how much sum_i cos(w_i * distance) over the fastest rotary pairs is larger at distance 0 than elsewhere."""
    distances = torch.arange(1, FARTHEST, device=layer.q_proj.weight.device)
    cosines, _ = layer.rotary(layer.q_proj.weight.new_zeros(1), distances[None])
    scale = layer.rotary.attention_scaling
    return pairs * scale**2 - (cosines[0, :, :pairs].sum(-1).max() * scale).item()


def reduced_rank_regression(moments: Moments, rank: int) -> tuple[Tensor, Tensor]:
    """The best map R [D, I] of that rank for g[t+1] - g[t], as an orthonormal basis [D, M] and the rest [M, I]."""
    rows = torch.cat([torch.arange(len(moments.gram_EE))[part] for part in (moments.embedding, moments.state)])
    gram_II = moments.gram_EE[rows][:, rows]
    difference_ID = (moments.cross_ED - moments.gram_EE[:, moments.state])[rows]
    full_DI = ridge(gram_II, difference_ID).T
    basis_DM = torch.linalg.eigh(full_DI @ gram_II @ full_DI.T).eigenvectors[:, -rank:]
    return basis_DM, basis_DM.T @ full_DI


def fused_map(moments: Moments, update_DI: Tensor) -> Tensor:
    """The fc [D, X] for which u + R [norm(e); u], u = fc(taps), is closest to g[t+1]."""
    D = len(update_DI)
    of_embedding_DD, keep_DD = update_DI[:, :D], torch.eye(D).to(update_DI) + update_DI[:, D:]
    taps = moments.taps
    wanted_XD = moments.cross_ED[taps] - moments.gram_EE[taps, moments.embedding] @ of_embedding_DD.T
    forecast_DX = ridge(moments.gram_EE[taps, taps], wanted_XD).T
    damped_DD = keep_DD.T @ keep_DD + DAMPING * torch.eye(D).to(keep_DD)
    return torch.linalg.solve(damped_DD, keep_DD.T @ forecast_DX)
