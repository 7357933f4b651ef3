"""What training steps cost, ours beside another form: the same loss, in processes of their own, in turns A B A B."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from heads.alignment import label_counts
from heads.family import DraftHeads
from train.metrics import memory_gb
from train.own_process import own_process
from train.savings import SAVINGS
from train.step_cost import FORMS, NAIVE, OURS, PHASES, Case, TrainingStep, inputs_of, make_heads

# Shapes: K heads or steps

# Float32 sums in another order; anything more is another loss.
TOLERANCE = 1e-5
CHECKED_TOKENS = 128


def check_equal(case: Case) -> tuple[float, float]:
    """The `largest_difference` of ours and naive, in float32, on one short row.

    Raises:
        ValueError: if they are not the same loss.
    """
    step = TrainingStep(replace(case, rows=1, tokens=min(case.tokens, CHECKED_TOKENS)), OURS)
    naive = make_heads(case, step.target, FORMS[NAIVE])
    batch = step.batch
    features = {tap: feature.float() for tap, feature in step.source(batch).items()}
    counts_K = label_counts(batch.supervised_BT, batch.documents_BT, case.depth)
    difference = largest_difference(step.heads, naive, features, (*inputs_of(batch), counts_K))
    if not max(difference) < TOLERANCE:
        raise ValueError(
            f"{case.family}: loss and gradients of the naive form differ by {difference[0]:.1e} and "
            f"{difference[1]:.1e} (limit {TOLERANCE}): they are not the same loss, so their costs say nothing"
        )
    return difference


def largest_difference(
    ours: DraftHeads, naive: DraftHeads, features: dict[str, Tensor], inputs: tuple[Tensor, ...]
) -> tuple[float, float]:
    """How far two losses and the gradients of any one parameter are apart, relative to the second."""
    (loss, found), (right_loss, right) = [_loss_and_gradients(heads, features, inputs) for heads in (ours, naive)]
    assert found.keys() == right.keys()
    apart = [((found[name] - right[name]).norm() / right[name].norm()).item() for name in right]
    return ((loss - right_loss).abs() / right_loss).item(), max(apart)


def _loss_and_gradients(
    heads: DraftHeads, features: dict[str, Tensor], inputs: tuple[Tensor, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)  # of EAGLE-1's noise
    loss, _ = heads(features, *inputs)
    parameters = dict(heads.named_parameters())
    gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    if apart := [gradients.pop(name) for name in parameters if name.startswith("lm_heads_apart.")]:
        gradients["lm_head_weight"] = torch.stack(apart)
    return loss.detach(), gradients


_steps: dict[str, TrainingStep] = {}  # of this process, by form


def hold_step(case: Case, form: str) -> tuple[int, float]:
    """Make the step of this process; returns its supervised tokens and the memory held before the first step.

    form: ours, naive, or ours without the saving of that name.
    """
    if form in SAVINGS:
        SAVINGS[form].undo()
    _steps[form] = TrainingStep(case, form)
    return _steps[form].batch.num_supervised, memory_gb()


def take_step(form: str) -> tuple[dict[str, float], float]:
    """Take the held step once; returns seconds by phase and the peak memory so far."""
    return _steps[form](), memory_gb()


def measure(case: Case, rounds: int, advance: Callable[[str], None], other: str = NAIVE) -> dict[str, Any]:
    """Speed, memory and shares of ours and another form, and ratios.

    `advance` is told what comes next, `2 * (rounds + 2)` times.

    Raises:
        ValueError: if memory does not suffice.
    """
    forms = (OURS, other)
    seconds: dict[str, list[dict[str, float]]] = {form: [] for form in forms}
    held, peak, tokens = {}, {}, 0
    with own_process() as first, own_process() as second:
        calls = dict(zip(forms, (first, second), strict=True))
        for form, call in calls.items():
            advance(f"{case.family}: load {form}")
            tokens, held[form] = call(hold_step, case, form)
        for turn in range(rounds + 1):
            for form, call in calls.items():
                advance(f"{case.family}: {form}, step {turn} of {rounds}")
                taken, peak[form] = call(take_step, form)
                if turn:  # the first allocates the optimiser's state and warms up
                    seconds[form].append(taken)
    return {
        **asdict(case),
        "supervised_tokens": tokens,
        **{form: summary(seconds[form], tokens, held[form], peak[form]) for form in forms},
        **ratios(*seconds.values()),
        "memory_ratio": peak[other] / peak[OURS],
    }


def summary(seconds: list[dict[str, float]], tokens: int, held_gb: float, peak_gb: float) -> dict[str, Any]:
    """Medians of one form."""
    step = statistics.median(sum(phases.values()) for phases in seconds)
    medians = {phase: statistics.median(phases[phase] for phases in seconds) for phase in PHASES}
    return {
        "tokens_per_s": tokens / step,
        "step_s": step,
        "phase_s": medians,
        "share": {phase: medians[phase] / sum(medians.values()) for phase in PHASES},
        "peak_gb": peak_gb,
        "step_gb": peak_gb - held_gb,
    }


def ratios(ours: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, float]:
    """How many times longer the other form takes: of the medians, and the extremes of the turns."""
    whole = [[sum(phases.values()) for phases in taken] for taken in (ours, other)]
    rest = [[sum(phases.values()) - phases["target"] for phases in taken] for taken in (ours, other)]
    turns = [b / a for a, b in zip(*whole, strict=True)]
    return {
        "speedup": statistics.median(whole[1]) / statistics.median(whole[0]),
        "speedup_low": min(turns),
        "speedup_high": max(turns),
        "speedup_without_target": statistics.median(rest[1]) / statistics.median(rest[0]),
    }


def linearity(places: Sequence[float], values: Sequence[float]) -> float:
    """R squared of the straight line through three or more values: the share of their variance that it explains."""
    assert len(places) >= 3, "any line fits two values"
    return statistics.correlation(places, values) ** 2
