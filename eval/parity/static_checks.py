"""What the exported files say by themselves: nothing is computed with them yet."""

from collections.abc import Iterator

import torch
from torch import Tensor

from eval.parity.certificate import GOLDEN_FILE, PARITY_FILE
from eval.parity.digests import tensor_digests
from eval.parity.exported import Exported, Finding
from eval.parity.layouts import LAYOUTS, NORM_FLAGS, EagleSpec, block_of, read_taps
from heads.export.files import CHECKSUM_FILE, read_tensors, verify_checksums
from heads.target import dtype_name

# Shapes: V vocabulary, Ve ids that the engine drafts, D hidden


def check_files(exported: Exported) -> Iterator[Finding]:
    """One file of weights, and the checksums of all files."""
    found = sorted(path.name for path in exported.directory.glob("*.safetensors"))
    others = ", ".join(name for name in found if name != exported.weights_file)
    cause = f"{others}: engines would load it as weights; remove it" if others else ""
    yield Finding("files", exported.weights_file, ", ".join(found), cause)

    listing = exported.directory / CHECKSUM_FILE
    lines = listing.read_text().splitlines() if listing.is_file() else []
    listed = {line.partition("  ")[2] for line in lines}
    unlisted = sorted((exported.engine_files | {PARITY_FILE, GOLDEN_FILE}) - listed)
    cause = f"{CHECKSUM_FILE} does not list {', '.join(unlisted)}" if unlisted else ""
    try:
        verify_checksums(exported.directory)
    except ValueError as error:
        cause = str(error)
    yield Finding("checksums", "of all files", f"{len(listed)} files", cause)


def check_digests(exported: Exported) -> Iterator[Finding]:
    """The exported tensors are those that the certificate was written for."""
    recorded = exported.certificate.tensors
    found = tensor_digests(read_tensors(exported.directory / exported.weights_file))
    causes = [
        f"{name} is not the tensor that was exported" for name in recorded.keys() & found.keys()
        if recorded[name] != found[name]
    ]  # fmt: skip
    causes += [f"{name} is gone since the export" for name in recorded.keys() - found.keys()]
    causes += [f"{name} is new since the export" for name in found.keys() - recorded.keys()]
    expected = f"{len(recorded)} tensors"
    yield Finding("tensor checksums", expected, f"{len(causes)} differ", "; ".join(sorted(causes)))


def check_config(exported: Exported) -> Iterator[Finding]:
    """Whether config.json is about this target, and means to the engine what it says."""
    spec, target = exported.spec, exported.target
    wrong = [
        f"{key}={getattr(spec, key)}, the target has {getattr(target, key)}"
        for key in ("hidden_size", "vocab_size")
        if getattr(spec, key) != getattr(target, key)
    ]
    if isinstance(spec, EagleSpec):
        wrong += _eagle_config_faults(exported)
    yield Finding("config", f"as {exported.engine} reads it", f"{len(wrong)} keys wrong", "; ".join(wrong))


def _eagle_config_faults(exported: Exported) -> list[str]:
    config, layout, target, wrong = exported.config, exported.layout, exported.target, []
    layer = config if layout.section is None else config[layout.section]
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in layout.classes:
        wrong.append(f"architectures={named}, {layout.engine} loads {', '.join(sorted(layout.classes))}")
    if layout.section is not None and config["speculators_model_type"] != "eagle3":
        wrong.append(f"speculators_model_type={config['speculators_model_type']}, the file holds eagle3")
    if layer.get("num_hidden_layers") != 1:
        wrong.append(f"num_hidden_layers={layer.get('num_hidden_layers')}, the file holds 1")
    if config.get("tie_word_embeddings", False):
        wrong.append("tie_word_embeddings=True would replace the LM head by the embedding")
    reach = layer.get("max_position_embeddings", 0)
    if reach < target.max_context:
        wrong.append(f"max_position_embeddings={reach} ends before the target's {target.max_context}")
    ignored = [flag for flag in NORM_FLAGS if config.get(flag) is True and flag not in layout.flags]
    return wrong + [f"{flag}=True, which {layout.engine} does not follow in this format" for flag in ignored]


def check_tensors(exported: Exported) -> Iterator[Finding]:
    """Names, shapes and dtypes."""
    problems = exported.expected.problems(exported.tensors)
    dropped = [name for name in exported.tensors if name.endswith(".bias") and f"{name} is unexpected" in problems]
    problems += [f"{exported.engine} drops {name}: config.json does not announce it" for name in dropped]
    dtypes = {dtype_name(t.dtype) for t in exported.tensors.values() if t.is_floating_point()}
    if dtypes != {exported.certificate.dtype}:
        problems.append(f"weights are {', '.join(sorted(dtypes))}, exported were {exported.certificate.dtype}")
    expected = f"{len(exported.expected.required)} needed"
    yield Finding("tensors", expected, f"{len(exported.tensors)} in the file", "; ".join(problems))


def check_vocabulary(exported: Exported) -> Iterator[Finding]:
    """Which token ids the engine drafts, against those of the trained heads."""
    recorded, found = exported.golden.draft_ids, exported.engine_ids
    mapped = exported.certificate.kind == "eagle3"  # other formats have no map: their engines draft all ids
    cause = _vocabulary_fault(exported, recorded, found) if mapped else ""
    size = exported.target.vocab_size
    yield Finding("vocabulary map", f"{len(recorded)} of {size} ids", f"{len(found)} of {size} ids", cause)


def _vocabulary_fault(exported: Exported, recorded: Tensor, found: Tensor) -> str:
    d2t, t2d, size = exported.tensors.get("d2t"), exported.tensors.get("t2d"), exported.target.vocab_size
    if len(found) != len(recorded):
        return f"draft_vocab_size={len(found)}, the heads were trained on {len(recorded)} ids"
    if d2t is None and len(found) < size:
        return "d2t is missing: the engine would take draft indices for token ids"
    if d2t is not None and not torch.equal(found, recorded) and torch.equal(d2t.long(), recorded):
        return "d2t holds token ids; it must hold offsets (token id minus draft index)"
    if found.min() < 0 or found.max() >= size or len(found.unique()) < len(found):
        return f"d2t leaves the target's {size} ids, or repeats one"
    if not torch.equal(found, recorded):
        differ = int((found != recorded).sum())
        return f"d2t is of another draft vocabulary: {differ} of {len(found)} ids are not those of the trained heads"
    if t2d is not None and not torch.equal(t2d.nonzero().flatten(), found.sort().values):
        return "t2d and d2t disagree: one of them is of another draft vocabulary"
    return ""


def check_taps(exported: Exported) -> Iterator[Finding]:
    """The states that the engine taps, in our names, against those that the heads were trained on."""
    spec, recorded = exported.spec, exported.certificate.taps
    if not isinstance(spec, EagleSpec) or spec.kind == "eagle":
        cause = "" if recorded == ["final_norm"] else "the heads were trained on other states than engines give them"
        yield Finding("taps", ", ".join(recorded), "final_norm", cause)
        return
    readings = [(exported.engine, spec.entered)]
    if exported.certificate.format == "vllm":  # SGLang can read this format, too, from another key
        sglang = LAYOUTS["eagle3", "sglang"]
        readings.append((sglang.engine, read_taps(sglang, exported.config, exported.target.num_layers)))
    for engine, entered in readings:
        found = [f"post_block[{block - 1}]" for block in entered]
        cause = "" if found == recorded else f"{engine} would read {', '.join(found)}: {_apart(recorded, found)}"
        yield Finding(f"taps of {engine}", ", ".join(recorded), ", ".join(found), cause)


def _apart(recorded: list[str], found: list[str]) -> str:
    shifts = {block_of(there) - block_of(here) for here, there in zip(recorded, found, strict=False)}
    if len(found) == len(recorded) and shifts in ({1}, {-1}):
        return "off by one, as if its numbers were of the other engines' convention"
    return f"the heads were trained on {', '.join(recorded)}"


def check_copies(exported: Exported) -> Iterator[Finding]:
    """Tensors of the file that must be the target's own."""
    pairs = {"embed_tokens.weight": exported.target.embedding.weight}
    if exported.certificate.kind != "eagle3":
        pairs["lm_head.weight"] = exported.target.lm_head.get_parameter("weight")
    for name in pairs.keys() & exported.tensors.keys():
        theirs_VD, ours_VD = exported.tensors[name], pairs[name].detach().cpu()
        if theirs_VD.shape != ours_VD.shape:
            yield Finding(name, str(list(ours_VD.shape)), str(list(theirs_VD.shape)), f"{name} is not the target's")
            continue
        # In the coarser dtype of the two, since either may have been rounded to it.
        coarse = max(theirs_VD.dtype, ours_VD.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        rows = int((theirs_VD.to(coarse) != ours_VD.to(coarse)).any(1).sum())
        cause = f"{name} in the file is not the target's: {rows} of {len(ours_VD)} rows differ" if rows else ""
        yield Finding(name, "the target's", f"{rows} rows differ", cause)
