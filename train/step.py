"""One optimiser step: gradients over all micro-batches and processes, as if they were one batch."""

import zlib
from collections.abc import Iterable, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from data.batches import Step
from heads.alignment import label_counts
from train.features import FeatureSource
from train.parallel import Parallel

# Shapes: B rows, T tokens, D hidden, K heads, S statistics (heads.objectives.Statistics)


def accumulate_gradients(step: Step, source: FeatureSource, parallel: Parallel) -> tuple[float, Tensor]:
    """Add the gradients of `step` to the trained parameters; returns its loss and statistics [S, K].

    Heads compute in the dtype of the features. The results are sums over all processes, the statistics in float64 on
    the CPU. A loss that is not finite leaves gradients that are not either, in all processes.
    """
    accelerator, depth = parallel.accelerator, parallel.heads.depth
    # Every process sees the whole step, so all divide by the same counts without asking each other.
    counts_K = label_counts(step.whole.supervised_BT, step.whole.documents_BT, depth).to(accelerator.device)
    sums = []
    for index, cpu_batch in enumerate(step.micro_batches):
        batch = cpu_batch.to(accelerator.device)
        features = source(batch)
        with parallel.accumulating(last=index == len(step.micro_batches) - 1):
            loss, statistics_SK = parallel.model(
                features, batch.ids_BT, batch.supervised_BT, batch.documents_BT, batch.positions_BT, counts_K
            )
            loss = loss + source.own_loss(batch, features, step)
            # An infinite loss can have finite gradients. Times NaN they are not, and all processes skip the update.
            one_or_nan = 1 + 0 * loss.detach()
            # Processes average their gradients, but the losses are parts of one sum.
            parallel.backward(loss * accelerator.num_processes * one_or_nan)
        sums.append(torch.cat([loss.detach()[None], statistics_SK.flatten()]).double())
    totals = accelerator.reduce(torch.stack(sums).sum(0), "sum")
    assert isinstance(totals, Tensor)
    totals = totals.cpu()
    return totals[0].item(), totals[1:].view(-1, depth)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch for one step of one process, so that a resume has no random state to restore."""
    torch.manual_seed(zlib.crc32(f"step {step} of rank {rank} of seed {seed}".encode()))


def check_synchronised(grad_norm: Tensor, accelerator: Accelerator) -> None:
    """Assert that all processes hold the same gradient: launched wrongly, each would train its own heads."""
    norms = accelerator.gather(grad_norm.detach()[None])
    assert isinstance(norms, Tensor)
    assert len(norms) == accelerator.num_processes, "gather reached other processes than the launch"
    assert torch.allclose(norms, norms[0], rtol=1e-4, equal_nan=True), (
        f"gradients differ between processes: {norms.tolist()}"
    )


def describe_fault(loss: float, grad_norm: float, step: Step, rows: Sequence[Sequence[int]]) -> str:
    """A step that did not go well: which one, its numbers, and the samples in its rows."""
    samples = name_samples(index for row in rows for index in row)
    numbers = f"loss {loss}, gradient norm {grad_norm}"
    return f"step {step.number + 1} (epoch {step.epoch}): {numbers}; its samples are {samples}"


def name_samples(indices: Iterable[int]) -> str:
    """The first twenty of some samples."""
    samples = sorted(indices)
    return f"{samples[:20]}{' ...' if len(samples) > 20 else ''}"
