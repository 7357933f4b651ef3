"""How often each candidate of each head is right on real prompts: the table that a draft tree is searched from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eval.batched import generate_batch
from eval.drafters import Draft
from eval.level_drafter import DynamicDrafter
from eval.sampling import SamplingConfig
from heads.medusa import MedusaHeads
from heads.target import FINAL_NORM, Target

# Shapes: K heads, W candidates, T tokens of prompt and answer, Vd draft vocabulary


@torch.inference_mode()
def measure_accuracy(
    target: Target, heads: MedusaHeads, prompts: Sequence[Sequence[int]], max_new_tokens: int, width: int
) -> Tensor:
    """Return accuracy_KW: the share of positions where candidate w of head k is the token that greedy decoding says.

    The target first answers all prompts greedily in one batch; each head is then asked at every position of the
    answers that has its label inside the answer.
    """
    width = min(width, len(heads.d2t))
    answers = generate_batch(target, prompts, SamplingConfig(), max_new_tokens, [0] * len(prompts))
    right_KW = torch.zeros(heads.depth, width, device=target.device)
    asked_K = torch.zeros(heads.depth, device=target.device)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids_T = torch.tensor([*prompt, *answer], device=target.device)
        places_T = torch.arange(len(ids_T), device=target.device)
        features = target.features(ids_T[None], places_T[None], torch.zeros_like(ids_T)[None])
        # The first draft is made at the last prompt token, where the answer's first token is already certain.
        start = len(prompt) - 1
        states_KND = heads.states(features[FINAL_NORM][0, start:])
        candidates_KNW = heads.draft_ids[(states_KND @ heads.lm_head().mT.to(states_KND.dtype)).topk(width).indices]
        for k in range(heads.depth):
            labels_N = ids_T[start + 2 + k :]
            right_KW[k] += (candidates_KNW[k, : len(labels_N)] == labels_N[:, None]).sum(0)
            asked_K[k] += len(labels_N)
    if not asked_K[-1]:
        raise ValueError(
            f"the calibration answers are too short for {heads.depth} heads; give more calibration prompts "
            f"or raise calibration_tokens={max_new_tokens}"
        )
    return (right_KW / asked_K[:, None]).cpu()


@torch.inference_mode()
def measure_dynamic(
    target: Target, drafter: DynamicDrafter, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Tensor:
    """Return expected_DM: tokens expected of a cycle with a dynamic tree of depth d + 1 and m + 1 draft nodes.

    One drafting of the largest tree at every position of greedy answers tells of all smaller ones: the likeliest m
    nodes of a tree are those of the tree of m nodes. No verify is needed, since what the target says is known.
    """
    answers = generate_batch(target, prompts, SamplingConfig(), max_new_tokens, [0] * len(prompts))
    stood_DM = torch.zeros(drafter.size.depth, drafter.size.nodes, dtype=torch.long)
    asked = 0
    root_1 = torch.zeros(1, dtype=torch.long, device=target.device)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids_T = torch.tensor([*prompt, *answer], device=target.device)
        places_T = torch.arange(len(ids_T), device=target.device)
        features = target.features(ids_T[None], places_T[None], torch.zeros_like(ids_T)[None], drafter.taps)
        start = len(prompt)
        drafter.reset(ids_T[:start], {tap: feature[:, :start] for tap, feature in features.items()})
        for place in range(start, len(ids_T) - 1):
            draft = drafter.propose(ids_T[place], len(ids_T) - 1 - place)
            for depth, order in enumerate(_orders_that_stand(draft, ids_T[place + 1 :].tolist())):
                stood_DM[depth, order - 1 :] += 1
            asked += 1
            drafter.observe({tap: feature[:, place : place + 1] for tap, feature in features.items()}, root_1)
    return 1 + stood_DM.cumsum(0) / max(1, asked)


def _orders_that_stand(draft: Draft, said: Sequence[int]) -> list[int]:
    """The places by likelihood of the drafts that greedy verification would accept, from the root's child on."""
    assert draft.order_N is not None
    tokens, orders = draft.tokens_N.tolist(), draft.order_N.tolist()
    node, accepted = 0, []
    for token in said:
        node = next((child for child in draft.tree.children[node] if tokens[child] == token), 0)
        if not node:
            break
        accepted.append(orders[node])
    return accepted
