"""The adapter that Medusa-2 trains on the target, together with heads (arXiv 2401.10774, section 2.2.2).

The base weights stay frozen, to the bit. With the adapter off the target is the original, which so teaches the adapted
one without a second copy of its weights. With the adapter on it is another model: the one that heads are trained on
and that must be served.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from heads.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_sha256, chained, without_deprecation
from heads.export.files import check_tensors, read_tensors, write_tensors
from heads.identity import public_name
from heads.target import Target

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
DRIFT_FILE = "drift.json"  # beside them, see train/drift.py


@dataclass(frozen=True)
class AdapterConfig:
    """`conf/adapter/`. Rank and scale are those of Medusa-2's published recipes.

    r, alpha: rank, and scale times rank: an adapted layer computes W + (alpha / r) B A.
    dropout: on what A reads, in training alone.
    targets: linear layers of the decoder's blocks, by the last part of their names. The embedding and the LM head
        are none of them, so that a tie between these holds.
    lr_ratio: learning rate of the adapter over that of the heads.
    warmup_share: share of the run in which heads learn alone. The adapter then starts with its own warm-up
        (trainer.warmup_ratio of what is left), so that untrained heads do not pull the target astray.
    lm_weight: loss = heads' loss + lm_weight * KL(original || adapted), the mean over supervised tokens. It is
        1 / lambda_0 of the paper: 100 in its recipe with a self-distilled target.
    """

    r: int = 32
    alpha: int = 16
    dropout: float = 0.0
    targets: list[str] = field(default_factory=lambda: list(PROJECTIONS))
    lr_ratio: float = 0.25
    warmup_share: float = 0.25
    lm_weight: float = 100.0

    def __post_init__(self):
        for names, fits, rule in (
            (("r", "alpha"), lambda value: value >= 1, "at least 1; for no adapter leave out adapter="),
            (("dropout", "warmup_share"), lambda value: 0 <= value < 1, "in [0, 1); it is a share"),
            (("lr_ratio",), lambda value: value > 0, "above 0; 0.25 is customary"),
            (("lm_weight",), lambda value: value >= 0, "at least 0; 0 lets the target drift freely"),
        ):
            for name in names:
                if not fits(getattr(self, name)):
                    raise ValueError(f"adapter.{name}={getattr(self, name)} must be {rule}")
        if not self.targets:
            raise ValueError(f"adapter.targets=[] must name layers; {', '.join(PROJECTIONS)} are customary")


class Adapter:
    """A new LoRA adapter on `target`, which computes what it did before until the adapter has moved.

    parameters: the trained weights (float32) by their names in peft's files.
    moving: whether they are trained now.

    Raises:
        ValueError: if the target has no such layers, or caps its logits.
    """

    def __init__(self, target: Target, config: AdapterConfig, seed: int):
        if target.softcap is not None:
            raise ValueError(
                f"adapter: targets of type {target.text_config.model_type} cap their logits, which the distance to the "
                "original does not follow; leave out adapter=, or choose another target"
            )
        self.target, self.config, self.moving = target, config, False
        self.merged_before = target.adapter_sha256
        settings = LoraConfig(
            task_type="CAUSAL_LM",
            r=config.r,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=layer_names(target, config.targets),
        )
        torch.manual_seed(seed)  # the same start in all processes
        with without_deprecation():
            self.model = get_peft_model(target.model, settings).eval()
        trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self.parameters = {name.replace(".default.", "."): value for name, value in trained.items()}
        self.let_move(False)

    def let_move(self, moving: bool) -> None:
        """Train the adapter from now on, or let it rest."""
        self.moving = moving
        for parameter in self.parameters.values():
            parameter.requires_grad_(moving)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the target is the original."""
        tuner: Any = self.model.base_model
        tuner.disable_adapter_layers()
        try:
            yield
        finally:
            tuner.enable_adapter_layers()
            self.let_move(self.moving)  # peft turns gradients off and on with the layers

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Inside, dropout is on."""
        drops = [module for module in self.model.modules() if isinstance(module, nn.Dropout)]
        for module in drops:
            module.train()
        try:
            yield
        finally:
            for module in drops:
                module.eval()

    def sign(self) -> None:
        """Let the target carry the digest of the adapter as it stands: heads saved now belong to this target."""
        self.target.adapter_sha256 = chained(self.merged_before, adapter_sha256(self.model))

    def save(self, directory: Path) -> None:
        """Write the adapter into `directory` in peft's layout."""
        settings = copy.copy(self.model.peft_config["default"])
        settings.inference_mode, settings.base_model_name_or_path = True, public_name(self.target.config)
        settings.save_pretrained(str(directory))
        write_tensors(directory / ADAPTER_WEIGHTS, self.parameters)

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote.

        Raises:
            ValueError: if a tensor is missing, unexpected or of another shape.
        """
        path = directory / ADAPTER_WEIGHTS
        tensors = read_tensors(path)
        expected = {name: (tuple(value.shape), value.dtype) for name, value in self.parameters.items()}
        check_tensors(tensors, expected, path)
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
        self.sign()


def layer_names(target: Target, wanted: list[str]) -> list[str]:
    """Full names of the linear layers in the decoder's blocks whose last part is among `wanted`.

    Raises:
        ValueError: naming what is not there, and what is.
    """
    blocks = {id(module) for module in target.decoder.get_submodule("layers").modules()}
    linear = [
        name for name, module in target.model.named_modules() if id(module) in blocks and isinstance(module, nn.Linear)
    ]
    known = sorted({name.rpartition(".")[2] for name in linear})
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(
            f"adapter.targets: {unknown[0]} is no linear layer of the decoder's blocks; they have {', '.join(known)} "
            "(the embedding and the LM head stay as they are, since they can be tied)"
        )
    return [name for name in linear if name.rpartition(".")[2] in wanted]
