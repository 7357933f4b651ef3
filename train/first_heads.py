"""The heads that a run starts from: new ones over what its data supervises, or those that another run left."""

import logging
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from data.prepared import PreparedData
from heads import HEADS, vocabulary
from heads.family import DraftHeads
from heads.layout import heads_directory, load_heads
from heads.target import Target
from train.config import TrainConfig

logger = logging.getLogger(__name__)

# Shapes: V vocabulary; counts_V is how often the data supervises each id

# Settings that say how heads learn, not what they compute: heads go on under others.
OF_TRAINING = ("init", "noise", "num_steps", "objective", "regression_weight")


def first_heads(config: TrainConfig, target: Target, prepared: PreparedData) -> DraftHeads:
    """Heads on `target` in float32, as `init_from` or new.

    Raises:
        ValueError: if `init_from` holds no heads, or others than this run trains.
    """
    torch.manual_seed(config.seed)
    counts_V = prepared.token_counts(target.vocab_size)
    return new_heads(config, target, counts_V) if config.init_from is None else known_heads(config, target, counts_V)


def new_heads(config: TrainConfig, target: Target, counts_V: Tensor) -> DraftHeads:
    """New heads over the token ids that the data supervises most."""
    size = config.heads.draft_vocab_size
    if size is None:
        draft_ids = torch.arange(target.vocab_size)
    else:
        draft_ids = vocabulary.most_frequent(counts_V, size, target.eos_ids)
    return _of_this_run(config, target, draft_ids, counts_V).initialise()


def known_heads(config: TrainConfig, target: Target, counts_V: Tensor) -> DraftHeads:
    """The heads of `init_from`, with this run's settings of training; the target may be a fine-tune of theirs.

    Raises:
        ValueError: if there are none, or if they compute something else than this run's settings say.
    """
    assert config.init_from is not None
    known = load_heads(heads_directory(config.init_from, "init_from"), target, allow_other_weights=True)
    if known.kind != config.kind:
        raise ValueError(f"init_from={config.init_from} holds {known.kind} heads; set heads={known.kind}")
    heads = _of_this_run(config, target, vocabulary.from_offsets(known.d2t), counts_V)
    theirs, ours = _structure(known, known.config), _structure(known, heads.config)
    if wrong := next((name for name in ours if theirs[name] != ours[name]), None):
        raise ValueError(
            f"init_from={config.init_from} holds heads of {wrong}={theirs[wrong]}, but this run trains {wrong}="
            f"{ours[wrong]}; set {wrong}={theirs[wrong]}, or start from new heads with init_from=null"
        )
    heads.load_state_dict(known.state_dict())
    logger.info("heads start from %s", config.init_from)
    return heads


def _of_this_run(config: TrainConfig, target: Target, draft_ids: Tensor, counts_V: Tensor) -> DraftHeads:
    if len(draft_ids) < target.vocab_size:
        share = vocabulary.coverage(counts_V, draft_ids)
        logger.info(
            "draft vocabulary: %d of %d ids, %.2f%% of the tokens", len(draft_ids), target.vocab_size, 100 * share
        )
    family = HEADS[config.kind]
    heads = family(family.resolve(config.heads, target), target.hidden_size, target.vocab_size, draft_ids)
    return heads.bind(target)


def _structure(heads: DraftHeads, config: Any) -> dict[str, Any]:
    """What decides what heads of `config` compute, by the names of their settings."""
    structure = {}
    for name, value in asdict(config).items():
        if name == "layer":
            structure |= {f"heads.layer.{inner}": of_layer for inner, of_layer in value.items()}
        elif name == "draft_vocab_size":
            structure[f"heads.{name}"] = None if value == heads.vocab_size else value
        elif name not in OF_TRAINING:
            structure[f"heads.{name}"] = value
    return structure
