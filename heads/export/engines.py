"""How engines are started with exported EAGLE heads, and what they then cannot do."""

import json
import shlex

from heads.export.eagle_outline import Outline

# SafeAILab's decoder has modelling files for these targets only.
SAFEAILAB_TARGETS = "Llama, Qwen2, Qwen3 and Mixtral"


def vllm(outline: Outline, target: str, directory: str) -> str:
    settings = {"method": outline.kind, "model": directory, "num_speculative_tokens": outline.chain}
    speculative = shlex.quote(json.dumps(settings, separators=(",", ":")))
    return f"vllm serve {shlex.quote(target)} --speculative-config {speculative}"


def vllm_and_llama_cpp(outline: Outline, target: str, directory: str) -> str:
    if not _fits_llama_cpp(outline):
        return vllm(outline, target, directory)
    draft = shlex.quote(f"{directory}.gguf")
    convert = f"python convert_hf_to_gguf.py {shlex.quote(directory)} --target-model-dir {shlex.quote(target)}"
    return "\n".join(
        [
            "# vLLM",
            vllm(outline, target, directory),
            "# llama.cpp, with the target as a directory for the conversion and as target.gguf for the server",
            f"{convert} --outtype bf16 --outfile {draft}",
            f"llama-server -m target.gguf -md {draft} --spec-type draft-eagle3 --spec-draft-n-max {outline.chain}",
        ]
    )


def sglang(outline: Outline, target: str, directory: str) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {shlex.quote(directory)} --speculative-num-steps {outline.chain} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {outline.chain + 1}"
    )


def safeailab(outline: Outline, target: str, directory: str) -> str:
    generation = "" if outline.kind == "eagle3" else " --no-eagle3"
    return (
        f"python -m eagle.application.webui --base-model-path {shlex.quote(target)} "
        f"--ea-model-path {shlex.quote(directory)}{generation} --model-type llama-3-instruct"
    )


def vllm_limits(outline: Outline) -> list[str]:
    limits = ["vLLM drafts the single best chain, no tree: expect a lower tau than that of a draft tree"]
    if outline.kind == "eagle3" and not _fits_llama_cpp(outline):
        limits.append(
            "llama.cpp does not take these heads: it needs exactly 3 taps, no fc_norm, norm_output, qk_norm, "
            "attention_bias or sliding window"
        )
    return limits


def speculators_limits(outline: Outline) -> list[str]:
    named = "vLLM 0.33 takes the speculator alone (vllm serve <directory>) only if the target has a hub id"
    return [*vllm_limits(outline), named]


def sglang_limits(outline: Outline) -> list[str]:
    return [
        "SGLang takes a missing or unknown tensor without an error: check SHA256SUMS before you serve",
        "for SGLang only: vLLM would take the taps of this config.json one block too early, use format=vllm for it",
    ]


def specforge_limits(outline: Outline) -> list[str]:
    limits = sglang_limits(outline)
    if outline.flag("norm_output"):
        limits.append(
            "norm_output: SGLang feeds the normed state back, as here; SpecForge's own training does not, so go on "
            "training these heads here"
        )
    return limits


def safeailab_limits(outline: Outline) -> list[str]:
    return [
        f"SafeAILab's decoder takes {SAFEAILAB_TARGETS} targets; --model-type chooses the chat template",
        "SafeAILab's draft trees (EAGLE-2) are not part of the format: tau will differ from the one measured here",
    ]


def _fits_llama_cpp(outline: Outline) -> bool:
    layer = outline.layer
    odd = layer.qk_norm or layer.attention_bias or layer.sliding_window or outline.flag("fc_norm")
    return outline.kind == "eagle3" and len(outline.taps) == 3 and not odd and not outline.flag("norm_output")
