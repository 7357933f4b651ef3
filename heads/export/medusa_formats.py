"""The formats in which engines read Medusa heads: config keys, tensor names and shapes, in one table.

    fasterdecoding   FasterDecoding/Medusa's `medusa_lm_head.safetensors`, served by TGI
    vllm             vLLM's `MedusaModel`, up to vLLM 0.32

Writing, reading and checking follow from the table (`medusa_writer`, `medusa_reader`). Both formats know
the full vocabulary only.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from heads.export.engines import VLLM_ON_CPU, VLLM_PORT, ask

# Shapes: K heads, L layers, D hidden, V vocabulary

# In the directory of the export.
TO_PICKLE = (
    'python -c "import torch; from safetensors.torch import load_file; '
    "torch.save(load_file('medusa_lm_head.safetensors'), 'medusa_lm_head.pt')\""
)
TARGET_LM_HEAD = "target_lm_head"  # stands beside the names of MedusaHeads.state_dict()


@dataclass(frozen=True)
class Outline:
    """What determines the config keys, tensor names and shapes of exported Medusa heads."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    shared: bool  # all heads use the target's LM head
    dtype: str
    target: str


@dataclass(frozen=True)
class Source:
    """Where a tensor of a format lies in our stacked ones: `name[index]`, of the given shape."""

    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MedusaFormat:
    """One row of the table.

    Names may hold {head}, {layer} and {num_layers}. config maps each key to its value. Files from elsewhere
    may lack the `optional` keys, have any value under the `free` ones, and have the `ignored` ones besides.
    """

    weights_file: str
    block: str
    own_lm_head: str
    shared_lm_head: str | None  # None: not in the file, the engine takes the target's
    config: Mapping[str, Callable[[Outline], Any]]
    num_heads_key: str
    num_layers_key: str
    shared_key: str
    optional: frozenset[str]
    free: frozenset[str]
    ignored: frozenset[str]
    serve: Callable[[Outline, str], str]  # the command, given the directory
    limits: Callable[[Outline], list[str]]

    def tensors(self, outline: Outline) -> dict[str, Source]:
        """Every tensor of the weights file."""
        D, V, num_layers = outline.hidden_size, outline.vocab_size, outline.num_layers
        table: dict[str, Source] = {}
        for head in range(outline.num_heads):
            for layer in range(num_layers):
                block = self.block.format(head=head, layer=layer)
                table[f"{block}.weight"] = Source("block_weight", (layer, head), (D, D))
                table[f"{block}.bias"] = Source("block_bias", (layer, head), (D,))
            if not outline.shared:
                table[self.own_name(head, num_layers)] = Source("lm_head_weight", (head,), (V, D))
        if outline.shared and self.shared_lm_head is not None:
            table[self.shared_lm_head] = Source(TARGET_LM_HEAD, (), (V, D))
        return table

    def own_name(self, head: int, num_layers: int) -> str:
        """Name of the LM head that belongs to one Medusa head."""
        return self.own_lm_head.format(head=head, num_layers=num_layers)

    def values(self, outline: Outline) -> dict[str, Any]:
        """The whole of config.json."""
        return {key: value(outline) for key, value in self.config.items()}


def _serve_vllm(outline: Outline, directory: str) -> str:
    settings = {"method": "medusa", "model": directory, "num_speculative_tokens": outline.num_heads}
    speculative = shlex.quote(json.dumps(settings, separators=(",", ":")))
    return f"vllm serve {shlex.quote(outline.target)} --speculative-config {speculative}"


def _serve_tgi(outline: Outline, directory: str) -> str:
    return f"text-generation-launcher --model-id {shlex.quote(directory)}"


def _vllm_limits(outline: Outline) -> list[str]:
    return [
        ask(VLLM_PORT),
        VLLM_ON_CPU,
        "vLLM 0.32 is the last release with Medusa, 0.33 refuses method=medusa: pip install 'vllm==0.32.*'",
        "vLLM drafts the single best chain, no tree: expect a lower tau than that of a draft tree",
    ]


def _fasterdecoding_limits(outline: Outline) -> list[str]:
    limits = [
        f"TGI finds the target by base_model_name_or_path={outline.target}: a hub id or a path there",
        f"FasterDecoding's own decoder and TensorRT-LLM's older engines read a pickle, so there: {TO_PICKLE}",
        "the draft tree is not part of the format: TGI drafts a chain, FasterDecoding uses trees of its own",
    ]
    if outline.num_layers > 1:
        limits.append(
            f"FasterDecoding's own decoder repeats one block {outline.num_layers} times and so would use "
            "only the last layer of each head, without an error; TGI reads all layers"
        )
    if outline.num_layers > 1 and outline.shared:
        limits.append(
            "TGI reads version 2 (shared LM head) with one layer only; train with heads.num_layers=1 or "
            "heads.lm_head=own for it"
        )
    return limits


FORMATS = {
    "fasterdecoding": MedusaFormat(
        weights_file="medusa_lm_head.safetensors",
        block="{head}.{layer}.linear",
        own_lm_head="{head}.{num_layers}.weight",
        shared_lm_head=None,
        config={
            "model_type": lambda outline: "medusa",
            "base_model_name_or_path": lambda outline: outline.target,
            "medusa_num_heads": lambda outline: outline.num_heads,
            "medusa_num_layers": lambda outline: outline.num_layers,
            # The first generation had no such key; written in both so that neither is taken for the other.
            "version": lambda outline: "2" if outline.shared else "1",
        },
        num_heads_key="medusa_num_heads",
        num_layers_key="medusa_num_layers",
        shared_key="version",
        optional=frozenset({"model_type", "base_model_name_or_path", "version"}),
        free=frozenset({"base_model_name_or_path"}),
        ignored=frozenset({"transformers_version"}),
        serve=_serve_tgi,
        limits=_fasterdecoding_limits,
    ),
    "vllm": MedusaFormat(
        weights_file="model.safetensors",
        block="blocks.{head}.layers.{layer}",
        own_lm_head="lm_heads.{head}.weight",
        shared_lm_head="lm_head.weight",
        config={
            "architectures": lambda outline: ["MedusaModel"],
            "model_type": lambda outline: "medusa",
            "hidden_size": lambda outline: outline.hidden_size,
            "vocab_size": lambda outline: outline.vocab_size,
            "num_heads": lambda outline: outline.num_heads,
            "num_hidden_layers": lambda outline: outline.num_layers,
            # Without it vLLM drops the biases and does not say so.
            "medusa_fc_bias": lambda outline: True,
            "original_lm_head": lambda outline: outline.shared,
            "dtype": lambda outline: outline.dtype,
            "torch_dtype": lambda outline: outline.dtype,
        },
        num_heads_key="num_heads",
        num_layers_key="num_hidden_layers",
        shared_key="original_lm_head",
        optional=frozenset({"original_lm_head", "dtype", "torch_dtype"}),
        free=frozenset({"dtype", "torch_dtype"}),
        ignored=frozenset({"transformers_version", "max_paths", "topk", "max_seq_len"}),
        serve=_serve_vllm,
        limits=_vllm_limits,
    ),
}


def find_format(name: str) -> MedusaFormat:
    """Raises ValueError if there is no format of this name."""
    if name not in FORMATS:
        raise ValueError(
            f"format={name} is unknown; known are {', '.join(FORMATS)} (fasterdecoding is what TGI reads); "
            "heads as trained are already in our own format"
        )
    return FORMATS[name]
