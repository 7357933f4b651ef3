"""Which format takes which kind of heads."""

from collections.abc import Mapping

from heads.export import eagle_formats, medusa_formats

# By (kind, format): several kinds have a format of the same name.
FORMATS: Mapping[tuple[str, str], medusa_formats.MedusaFormat | eagle_formats.EagleFormat] = {
    **{("medusa", name): form for name, form in medusa_formats.FORMATS.items()},
    **{(form.kind, form.name): form for form in eagle_formats.FORMATS},
}


# What people ask for and an engine does not do, and what is nearest.
REFUSED: Mapping[tuple[str, str], str] = {
    ("medusa", "tensorrt-llm"): (
        "TensorRT-LLM serves Medusa from a pickle only, in its older engines: export with format=fasterdecoding and "
        "follow the note that it prints"
    ),
    ("eagle", "tensorrt-llm"): "TensorRT-LLM's PyTorch backend drafts with EAGLE-3 only: train heads.kind=eagle3",
    ("medusa", "llama.cpp"): "llama.cpp has no Medusa: train heads.kind=eagle3",
    ("eagle", "llama.cpp"): "llama.cpp drafts with EAGLE-3 only: train heads.kind=eagle3",
}


def kinds_of(format_name: str) -> list[str]:
    """The kinds of heads that a format takes. Raises ValueError if no kind has a format of this name."""
    if kinds := [kind for kind, name in FORMATS if name == format_name]:
        return kinds
    raise ValueError(
        f"format={format_name} is unknown; known are {', '.join(sorted({name for _, name in FORMATS}))}; "
        "heads as trained are already in our own format"
    )


def check_kind(kind: str, format_name: str, where: str) -> None:
    """Raises ValueError if the format does not take this kind of heads; `where` starts the message."""
    if kind in (kinds := kinds_of(format_name)):
        return
    known = [f"format={name}" for other, name in FORMATS if other == kind]
    nearest = REFUSED.get((kind, format_name))
    raise ValueError(
        f"{where} {kind} heads, format={format_name} takes {', '.join(kinds)} heads; "
        f"{kind} heads go to {', '.join(known) or 'no engine: decode with eval/eval_heads.py'}"
        f"{f'. {nearest}' if nearest else ''}"
    )
