"""How often each candidate of each head is right on real prompts: the table that a draft tree is searched from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eval.batched import generate_batch
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
