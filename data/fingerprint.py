"""What the prepared data depends on, as hashes: the parts of its key."""

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.prepared import file_sha256
from data.sources import source_files

CODE_FILES = ("conversations.py", "render.py", "samples.py", "sources.py", "turns.py")


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of the chat template's text."""
    return _sha256(json.dumps(tokenizer.chat_template, sort_keys=True))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of the serialised tokenizer and of the special tokens, which the chat template can name."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        form = json.loads(tokenizer.backend_tokenizer.to_str())
        # A call with padding or truncation leaves its settings there; they do not change what text becomes.
        del form["padding"], form["truncation"]
    else:
        form = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    return _sha256(json.dumps([form, tokenizer.special_tokens_map], sort_keys=True, default=str))


def key_parts(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Collection[int],
    parameters: dict[str, Any],
) -> dict[str, Any]:
    """Everything that decides the prepared data, readable. A source counts by name and bytes, not place."""
    code = "".join(file_sha256(Path(__file__).with_name(name)) for name in CODE_FILES)
    return {
        "sources": [_source_part(source) for source in sources],
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template_fingerprint(tokenizer),
        "eos_ids": sorted(eos_ids),
        "parameters": parameters,
        "transformers": transformers.__version__,
        "code": _sha256(code),
    }


def key_of(parts: dict[str, Any]) -> str:
    """The key: sha256 of the parts."""
    return _sha256(json.dumps(parts, sort_keys=True))


def _source_part(source: str) -> dict[str, Any]:
    split, files = source_files(source)
    sizes = {name: [file.stat().st_size, file_sha256(file)] for name, file in files.items()}
    return {"split": split, "size_and_sha256": sizes}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
