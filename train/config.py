"""What a training run is told: one dataclass on top of those of the target, the heads and the data."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, make_dataclass
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from data.shards import DataConfig
from eval.config import from_hydra as convert
from heads import HEADS
from heads.target import TargetConfig
from train.adapter import AdapterConfig

Config = TypeVar("Config")

PRECISIONS = ("auto", "float32", "bfloat16")
TRACKERS = ("wandb", "tensorboard", "none")
# What AdamW learns each family at: by their authors' recipes, for EAGLE by today's trainers (SpecForge, ModelOpt).
LEARNING_RATES = {"medusa": 1e-3, "hydra": 5e-4, "eagle": 1e-4, "eagle3": 1e-4}
RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("steps batch_size micro_batch_size log_every keep_last eval_tokens init_tokens", lambda v: v >= 1, "at least 1"),
    ("eval_every save_every eval_prompts weight_decay", lambda v: v >= 0, "at least 0; 0 is for none"),
    ("epochs max_seconds lr clip_norm", lambda v: v > 0, "above 0"),
    ("warmup_ratio min_lr_ratio max_skipped", lambda v: 0 <= v <= 1, "in [0, 1]; it is a share"),
    ("beta1 beta2", lambda v: 0 <= v < 1, "in [0, 1); 0.9 and 0.95 are customary"),
)


@dataclass(frozen=True)
class TrainerConfig:
    """`conf/trainer/`. A step is one update of the optimiser, over `batch_size` rows of all processes.

    steps: None takes them from `epochs`.
    max_seconds: a time budget for the loop (a resumed run counts the seconds before). The learning rate follows
        whichever is further, the share of the steps or of the seconds, so that the run ends annealed; the last
        measurement and save come on top. Such a run is not repeatable to the bit.
    init_tokens: supervised tokens that heads.init=regression is fitted on, at most one epoch.
    keep_features: keep the target's features in memory, so that the warm start and each row's first epoch are all
        that the target costs.
    features: a directory that scripts/extract_features.py wrote for this target, these heads, and this data or more;
        the target's decoder is then not run in training.
    compile: torch.compile the target's decoder blocks and parts of the heads (train/compiling.py): slow to start. On a
        CPU the target's layers then keep their usual layout, which a compiler needs.
    gradient_checkpointing: in the backward, compute the activations of each EAGLE step, Hydra head or stack of Medusa
        blocks again instead of keeping them, and with an adapter those of the target's decoder blocks: a step takes
        longer in less memory, gradients are the same.
    lr: the largest learning rate; null in YAML is that of the heads' family (LEARNING_RATES).
    shard_target: the processes share the target out: each keeps a part of every decoder block (FSDP2), for targets that
        one GPU does not hold.
    max_skipped: the largest share of the steps done so far that may be skipped. A step whose loss or gradient is not
        finite is skipped: no weight and no moment changes, the learning rate goes on. One step always may be skipped,
        unless this is 0.
    precision: what heads compute in; their masters and the optimiser are float32 always. "auto" is the dtype of
        the target, in which they will be served.
    eval_every, save_every: in steps; 0 is only at the end. A measured step is saved too.
    keep_last: whole checkpoints kept beside the best.
    eval_prompts, eval_tokens: held-out prompts, and new tokens for each, that tau is measured on; 0: never.
    """

    steps: int | None = None
    epochs: float = 1.0
    max_seconds: float | None = None
    batch_size: int = 16
    micro_batch_size: int = 2
    lr: float = 1e-3
    warmup_ratio: float = 0.05
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    max_skipped: float = 0.01
    precision: str = "auto"
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 500
    init_tokens: int = 65536
    keep_features: bool = False
    features: str | None = None
    compile: bool = False
    gradient_checkpointing: bool = False
    shard_target: bool = False
    keep_last: int = 2
    eval_prompts: int = 16
    eval_tokens: int = 128
    tracker: str = "wandb"

    def __post_init__(self):
        for names, fits, rule in RANGES:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not fits(value):
                    raise ValueError(f"trainer.{name}={value} must be {rule}")
        if self.keep_features and self.features is not None:
            raise ValueError(
                f"trainer.keep_features=true keeps what the target says, trainer.features={self.features} replaces the "
                "target; set trainer.keep_features=false"
            )
        for name, choices in (("precision", PRECISIONS), ("tracker", TRACKERS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"trainer.{name}={getattr(self, name)} must be one of {', '.join(choices)}")

    def may_skip(self, skipped: int, done: int) -> bool:
        """Whether a run may go on after it has skipped `skipped` of `done` steps."""
        return skipped <= self.max_skipped * done or (skipped == 1 and self.max_skipped > 0)


@dataclass(frozen=True)
class TrainConfig:
    """`conf/train.yaml`. `heads` is the config of one family; `kind` names the family.

    init_from: the directory of a run, a checkpoint or imported heads: these go on learning, on this run's data.
    """

    model: TargetConfig
    heads: Any
    data: DataConfig
    run_name: str
    output_dir: str
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    adapter: AdapterConfig | None = None  # Medusa-2: train a LoRA adapter on the target, too
    threads: int | None = None  # CPU threads of a process; None shares the cores among the processes
    seed: int = 0
    init_from: str | None = None
    resume: bool = False

    def __post_init__(self):
        if not self.run_name or "/" in self.run_name:
            raise ValueError(f"run_name={self.run_name!r} must be a name without '/'; it becomes a folder")
        if self.trainer.eval_prompts and not self.data.heldout:
            raise ValueError(
                "data.heldout=[] must name prompts to measure tau on; give a source, or set trainer.eval_prompts=0"
            )
        if self.adapter is not None:
            self._check_adapter()
        if self.trainer.shard_target:
            self._check_sharing()
        if self.trainer.compile:
            self._check_compiling()

    def _check_adapter(self) -> None:
        problem = ""
        if self.trainer.keep_features:
            problem = "trainer.keep_features=true keeps features that change with it; set it to false"
        elif self.trainer.features is not None:
            problem = f"trainer.features={self.trainer.features} was stored from the original; set it to null"
        elif self.model.adapter is not None:
            problem = (
                f"model.adapter={self.model.adapter} is on the target already; merge that one with "
                "scripts/merge_adapter.py, give the result as model.path=... and set model.adapter=null"
            )
        if problem:
            raise ValueError(f"adapter: the target is trained here, but {problem}")

    def _check_sharing(self) -> None:
        problem = ""
        if self.trainer.keep_features or self.trainer.features is not None:
            problem = "all processes must run it equally often; keep or store no features"
        elif self.adapter is not None:
            problem = "adapter= trains it; train the adapter on a target that each process holds whole"
        elif self.model.device_map is not None:
            problem = f"model.device_map={self.model.device_map} spreads it already; set it to null"
        elif self.model.quantization is not None:
            problem = f"parts of quantised weights ({self.model.quantization}) cannot be put together; set it to null"
        if problem:
            raise ValueError(f"trainer.shard_target=true shares the target out, but {problem}")

    def _check_compiling(self) -> None:
        problem = ""
        if self.adapter is not None:
            problem = "adapter= turns layers of the target on and off, each time another program"
        elif self.model.device_map is not None:
            problem = f"model.device_map={self.model.device_map} moves data between GPUs by hooks inside of it"
        elif self.model.quantization is not None:
            problem = f"quantised weights ({self.model.quantization}) come with kernels of their own"
        if problem:
            raise ValueError(f"trainer.compile=true compiles the target, but {problem}; set trainer.compile=false")

    @property
    def kind(self) -> str:
        """The name of the heads' family in `heads.HEADS`."""
        return next(kind for kind, family in HEADS.items() if family.config_class is type(self.heads))

    def resolved(self) -> dict[str, Any]:
        """Everything as plain values, in the shape of the YAML that makes this config."""
        values = asdict(self)
        return {**values, "heads": {"kind": self.kind, **values["heads"]}}


def from_hydra(composed: DictConfig | dict[str, Any]) -> TrainConfig:
    """Turn the composed YAML into a checked TrainConfig; the rest of the program never sees OmegaConf.

    Where `trainer.lr` is null, it becomes that of the heads' family.

    Raises:
        ValueError: naming an unknown kind or key, a missing value, a wrong type or a value out of range.
    """
    values = OmegaConf.create(composed)
    kind = OmegaConf.select(values, "heads.kind")
    if kind in LEARNING_RATES and OmegaConf.select(values, "trainer.lr") is None:
        OmegaConf.update(values, "trainer.lr", LEARNING_RATES[kind], force_add=True)
    return with_heads(TrainConfig, values)


def with_heads(base: type[Config], composed: DictConfig | dict[str, Any]) -> Config:
    """`from_hydra` for any dataclass whose field `heads` is the config of one family."""
    values = OmegaConf.to_container(OmegaConf.create(composed), resolve=True)
    assert isinstance(values, dict)
    heads = values.get("heads")
    if not isinstance(heads, dict):
        raise ValueError(f"heads={heads} must be a group of settings with a kind; see conf/heads/")
    if heads.get("kind") not in HEADS:
        raise ValueError(f"heads.kind={heads.get('kind')} must be one of {', '.join(HEADS)}; choose with heads=<name>")
    family = HEADS[heads.pop("kind")].config_class
    # The family decides the type of `heads`, so that its keys are checked like all others and named in full.
    typed: list[Any] = [("heads", family)]
    if values.get("adapter") is not None:  # the merge cannot fill what may be None
        typed.append(("adapter", AdapterConfig, field(default_factory=AdapterConfig)))
    schema = make_dataclass(base.__name__, typed, bases=(base,), frozen=True)
    return convert(schema, OmegaConf.create(values))
