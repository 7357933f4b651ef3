"""EAGLE-3 heads (arXiv 2503.01840): three fused taps, training-time test, an LM head of their own.

    fc(taps[t]) = u_0[t]                                                  [norms before fc by option]
    cat(input_layernorm(e(x[t+1+s])), hidden_norm(u_s[t])) -> attention   [residual: u_s[t], or its norm by option]
    state -> norm -> LM head over the draft vocabulary
    state (or its norm, by option) -> u_{s+1}[t]

The defaults are the conventions that every engine loads; the options are those of EAGLE-3.1 and of speculators.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heads.eagle import EagleHeads
from heads.eagle3_start import Moments, start_layer
from heads.eagle_layer import EagleLayer, LayerShape
from heads.objectives import Objective
from heads.scaled_linear import ScaledLinear
from heads.target import FINAL_NORM, Target
from heads.warm_start import LinearForecast

# Shapes: B batch, T tokens, D hidden, V vocabulary, Vd draft vocabulary


@dataclass(frozen=True)
class Eagle3Config:
    """`conf/heads/eagle3.yaml`.

    num_steps: unrolled training steps. taps: the target's decoder blocks (0-based) whose outputs are fused; None takes
    1, n//2-1 and n-4. norm_before_residual: the residual stream starts from the normed feature. norm_before_fc: one
    norm over the joined taps (speculators). fc_norm: a norm for each tap. norm_output: feed the normed state back.
    init: "target" repeats the target's guess; "regression" is the linear forecast of heads/eagle3_start.py, fitted on
    `trainer.init_tokens` tokens, for the default norms.
    """

    num_steps: int = 4
    init: str = "target"
    taps: list[int] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    draft_vocab_size: int | None = None
    layer: LayerShape = field(default_factory=LayerShape)
    objective: Objective = field(default_factory=lambda: Objective(ce_weight=0.0, kl_weight=1.0))

    def __post_init__(self):
        if self.num_steps < 1:
            raise ValueError(f"heads.num_steps={self.num_steps} must be at least 1")
        if self.taps is not None and (not self.taps or sorted(set(self.taps)) != self.taps or self.taps[0] < 0):
            raise ValueError(f"heads.taps={self.taps} must be ascending numbers of decoder blocks, from 0, none twice")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("heads.norm_before_fc and heads.fc_norm exclude each other; choose one")
        if self.init not in {"target", "regression"}:
            raise ValueError(f"heads.init={self.init} must be target or regression")
        normed = self.norm_before_residual or self.norm_before_fc or self.fc_norm or self.norm_output
        if self.init == "regression" and (normed or self.layer.qk_norm):
            raise ValueError(
                "heads.init=regression is for the default norms; use init=target with norm_before_residual, "
                "norm_before_fc, fc_norm, norm_output or layer.qk_norm"
            )


class Eagle3Heads(EagleHeads):
    """EAGLE-3: own LM head, fused taps."""

    kind = "eagle3"
    config_class = Eagle3Config
    norm = "none: outputs of decoder blocks"

    def __init__(self, config: Eagle3Config, hidden_size: int, vocab_size: int, draft_ids: Tensor):
        super().__init__(config, hidden_size, vocab_size, draft_ids)
        assert config.taps is not None, "resolve() fills in the taps"
        D, eps = hidden_size, config.layer.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(len(config.taps) * D, eps)
        if config.fc_norm:
            self.fc_norms = nn.ModuleList(LlamaRMSNorm(D, eps) for _ in config.taps)
        self.fc = ScaledLinear(len(config.taps) * D, D)
        self.input_layernorm = LlamaRMSNorm(D, eps)
        self.hidden_norm = LlamaRMSNorm(D, eps)
        self.layer = EagleLayer(config.layer, D, 2 * D)
        self.final_norm = LlamaRMSNorm(D, eps)
        self.lm_head_weight = nn.Parameter(torch.zeros(len(draft_ids), D))

    @classmethod
    def resolve(cls, config: Any, target: Target) -> Any:
        """Raises `ValueError` for a tap that the target does not have."""
        n = target.num_layers
        taps = config.taps or sorted({min(max(block, 0), n - 1) for block in (1, n // 2 - 1, n - 4)})
        if taps[-1] >= n:
            raise ValueError(f"heads.taps={taps} must be below {n}, the target's number of decoder blocks")
        return replace(super().resolve(config, target), taps=taps)

    @property
    def taps(self) -> tuple[str, ...]:
        return tuple(f"post_block[{block}]" for block in self.config.taps)

    @property
    def forecasts(self) -> int:
        return 1 if self.config.init == "regression" else 0

    @property
    def forecast_size(self) -> int:
        return (2 + len(self.config.taps)) * self.hidden_size

    def forecast_inputs(self, features: dict[str, Tensor], ids_BT: Tensor) -> Tensor:
        hidden_BTD = features[FINAL_NORM]
        normed_BTD = self.input_layernorm(self.embed(ids_BT.roll(-1, 1), hidden_BTD))
        return torch.cat([normed_BTD, *(features[tap] for tap in self.taps), hidden_BTD], -1)

    @torch.no_grad()
    def start_from(self, forecast: LinearForecast) -> None:
        rms_X = forecast.input_rms()[self.hidden_size : -self.hidden_size]  # of the taps, see forecast_inputs
        self.fc.start(start_layer(self.layer, Moments(forecast, self.final_norm.weight)).float(), rms_X)

    @torch.no_grad()
    def initialise(self) -> Self:
        """Start as the target's own reading of the last tap: its final norm, its LM head, an empty layer between."""
        ones_D = torch.ones(self.hidden_size, device=self.fc.weight.device, dtype=self.target.dtype)
        # Normed ones are the norm's weight, whether the family multiplies by w or by 1 + w.
        self.final_norm.weight.copy_(self.target.final_norm(ones_D))
        self.lm_head_weight.copy_(self.target_rows_VD)
        self.fc.weight[:, -self.hidden_size :] += torch.eye(self.hidden_size, device=self.fc.weight.device)
        for projection in (self.layer.o_proj, self.layer.down_proj):
            projection.weight.zero_()
        return self

    def fuse(self, features: dict[str, Tensor]) -> Tensor:
        parts = [features[tap] for tap in self.taps]
        if self.config.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)]
        joined = torch.cat(parts, -1)
        return self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)

    def enter(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(feature)
        inputs = torch.cat([self.input_layernorm(embedding), normed], -1)
        return inputs, normed if self.config.norm_before_residual else feature

    def read(self, state: Tensor) -> Tensor:
        return self.final_norm(state)

    def feed(self, state: Tensor) -> Tensor:
        return self.final_norm(state) if self.config.norm_output else state

    def lm_head(self) -> Tensor:
        return self.lm_head_weight
