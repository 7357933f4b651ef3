"""llama.cpp: GGUF files (exported, or by its own converter), its server with EAGLE-3 heads and without.

Its batched verification rounds otherwise than its plain steps, and its last draft ends where the token limit does: so
texts and counters need not equal ours, and it is no exact engine.
"""

import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx

from eval.serving.engine_process import Launch, tail, without_ours
from eval.serving.environment import EngineUnavailable
from eval.serving.served_heads import ServedHeads
from heads.export.engines import GGUF_FILE, OUTTYPES

logger = logging.getLogger(__name__)

SERVER, CONVERTER = "llama-server", "convert_hf_to_gguf.py"


@dataclass(frozen=True)
class Tools:
    """llama.cpp's programs. The converter stands in a checkout of llama.cpp, beside its `gguf-py`."""

    server: Path
    converter: Path


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


def find_tools(server: str | None, converter: str | None) -> Tools:
    """The given programs, or those on PATH.

    Raises:
        EngineUnavailable: if one is not given and not on PATH.
        ValueError: if a given one does not exist.
    """
    return Tools(_find(SERVER, server, "server"), _find(CONVERTER, converter, "converter"))


def prepare(
    tools: Tools,
    target: str,
    heads: ServedHeads,
    dtype: str,
    max_context: int,
    directory: Path,
    arguments: Sequence[str] = (),
) -> LlamaCppEngine:
    """Convert the target to a GGUF file in `directory`, and the heads, too, unless their export holds one.

    Raises:
        ValueError: if the heads are not EAGLE-3, the target is not a directory, or the converter refuses one of them.
    """
    if heads.kind != "eagle3":
        raise ValueError(
            f"{heads.directory} holds {heads.kind} heads, llama.cpp takes eagle3 heads only; use engine=vllm"
        )
    if not Path(target).is_dir():
        raise ValueError(f"model.path={target} must be a directory: llama.cpp's converter reads no hub id")
    directory.mkdir(parents=True, exist_ok=True)
    outtype = OUTTYPES[dtype]
    target_file = _convert(tools, Path(target), directory / "target.gguf", outtype)
    heads_file = heads.directory / GGUF_FILE
    if not heads_file.is_file():
        heads_file = _convert(tools, heads.directory, directory / GGUF_FILE, outtype, "--target-model-dir", target)
    return LlamaCppEngine(tools.server, target_file, heads_file, heads.chain, outtype, max_context, arguments)


def _find(name: str, given: str | None, key: str) -> Path:
    if given is not None:
        if not Path(given).is_file():
            raise ValueError(f"{key}={given} does not exist; give the path of llama.cpp's {name}")
        return Path(given).resolve()
    found = shutil.which(name)
    if found is None:
        raise EngineUnavailable(f"llama.cpp is not here: no {name} on PATH; build it and give {key}=PATH")
    return Path(found)


def _convert(tools: Tools, source: Path, file: Path, outtype: str, *more: str) -> Path:
    log = file.with_suffix(".log")
    command = [sys.executable, str(tools.converter), str(source), *more, "--outtype", outtype, "--outfile", str(file)]
    library = {"PYTHONPATH": str(tools.converter.parent / "gguf-py")}
    logger.info("converting %s to %s", source, file)
    with log.open("w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=without_ours() | library, check=False
        )
    if done.returncode or not file.exists():
        said = "\n  ".join(tail(log))
        raise ValueError(f"{tools.converter} refused {source}; the end of {log}:\n  {said}")
    return file
