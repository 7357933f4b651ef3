"""Medusa heads rebuilt from exported files, in plain torch, as vLLM and TGI read them.

head k at anchor t: final_norm[t] -> blocks x + SiLU(W x + b) -> LM head -> guess of x[t+2+k]
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from eval.parity.certificate import GoldenPrompt
from eval.parity.expected import Expected, Shape
from eval.parity.replay import Entered
from heads.target import FINAL_NORM

# Shapes: K heads, D hidden, Ve ids that the engine drafts, C columns


@dataclass(frozen=True)
class MedusaSpec:
    """Medusa heads as an engine understands its config.json. block: the name of a layer of a head."""

    engine: str
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    block: str
    biases: bool
    lm_heads: tuple[str, ...]  # in the file: one for each head, one for all, or none: the engine takes the target's

    @property
    def shared(self) -> bool:
        return len(self.lm_heads) < self.num_heads or self.lm_heads == ("lm_head.weight",)

    def name(self, head: int, layer: int) -> str:
        return self.block.format(head=head, layer=layer)

    def expected(self) -> Expected:
        """The tensors that the engine looks for."""
        width = self.hidden_size
        shapes: dict[str, Shape] = dict.fromkeys(self.lm_heads, (self.vocab_size, width))
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                shapes[f"{self.name(head, layer)}.weight"] = (width, width)
                if self.biases:
                    shapes[f"{self.name(head, layer)}.bias"] = (width,)
        return Expected(shapes, {})


def read_medusa_spec(format_name: str, config: Mapping[str, Any], hidden_size: int, vocab_size: int) -> MedusaSpec:
    """What an engine makes of config.json; TGI derives both sizes from the target.

    Raises:
        ValueError: naming a key that it needs and does not find.
    """
    if format_name == "fasterdecoding":
        heads, layers = _sizes(config, "medusa_num_heads", "medusa_num_layers")
        own = () if config.get("version") == "2" else tuple(f"{head}.{layers}.weight" for head in range(heads))
        return MedusaSpec("TGI", heads, layers, hidden_size, vocab_size, "{head}.{layer}.linear", True, own)
    heads, layers, width, vocabulary = _sizes(config, "num_heads", "num_hidden_layers", "hidden_size", "vocab_size")
    one = config.get("original_lm_head") is True
    lm_heads = ("lm_head.weight",) if one else tuple(f"lm_heads.{head}.weight" for head in range(heads))
    biases = config.get("medusa_fc_bias") is True  # else vLLM drops them and does not say so
    return MedusaSpec("vLLM", heads, layers, width, vocabulary, "blocks.{head}.layers.{layer}", biases, lm_heads)


def _sizes(config: Mapping[str, Any], *keys: str) -> list[int]:
    if lacking := [key for key in keys if type(config.get(key)) is not int]:
        raise ValueError(f"config.json lacks {', '.join(lacking)}")
    return [config[key] for key in keys]


@dataclass(frozen=True)
class MedusaReplay:
    """weights: by the names in the file. lm_heads: rows of each head. order: which head drafts at which step."""

    spec: MedusaSpec
    weights: dict[str, Tensor]
    lm_heads: tuple[Tensor, ...]
    ids_E: Tensor
    order: tuple[int, ...] | None = None
    anchor_shift: int = 0

    def sequence(self, prompt: GoldenPrompt) -> "Features":
        """The features of a prompt and its continuation, of which each anchor reads its own."""
        return Features(self, prompt)

    def state(self, hidden_D: Tensor, head: int) -> Tensor:
        for layer in range(self.spec.num_layers):
            name = self.spec.name(head, layer)
            bias_D = self.weights[f"{name}.bias"] if self.spec.biases else None
            hidden_D = hidden_D + F.silu(F.linear(hidden_D, self.weights[f"{name}.weight"], bias_D))
        return hidden_D


@dataclass(frozen=True)
class Features(Entered):
    """The features of a prompt, with the heads that read them; no draft is read."""

    replay: MedusaReplay
    prompt: GoldenPrompt

    def drafts(self, anchor: int, forced_K: Tensor | None = None, columns: Tensor | None = None) -> Iterator[Tensor]:
        replay = self.replay
        hidden_D = self.prompt.features[FINAL_NORM][self.prompt.place(anchor) + replay.anchor_shift]
        for head in replay.order or range(replay.spec.num_heads):
            rows_ED = replay.lm_heads[head] if columns is None else replay.lm_heads[head][columns]
            yield (rows_ED @ replay.state(hidden_D, head))[None]
