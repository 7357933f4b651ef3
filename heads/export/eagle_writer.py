"""Write EAGLE heads as an engine reads them; what is in a format is stated in `eagle_formats`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.eagle import EagleHeads
from heads.export.eagle_formats import WEIGHTS_FILE, EagleFormat, find_format
from heads.export.eagle_gguf import tokenizer_fields, write_gguf
from heads.export.eagle_outline import NORM_FLAGS, Outline
from heads.export.eagle_tensors import EMBEDDINGS, ZEROS
from heads.export.engines import GGUF_FILE, SERVER_FILE
from heads.export.files import write_json
from heads.export.package import Companion, Content, Export, cast_weights, load_as, write_export
from heads.identity import public_name
from heads.target import Target, dtype_name

# Shapes: V vocabulary, Vd draft vocabulary


def export_heads(
    source: Path,
    directory: Path,
    target: Target,
    format_name: str,
    *,
    dtype: str | None = None,
    expand_vocabulary: bool = False,
    allow_other_weights: bool = False,
    companion: Companion | None = None,
    target_gguf: Path | None = None,
) -> Export:
    """Write the heads saved in `source` as an engine reads them, with a model card and checksums.

    dtype: of the written weights, None for that of the heads.
    expand_vocabulary: let the engine draft all token ids with EAGLE-1 heads that were trained on some of them.
    target_gguf: the target as llama.cpp serves it; format=llama.cpp then writes the heads as such a file, too.

    Raises:
        ValueError: if the heads cannot be loaded or expressed in the format, `target_gguf` is not this target or not
            for this format, or `directory` holds other files.
    """
    heads = load_as(EagleHeads, source, target, format_name, allow_other_weights=allow_other_weights)
    form = find_format(heads.kind, format_name)
    outline = replace(outline_of(heads, target, dtype), target_gguf=target_gguf.name if target_gguf else "")
    form.check(outline)
    limits = form.limits(outline)
    if heads.kind == "eagle":
        limits += _eagle1_limits(outline, target, expand_vocabulary)
    elif expand_vocabulary:
        raise ValueError(
            "expand_vocabulary=true is for heads without a d2t; eagle3 exports carry their draft vocabulary"
        )
    tensors = cast_weights(_tensors(form, outline, heads, target), outline.dtype)
    content = Content(
        weights_file=WEIGHTS_FILE,
        tensors=tensors,
        config=form.config(outline),
        dtype=outline.dtype,
        title="EAGLE-3 heads" if heads.kind == "eagle3" else "EAGLE heads",
        facts=_facts(outline),
        serve=lambda name, folder: form.serve(outline, name, folder),
        limits=limits,
        beside=_beside(form, outline, tensors, target_gguf),
    )
    done = write_export(source, directory, target, content, companion)
    if target_gguf is None:
        return done
    # The card names the target's file, the command gives its path.
    here = replace(outline, target_gguf=str(target_gguf))
    return replace(done, command=form.serve(here, outline.target, str(directory)))


def _beside(
    form: EagleFormat, outline: Outline, tensors: Mapping[str, Tensor], target_gguf: Path | None
) -> tuple[Companion, ...]:
    """What the format has besides weights and config."""
    if target_gguf is not None:
        if form.name != "llama.cpp":
            raise ValueError(f"target_gguf={target_gguf} is for format=llama.cpp, not for format={form.name}")
        tokenizer = tokenizer_fields(target_gguf, outline)
        return (Companion((GGUF_FILE,), lambda folder: write_gguf(folder / GGUF_FILE, outline, tensors, tokenizer)),)
    if (server_config := form.server_config) is None:
        return ()
    # JSON, which YAML includes.
    return (Companion((SERVER_FILE,), lambda folder: write_json(folder / SERVER_FILE, server_config(outline))),)


def outline_of(heads: EagleHeads, target: Target, dtype: str | None = None) -> Outline:
    """What determines an export of these heads. dtype: None for that of the heads."""
    architectures = target.model.config.architectures or [type(target.model).__name__]
    return Outline(
        heads=heads.config,
        hidden_size=heads.hidden_size,
        vocab_size=heads.vocab_size,
        draft_vocab_size=len(heads.d2t),
        target_layers=target.num_layers,
        dtype=dtype or dtype_name(heads.layer.o_proj.weight.dtype),
        target=public_name(target.config),
        target_architecture=architectures[0],
    )


def _eagle1_limits(outline: Outline, target: Target, expand: bool) -> list[str]:
    """What EAGLE-1 cannot carry: its engines use the target's own embeddings and LM head.

    Raises:
        ValueError: if the target scales its embeddings, or only some token ids were drafted in training (unless
            `expand`).
    """
    id_1 = torch.zeros(1, dtype=torch.long, device=target.device)
    if not torch.equal(target.embed(id_1), target.embedding.weight[id_1]):
        raise ValueError(
            f"targets of type {target.text_config.model_type} scale their embeddings, which engines of EAGLE-1 do not; "
            "train heads.kind=eagle3, whose norm takes the scale away"
        )
    if not outline.reduced:
        return []
    drafts = f"the heads draft {outline.draft_vocab_size} of {outline.vocab_size} token ids"
    if not expand:
        raise ValueError(
            f"{drafts}, engines draft all with EAGLE-1; set expand_vocabulary=true to let them, or train with "
            "heads.draft_vocab_size=null"
        )
    return [f"{drafts}, the engine drafts all: the output is the same, the acceptance may differ"]


def _tensors(form: EagleFormat, outline: Outline, heads: EagleHeads, target: Target) -> dict[str, Tensor]:
    ours = {**heads.state_dict(), EMBEDDINGS: target.embedding.weight.detach()}
    table = form.tensors(outline)
    wanted = {name: torch.zeros(at.shape) if at.name == ZEROS else ours[at.name] for name, at in table.items()}
    return {name: tensor.to(table[name].dtype or tensor.dtype) for name, tensor in wanted.items()}


def _facts(outline: Outline) -> dict[str, Any]:
    layer = outline.layer
    facts = {
        "layer": f"{layer.num_attention_heads} heads and {layer.num_key_value_heads} key/value heads of "
        f"{layer.head_dim}, MLP of {layer.intermediate_size}",
        "training steps": outline.heads.num_steps,
    }
    if outline.kind == "eagle":
        return {**facts, "features": "the target's final norm", "LM head": "the target's"}
    options = [name for name in NORM_FLAGS if outline.flag(name)]
    return {
        **facts,
        "taps (outputs of decoder blocks, from 0)": ", ".join(map(str, outline.taps)),
        "norm options": ", ".join(options) or "none",
    }
