"""Before the first step: heads that ask for it start from a linear forecast, fitted by all processes together."""

import itertools
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import cast

from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import Tensor

from data.batches import BatchLoader
from heads.family import DraftHeads
from heads.target import FINAL_NORM
from heads.warm_start import LinearForecast
from train.config import TrainerConfig
from train.display import Display
from train.features import FeatureSource
from train.step import name_samples

# Shapes: B rows, T tokens, I inputs of the forecast

logger = logging.getLogger(__name__)


def warm_start(
    heads: DraftHeads,
    loader: BatchLoader,
    source: FeatureSource,
    trainer: TrainerConfig,
    accelerator: Accelerator,
    display: Display,
) -> None:
    """Start whole `heads` as their family says, from `trainer.init_tokens` supervised tokens or one epoch.

    Raises:
        FloatingPointError: if the features of more samples than `trainer.max_skipped` allows are not finite.
    """
    if not heads.forecasts:
        return
    forecast = LinearForecast(heads.forecasts, heads.forecast_size, heads.hidden_size, accelerator.device)
    tokens, seen, faulty = 0, 0, set[int]()
    for step in itertools.islice(loader.steps(0), loader.steps_per_epoch):
        rows = loader.step_rows(step.number)
        own_rows = iter(rows[loader.rank :: loader.world_size])
        for cpu_batch in step.micro_batches:
            batch = cpu_batch.to(accelerator.device)
            features = source(batch)
            inputs_BTI = heads.forecast_inputs(features, batch.ids_BT)
            left_out_BT = forecast.add(
                inputs_BTI, features[FINAL_NORM], batch.ids_BT, batch.supervised_BT, batch.documents_BT
            )
            faulty |= samples_at(left_out_BT.cpu(), cpu_batch.documents_BT, own_rows)
        tokens, seen = tokens + step.whole.num_supervised, seen + sum(map(len, rows))
        display.show(0, {"init/tokens": tokens})
        if tokens >= trainer.init_tokens:
            break
    judge(set(gather_object(sorted(faulty))), seen, trainer, accelerator)
    forecast.combine(lambda sums: cast(Tensor, accelerator.reduce(sums, "sum")))
    heads.start_from(forecast)
    for tensor in (*heads.parameters(), *heads.buffers()):
        broadcast(tensor.data)
    logger.info("heads start from a linear forecast over %d supervised tokens", tokens)


def samples_at(marked_BT: Tensor, documents_BT: Tensor, rows: Iterator[Sequence[int]]) -> set[int]:
    """The samples that hold a marked position of a batch; its rows, as lists of samples, are the next of `rows`."""
    samples = list(itertools.islice(rows, len(documents_BT)))
    return {samples[row][int(documents_BT[row, place])] for row, place in marked_BT.nonzero().tolist()}


def judge(faulty: Collection[int], seen: int, trainer: TrainerConfig, accelerator: Accelerator) -> None:
    """Say which of the samples `seen` are `faulty`: what is not finite in them is left out, as of steps.

    Raises:
        FloatingPointError: if these are too many, by the rule for skipped steps.
    """
    if not faulty:
        return
    fault = (
        f"linear forecast: the target's features are not finite in {len(faulty)} of {seen} samples, "
        f"{name_samples(faulty)}"
    )
    if not trainer.may_skip(len(faulty), seen):
        raise FloatingPointError(
            f"{fault}, more than trainer.max_skipped={trainer.max_skipped} allows. Run the target in bfloat16 or "
            "float32 (model.dtype), or look at these samples"
        )
    if accelerator.is_main_process:
        logger.warning("%s. What is not finite is left out of it: look at these samples", fault)
