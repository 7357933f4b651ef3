"""The losses of all families as public trainers compute them: what ours are measured against, and must equal.

Naive is not careless: a form does what the trainers of its family do, with no copy or product that they avoid.

- Every position is computed; a mask picks the supervised ones at the end.
- A Python loop over heads or steps; each makes float32 logits over the whole vocabulary, which autograd keeps, and
  counts how often its first guess is right.
- Medusa's trainers (FasterDecoding's, axolotl's) stack the logits of all heads and take them out again one by one.
  FasterDecoding's also copies each without its last positions and counts the five best guesses: left out here.
- The target's distributions exist at all positions at once; a step reads them shifted, as a view.
- EAGLE's step s attends over the keys of all steps, under a dense mask of T rows and (s + 1) * T columns:

            step 0      step 1      step 2            T = 4, s = 2: row t of the mask
          0  1  2  3  0  1  2  3  0  1  2  3
    t=2   x  x  x  .  .  .  x  .  .  .  x  .

A naive class is made like its family, with the same parameters; `split` then takes stacked LM heads apart. Of the
statistics it counts `top1` alone, ours all.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.alignment import IGNORE, Anchors
from heads.eagle import Eagle1Heads, EagleHeads
from heads.eagle3 import Eagle3Heads
from heads.family import DraftHeads, HeadPerToken
from heads.hydra import HydraHeads
from heads.masks import additive, document_mask
from heads.medusa import MedusaHeads
from heads.objectives import Statistics
from heads.target import FINAL_NORM

# Shapes: B batch, T tokens, R = B * T rows, K heads or steps, L blocks, D hidden, V draft vocabulary, H query and
# G key/value heads of size d

TOP1 = Statistics._fields.index("top1")


class FullLogits(DraftHeads):
    """Logits of all heads at all rows: overrides the chunked loss of every family."""

    def split(self) -> None:
        """Give each head parameters of its own, once all have their values."""

    def loss(
        self, states_KND: Tensor, anchors: Anchors, hidden_RD: Tensor, label_counts_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `DraftHeads.loss` where the anchors are all rows: N = R. Knows cross-entropy and forward KL."""
        objective, K = self.config.objective, len(states_KND)
        if objective.reverse_kl_weight or objective.needs_acceptance:
            raise NotImplementedError("the naive form knows ce_weight and kl_weight only")
        R, counted_KR = len(hidden_RD), anchors.labels_KN != IGNORE
        draft_labels_KR = self.draft_labels(anchors.labels_KN)
        scale_K = self.head_scale(objective, label_counts_K)
        p_RV, entropy_R = self.target_distributions(hidden_RD, K) if objective.kl_weight else (hidden_RD, hidden_RD)
        loss = hidden_RD.new_zeros((), dtype=torch.float32)
        statistics = torch.zeros(len(Statistics._fields), K, device=hidden_RD.device)
        for k, logits_RV in enumerate(self.all_logits(states_KND)):
            log_q_RV = logits_RV.float().log_softmax(-1)
            statistics[TOP1, k] = (logits_RV.detach().argmax(-1) == draft_labels_KR[k]).sum()
            if objective.ce_weight:
                ce = F.nll_loss(log_q_RV, draft_labels_KR[k], ignore_index=IGNORE, reduction="sum")
                loss = loss + objective.ce_weight * scale_K[k] * ce
            if objective.kl_weight:
                future = slice(k + 1, k + 1 + R)  # p[t+1+k] is the law of x[t+2+k]
                kl_R = -(p_RV[future] * log_q_RV).sum(-1) - entropy_R[future]
                loss = loss + objective.kl_weight * scale_K[k] * (kl_R * counted_KR[k]).sum()
        return loss, statistics

    def all_logits(self, states_KRD: Tensor) -> Iterator[Tensor]:
        """The logits [R, V] of one head or step after the other."""
        for state_RD, weight_VD in zip(states_KRD, self.lm_heads(len(states_KRD)), strict=True):
            yield F.linear(state_RD, weight_VD.to(state_RD.dtype))

    def lm_heads(self, K: int) -> Sequence[Tensor]:
        """The LM head [V, D] that each head or step reads."""
        return [self.lm_head()] * K

    @torch.no_grad()
    def target_distributions(self, hidden_RD: Tensor, K: int) -> tuple[Tensor, Tensor]:
        """The target's distributions [R + K, V] over the draft vocabulary at all rows, and their entropies [R + K].

        The K rows of padding let every head read all of its R rows as one view.
        """
        logits_RV = F.linear(hidden_RD, self.target.lm_head.weight.to(hidden_RD.dtype)).float()
        if self.target.softcap is not None:
            logits_RV = torch.tanh(logits_RV / self.target.softcap) * self.target.softcap
        if len(self.d2t) < self.vocab_size:
            logits_RV = logits_RV[:, self.draft_ids]
        log_p_RV = logits_RV.log_softmax(-1)
        p_RV = log_p_RV.exp()
        return F.pad(p_RV, (0, 0, 0, K)), F.pad(-(p_RV * log_p_RV).sum(-1), (0, K))


class HeadsApart(FullLogits, HeadPerToken):
    """Own LM heads as K parameters: a slice of a stacked one would get a gradient as large as all of them."""

    def split(self) -> None:
        """Turn `lm_head_weight` into the parameters `lm_heads_apart`, in the same memory."""
        if self.config.lm_head == "own":
            self.lm_heads_apart = nn.ParameterList(self.lm_head_weight.detach().unbind())
            del self.lm_head_weight

    def lm_heads(self, K: int) -> Sequence[Tensor]:
        return list(self.lm_heads_apart) if self.config.lm_head == "own" else super().lm_heads(K)


class NaiveMedusa(HeadsApart, MedusaHeads):
    """Medusa heads, one after the other at every position."""

    def forward(self, features, ids_BT, supervised_BT, documents_BT, positions_BT, label_counts_K):
        anchors = every_position(ids_BT, supervised_BT, documents_BT, self.depth)
        hidden_RD = features[FINAL_NORM].flatten(0, 1)
        states = []
        for weight_LDD, bias_LD in zip(self.block_weight.unbind(1), self.block_bias.unbind(1), strict=True):
            state_RD = hidden_RD
            for weight_DD, bias_D in zip(weight_LDD, bias_LD, strict=True):
                state_RD = state_RD + F.silu(
                    F.linear(state_RD, weight_DD.to(state_RD.dtype), bias_D.to(state_RD.dtype))
                )
            states.append(state_RD)
        return self.loss(torch.stack(states), anchors, hidden_RD, label_counts_K)

    def all_logits(self, states_KRD: Tensor) -> Iterator[Tensor]:
        stacked_KRV = torch.stack(list(super().all_logits(states_KRD)))
        for k in range(len(stacked_KRV)):
            yield stacked_KRV[k]


class NaiveHydra(HeadsApart, HydraHeads):
    """Hydra heads, one after the other at every position."""

    def forward(self, features, ids_BT, supervised_BT, documents_BT, positions_BT, label_counts_K):
        anchors = every_position(ids_BT, supervised_BT, documents_BT, self.depth)
        hidden_BTD = features[FINAL_NORM]
        context_BTD = hidden_BTD if self.prefix is None else self.prefix(hidden_BTD, documents_BT, positions_BT)
        read, states = [], []
        for k in range(self.depth):
            read.append(self.embed(ids_BT.roll(-1 - k, 1)))
            embeddings_RED = torch.stack(read, 2).flatten(0, 1)
            states.append(self.head_states(k, context_BTD.flatten(0, 1), embeddings_RED))
        return self.loss(torch.stack(states), anchors, hidden_BTD.flatten(0, 1), label_counts_K)


class NaiveEagle(FullLogits, EagleHeads):
    """EAGLE heads, unrolled at every position under dense masks over the keys of all steps."""

    def forward(self, features, ids_BT, supervised_BT, documents_BT, positions_BT, label_counts_K):
        anchors = every_position(ids_BT, supervised_BT, documents_BT, self.depth)
        hidden_RD = features[FINAL_NORM].flatten(0, 1)
        with torch.autocast(hidden_RD.device.type, hidden_RD.dtype, enabled=hidden_RD.dtype != torch.float32):
            fused_BTD = self.perturb(self.fuse(features))
            states_SRD = self.unroll_densely(fused_BTD, ids_BT, documents_BT, positions_BT).flatten(1, 2)
        loss, statistics = self.loss(self.read(states_SRD).to(hidden_RD.dtype), anchors, hidden_RD, label_counts_K)
        scale_K = self.head_scale(self.config.objective, label_counts_K)
        return loss + self.regression(states_SRD, hidden_RD, anchors, scale_K), statistics

    def unroll_densely(self, feature_BTD: Tensor, ids_BT: Tensor, documents_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """The states [S, B, T, D] of all steps at all positions."""
        assert self.config.layer.sliding_window is None, "the naive form knows no window"
        visible_B1TT = document_mask(documents_BT, positions_BT, None)
        own_B1TT = torch.eye(ids_BT.shape[1], dtype=torch.bool, device=ids_BT.device).expand_as(visible_B1TT)
        keys, values, columns, states = [], [], [], []
        for step in range(self.depth):
            tokens_BT = ids_BT.roll(-1 - step, 1)
            inputs_BTI, residual_BTD = self.enter(self.embed(tokens_BT, feature_BTD), feature_BTD)
            query_BHTd = self.layer.queries(inputs_BTI, positions_BT + step)
            key_BGTd, value_BGTd = self.layer.keys_values(inputs_BTI, positions_BT + step)
            keys.append(key_BGTd)
            values.append(value_BGTd)
            columns.append(own_B1TT if step else visible_B1TT)
            attended_BHTd = F.scaled_dot_product_attention(
                query_BHTd, torch.cat(keys, 2), torch.cat(values, 2),
                additive(torch.cat(columns, -1), query_BHTd.dtype), enable_gqa=True,
            )  # fmt: skip
            states.append(self.layer.finish(residual_BTD, attended_BHTd))
            feature_BTD = self.feed(states[-1])
        return torch.stack(states)


class NaiveEagle1(NaiveEagle, Eagle1Heads):
    """EAGLE-1, with the regression of its states at every position."""

    def regression(self, states_SND: Tensor, hidden_RD: Tensor, anchors: Anchors, scale_K: Tensor) -> Tensor:
        loss = scale_K.new_zeros(())
        for step, state_RD in enumerate(states_SND):
            ahead = step + 1
            future_RD = hidden_RD[ahead:].to(state_RD.dtype)
            distance_R = F.smooth_l1_loss(state_RD[:-ahead], future_RD, reduction="none").mean(-1).float()
            counted_R = distance_R * (anchors.labels_KN[step, :-ahead] != IGNORE)
            loss = loss + scale_K[step] * counted_R.sum()
        return self.config.regression_weight * loss


class NaiveEagle3(NaiveEagle, Eagle3Heads):
    """EAGLE-3."""


NAIVE: dict[str, type[FullLogits]] = {
    "medusa": NaiveMedusa,
    "hydra": NaiveHydra,
    "eagle": NaiveEagle1,
    "eagle3": NaiveEagle3,
}


def every_position(ids_BT: Tensor, supervised_BT: Tensor, documents_BT: Tensor, num_heads: int) -> Anchors:
    """All rows as anchors; head k has the label x[t+2+k] where x[t+1] .. x[t+2+k] are supervised, in t's document.

    The last row of a sequence reads the first token of the next one, as a shift by `roll` does: it is masked.
    """
    T, labels = ids_BT.shape[1], []
    places_T = torch.arange(T, device=ids_BT.device)
    counted_BT = torch.ones_like(supervised_BT)
    for ahead in range(1, num_heads + 2):
        same_document_BT = documents_BT.roll(-ahead, 1) == documents_BT
        counted_BT = counted_BT & supervised_BT.roll(-ahead, 1) & same_document_BT & (places_T < T - ahead)
        labels.append(torch.where(counted_BT, ids_BT.roll(-ahead, 1), IGNORE).flatten())
    return Anchors(torch.arange(ids_BT.numel(), device=ids_BT.device), torch.stack(labels[1:]))
