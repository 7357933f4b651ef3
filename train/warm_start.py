"""Before the first step: heads that ask for it start from a linear forecast, fitted by all processes together."""

import itertools
import logging
from typing import cast

from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from data.batches import BatchLoader
from heads.family import DraftHeads
from heads.target import FINAL_NORM
from heads.warm_start import LinearForecast
from train.display import Display
from train.features import FeatureSource

logger = logging.getLogger(__name__)


def warm_start(
    heads: DraftHeads,
    loader: BatchLoader,
    source: FeatureSource,
    init_tokens: int,
    accelerator: Accelerator,
    display: Display,
) -> None:
    """Start whole `heads` as their family says, from `init_tokens` supervised tokens or one epoch."""
    if not heads.forecasts:
        return
    forecast = LinearForecast(heads.forecasts, heads.forecast_size, heads.hidden_size, accelerator.device)
    tokens = 0
    for step in itertools.islice(loader.steps(0), loader.steps_per_epoch):
        for cpu_batch in step.micro_batches:
            batch = cpu_batch.to(accelerator.device)
            features = source(batch)
            inputs_BTI = heads.forecast_inputs(features, batch.ids_BT)
            forecast.add(inputs_BTI, features[FINAL_NORM], batch.ids_BT, batch.supervised_BT, batch.documents_BT)
        tokens += step.whole.num_supervised
        display.show(0, {"init/tokens": tokens})
        if tokens >= init_tokens:
            break
    forecast.combine(lambda sums: cast(Tensor, accelerator.reduce(sums, "sum")))
    heads.start_from(forecast)
    for tensor in (*heads.parameters(), *heads.buffers()):
        broadcast(tensor.data)
    logger.info("heads start from a linear forecast over %d supervised tokens", tokens)
