"""Medusa heads: K small networks on the target's last feature, each guessing one token further ahead.

    head k at t:  final_norm[t] -> L residual blocks -> LM head -> guess of x[t+2+k]
    residual block:  x + SiLU(W x + b), W = b = 0 at the start, which makes it the exact identity

Paper: arXiv 2401.10774. All heads run as one stacked product. Unlike the original, L blocks are L sets of weights.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.alignment import IGNORE, find_anchors
from heads.objectives import Objective, Teacher, chunked_loss
from heads.target import FINAL_NORM, Target
from heads.vocabulary import draft_index, from_offsets, membership, to_offsets

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


class MedusaHeads(nn.Module):
    """K Medusa heads over the token ids `draft_ids` [Vd] (ascending) of one target.

    `forward` is the training objective; `draft_logits` serves decoding.
    """

    kind = "medusa"
    config_class = MedusaConfig
    taps: tuple[str, ...] = (FINAL_NORM,)

    def __init__(self, config: MedusaConfig, hidden_size: int, vocab_size: int, draft_ids: Tensor):
        super().__init__()
        self.config = config
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        K, L, D = config.num_heads, config.num_layers, hidden_size
        self.block_weight = nn.Parameter(torch.zeros(L, K, D, D))
        self.block_bias = nn.Parameter(torch.zeros(L, K, D))
        if config.lm_head == "own":
            self.lm_head_weight = nn.Parameter(torch.zeros(K, len(draft_ids), D))
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", to_offsets(draft_ids))
        self.register_buffer("t2d", membership(draft_ids, vocab_size))
        self.draft_index_V: Tensor
        self.target_rows_VD: Tensor
        self.register_buffer("draft_index_V", draft_index(draft_ids, vocab_size), persistent=False)
        self.register_buffer("target_rows_VD", torch.empty(0), persistent=False)
        self.softcap: float | None = None

    @property
    def depth(self) -> int:
        """How many tokens ahead the heads guess."""
        return self.config.num_heads

    @property
    def draft_ids(self) -> Tensor:
        """Token ids [Vd] of the draft vocabulary."""
        return from_offsets(self.d2t)

    def bind(self, target: Target) -> "MedusaHeads":
        """Take from the target what is not stored with the heads: its LM head's rows (teacher and shared head).

        Raises:
            ValueError: if the target has another width or vocabulary, or an LM head with a bias.
        """
        for name in ("hidden_size", "vocab_size"):
            if getattr(self, name) != getattr(target, name):
                raise ValueError(
                    f"heads were made for {name}={getattr(self, name)} but the target has {getattr(target, name)}; "
                    "load the target that they were trained on"
                )
        if target.lm_head.bias is not None:
            raise ValueError("the target's LM head has a bias, which Medusa heads cannot carry; use another target")
        self.to(target.device)
        weight_VD = target.lm_head.weight.detach()
        full = len(self.d2t) == self.vocab_size
        self.target_rows_VD = weight_VD if full else weight_VD[self.draft_ids]
        self.softcap = target.softcap
        return self

    def initialise(self) -> "MedusaHeads":
        """Start own LM heads as the target's rows: head k first repeats the target's guess of x[t+1]."""
        if self.config.lm_head == "own":
            self.lm_head_weight.data.copy_(self.target_rows_VD.expand_as(self.lm_head_weight))
        return self

    @torch.no_grad()
    def start_from(self, maps_KDD: Tensor) -> None:
        """Start own LM heads as the target's rows after the linear forecasts of `LinearForecast.solve`."""
        rows_VD = self.target_rows_VD.to(maps_KDD.dtype)
        for k, map_DD in enumerate(maps_KDD):
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

    def lm_head(self) -> Tensor:
        """The LM heads: [K, Vd, D] if each head owns one, else the target's [Vd, D]."""
        return self.lm_head_weight if self.config.lm_head == "own" else self.target_rows_VD

    def draft_logits(self, hidden_D: Tensor) -> Tensor:
        """Guess the next K tokens after the certain one from one feature: [D] -> [K, Vd]."""
        return (self.states(hidden_D[None]) @ self.lm_head().mT.to(hidden_D.dtype)).squeeze(1)

    def forward(
        self,
        features: dict[str, Tensor],
        ids_BT: Tensor,
        supervised_BT: Tensor,
        documents_BT: Tensor,
        label_counts_K: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The loss of a batch and its statistics [9, K] (see `Statistics`).

        label_counts_K: labels of each head in the whole optimiser step, so that micro-batches and processes add up.
        """
        objective = self.config.objective
        anchors = find_anchors(ids_BT, supervised_BT, documents_BT, self.config.num_heads)
        hidden_RD = features[FINAL_NORM].flatten(0, 1)
        decay_K = objective.decay ** torch.arange(self.config.num_heads, device=hidden_RD.device)
        no_label = anchors.labels_KN == IGNORE
        teacher = Teacher(hidden_RD, anchors.future_rows(), self.target_rows_VD.to(hidden_RD.dtype), self.softcap)
        return chunked_loss(
            self.states(hidden_RD[anchors.rows_N]),
            self.lm_head(),
            anchors.labels_KN,
            torch.where(no_label, IGNORE, self.draft_index_V[anchors.labels_KN.clamp_min(0)]),
            decay_K / label_counts_K.clamp_min(1),
            objective,
            teacher,
        )

    def describe(self) -> dict[str, Any]:
        """What a run logs once."""
        return {
            "parameters": sum(parameter.numel() for parameter in self.parameters()),
            "draft_vocab_size": len(self.d2t),
        }
