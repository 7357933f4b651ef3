"""Medusa heads: K small networks on the target's last feature, each guessing one token further ahead.

    head k at t:  final_norm[t] -> L residual blocks -> LM head -> guess of x[t+2+k]
    residual block:  x + SiLU(W x + b), W = b = 0 at the start, which makes it the exact identity

Paper: arXiv 2401.10774. All heads run as one stacked product. Unlike the original, L blocks are L sets of weights.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.alignment import find_anchors
from heads.family import HeadPerToken
from heads.objectives import Objective
from heads.target import FINAL_NORM
from heads.warm_start import LinearForecast

# Shapes: B batch, T tokens, N rows, K heads, L layers, D hidden, V vocabulary, Vd draft vocabulary

LM_HEADS = ("own", "shared")
INITS = ("target", "regression")


@dataclass(frozen=True)
class MedusaConfig:
    """`conf/heads/medusa.yaml`.

    lm_head: "own" trains one LM head for each Medusa head, initialised from the target's rows; "shared" uses the
    target's frozen LM head for all: K times smaller, a little less accurate.
    init: where own LM heads start: "target", as the target's rows, so that every head first repeats its guess of
        x[t+1]; or "regression", as these rows after a linear forecast of the feature (heads/warm_start.py), which
        training fits on `trainer.init_tokens` tokens before its first step.
    draft_vocab_size: number of token ids that can be proposed, None for all of the target's.
    """

    num_heads: int = 4
    num_layers: int = 1
    lm_head: str = "own"
    init: str = "target"
    draft_vocab_size: int | None = None
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self):
        for name in ("num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"heads.{name}={getattr(self, name)} must be at least 1")
        if self.lm_head not in LM_HEADS:
            raise ValueError(f"heads.lm_head={self.lm_head} must be one of {', '.join(LM_HEADS)}")
        if self.init not in INITS:
            raise ValueError(f"heads.init={self.init} must be one of {', '.join(INITS)}")
        if self.init == "regression" and self.lm_head == "shared":
            raise ValueError("heads.init=regression starts own LM heads; with heads.lm_head=shared use init=target")


class MedusaHeads(HeadPerToken):
    """K Medusa heads; `forward` is the training objective, `draft_logits` serves decoding."""

    kind = "medusa"
    config_class = MedusaConfig
    compiled_parts = ("states",)

    def __init__(self, config: MedusaConfig, hidden_size: int, vocab_size: int, draft_ids: Tensor):
        super().__init__(config, hidden_size, vocab_size, draft_ids)
        K, L, D = config.num_heads, config.num_layers, hidden_size
        self.block_weight = nn.Parameter(torch.zeros(L, K, D, D))
        self.block_bias = nn.Parameter(torch.zeros(L, K, D))
        if config.lm_head == "own":
            self.lm_head_weight = nn.Parameter(torch.zeros(K, len(draft_ids), D))

    @torch.no_grad()
    def start_from(self, forecast: LinearForecast) -> None:
        """Start own LM heads as the target's rows after the linear forecasts."""
        maps_KDI = forecast.solve()
        rows_VD = self.target_rows_VD.to(maps_KDI.dtype)
        for k, map_DD in enumerate(maps_KDI):
            self.lm_head_weight[k] = rows_VD @ map_DD

    def states(self, hidden_ND: Tensor) -> Tensor:
        """Run the residual blocks of all heads: [N, D] -> [K, N, D], in the dtype of `hidden_ND`."""
        state_KND = hidden_ND.expand(self.config.num_heads, -1, -1)
        for weight_KDD, bias_KD in zip(self.block_weight, self.block_bias, strict=True):
            linear_KND = torch.baddbmm(
                bias_KD[:, None].to(hidden_ND.dtype), state_KND, weight_KDD.mT.to(hidden_ND.dtype)
            )
            state_KND = state_KND + F.silu(linear_KND)
        return state_KND

    def draft_logits(self, hidden_D: Tensor) -> Tensor:
        """Guess the next K tokens after the certain one from one feature: [D] -> [K, Vd]."""
        states_K1D = self.states(hidden_D[None])
        if self.config.lm_head == "shared":
            return self.guess(states_K1D.squeeze(1))
        return (states_K1D @ self.lm_head_weight.mT.to(hidden_D.dtype)).squeeze(1)

    def forward(
        self,
        features: dict[str, Tensor],
        ids_BT: Tensor,
        supervised_BT: Tensor,
        documents_BT: Tensor,
        positions_BT: Tensor,
        label_counts_K: Tensor,
    ) -> tuple[Tensor, Tensor]:
        anchors = find_anchors(ids_BT, supervised_BT, documents_BT, self.config.num_heads)
        hidden_RD = features[FINAL_NORM].flatten(0, 1)
        states_KND = self.recomputed(self.states, hidden_RD[anchors.rows_N])
        return self.loss(states_KND, anchors, hidden_RD, label_counts_K)
