"""Sources -> prepared data, stored under a key of everything that it depends on: same settings, same file."""

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations import Conversation, read_conversations
from data.fingerprint import key_of, key_parts
from data.prepared import PreparedData
from data.problems import Problems
from data.progress import Progress
from data.samples import SampleBuilder

logger = logging.getLogger(__name__)

RESERVED_KWARGS = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


@dataclass(frozen=True)
class DataConfig:
    """Sources and how they become samples; `data/sources.py` says what a source is.

    `max_length` counts tokens; `limit` is the largest number of conversations of a split, None for all;
    `cache_dir` "" stands for $HEADSTART_CACHE/data, or ~/.cache/headstart/data.
    """

    train: list[str]
    heldout: list[str] = field(default_factory=list)
    max_length: int = 1024
    packing: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    max_bad_share: float = 0.01
    limit: int | None = None
    cache_dir: str = ""

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("data.train=[] must name at least one source; give a path or hub:owner/name")
        both = sorted(set(self.train) & set(self.heldout))
        if both:
            raise ValueError(f"data.heldout={self.heldout} must not share sources with data.train; remove {both}")
        if self.max_length < 2:
            raise ValueError(f"data.max_length={self.max_length} must be at least 2; use 1024")
        if not 0 <= self.max_bad_share <= 1:
            raise ValueError(f"data.max_bad_share={self.max_bad_share} must lie in 0..1; use 0.01")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"data.limit={self.limit} must be at least 1; use null for all conversations")
        if self.system_prompt is not None and not self.system_prompt.strip():
            raise ValueError(f"data.system_prompt={self.system_prompt!r} must hold text; use null for none")
        reserved = sorted(RESERVED_KWARGS & set(self.template_kwargs))
        if reserved:
            raise ValueError(f"data.template_kwargs must not set {reserved}: rendering sets them; remove them")


def prepare(
    sources: Sequence[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Collection[int],
    progress: bool = False,
) -> PreparedData:
    """Renders `sources` (config.train or config.heldout) or takes the stored result of the same settings.

    `eos_ids`: every id at which serving stops. `progress`: shown on standard error. Raises ValueError for
    a missing or empty source, for more bad rows than config.max_bad_share, and if no sample is left.
    """
    parameters = {
        "max_length": config.max_length,
        "template_kwargs": config.template_kwargs,
        "system_prompt": config.system_prompt,
        "max_bad_share": config.max_bad_share,
        "limit": config.limit,
    }
    parts = key_parts(sources, tokenizer, eos_ids, parameters)
    key = key_of(parts)
    folder = Path(config.cache_dir or default_cache()).expanduser()
    stored = PreparedData.load(folder, key)
    if stored is not None:
        logger.info("prepared data taken from %s", folder / key)
        return stored
    problems = Problems()
    builder = SampleBuilder(tokenizer, eos_ids, config.template_kwargs, config.max_length)
    with Progress("rendering", "conversations", None, shown=progress) as counter:
        for conversation in _conversations(sources, config.limit, problems):
            builder.add(conversation.with_system(config.system_prompt), problems)
            counter.advance(1)
    problems.check(config.max_bad_share)
    prepared = builder.finish(problems, key)
    prepared.save(folder, {**parts, "paths": list(sources)})
    logger.info("prepared data written to %s: %s", folder / key, prepared.summary)
    return prepared


def _conversations(sources: Sequence[str], limit: int | None, problems: Problems) -> Iterator[Conversation]:
    rows = (row for source in sources for row in read_conversations(source, problems))
    return islice(rows, limit)


def default_cache() -> Path:
    """Where prepared data is kept unless `cache_dir` says otherwise."""
    return Path(os.environ.get("HEADSTART_CACHE", "~/.cache/headstart")) / "data"
