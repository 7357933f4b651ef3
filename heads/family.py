"""What every family of heads is to the rest of the program: one small interface for training, saving and binding.

A family is a config dataclass and a subclass of `DraftHeads`, listed in `heads.HEADS`. How its heads draft while
decoding is the business of a drafter in `eval/`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heads.alignment import Anchors
from heads.objectives import Objective, Teacher, chunked_loss
from heads.packed import PackedLinear
from heads.target import FINAL_NORM, Target
from heads.vocabulary import draft_index, from_offsets, membership, to_offsets
from heads.warm_start import LinearForecast

# Shapes: B batch, T tokens, R = B * T rows, K heads or unrolled steps, N anchors, D hidden, V vocabulary,
# Vd draft vocabulary


class DraftHeads(nn.Module, ABC):
    """Heads over the token ids `draft_ids` [Vd] (ascending) of one target.

    kind: the family's name in configs and files. norm: which norm its features went through.
    compiled_parts: the methods, also of submodules, that `trainer.compile` compiles: most of the work of `forward`
        before the loss, in a structure that is always the same.
    gradient_checkpointing: whether a backward computes activations again (`recomputed`); training turns it on.
    """

    kind: ClassVar[str]
    config_class: ClassVar[type]
    norm: ClassVar[str] = "the target's final norm is applied"
    compiled_parts: ClassVar[tuple[str, ...]]

    def __init__(self, config: Any, hidden_size: int, vocab_size: int, draft_ids: Tensor):
        super().__init__()
        self.config = config
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", to_offsets(draft_ids))
        self.register_buffer("t2d", membership(draft_ids, vocab_size))
        self.draft_index_V: Tensor
        self.target_rows_VD: Tensor
        self.register_buffer("draft_index_V", draft_index(draft_ids, vocab_size), persistent=False)
        self.register_buffer("target_rows_VD", torch.empty(0), persistent=False)
        self._target: list[Target] = []  # in a list, so that its parameters do not become the heads'
        self.packed_lm_head: PackedLinear | None = None
        self.gradient_checkpointing = False

    @classmethod
    def resolve(cls, config: Any, target: Target) -> Any:
        """`config` with everything spelled out that it leaves to the target."""
        return config

    @property
    @abstractmethod
    def taps(self) -> tuple[str, ...]:
        """Names of the target's features that the heads read while drafting."""

    @property
    def training_taps(self) -> tuple[str, ...]:
        """Names of the target's features that training reads."""
        return self.taps

    @property
    @abstractmethod
    def depth(self) -> int:
        """How many tokens behind the certain one training teaches."""

    @property
    def forecasts(self) -> int:
        """How many maps of the `LinearForecast` that training starts from (`start_from`); 0 for none."""
        return 0

    @property
    def forecast_size(self) -> int:
        """Width I of `forecast_inputs`."""
        return self.hidden_size

    def forecast_inputs(self, features: dict[str, Tensor], ids_BT: Tensor) -> Tensor:
        """What the forecast is made from at each position: [B, T, I]."""
        return features[FINAL_NORM]

    @abstractmethod
    def forward(
        self,
        features: dict[str, Tensor],
        ids_BT: Tensor,
        supervised_BT: Tensor,
        documents_BT: Tensor,
        positions_BT: Tensor,
        label_counts_K: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The loss of a batch and its statistics [S, K] (see `heads.objectives.Statistics`).

        label_counts_K: labels of each head in the whole optimiser step, so that micro-batches and processes add up.
        """

    @abstractmethod
    def lm_head(self) -> Tensor:
        """The LM head's rows: [Vd, D], or [K, Vd, D] if each head owns one."""

    def initialise(self) -> Self:
        """Start from what the target knows; needs `bind`."""
        return self

    def start_from(self, forecast: LinearForecast) -> None:
        """Start from linear forecasts of the target's next features."""
        raise NotImplementedError

    @property
    def draft_ids(self) -> Tensor:
        """Token ids [Vd] of the draft vocabulary."""
        return from_offsets(self.d2t)

    @property
    def target(self) -> Target:
        """The target that the heads are bound to."""
        return self._target[0]

    def bind(self, target: Target) -> Self:
        """Take from the target what is not stored with the heads: embeddings, LM head, teacher.

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
            raise ValueError("the target's LM head has a bias, which heads cannot carry; use another target")
        self.to(target.device)
        self._target = [target]
        weight_VD = target.lm_head.weight.detach()
        self.target_rows_VD = weight_VD if len(self.d2t) == self.vocab_size else weight_VD[self.draft_ids]
        return self

    def pack_lm_head(self) -> None:
        """Lay out the LM head that all heads or steps share for a CPU; `guess` then no longer follows training."""
        rows_VD = self.lm_head()
        if rows_VD.ndim == 2:
            self.packed_lm_head = PackedLinear(rows_VD.detach())

    def guess(self, states_D: Tensor) -> Tensor:
        """The logits [..., Vd] of states [..., D], through the LM head that all heads or steps share."""
        if self.packed_lm_head is not None:
            return self.packed_lm_head(states_D)
        return F.linear(states_D, self.lm_head().to(states_D.dtype))

    def recomputed(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """`function(*inputs)`; with gradient checkpointing only the inputs and the result are kept for the backward.

        It runs twice then, so it must draw no random numbers, and inputs must not be changed after it.
        """
        if not self.gradient_checkpointing:
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)

    def draft_labels(self, labels_KN: Tensor) -> Tensor:
        """Draft indices of labels: negative where there is no label or the draft vocabulary lacks it."""
        return torch.where(labels_KN < 0, labels_KN, self.draft_index_V[labels_KN.clamp_min(0)])

    def teacher(self, objective: Objective, hidden_RD: Tensor, rows_KN: Tensor) -> Teacher:
        """The target's distributions at rows [K, N] of its `final_norm` features."""
        rows_VD, all_rows_VD = self.target_rows_VD, self.target.lm_head.weight
        # The whole LM head is asked only for the mass that the draft vocabulary leaves out.
        reduced = objective.needs_acceptance and len(rows_VD) < len(all_rows_VD)
        return Teacher(
            hidden_RD,
            rows_KN,
            rows_VD.to(hidden_RD.dtype),
            self.target.softcap,
            all_rows_VD.to(hidden_RD.dtype) if reduced else None,
        )

    def loss(
        self, states_KND: Tensor, anchors: Anchors, hidden_RD: Tensor, label_counts_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The token losses of what the LM head reads at the anchors; `hidden_RD` are the `final_norm` features."""
        objective = self.config.objective
        return chunked_loss(
            states_KND,
            self.lm_head(),
            anchors.labels_KN,
            self.draft_labels(anchors.labels_KN),
            self.head_scale(objective, label_counts_K),
            objective,
            self.teacher(objective, hidden_RD, anchors.future_rows()),
        )

    def head_scale(self, objective: Objective, label_counts_K: Tensor) -> Tensor:
        """What a label's loss of each head counts: decay ** k over the number of its labels."""
        decay_K = objective.decay ** torch.arange(len(label_counts_K), device=label_counts_K.device)
        return decay_K / label_counts_K.clamp_min(1)

    def describe(self) -> dict[str, Any]:
        """What a run logs once."""
        return {
            "parameters": sum(parameter.numel() for parameter in self.parameters()),
            "draft_vocab_size": len(self.d2t),
        }


class HeadPerToken(DraftHeads):
    """K heads on the target's last feature, one for each token ahead, with LM heads of their own or the target's.

    The config has `num_heads`, `lm_head` ("own" or "shared") and `init` ("target" or "regression").
    """

    lm_head_weight: nn.Parameter  # [K, Vd, D], of own LM heads

    @property
    def taps(self) -> tuple[str, ...]:
        return (FINAL_NORM,)

    @property
    def depth(self) -> int:
        return self.config.num_heads

    @property
    def forecasts(self) -> int:
        return self.depth if self.config.init == "regression" else 0

    def initialise(self) -> Self:
        """Start own LM heads as the target's rows: every head first repeats the target's guess of x[t+1]."""
        if self.config.lm_head == "own":
            self.lm_head_weight.data.copy_(self.target_rows_VD.expand_as(self.lm_head_weight))
        return self

    def lm_head(self) -> Tensor:
        return self.lm_head_weight if self.config.lm_head == "own" else self.target_rows_VD
