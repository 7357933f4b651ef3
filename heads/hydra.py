"""Hydra heads: K small networks that draft in turn, each reading the tokens drafted before it.

    head k at t:  [final_norm[t], e(x[t+1]), ..., e(x[t+1+k])] -> L blocks -> LM head -> guess of x[t+2+k]
    first block:  S inputs + s + SiLU(W inputs + b), S = [I, 0, ..., 0] and s = W = b = 0 at the start
    other blocks: x + SiLU(W x + b), W = b = 0 at the start

so that a fresh head passes on the feature, and with it the target's guess. Hydra++ puts a decoder layer in between
(`PrefixAttention`). Paper: arXiv 2402.05109. Unlike there, no blocks share weights and embeddings are normalised.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heads.alignment import find_anchors
from heads.eagle import layer_shape
from heads.eagle_layer import EagleLayer, LayerShape
from heads.family import HeadPerToken
from heads.masks import additive, document_mask
from heads.medusa import INITS, LM_HEADS
from heads.objectives import Objective
from heads.packed import PackedLinear
from heads.target import FINAL_NORM, Target
from heads.warm_start import LinearForecast

# Shapes: B batch, T tokens, N anchors or tree nodes, K heads, E = k + 1 embeddings of head k, D hidden, J = (E + 1) * D
# inputs of head k, I inputs of a block, H attention and G key/value heads of size d, V vocabulary, Vd draft vocabulary


@dataclass(frozen=True)
class HydraConfig:
    """`conf/heads/hydra.yaml`.

    lm_head: "own" trains one for each head, which starts as the target's rows; "shared" uses the target's, frozen.
    init: "target" starts from the feature as it is, "regression" from a linear forecast of later ones (warm_start.py).
    prefix_attention: Hydra++, heads read the output of a decoder layer over the features so far, of shape `layer`.
    draft_vocab_size: number of token ids that can be proposed, None for all of the target's.
    """

    num_heads: int = 4
    num_layers: int = 1
    lm_head: str = "own"
    init: str = "target"
    prefix_attention: bool = False
    layer: LayerShape = field(default_factory=LayerShape)
    draft_vocab_size: int | None = None
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self):
        for name in ("num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"heads.{name}={getattr(self, name)} must be at least 1")
        for name, choices in (("lm_head", LM_HEADS), ("init", INITS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"heads.{name}={getattr(self, name)} must be one of {', '.join(choices)}")


class HydraHead(nn.Module):
    """The blocks of one head, from a feature and `num_embeddings` embeddings to the state that its LM head reads."""

    def __init__(self, num_embeddings: int, num_layers: int, hidden_size: int):
        super().__init__()
        self.skip = nn.Linear((1 + num_embeddings) * hidden_size, hidden_size)
        self.first = nn.Linear(self.skip.in_features, hidden_size)
        self.others = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers - 1))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        nn.init.eye_(self.skip.weight)  # [I, 0, ..., 0], as the feature comes first

    def forward(self, inputs_NJ: Tensor) -> Tensor:
        """[N, J] -> [N, D], in the dtype of the inputs."""
        state_ND = _linear(self.skip, inputs_NJ) + F.silu(_linear(self.first, inputs_NJ))
        for layer in self.others:
            state_ND = state_ND + F.silu(_linear(layer, state_ND))
        return state_ND


def _linear(layer: nn.Module, inputs_NI: Tensor) -> Tensor:
    if isinstance(layer, PackedLinear):
        return layer(inputs_NI)  # only heads that serve are packed, in the dtype of their inputs
    assert isinstance(layer, nn.Linear)
    return F.linear(inputs_NI, layer.weight.to(inputs_NI.dtype), layer.bias.to(inputs_NI.dtype))


class PrefixAttention(nn.Module):
    """A causal decoder layer over the target's features, the identity at the start."""

    def __init__(self, shape: LayerShape, hidden_size: int):
        super().__init__()
        self.norm = LlamaRMSNorm(hidden_size, shape.rms_norm_eps)
        self.layer = EagleLayer(shape, hidden_size, hidden_size)
        for last in (self.layer.o_proj, self.layer.down_proj):
            nn.init.zeros_(last.weight)

    def forward(self, hidden_BTD: Tensor, documents_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """All positions of packed documents, for training: [B, T, D]."""
        inputs_BTD = self.norm(hidden_BTD)
        query_BHTd = self.layer.queries(inputs_BTD, positions_BT)
        key_BGTd, value_BGTd = self.layer.keys_values(inputs_BTD, positions_BT)
        window = self.layer.shape.sliding_window
        mask_B1TT = additive(document_mask(documents_BT, positions_BT, window), query_BHTd.dtype)
        attended_BHTd = F.scaled_dot_product_attention(query_BHTd, key_BGTd, value_BGTd, mask_B1TT, enable_gqa=True)
        return self.layer.finish(hidden_BTD, attended_BHTd).to(hidden_BTD.dtype)


class HydraHeads(HeadPerToken):
    """K Hydra heads; `forward` is the training objective, `embed` and `draft_logits` serve decoding."""

    kind = "hydra"
    config_class = HydraConfig
    compiled_parts = ("context", "states")

    def __init__(self, config: HydraConfig, hidden_size: int, vocab_size: int, draft_ids: Tensor):
        super().__init__(config, hidden_size, vocab_size, draft_ids)
        self.heads = nn.ModuleList(HydraHead(k + 1, config.num_layers, hidden_size) for k in range(config.num_heads))
        self.prefix = PrefixAttention(config.layer, hidden_size) if config.prefix_attention else None
        if config.lm_head == "own":
            self.lm_head_weight = nn.Parameter(torch.zeros(config.num_heads, len(draft_ids), hidden_size))

    @classmethod
    def resolve(cls, config: HydraConfig, target: Target) -> HydraConfig:
        return replace(config, layer=layer_shape(config.layer, target)) if config.prefix_attention else config

    def start_from(self, forecast: LinearForecast) -> None:
        """Start from the linear forecasts instead of the feature itself."""
        for head, map_DD in zip(self.heads, forecast.solve(), strict=True):
            head.get_parameter("skip.weight").data[:, : self.hidden_size] = map_DD

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D] of token ids [...], each divided by its root mean square, in float32."""
        # SmolLM2's embeddings are a fourteenth of its features (0.14, 1.9), and Adam moves every weight alike: two
        # short epochs on 30 thousand tokens took head 0 from 22.3 % to 27.4 % right. A learnt gain stayed at 22.4 %.
        return F.rms_norm(self.target.embed(ids).float(), (self.hidden_size,), eps=1e-12)

    def head_states(self, k: int, hidden_ND: Tensor, embeddings_NED: Tensor) -> Tensor:
        """Run the blocks of head k on features and the k + 1 embeddings behind them: [N, D] in the features' dtype."""
        return self.heads[k](torch.cat([hidden_ND, embeddings_NED.to(hidden_ND.dtype).flatten(1)], dim=1))

    def context(self, hidden_BTD: Tensor, documents_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """What heads read as the feature while they train: [B, T, D]."""
        if self.prefix is None:
            return hidden_BTD
        return self.recomputed(self.prefix, hidden_BTD, documents_BT, positions_BT)

    def states(self, context_ND: Tensor, embeddings_NKD: Tensor) -> Tensor:
        """What the LM heads of all heads read, at anchors with the K tokens behind them: [K, N, D]."""
        return torch.stack(
            [self.recomputed(self.head_states, k, context_ND, embeddings_NKD[:, : k + 1]) for k in range(self.depth)]
        )

    def draft_logits(self, k: int, hidden_ND: Tensor, embeddings_NED: Tensor) -> Tensor:
        """Head k's guesses behind the certain token and k drafted ones, whose embeddings it reads: [N, Vd]."""
        states_ND = self.head_states(k, hidden_ND, embeddings_NED)
        if self.config.lm_head == "shared":
            return self.guess(states_ND)
        return F.linear(states_ND, self.lm_head_weight[k].to(hidden_ND.dtype))

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
        hidden_BTD = features[FINAL_NORM]
        context_ND = self.context(hidden_BTD, documents_BT, positions_BT).flatten(0, 1)[anchors.rows_N]
        embeddings_NKD = self.embed(following_ids(ids_BT, anchors.rows_N, self.depth)).to(context_ND.dtype)
        return self.loss(self.states(context_ND, embeddings_NKD), anchors, hidden_BTD.flatten(0, 1), label_counts_K)


def following_ids(ids_BT: Tensor, rows_N: Tensor, count: int) -> Tensor:
    """The `count` token ids behind each row of the flattened batch: [N, count]; head k reads the first k + 1.

    row          0  1  2  3  4  5
    x            U  a  b  c  #  U
    behind 0     a  b  c             head 0 reads a and guesses b, head 1 reads a, b and guesses c
    behind 2     c  #  U             head 0 reads c and guesses #, the others have no label
    """
    places_NK = rows_N[:, None] + torch.arange(1, count + 1, device=rows_N.device)
    return ids_BT.flatten()[places_NK.clamp_max(ids_BT.numel() - 1)]  # past the end: read by heads without a label
