"""Sums of the steps since the last log, and the numbers that a log line shows."""

import resource
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.objectives import TOP, Statistics

# Shapes: S statistics (the fields of heads.objectives.Statistics), K heads


@dataclass
class Window:
    """What happened since the last log. It is part of a checkpoint: a resumed run logs the same numbers."""

    statistics_SK: Tensor  # float64, on the CPU
    steps: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def empty(cls, num_heads: int) -> "Window":
        """A window without a step."""
        return cls(torch.zeros(len(Statistics._fields), num_heads, dtype=torch.float64))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Window":
        """The window of `to_json`."""
        statistics_SK = torch.tensor(values["statistics"], dtype=torch.float64)
        return cls(statistics_SK, values["steps"], values["loss"], values["grad_norm"])

    def to_json(self) -> dict[str, Any]:
        """Plain values. Times are left out: the seconds between two processes are nobody's speed."""
        statistics = self.statistics_SK.tolist()
        return {"statistics": statistics, "steps": self.steps, "loss": self.loss, "grad_norm": self.grad_norm}

    def add(self, loss: float, grad_norm: float, statistics_SK: Tensor, tokens: int, seconds: float) -> None:
        """Count one optimiser step of all processes."""
        self.statistics_SK += statistics_SK
        self.steps += 1
        self.loss += loss
        self.grad_norm += grad_norm
        self.tokens += tokens
        self.seconds += seconds

    def metrics(self) -> dict[str, float]:
        """Means over the steps that were not skipped.

        A rate without a case to count is left out, not shown as 0 or NaN.
        """
        sums = Statistics(*self.statistics_SK)
        values: dict[str, float] = {}
        if self.steps:  # none if all steps of the window were skipped
            values |= {"train/loss": self.loss / self.steps, "train/grad_norm": self.grad_norm / self.steps}
        _put(values, "train/ce", sums.ce.sum(), sums.in_vocab.sum())
        if sums.kl.any():  # all zeros: not computed, since nothing weighs it
            _put(values, "train/kl", sums.kl.sum(), sums.labels.sum())
        for head in range(sums.labels.shape[0]):
            for top, hits_K in zip(TOP, (sums.top1, sums.top5, sums.top10), strict=True):
                _put(values, f"train/top{top}_head{head}", hits_K[head], sums.labels[head])
            _put(values, f"train/alpha_{head + 1}", sums.chain[head], sums.offered[head])
        if self.seconds:
            values["train/supervised_tokens_per_s"] = self.tokens / self.seconds
        return values


def _put(values: dict[str, float], name: str, count: Tensor, total: Tensor) -> None:
    if total:
        values[name] = (count / total).item()


def memory_gb() -> float:
    """The most memory that this process held so far, in GB: the GPU's, or without one the process's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
