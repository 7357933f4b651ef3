"""llama.cpp: its server with EAGLE-3 heads and without, from GGUF files of the target and of the heads.

Its batched verification rounds otherwise than its plain steps: so texts and counters need not equal ours, and it is no
exact engine. Its last draft ends where the token limit does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx

from eval.serving.engine_process import Launch
from eval.serving.served_heads import ServedHeads
from heads.export.engines import GGUF_FILE


@dataclass(frozen=True)
class LlamaCppEngine:
    """llama-server with a target and heads as GGUF files. max_context: tokens of prompt, answer and one draft."""

    server: Path
    target: Path
    heads: Path
    chain: int
    cache_type: str
    max_context: int
    arguments: Sequence[str] = ()
    name: ClassVar[str] = "llama.cpp"
    exact: ClassVar[bool] = False
    drafts_past_end: ClassVar[bool] = False

    def launch(self, with_heads: bool) -> Launch:
        command = [
            str(self.server), "-m", str(self.target), "--ctx-size", str(self.max_context), "--parallel", "1",
            "--cache-type-k", self.cache_type, "--cache-type-v", self.cache_type, "--no-cache-prompt", "--metrics",
        ]  # fmt: skip
        if with_heads:
            command += [
                "--spec-type", "draft-eagle3", "--spec-draft-model", str(self.heads),
                "--spec-draft-n-max", str(self.chain), "--spec-draft-p-min", "0",
                "--spec-draft-type-k", self.cache_type, "--spec-draft-type-v", self.cache_type,
            ]  # fmt: skip
        return Launch(f"llama.cpp {'with' if with_heads else 'without'} heads", [*command, *self.arguments], {})

    def request(self, ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]) -> tuple[str, dict[str, Any]]:
        # Its own path: the one after OpenAI's returns text only. The ends of an answer stand in the GGUF file.
        return "/completion", {
            "prompt": list(ids),
            "n_predict": max_new_tokens,
            "temperature": 0.0,
            "cache_prompt": False,
            "return_tokens": True,
        }

    def tokens(self, reply: dict[str, Any]) -> list[int]:
        return list(reply["tokens"])

    def version(self, client: httpx.Client) -> str:
        return client.get("/props").json()["build_info"]


def heads_file(heads: ServedHeads) -> Path:
    """The heads as llama-server reads them. `ValueError` if their export holds no such file."""
    file = heads.directory / GGUF_FILE
    if file.is_file():
        return file
    raise ValueError(
        f"{heads.directory} holds no {GGUF_FILE}, from which llama.cpp drafts; give the heads that it was exported "
        "from, or export them with format=llama.cpp target_gguf=FILE"
    )
