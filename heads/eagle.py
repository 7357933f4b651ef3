"""EAGLE heads: a small autoregressive drafter over the target's features, and EAGLE-1, the first of them.

At position t, step s reads a feature and the embedding of the next token and gives the state that guesses the one
after it; the state is also the feature of step s + 1:

    (u_s[t], e(x[t+1+s])) -> layer -> state_s[t] -> LM head -> guess of x[t+2+s]
                                          \\-> u_{s+1}[t]

EAGLE-1 (arXiv 2401.15077): u_0 is the target's `final_norm` feature, embedding and feature are joined by one linear
map, the state is trained to be the next feature and is read by the target's own frozen LM head.
"""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.alignment import IGNORE, Anchors, find_anchors
from heads.eagle_layer import EagleCache, EagleLayer, LayerShape, cached_attention, unrolled_attention
from heads.family import DraftHeads
from heads.masks import additive
from heads.objectives import Objective
from heads.scaled_linear import ScaledLinear
from heads.target import FINAL_NORM, Target
from heads.warm_start import LinearForecast

# Shapes: B batch, T tokens, A most anchors of a row, N anchors or tree nodes, S steps, D hidden, C cached rows,
# V vocabulary, Vd draft vocabulary, I inputs of the attention, G key/value heads of size d

# Keys and values [B, G, A, d] of the steps 1, 2, ..., each at the anchors themselves.
OwnKeysValues = tuple[tuple[Tensor, Tensor], ...]


class Rows(NamedTuple):
    """What all steps of an unrolled forward share: the batch, its anchors, and the keys and values of step 0."""

    ids_BT: Tensor
    documents_BT: Tensor
    positions_BT: Tensor
    places_BA: Tensor
    key_BGTd: Tensor
    value_BGTd: Tensor

    def positions_of(self, step: int) -> Tensor:
        """The rotary positions [B, A] of a step at the anchors."""
        return self.positions_BT.gather(1, self.places_BA) + step


class EagleHeads(DraftHeads):
    """What EAGLE-1 and EAGLE-3 share: the unrolled training forward, and the cached one for drafting."""

    layer: EagleLayer
    compiled_parts = ("layer.finish",)  # every step's attention is another program: too long to compile

    @classmethod
    def resolve(cls, config: Any, target: Target) -> Any:
        return replace(config, layer=layer_shape(config.layer, target))

    @property
    def depth(self) -> int:
        return self.config.num_steps

    @property
    def training_taps(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.taps, FINAL_NORM)))

    @abstractmethod
    def fuse(self, features: dict[str, Tensor]) -> Tensor:
        """The features u_0 of step 0 from the target's: [..., D]."""

    @abstractmethod
    def enter(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads [..., I] and the residual stream [..., D] that it adds to."""

    @abstractmethod
    def read(self, state: Tensor) -> Tensor:
        """What the LM head reads of a state [..., D]."""

    @abstractmethod
    def feed(self, state: Tensor) -> Tensor:
        """The feature [..., D] of the next step."""

    def embed(self, ids: Tensor, like: Tensor) -> Tensor:
        """The target's embeddings [..., D] of token ids, in the dtype of `like`."""
        return self.target.embed(ids).to(like.dtype)

    def unroll(
        self, fused_BTD: Tensor, ids_BT: Tensor, documents_BT: Tensor, positions_BT: Tensor, places_BA: Tensor
    ) -> Tensor:
        """The states [S, B, A, D] of all steps at the positions `places_BA`, with the data's tokens as drafts."""
        given = ids_BT, documents_BT, positions_BT, places_BA
        first_BAD, *key_value = self.recomputed(self.begin, fused_BTD, *given)
        rows = Rows(*given, *key_value)
        states: list[Tensor] = [first_BAD]
        own: OwnKeysValues = ()  # not a list that grows: a step that is computed again must see what it saw before
        for step in range(1, self.depth):
            state_BAD, *key_value = self.recomputed(self.advance, step, states[-1], rows, own)
            states.append(state_BAD)
            own = (*own, tuple(key_value))
        return torch.stack(states)

    def begin(
        self, fused_BTD: Tensor, ids_BT: Tensor, documents_BT: Tensor, positions_BT: Tensor, places_BA: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Step 0: its states [B, A, D] at the anchors, keys and values [B, G, T, d] at all positions."""
        next_BT = ids_BT.roll(-1, 1)  # the last token's is of no account: no anchor sees so far
        inputs_BTI, residual_BTD = self.enter(self.embed(next_BT, fused_BTD), fused_BTD)
        rows = Rows(ids_BT, documents_BT, positions_BT, places_BA, *self.layer.keys_values(inputs_BTI, positions_BT))
        state_BAD = self.attend(0, at_places(inputs_BTI, places_BA), at_places(residual_BTD, places_BA), rows, ())
        return state_BAD, rows.key_BGTd, rows.value_BGTd

    def advance(self, step: int, state_BAD: Tensor, rows: Rows, own: OwnKeysValues) -> tuple[Tensor, Tensor, Tensor]:
        """Step 1 or later from the states before it: its states [B, A, D], own keys and own values [B, G, A, d]."""
        feature_BAD = self.feed(state_BAD)
        tokens_BA = rows.ids_BT.gather(1, (rows.places_BA + 1 + step).clamp_max(rows.ids_BT.shape[1] - 1))
        inputs_BAI, residual_BAD = self.enter(self.embed(tokens_BA, feature_BAD), feature_BAD)
        key_value = self.layer.keys_values(inputs_BAI, rows.positions_of(step))
        return self.attend(step, inputs_BAI, residual_BAD, rows, (*own, key_value)), *key_value

    def attend(self, step: int, inputs_BAI: Tensor, residual_BAD: Tensor, rows: Rows, own: OwnKeysValues) -> Tensor:
        """The states [B, A, D] of a step, from what its attention reads and from its residual stream."""
        window = self.config.layer.sliding_window
        visible_BAT = causal_visibility(rows.places_BA, rows.documents_BT, rows.positions_BT, step, window)
        attended_BHAd = unrolled_attention(
            self.layer.queries(inputs_BAI, rows.positions_of(step)), rows.key_BGTd, rows.value_BGTd,
            additive(visible_BAT, rows.value_BGTd.dtype), own if window is None else own[-window:],
        )  # fmt: skip
        return self.layer.finish(residual_BAD, attended_BHAd)

    def forward(
        self,
        features: dict[str, Tensor],
        ids_BT: Tensor,
        supervised_BT: Tensor,
        documents_BT: Tensor,
        positions_BT: Tensor,
        label_counts_K: Tensor,
    ) -> tuple[Tensor, Tensor]:
        anchors = find_anchors(ids_BT, supervised_BT, documents_BT, self.depth)
        places_BA, valid_BA = anchor_table(anchors.rows_N, *ids_BT.shape)
        hidden_RD = features[FINAL_NORM].flatten(0, 1)
        # The masters are float32; matrix products run in the dtype of the features.
        with torch.autocast(hidden_RD.device.type, hidden_RD.dtype, enabled=hidden_RD.dtype != torch.float32):
            fused_BTD = self.perturb(self.fuse(features))
            states_SND = self.unroll(fused_BTD, ids_BT, documents_BT, positions_BT, places_BA)[:, valid_BA]
        loss, statistics = self.loss(self.read(states_SND).to(hidden_RD.dtype), anchors, hidden_RD, label_counts_K)
        scale_K = self.head_scale(self.config.objective, label_counts_K)
        return loss + self.regression(states_SND, hidden_RD, anchors, scale_K), statistics

    def perturb(self, fused_BTD: Tensor) -> Tensor:
        """Training noise on the features, if the family has any."""
        return fused_BTD

    def regression(self, states_SND: Tensor, hidden_RD: Tensor, anchors: Anchors, scale_K: Tensor) -> Tensor | float:
        """A loss on the states themselves, if the family has one."""
        return 0.0

    def new_cache(self, capacity: int) -> EagleCache:
        weight = self.layer.o_proj.weight
        return EagleCache(self.layer, capacity, weight.device, weight.dtype)

    def draft(
        self,
        feature_ND: Tensor,
        tokens_N: Tensor,
        positions_N: Tensor,
        cache: EagleCache,
        start: int,
        visible_NS: Tensor | None,
    ) -> Tensor:
        """The states [N, D] behind N tokens, whose keys become the cache's rows from `start`; None sees all rows."""
        inputs_NI, residual_ND = self.enter(self.embed(tokens_N, feature_ND), feature_ND)
        key_BGNd, value_BGNd = self.layer.keys_values(inputs_NI[None], positions_N[None])
        cache.write(start, key_BGNd[0], value_BGNd[0])
        query_BHNd = self.layer.queries(inputs_NI[None], positions_N[None])
        mask_NS = None if visible_NS is None else additive(visible_NS, feature_ND.dtype)
        attended_HNd = cached_attention(query_BHNd[0], cache, start + len(tokens_N), mask_NS)
        return self.layer.finish(residual_ND[None], attended_HNd[None])[0]

    def draft_logits(self, state_ND: Tensor) -> Tensor:
        """The guesses [N, Vd] of states."""
        return self.guess(self.read(state_ND))


def anchor_table(rows_N: Tensor, B: int, T: int) -> tuple[Tensor, Tensor]:
    """Anchors by row of the batch: places [B, A] and which entries are anchors [B, A], in the order of rows_N."""
    counts_B = torch.bincount(rows_N // T, minlength=B)
    valid_BA = torch.arange(int(counts_B.max()), device=rows_N.device) < counts_B[:, None]
    places_BA = torch.zeros(valid_BA.shape, dtype=torch.long, device=rows_N.device)
    places_BA[valid_BA] = rows_N % T
    return places_BA, valid_BA


def at_places(rows_BTD: Tensor, places_BA: Tensor) -> Tensor:
    """The rows [B, A, D] at `places_BA`."""
    return rows_BTD.gather(1, places_BA[..., None].expand(-1, -1, rows_BTD.shape[-1]))


def causal_visibility(
    places_BA: Tensor, documents_BT: Tensor, positions_BT: Tensor, step: int, window: int | None
) -> Tensor:
    """Which step-0 keys a query of step `step` at `places_BA` sees: [B, A, T]."""
    T = documents_BT.shape[1]
    visible_BAT = torch.arange(T, device=places_BA.device) <= places_BA[..., None]
    visible_BAT &= documents_BT.gather(1, places_BA)[..., None] == documents_BT[:, None]
    if window is not None:
        visible_BAT &= positions_BT.gather(1, places_BA)[..., None] + step - positions_BT[:, None] < window
    return visible_BAT


def layer_shape(given: LayerShape, target: Target) -> LayerShape:
    """`given` with what it leaves open taken from the target."""
    config = target.text_config.to_dict()
    heads = config["num_attention_heads"]
    rope = config["rope_parameters"]
    defaults = {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or target.hidden_size // heads,
        "intermediate_size": config["intermediate_size"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_parameters": rope.get("full_attention", rope),  # Gemma 3 has one set for each kind of layer
        "max_position_embeddings": config["max_position_embeddings"],
    }
    return replace(given, **{name: value for name, value in defaults.items() if not getattr(given, name)})


@dataclass(frozen=True)
class EagleConfig:
    """`conf/heads/eagle.yaml`.

    num_steps: unrolled training steps; 1 is EAGLE-1 as published.
    regression_weight: of the smooth L1 distance between states and the target's next features.
    noise: half the width of the uniform noise on the features in training.
    init: "random", or "regression": the joining map starts as the linear forecast of the next feature
        (heads/warm_start.py), fitted on `trainer.init_tokens` tokens, with a layer behind it that changes nothing yet.
    bias: of the map that joins embedding and feature; engines drop it.
    """

    num_steps: int = 1
    init: str = "random"
    bias: bool = False
    noise: float = 0.1
    regression_weight: float = 1.0
    draft_vocab_size: int | None = None
    layer: LayerShape = field(default_factory=LayerShape)
    objective: Objective = field(default_factory=lambda: Objective(ce_weight=0.0, kl_weight=0.1))

    def __post_init__(self):
        if self.num_steps < 1:
            raise ValueError(f"heads.num_steps={self.num_steps} must be at least 1")
        if self.init not in {"random", "regression"}:
            raise ValueError(f"heads.init={self.init} must be random or regression")
        for name in ("noise", "regression_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"heads.{name}={getattr(self, name)} must be at least 0; 0 turns it off")


class Eagle1Heads(EagleHeads):
    """EAGLE-1: feature regression and the target's own LM head."""

    kind = "eagle"
    config_class = EagleConfig

    def __init__(self, config: EagleConfig, hidden_size: int, vocab_size: int, draft_ids: Tensor):
        super().__init__(config, hidden_size, vocab_size, draft_ids)
        self.fc = ScaledLinear(2 * hidden_size, hidden_size, bias=config.bias)
        self.layer = EagleLayer(config.layer, hidden_size, hidden_size)

    @property
    def taps(self) -> tuple[str, ...]:
        return (FINAL_NORM,)

    @property
    def forecasts(self) -> int:
        return 1 if self.config.init == "regression" else 0

    @property
    def forecast_size(self) -> int:
        return 2 * self.hidden_size

    def forecast_inputs(self, features: dict[str, Tensor], ids_BT: Tensor) -> Tensor:
        hidden_BTD = features[FINAL_NORM]
        return torch.cat([self.embed(ids_BT.roll(-1, 1), hidden_BTD), hidden_BTD], -1)

    @torch.no_grad()
    def start_from(self, forecast: LinearForecast) -> None:
        self.fc.start(forecast.solve()[0].float(), forecast.input_rms())
        for projection in (self.layer.o_proj, self.layer.down_proj):
            projection.weight.zero_()

    def fuse(self, features: dict[str, Tensor]) -> Tensor:
        return features[FINAL_NORM]

    def enter(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        # No norm before the attention: the published layer has none.
        joined = self.fc(torch.cat([embedding, feature], -1))
        return joined, joined

    def read(self, state: Tensor) -> Tensor:
        return state

    def feed(self, state: Tensor) -> Tensor:
        return state

    def lm_head(self) -> Tensor:
        return self.target_rows_VD

    def perturb(self, fused_BTD: Tensor) -> Tensor:
        return fused_BTD + (2 * torch.rand_like(fused_BTD) - 1) * self.config.noise

    def regression(self, states_SND: Tensor, hidden_RD: Tensor, anchors: Anchors, scale_K: Tensor) -> Tensor | float:
        # A constant, as the teacher is: a target that is trained itself must not make its features easier to guess.
        future_SND = hidden_RD.detach()[anchors.future_rows()].to(states_SND.dtype)
        distance_SN = F.smooth_l1_loss(states_SND, future_SND, reduction="none").mean(-1).float()
        counted_SN = distance_SN * (anchors.labels_KN != IGNORE)
        return self.config.regression_weight * (counted_SN.sum(1) * scale_K).sum()
