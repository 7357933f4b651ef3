"""One training step, ours or naive, that can be repeated and tells the seconds of its phases.

The step is that of `train.loop`, on one batch of made-up conversations: nothing in its cost depends on the text.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from data.batches import Batch, BatchLoader
from data.prepared import PreparedData, Summary
from eval.threads import use_threads
from heads import HEADS
from heads.alignment import label_counts
from heads.family import DraftHeads
from heads.target import DTYPES, Target, TargetConfig, load_target, place_target, preferred_dtype
from heads.tiny import FAMILIES, SHAPE, tiny_tokenizer
from train import naive_losses
from train.compiling import check_compiler, compile_heads, compile_target
from train.config import TrainerConfig
from train.features import FeatureSource
from train.optimizer import build_optimizer, trainable_parameters

# Shapes: B rows, T tokens, K heads or steps

OURS, NAIVE = "ours", "naive"
FORMS = {OURS: HEADS, NAIVE: naive_losses.NAIVE}
OPTIONS = ("compile", "gradient_checkpointing")  # of the trainer: ours with one of them is a form, too
PHASES: tuple[str, ...] = ("data", "target", "heads", "loss", "backward", "optimiser")
DEPTH = {"medusa": "num_heads", "hydra": "num_heads", "eagle": "num_steps", "eagle3": "num_steps"}
LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
# Random targets that can have any vocabulary, by model.path.
SHAPES: dict[str, dict[str, Any]] = {
    "random:smollm2-shape": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "tie_word_embeddings": True,
        "initializer_range": 0.04,
    },
    "random:llama": {**SHAPE, **FAMILIES["llama"]},
    "random:llama3-1b-shape": {
        **LLAMA3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "random:llama3-8b-shape": {
        **LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Case:
    """One step to measure: `depth` Medusa or Hydra heads, or EAGLE steps.

    vocabulary: of a random target, None for its own. supervised: the share of each row that is an answer.
    draft_vocabulary: how many token ids the heads can propose, None for all.
    """

    family: str
    depth: int
    model: TargetConfig
    vocabulary: int | None
    rows: int
    tokens: int
    supervised: float
    threads: int | None
    draft_vocabulary: int | None = None


class TrainingStep:
    """One optimiser step that can be repeated: ours, also with one of OPTIONS, or naive.

    Raises:
        ValueError: if the target cannot be loaded, or nothing can be compiled here.
    """

    def __init__(self, case: Case, form: str):
        trainer = replace(TrainerConfig(), **{form: True} if form in OPTIONS else {})
        use_threads(case.threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if trainer.compile:
            check_compiler(device)
        self.target = load_or_make_target(case.model, case.vocabulary, device, pack=not trainer.compile)
        self.loader = batch_loader(case, self.target.vocab_size, micro_batch_size=case.rows)
        self.batch = self.next_batch()
        self.heads = make_heads(case, self.target, FORMS.get(form, HEADS))
        self.heads.gradient_checkpointing = trainer.gradient_checkpointing
        if trainer.compile:
            compile_target(self.target)
            compile_heads(self.heads)
        self.source = FeatureSource(self.target, self.heads.training_taps, self.target.dtype, keep=False)
        self.trainable = trainable_parameters(self.heads, self.target)
        self.optimizer = build_optimizer(self.trainable, trainer)
        self.watch = Stopwatch(device)
        self.heads.loss = self.watch.around("loss", self.heads.loss)

    def __call__(self) -> dict[str, float]:
        """Take the step; returns the seconds of each of PHASES."""
        watch = self.watch
        watch.reset()
        with watch("data"):
            batch = self.batch = self.next_batch()
            counts_K = label_counts(batch.supervised_BT, batch.documents_BT, self.heads.depth)
        with watch("target"):
            features = self.source(batch)
        with watch("heads"):
            loss, _ = self.heads(features, *inputs_of(batch), counts_K)
        with watch("backward"):
            loss.backward()
        with watch("optimiser"):
            nn.utils.clip_grad_norm_(self.trainable.values(), TrainerConfig().clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        watch.seconds["heads"] -= watch.seconds["loss"]  # which ran inside of it
        return watch.seconds

    def next_batch(self) -> Batch:
        """The batch of the coming step, put together anew; it is the same each time."""
        return self.loader.step(0).micro_batches[0].to(self.target.device)


class Stopwatch:
    """Adds up the seconds of PHASES."""

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = self._now()
        yield
        self.seconds[phase] += self._now() - began

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its calls counted as `phase`."""

        def timed(*arguments: Any) -> Any:
            with self(phase):
                return function(*arguments)

        return timed

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def load_or_make_target(
    config: TargetConfig, vocabulary: int | None, device: torch.device, pack: bool = True
) -> Target:
    """The target of `config`; those of SHAPES are made here, with `vocabulary` token ids if it is given.

    Raises:
        ValueError: if the target cannot be loaded, or cannot have another vocabulary.
    """
    if config.path not in SHAPES:
        if vocabulary is not None:
            raise ValueError(
                f"vocabulary={vocabulary} needs a target of random weights, but {config.path} has its own; leave out "
                "vocabulary, or model"
            )
        return load_target(config, device, pack)
    shape = SHAPES[config.path]
    torch.manual_seed(0)
    with device:  # billions of weights are drawn in a second there, in minutes on a CPU
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**{**shape, "vocab_size": vocabulary or shape["vocab_size"]}),
            dtype=preferred_dtype(device) if config.dtype == "auto" else DTYPES[config.dtype],
            attn_implementation="sdpa",
        )
    return place_target(model, tiny_tokenizer(), config, device, pack)


def batch_loader(case: Case, vocab_size: int, **sharing: int) -> BatchLoader:
    """One step of rows of one prompt and one answer each, of random tokens; `sharing` says how it is divided."""
    ids_BT = torch.randint(0, vocab_size, (case.rows, case.tokens), generator=torch.Generator().manual_seed(0))
    answered_T = torch.arange(case.tokens) >= round(case.tokens * (1 - case.supervised))
    supervised_BT = answered_T.expand_as(ids_BT)
    counts = (case.rows, case.rows, ids_BT.numel(), int(supervised_BT.sum()), 0, 0, case.rows, 0)
    prepared = PreparedData(
        ids_N=ids_BT.flatten().int(),
        supervised_N=supervised_BT.flatten().to(torch.uint8),
        offsets_S1=torch.arange(case.rows + 1) * case.tokens,
        category_S=torch.zeros(case.rows, dtype=torch.int32),
        category_names=["made up"],
        summary=Summary(*counts, problems={}),
        digest="",
    )
    return BatchLoader(prepared, batch_size=case.rows, max_length=case.tokens, packing=False, pad_id=0, **sharing)


def make_heads(case: Case, target: Target, families: dict[str, type[DraftHeads]]) -> DraftHeads:
    """Fresh heads, every parameter disturbed: a layer that starts as nothing would have no gradients to compare."""
    torch.manual_seed(0)
    family = families[case.family]
    config = family.resolve(family.config_class(**{DEPTH[case.family]: case.depth}), target)
    with target.device:
        draft_ids = torch.arange(case.draft_vocabulary or target.vocab_size)
        heads = family(config, target.hidden_size, target.vocab_size, draft_ids)
    heads.bind(target).initialise()
    for parameter in heads.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    if isinstance(heads, naive_losses.FullLogits):
        heads.split()
    return heads


def inputs_of(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What heads are given of a batch besides features and label counts."""
    return batch.ids_BT, batch.supervised_BT, batch.documents_BT, batch.positions_BT
