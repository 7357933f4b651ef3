"""The loop that fits heads: step, log, measure, save."""

import math
import time
from pathlib import Path

from train.config import TrainConfig
from train.optimizer import set_learning_rate
from train.run import start_run
from train.step import accumulate_gradients, check_synchronised, describe_fault, seed_step

# Shapes: S statistics (heads.objectives.Statistics), K heads


def train(config: TrainConfig) -> Path:
    """Fit heads and return the directory of the best ones, `<output_dir>/heads`.

    Raises:
        ValueError: for a setting, a source or a run directory that cannot be used.
        FloatingPointError: if more steps are skipped than `trainer.max_skipped` allows; nothing is saved after it.
        SaveError: if a checkpoint cannot be written.
    """
    run, trainer = start_run(config), config.trainer
    with run.display:
        for step in run.source.ahead(run.loader.steps(run.done)):
            fraction = run.fraction(step.number)
            if fraction >= 1:
                break
            began = time.monotonic()
            seed_step(config.seed, step.number, run.accelerator.process_index)
            run.source.begin(fraction)
            loss, statistics_SK = accumulate_gradients(step, run.source, run.parallel)
            rate = set_learning_rate(run.parallel.optimizer, fraction, trainer)
            norm = run.parallel.update()
            check_synchronised(norm, run.accelerator)
            seconds, grad_norm = time.monotonic() - began, norm.item()
            if math.isfinite(grad_norm):
                run.count(loss, grad_norm, statistics_SK, step.whole.num_supervised, seconds)
            else:
                run.skip(describe_fault(loss, grad_norm, step, run.loader.step_rows(step.number)))
            run.display.advance(run.done, fraction)

            if _is_due(run.done, trainer.log_every):
                run.log_window(rate)
            if _is_due(run.done, trainer.eval_every):
                run.measure()
            if run.tau is not None or _is_due(run.done, trainer.save_every):
                run.save()
        return run.finish()


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
