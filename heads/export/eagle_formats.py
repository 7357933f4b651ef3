"""The formats in which EAGLE heads are exchanged: one row each, from which writing and strict reading follow.

    kind    format        written by, read by
    eagle3  safeailab     SafeAILab/EAGLE main (`eagle/model/cnets.py`)
            specforge     SpecForge `--to hf`, with embeddings
            sglang        SpecForge `--to sglang`; what SGLang 0.5.23 loads (`llama_eagle3.py`)
            vllm          what vLLM 0.32 and 0.33 load (`llama_eagle3.py`, `qwen3_eagle3.py`)
            speculators   speculators 0.9, read by vLLM
            modelopt      ModelOpt 0.47 `export_speculative_decoding`, for SGLang
            tensorrt-llm  what TensorRT-LLM loads in its PyTorch backend (`modeling_speculative.py`)
            llama.cpp     what llama.cpp b11434 converts (`conversion/llama.py`), and the GGUF file itself
    eagle   safeailab     SafeAILab/EAGLE, EAGLE-1 and 2 (`cnets1.py`)
            vllm          what vLLM loads (`llama_eagle.py`)

Weights lie in model.safetensors, all in one dtype. The keys of config.json are in `eagle_config`, the tensors in
`eagle_tensors`, the settings that a format may refuse in `eagle_outline`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from heads.export import eagle_config, engines
from heads.export.eagle_config import EAGLE3_CLASS
from heads.export.eagle_outline import (
    NO_JOINT_NORM,
    NO_QK_NORM,
    NO_TAP_NORMS,
    NO_WINDOW,
    PLAIN_LAYER,
    RAW_FEEDBACK,
    RAW_RESIDUAL,
    SAFEAILAB_ROPE,
    SEVERAL_CAPTURED,
    SEVERAL_TAPS,
    THREE_TAPS,
    Outline,
    Problem,
    Rule,
    conventional_taps,
    no_fc_bias,
    rope_types,
    square_attention,
    taps_inside,
)
from heads.export.eagle_tensors import (
    Source,
    eagle1_tensors,
    eagle3_tensors,
    embedding_tensors,
    layer_tensors,
    map_tensors,
)

WEIGHTS_FILE = "model.safetensors"
BLOCKS = ("midlayer", "layers.0")


@dataclass(frozen=True)
class EagleFormat:
    """One row of the table.

    block: the decoder layer's name; any_block: the engine knows it by `midlayer` and by `layers.0`. architectures: what
    may stand in a file. rules: what the format cannot express. serve: the command, given target and directory.
    layer_key: the key of config.json that holds the layer's sizes, None where they lie at the top. tap_shift: the
    engine's number of a tap minus ours, None where taps are not in the file. bias_key: says whether q, k and v have
    biases; zero_bias: o_proj then has one, too. fc_bias: EAGLE-1's fc has one where the file does not say. needed: keys
    that a file may not lack, because readers differ in what they then take. embeddings: the target's are written.
    full_maps: d2t and t2d are written for the full vocabulary, too. t2d: "needed" beside d2t, "skipped" by the engine
    (written, but a file may lack it), or "absent". map_dtype: of d2t. nested_flags: norm flags that the engine looks
    for in `eagle_config` only, and their names there. server_config: the content of SERVER_FILE, where a server is told
    of the heads in a file of its own.
    """

    kind: str
    name: str
    block: str
    architectures: tuple[str, ...]
    config: Callable[[Outline], dict[str, Any]]
    rules: tuple[Rule, ...]
    serve: Callable[[Outline, str, str], str]
    limits: Callable[[Outline], list[str]]
    any_block: bool = False
    layer_key: str | None = None
    tap_shift: int | None = None
    bias_key: str = "attention_bias"
    zero_bias: bool = False
    fc_bias: bool = False
    needed: frozenset[str] = frozenset()
    embeddings: bool = False
    full_maps: bool = False
    t2d: Literal["needed", "skipped", "absent"] = "needed"
    map_dtype: torch.dtype = torch.int64
    nested_flags: Mapping[str, str] = field(default_factory=dict)
    server_config: Callable[[Outline], dict[str, Any]] | None = None

    def tensors(self, outline: Outline) -> dict[str, Source]:
        """Every tensor of the weights file as we write it."""
        table = layer_tensors(outline, self.block, zero_bias=self.zero_bias)
        if self.kind == "eagle":
            table |= eagle1_tensors(outline)
        else:
            table |= eagle3_tensors(outline, self.block)
        if self.kind == "eagle3" and (outline.reduced or self.full_maps):
            maps = map_tensors(outline, self.map_dtype)
            table |= {name: at for name, at in maps.items() if (name, self.t2d) != ("t2d", "absent")}
        return table | (embedding_tensors(outline) if self.embeddings else {})

    def optional_tensors(self, outline: Outline) -> dict[str, Source]:
        """What a file may hold or lack, because it says nothing new."""
        maps = map_tensors(outline, self.map_dtype) if self.kind == "eagle3" else {}
        if outline.reduced:
            maps = {name: at for name, at in maps.items() if name == "t2d" and self.t2d != "needed"}
        return embedding_tensors(outline) | (maps if outline.reduced or self.full_maps else {})

    def problems(self, outline: Outline) -> list[Problem]:
        """What of these heads the format cannot express."""
        return [problem for rule in self.rules if (problem := rule(outline)) is not None]

    def check(self, outline: Outline) -> None:
        """Raises ValueError naming every setting that the format cannot express, the rule, and what works."""
        if not (problems := self.problems(outline)):
            return
        others = [form.name for form in FORMATS if form.kind == self.kind and not form.problems(outline)]
        fixes = [f"format={name}" for name in others] + ["train with " + ", ".join(p.plain for p in problems)]
        listed = "; ".join(f"{problem.value}: {problem.why}" for problem in problems)
        raise ValueError(f"format={self.name} cannot hold {listed}. Use {' or '.join(fixes)}")


FORMATS = (
    EagleFormat(
        kind="eagle3",
        name="safeailab",
        block="midlayer",
        architectures=(EAGLE3_CLASS, "LlamaForCausalLM"),
        config=eagle_config.safeailab,
        full_maps=True,
        rules=(
            conventional_taps,
            RAW_RESIDUAL,
            NO_JOINT_NORM,
            NO_TAP_NORMS,
            RAW_FEEDBACK,
            *PLAIN_LAYER,
            square_attention,
            SAFEAILAB_ROPE,
        ),
        serve=engines.safeailab,
        limits=engines.safeailab_limits,
    ),
    EagleFormat(
        kind="eagle3",
        name="specforge",
        block="midlayer",
        architectures=(EAGLE3_CLASS,),
        config=eagle_config.specforge,
        tap_shift=0,
        embeddings=True,
        full_maps=True,
        rules=(
            THREE_TAPS,
            taps_inside,
            RAW_RESIDUAL,
            NO_JOINT_NORM,
            *PLAIN_LAYER,
            rope_types("default", "linear", "dynamic", "llama3", "yarn"),
        ),
        serve=engines.sglang,
        limits=engines.specforge_limits,
    ),
    EagleFormat(
        kind="eagle3",
        name="sglang",
        block="midlayer",
        any_block=True,
        architectures=(EAGLE3_CLASS,),
        config=eagle_config.sglang,
        tap_shift=0,
        full_maps=True,
        t2d="skipped",
        rules=(SEVERAL_TAPS, taps_inside, RAW_RESIDUAL, *PLAIN_LAYER),
        serve=engines.sglang,
        limits=engines.sglang_limits,
    ),
    EagleFormat(
        kind="eagle3",
        name="vllm",
        block="layers.0",
        any_block=True,
        architectures=(EAGLE3_CLASS, "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"),
        config=eagle_config.vllm,
        tap_shift=1,
        zero_bias=True,
        t2d="skipped",
        rules=(),
        serve=engines.vllm,
        limits=engines.vllm_limits,
    ),
    EagleFormat(
        kind="eagle3",
        name="speculators",
        block="layers.0",
        architectures=("Eagle3DraftModel", "Eagle3Speculator"),
        config=eagle_config.speculators,
        layer_key="transformer_layer_config",
        tap_shift=1,
        zero_bias=True,
        needed=frozenset({"norm_before_residual"}),  # speculators would take false and vLLM true
        embeddings=True,
        rules=(),
        serve=engines.vllm,
        limits=engines.speculators_limits,
    ),
    EagleFormat(
        kind="eagle3",
        name="modelopt",
        block="layers.0",
        architectures=(EAGLE3_CLASS,),
        config=eagle_config.modelopt,
        tap_shift=0,
        t2d="absent",
        rules=(SEVERAL_TAPS, taps_inside, RAW_RESIDUAL, NO_JOINT_NORM, NO_TAP_NORMS, RAW_FEEDBACK, *PLAIN_LAYER),
        serve=engines.sglang,
        limits=engines.sglang_limits,
    ),
    EagleFormat(
        kind="eagle3",
        name="tensorrt-llm",
        block="midlayer",
        any_block=True,
        architectures=(EAGLE3_CLASS, "LlamaForCausalLM", "EAGLE3LlamaForCausalLM"),
        config=eagle_config.tensorrt_llm,
        tap_shift=0,
        zero_bias=True,
        needed=frozenset({"attention_bias"}),  # read without a default
        t2d="absent",
        map_dtype=torch.int32,
        nested_flags={"norm_before_fc": "norm_before_fc", "norm_output": "return_hidden_post_norm"},
        server_config=engines.trtllm_config,
        rules=(SEVERAL_CAPTURED, RAW_RESIDUAL, NO_QK_NORM, NO_WINDOW, rope_types("default", "linear", "llama3")),
        serve=engines.trtllm,
        limits=engines.trtllm_limits,
    ),
    EagleFormat(
        kind="eagle3",
        name="llama.cpp",
        block="layers.0",
        any_block=True,
        architectures=(EAGLE3_CLASS, "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
        config=eagle_config.vllm,
        tap_shift=1,
        needed=frozenset({eagle_config.TAPS}),  # else it takes the usual three, whatever eagle_config says
        t2d="skipped",
        rules=(THREE_TAPS, NO_TAP_NORMS, RAW_FEEDBACK, *PLAIN_LAYER, rope_types("default", "linear", "llama3")),
        serve=engines.llama_cpp,
        limits=engines.llama_cpp_limits,
    ),
    EagleFormat(
        kind="eagle",
        name="safeailab",
        block="layers.0",
        architectures=("LlamaForCausalLM",),
        config=eagle_config.safeailab_eagle1,
        bias_key="qkv_bias",
        fc_bias=True,
        embeddings=True,
        rules=(NO_QK_NORM, NO_WINDOW, square_attention, SAFEAILAB_ROPE),
        serve=engines.safeailab,
        limits=engines.safeailab_limits,
    ),
    EagleFormat(
        kind="eagle",
        name="vllm",
        block="layers.0",
        architectures=("LlamaForCausalLM", "EagleLlamaForCausalLM"),
        config=eagle_config.vllm_eagle1,
        bias_key="qkv_bias",
        rules=(no_fc_bias, NO_QK_NORM, NO_WINDOW),
        serve=engines.vllm,
        limits=engines.vllm_limits,
    ),
)


def find_format(kind: str, name: str) -> EagleFormat:
    """Raises ValueError if there is no format of this name for this kind of heads."""
    known = {form.name: form for form in FORMATS if form.kind == kind}
    if name not in known:
        raise ValueError(f"format={name} is unknown for {kind} heads; known are {', '.join(known)}")
    return known[name]
