"""Write Medusa heads as an engine reads them; what is in a format is stated in `medusa_formats`."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from heads.export.medusa_formats import TARGET_LM_HEAD, MedusaFormat, Outline, find_format
from heads.export.package import Companion, Content, Export, cast_weights, load_as, write_export
from heads.identity import public_name
from heads.medusa import MedusaHeads
from heads.target import Target, dtype_name

# Shapes: K heads, D hidden, V vocabulary


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
) -> Export:
    """Write the heads saved in `source` as an engine reads them, with a model card and checksums.

    dtype: of the written weights, None for that of the heads.
    expand_vocabulary: for own LM heads over a reduced draft vocabulary, fill other rows with the target's.

    Raises:
        ValueError: if the heads cannot be loaded or written in the format, or `directory` holds other files.
    """
    form = find_format(format_name)
    heads = load_as(MedusaHeads, source, target, format_name, allow_other_weights=allow_other_weights)
    outline = Outline(
        num_heads=heads.config.num_heads,
        num_layers=heads.config.num_layers,
        hidden_size=heads.hidden_size,
        vocab_size=heads.vocab_size,
        shared=heads.config.lm_head == "shared",
        dtype=dtype or dtype_name(heads.block_weight.dtype),
        target=public_name(target.config),
    )
    content = Content(
        weights_file=form.weights_file,
        limits=form.limits(outline) + vocabulary_limits(heads, expand_vocabulary),
        tensors=cast_weights(_tensors(form, outline, heads, target), outline.dtype),
        config=form.values(outline),
        dtype=outline.dtype,
        title="Medusa heads",
        facts={
            "heads (K)": f"{outline.num_heads}: the target's next token and {outline.num_heads} guesses after it",
            "layers of each head (L)": outline.num_layers,
            "LM head": "the target's, for all heads" if outline.shared else "one for each head",
        },
        serve=lambda name, folder: form.serve(replace(outline, target=name), folder),
    )
    return write_export(source, directory, target, content, companion)


def vocabulary_limits(heads: MedusaHeads, expand: bool) -> list[str]:
    """Say what becomes of a reduced draft vocabulary in a format without one.

    Raises:
        ValueError: for own LM heads, unless `expand`. They have no rows for the other ids, and no row can
            stand for "never": without a bias, zero rows have logit 0, which often is the largest.
    """
    size = len(heads.d2t)
    if size == heads.vocab_size:
        return []
    if heads.config.lm_head == "shared":
        drafts = f"the heads were trained to draft {size} of {heads.vocab_size} token ids, the engine drafts all"
        return [f"{drafts} with the target's LM head: the output is the same, the acceptance may differ"]
    if not expand:
        raise ValueError(
            f"the heads draft {size} of {heads.vocab_size} token ids, this format cannot; set "
            "expand_vocabulary=true to fill the other rows with the target's LM head, or train with "
            "heads.draft_vocab_size=null"
        )
    rows = f"{heads.vocab_size - size} of {heads.vocab_size} rows of each LM head are the target's, untrained"
    return [f"{rows}: the output is the same, the acceptance may differ, the file has full size"]


def _tensors(form: MedusaFormat, outline: Outline, heads: MedusaHeads, target: Target) -> dict[str, Tensor]:
    stacked = {name: tensor.detach() for name, tensor in heads.named_parameters()}
    lm_head_VD = target.lm_head.get_parameter("weight").detach()
    if not outline.shared and len(heads.d2t) < heads.vocab_size:
        expanded_KVD = lm_head_VD.to(heads.lm_head_weight.dtype).repeat(outline.num_heads, 1, 1)
        expanded_KVD[:, heads.draft_ids] = heads.lm_head_weight.detach()
        stacked["lm_head_weight"] = expanded_KVD
    stacked[TARGET_LM_HEAD] = lm_head_VD
    return {name: stacked[at.name][at.index] for name, at in form.tensors(outline).items()}
