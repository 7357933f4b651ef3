"""The decoder layer of EAGLE heads, in two forms of one computation: unrolled for training, cached for drafting.

Training runs all anchors t at once and S steps deep. Step s at anchor t sees the keys of step 0 at all positions up
to t, and of the later steps only its own (t = 2 of 4, s = 2; rows are queries, columns keys):

              step 0         step 1       step 2
            0  1  2  3     0  1  2  3   0  1  2  3
    t = 2   x  x  x  .     .  .  x  .   .  .  x  .        at rotary positions t + s

so attention is one causal block plus one score for each later step, never a mask of S * T columns (EAGLE-3's
training-time test, arXiv 2503.01840). Drafting computes the same with a cache: committed rows are the step-0 keys,
the rows of a draft tree follow them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

# Shapes: B batch, A queries, T keys, H heads, G key/value heads, d head size, D hidden


@dataclass(frozen=True)
class LayerShape:
    """Sizes and conventions of the layer. 0 or {} takes the target's (`heads.eagle.layer_shape`)."""

    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    rms_norm_eps: float = 0.0
    max_position_embeddings: int = 0
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    attention_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self):
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"heads.layer.sliding_window={self.sliding_window} must be at least 1, or null for none")


class _ExactRotary(LlamaRotaryEmbedding):
    """Rotary embedding whose frequencies stay float32: rounded to bfloat16, position 3000 would turn elsewhere."""

    def _apply(self, fn, recurse=True):
        exact = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self


class EagleLayer(nn.Module):
    """Self-attention over inputs of `input_size` and a gated MLP, on a residual stream of `hidden_size`."""

    def __init__(self, shape: LayerShape, hidden_size: int, input_size: int):
        super().__init__()
        self.shape = shape
        H, G, d = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = H, G, d
        self.q_proj = nn.Linear(input_size, H * d, bias=shape.attention_bias)
        self.k_proj = nn.Linear(input_size, G * d, bias=shape.attention_bias)
        self.v_proj = nn.Linear(input_size, G * d, bias=shape.attention_bias)
        self.o_proj = nn.Linear(H * d, hidden_size, bias=False)
        if shape.qk_norm:
            self.q_norm = LlamaRMSNorm(d, shape.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(d, shape.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden_size, shape.rms_norm_eps)
        self.gate_proj = nn.Linear(hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, hidden_size, bias=False)
        self.rotary = _ExactRotary(
            LlamaConfig(
                hidden_size=H * d,
                num_attention_heads=H,
                head_dim=d,
                max_position_embeddings=shape.max_position_embeddings,
                rope_parameters=shape.rope_parameters,
            )
        )

    def queries(self, inputs_BAI: Tensor, positions_BA: Tensor) -> Tensor:
        """Rotated queries [B, H, A, d]."""
        query_BHAd = self._split(self.q_proj(inputs_BAI))
        return self._rotate(self.q_norm(query_BHAd) if self.shape.qk_norm else query_BHAd, positions_BA)

    def keys_values(self, inputs_BTI: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, G, T, d]."""
        key_BGTd = self._split(self.k_proj(inputs_BTI))
        key_BGTd = self._rotate(self.k_norm(key_BGTd) if self.shape.qk_norm else key_BGTd, positions_BT)
        return key_BGTd, self._split(self.v_proj(inputs_BTI))

    def finish(self, residual_BAD: Tensor, attended_BHAd: Tensor) -> Tensor:
        """Everything behind the attention: [B, A, D]."""
        hidden_BAD = residual_BAD + self.o_proj(attended_BHAd.transpose(1, 2).flatten(2))
        normed_BAD = self.post_attention_layernorm(hidden_BAD)
        return hidden_BAD + self.down_proj(F.silu(self.gate_proj(normed_BAD)) * self.up_proj(normed_BAD))

    def _split(self, rows_BAF: Tensor) -> Tensor:
        return rows_BAF.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotate(self, states_BHAd: Tensor, positions_BA: Tensor) -> Tensor:
        cos_BAd, sin_BAd = self.rotary(states_BHAd, positions_BA)
        return states_BHAd * cos_BAd[:, None] + rotate_half(states_BHAd) * sin_BAd[:, None]


def unrolled_attention(
    query_BHAd: Tensor,
    key_BGTd: Tensor,
    value_BGTd: Tensor,
    mask_BAT: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """Attend to the step-0 keys that the additive `mask_BAT` shows and to one own key of each later step.

    own: keys and values [B, G, A, d] of the steps 1 ... s at each query's anchor. Returns [B, H, A, d].
    """
    B, H, A, d = query_BHAd.shape
    G, T = key_BGTd.shape[1:3]
    query_BGRAd = query_BHAd.view(B, G, H // G, A, d) / math.sqrt(d)
    scores = [torch.matmul(query_BGRAd.flatten(2, 3), key_BGTd.mT).view(B, G, -1, A, T) + mask_BAT[:, None, None]]
    scores += [(query_BGRAd * key_BGAd[:, :, None]).sum(-1, keepdim=True) for key_BGAd, _ in own]
    weights_BGRAK = torch.cat(scores, -1).softmax(-1, dtype=torch.float32).to(query_BHAd.dtype)
    attended_BGRAd = torch.matmul(weights_BGRAK[..., :T].flatten(2, 3), value_BGTd).view(B, G, -1, A, d)
    for step, (_, value_BGAd) in enumerate(own):
        attended_BGRAd = attended_BGRAd + weights_BGRAK[..., T + step, None] * value_BGAd[:, :, None]
    return attended_BGRAd.flatten(1, 2)


class EagleCache:
    """Keys and values of one sequence, [G, S, d]: `length` committed rows, rows of a draft tree behind them."""

    def __init__(self, layer: EagleLayer, capacity: int, device: torch.device, dtype: torch.dtype):
        size = (layer.num_kv_heads, capacity, layer.head_dim)
        self.keys_GSd = torch.empty(size, device=device, dtype=dtype)
        self.values_GSd = torch.empty(size, device=device, dtype=dtype)
        self.length = 0

    def write(self, start: int, key_GNd: Tensor, value_GNd: Tensor) -> None:
        """Put N rows at `start`, growing the buffers when they are full."""
        end = start + key_GNd.shape[1]
        if end > self.keys_GSd.shape[1]:
            self.keys_GSd, self.values_GSd = (
                F.pad(old_GSd, (0, 0, 0, max(end, 2 * old_GSd.shape[1]) - old_GSd.shape[1]))
                for old_GSd in (self.keys_GSd, self.values_GSd)
            )
        self.keys_GSd[:, start:end], self.values_GSd[:, start:end] = key_GNd, value_GNd


def cached_attention(query_HNd: Tensor, cache: EagleCache, end: int, mask_NS: Tensor | None) -> Tensor:
    """Attend to the first `end` rows of the cache, under an additive mask [N, end]: [H, N, d]."""
    G = cache.keys_GSd.shape[0]
    H, N, d = query_HNd.shape
    # The heads of one group become rows of one product, so that no key is copied.
    query_GMd = query_HNd.reshape(G, H // G * N, d)
    mask_1MS = None if mask_NS is None else mask_NS.repeat(H // G, 1)[None]
    attended_1GMd = F.scaled_dot_product_attention(
        query_GMd[None], cache.keys_GSd[None, :, :end], cache.values_GSd[None, :, :end], attn_mask=mask_1MS
    )
    return attended_1GMd[0].view(H, N, d)
