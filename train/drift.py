"""How far training has moved the target: what the adapted one says of the original's own answers."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from data.disk import write_whole
from eval.decode import cache_capacity, plain_generate
from eval.prompts import EvalPrompt
from eval.sampling import SamplingConfig
from eval.stopping import StopConditions
from heads.target import FINAL_NORM, Target
from train import checkpoint
from train.adapter import DRIFT_FILE, Adapter
from train.provenance import GO_ON

# Shapes: T tokens, A tokens of an answer, D hidden, V vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drift:
    """KL(original || adapted) in nats over the tokens of the original's greedy answers.

    top1_agreement: share of these tokens that are the adapted target's first choice, too.
    """

    prompts: int
    tokens: int
    mean_kl: float
    worst_kl: float
    top1_agreement: float

    @property
    def sentence(self) -> str:
        return (
            f"The adapted target differs from the original by {self.mean_kl:.4f} nats a token on average and "
            f"{self.worst_kl:.3f} at worst, and its first choice is the original's at {self.top1_agreement:.1%} of "
            f"{self.tokens} tokens of the original's greedy answers to {self.prompts} held-out prompts."
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sentence": self.sentence}


def hand_out_adapter(
    adapter: Adapter, best: Path, directory: Path, prompts: Sequence[EvalPrompt], max_new_tokens: int, bar: Progress
) -> None:
    """Write the adapter of the checkpoint `best` into `directory`, and how far it takes the target."""
    adapter.load(best)
    checkpoint.copy_adapter(best, directory)
    logger.info("%s: the heads fit the target with this adapter alone; scripts/merge_adapter.py merges it", directory)
    if not prompts:
        logger.warning("the target's drift is not measured: trainer.eval_prompts=0")
        return
    task = bar.add_task("drift", total=len(prompts), text="drift of the target")
    drift = measure_drift(adapter, prompts, max_new_tokens, lambda: bar.advance(task))
    write_whole(directory / DRIFT_FILE, json.dumps(drift.to_json(), indent=2) + "\n", GO_ON)
    logger.info(drift.sentence)


def measure_drift(
    adapter: Adapter,
    prompts: Sequence[EvalPrompt],
    max_new_tokens: int,
    on_prompt: Callable[[], None] = lambda: None,
) -> Drift:
    """Let the original answer `prompts` and compare both targets at every token of the answers."""
    target = adapter.target
    conditions = StopConditions(target.eos_ids, (), max_new_tokens, target.max_context)
    kls, agreements = [], []
    for prompt in prompts:
        with adapter.off():
            cache = target.new_cache(cache_capacity(len(prompt.ids), conditions, 1))
            answer = plain_generate(target, prompt.ids, conditions, SamplingConfig(), cache).tokens
            original_AV = answer_logits(target, prompt.ids, answer)
        adapted_AV = answer_logits(target, prompt.ids, answer)
        kls.append(divergence(original_AV, adapted_AV))
        agreements.append(original_AV.argmax(-1) == adapted_AV.argmax(-1))
        on_prompt()
    kl_A, agreement_A = torch.cat(kls), torch.cat(agreements).double()
    return Drift(len(prompts), len(kl_A), kl_A.mean().item(), kl_A.max().item(), agreement_A.mean().item())


@torch.no_grad()
def answer_logits(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """The logits [A, V], in float32, at the positions that predict the tokens of `answer`."""
    ids_BT = torch.tensor([[*prompt, *answer]], device=target.device)
    positions_BT = torch.arange(ids_BT.shape[1], device=target.device)[None]
    features = target.features(ids_BT, positions_BT, torch.zeros_like(ids_BT))
    return target.logits(features[FINAL_NORM][0, len(prompt) - 1 : -1]).float()


def divergence(original_AV: Tensor, adapted_AV: Tensor) -> Tensor:
    """KL(original || adapted) [A] of logits, in float64."""
    log_p_AV, log_q_AV = original_AV.double().log_softmax(-1), adapted_AV.double().log_softmax(-1)
    return (log_p_AV.exp() * (log_p_AV - log_q_AV)).sum(-1)
