"""Everything that one training run holds, and what it does beside learning: log, measure, save."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor

from data.batches import BatchLoader
from data.disk import writing
from eval.benchmark import measure_tau
from eval.prompts import EvalPrompt
from heads.identity import TargetIdentity, identify
from heads.target import Target
from train import checkpoint, start
from train.adapter import Adapter
from train.checkpoint import RunState
from train.compiling import decoding
from train.config import TrainConfig, TrainerConfig
from train.display import Display
from train.drift import hand_out_adapter
from train.features import FeatureSource
from train.launch import join_processes
from train.metrics import Window, memory_gb
from train.optimizer import Clock, trainable_parameters
from train.parallel import Parallel
from train.provenance import GO_ON, open_directory, record
from train.tracking import Tracking
from train.warm_start import warm_start

# Shapes: S statistics (heads.objectives.Statistics), K heads

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """One run in one process."""

    trainer: TrainerConfig
    accelerator: Accelerator
    directory: Path
    target: Target
    adapter: Adapter | None  # of the target, in a run that trains one
    identity: TargetIdentity
    prompts: list[EvalPrompt]
    loader: BatchLoader
    depth: int  # of the heads
    parallel: Parallel
    source: FeatureSource
    tracking: Tracking
    display: Display
    clock: Clock
    fixed: dict[str, Any]
    window: Window
    done: int  # steps, the skipped ones included
    skipped: int  # steps, since their loss or gradient was not finite
    tokens: int  # supervised ones learned from, one seen twice as two
    saved: int  # the step of the last checkpoint, -1 before the first
    tau: float | None  # measured after step `done`, None if it was not

    @property
    def root(self) -> Path:
        return self.directory / "checkpoints"

    def fraction(self, step: int) -> float:
        """How much of the run is done in the middle of `step`, the same in all processes: 1 or more ends it."""
        timed = self.clock.max_seconds is not None
        return self.clock.fraction(step, start.from_main(self.clock.seconds, self.accelerator) if timed else 0.0)

    def count(self, loss: float, grad_norm: float, statistics_SK: Tensor, tokens: int, seconds: float) -> None:
        """Count one step done, on `tokens` supervised tokens in `seconds`."""
        self.window.add(loss, grad_norm, statistics_SK, tokens, seconds)
        self.done, self.tau = self.done + 1, None
        self.tokens += tokens

    def skip(self, fault: str) -> None:
        """Count one step done that changed nothing, since its loss or gradient was not finite: `fault` describes it.

        Raises:
            FloatingPointError: if it is one too many; the trainer's config states the rule.
        """
        self.skipped += 1
        self.done, self.tau = self.done + 1, None
        if not self.trainer.may_skip(self.skipped, self.done):
            raise FloatingPointError(
                f"{fault}. It is not saved (last checkpoint: {f'step {self.saved}' if self.saved >= 0 else 'none'}), "
                f"and {self.skipped} of {self.done} steps were skipped, more than trainer.max_skipped="
                f"{self.trainer.max_skipped} allows. Lower trainer.lr, lengthen trainer.warmup_ratio, or look at these "
                "samples"
            )
        if self.accelerator.is_main_process:
            logger.warning(
                "%s. It is skipped, as %d of %d steps are: look at these samples", fault, self.skipped, self.done
            )

    def log_window(self, rate: float) -> None:
        """Log the steps since the last time; `rate` is the latest learning rate."""
        seen = {"train/supervised_tokens": self.tokens, "train/skipped": self.skipped}
        metrics = {**self.window.metrics(), **self.source.metrics(), **seen}
        self._log({**metrics, "train/lr": rate, "train/memory_gb": memory_gb()})
        self.window = Window.empty(self.depth)

    def measure(self) -> None:
        """Measure tau by decoding held-out prompts; the other processes wait for it."""
        if not self.prompts:
            return
        together = self.trainer.shard_target  # then no process can run the target alone
        tau, alphas, heads = 0.0, [], self.parallel.gather_heads(everywhere=together)
        if self.accelerator.is_main_process or together:
            with decoding():
                tau, alphas = measure_tau(self.target, heads, self.prompts, self.trainer.eval_tokens)
        if self.accelerator.is_main_process:
            self._log({"eval/tau": tau, **{f"eval/alpha_{k}": alpha for k, alpha in enumerate(alphas, 1)}})
        self.tau = start.from_main(tau, self.accelerator)

    def save(self) -> None:
        """Save all that the rest of the run depends on; the other processes wait."""
        heads, moments = self.parallel.gather_heads(), self.parallel.gather_moments()
        if self.accelerator.is_main_process:
            state = RunState(
                step=self.done,
                seconds=self.clock.seconds,
                tau=self.tau,
                window=self.window.to_json(),
                fixed=self.fixed,
                skipped=self.skipped,
                tokens=self.tokens,
            )
            if self.adapter is not None:
                self.adapter.sign()
                self.identity = identify(self.target)
            checkpoint.save(self.root, heads, moments, state, self.identity, self.adapter)
            checkpoint.prune(self.root, self.trainer.keep_last)
        self.saved = self.done
        self.accelerator.wait_for_everyone()

    def finish(self) -> Path:
        """Measure and save what is not yet, hand out the best heads; returns their directory."""
        self.display.advance(self.done, 1.0)
        if self.saved != self.done or (self.prompts and self.tau is None):
            self.measure()
            self.save()
        handed_out = self.directory / "heads"
        if self.accelerator.is_main_process:
            best = checkpoint.best(self.root)
            assert best is not None
            with writing(handed_out, GO_ON):
                checkpoint.copy_heads(best, handed_out)
            logger.info("%s: %s, tau %s", handed_out, best.name, checkpoint.read_state(best).tau)
            if self.adapter is not None:
                tokens, bar = self.trainer.eval_tokens, self.display.bar
                hand_out_adapter(self.adapter, best, self.directory / "adapter", self.prompts, tokens, bar)
        self.parallel.close()
        self.tracking.log_heads(handed_out)
        self.tracking.close()
        return handed_out

    def _log(self, metrics: dict[str, float]) -> None:
        self.tracking.log(metrics, self.done)
        self.display.show(self.done, metrics)


def start_run(config: TrainConfig) -> Run:
    """Load everything, from the last whole checkpoint if the run is resumed.

    Raises:
        ValueError: for a setting, a source or a run directory that cannot be used.
    """
    accelerator = join_processes(config)
    directory = open_directory(config, accelerator)
    target = start.load_frozen_target(config, accelerator)
    adapter = start.build_adapter(config, target)
    prepared = start.load_data(config, target, accelerator)
    loader = start.build_loader(config, target, prepared, accelerator)
    num_steps = start.count_steps(config, loader)
    fixed = start.fixed_settings(config, prepared)

    resumed = start.newest_checkpoint(directory / "checkpoints", accelerator) if config.resume else None
    heads, state = start.open_heads(config, target, adapter, prepared, resumed, fixed)
    trainable_parameters(heads, target)
    identity, run_id = identify(target), ""
    if accelerator.is_main_process:
        facts = {"from_step": state.step, "data_digest": prepared.digest, "target": asdict(identity)}
        run_id = record(config, directory, {**facts, **heads.describe()})
    trainer = config.trainer
    source = start.build_source(config, target, adapter, heads, prepared)
    display = Display(num_steps, accelerator.is_main_process)
    clock = Clock(num_steps, trainer.max_seconds, state.seconds)  # the warm start's time counts
    if state.step == 0 and config.init_from is None:
        with display:
            warm_start(heads, loader, source, trainer, accelerator, display)

    parallel = start.parallelise(heads, adapter, trainer, accelerator)
    if resumed is not None:
        parallel.restore(load_file(resumed / checkpoint.OPTIMIZER_FILE))
    logger.info("%s: %d steps of %d rows, %d an epoch", directory, num_steps, loader.batch_size, loader.steps_per_epoch)
    return Run(
        trainer=trainer,
        accelerator=accelerator,
        directory=directory,
        target=target,
        adapter=adapter,
        identity=identity,
        prompts=start.load_probes(config, target),
        loader=loader,
        depth=heads.depth,
        parallel=parallel,
        source=source,
        tracking=Tracking(accelerator, config, directory, run_id, state.step),
        display=display,
        clock=clock,
        fixed=fixed,
        window=Window.from_json(state.window),
        done=state.step,
        skipped=state.skipped,
        tokens=state.tokens,
        saved=-1 if resumed is None else state.step,
        tau=state.tau,
    )
