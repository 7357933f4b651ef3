"""What goes into which shard of a feature store, settled before the first byte is written.

A plan depends on the data and the layout alone, so a stopped extraction that is run again ends with the same bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.features import Index, Layout, document_key
from data.prepared import PreparedData

# Shapes: T tokens of a document, S documents of a shard, D hidden

# From token ids [T] and supervised [T] to the positions to store of a tap that is not whole: bool [T] by tap.
Positions = Callable[[Tensor, Tensor], dict[str, Tensor]]

HEADER_BYTES = 4096  # of a shard and its checksum, generously


@dataclass(frozen=True)
class Document:
    """Token ids that one prepared sample has, or several that supervise them differently."""

    key: bytes
    samples: tuple[int, ...]
    tokens: int
    rows: dict[str, int]  # stored rows of each tap


@dataclass(frozen=True)
class Plan:
    """Which documents each shard holds."""

    index: Index
    prepared: PreparedData
    positions: Positions
    shards: list[list[Document]]

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(document.tokens for shard in self.shards for document in shard)

    def ids(self, document: Document) -> Tensor:
        """Token ids [T]."""
        return self.prepared.sample(document.samples[0])[0]

    def document_bytes(self, document: Document) -> int:
        """Bytes that a document takes in its shard."""
        return document_bytes(document, self.index.layout)

    def shard_bytes(self, number: int) -> int:
        """Bytes that shard `number` takes on disk."""
        return HEADER_BYTES + sum(map(self.document_bytes, self.shards[number]))


def document_bytes(document: Document, layout: Layout) -> int:
    """Bytes that a document takes in a shard."""
    rows = sum(count * layout.row_bytes(tap) for tap, count in document.rows.items())
    return rows + len(document.key) + torch.int32.itemsize + torch.int64.itemsize * len(layout.taps)


def make_plan(
    prepared: PreparedData, layout: Layout, positions: Positions, made_for: dict[str, Any], shard_bytes: float
) -> Plan:
    """Documents in the order of the data, in shards that are closed once they hold `shard_bytes`."""
    documents = find_documents(prepared, layout, positions)
    shards: list[list[Document]] = []
    room = 0.0
    for document in documents:
        if room <= 0:
            shards.append([])
            room = shard_bytes
        shards[-1].append(document)
        room -= document_bytes(document, layout)
    return Plan(Index(made_for, layout, len(shards), len(documents)), prepared, positions, shards)


def find_documents(prepared: PreparedData, layout: Layout, positions: Positions) -> list[Document]:
    """The distinct documents of the data, in its order."""
    samples: dict[bytes, list[int]] = {}
    for sample in range(len(prepared)):
        samples.setdefault(document_key(prepared.sample(sample)[0]), []).append(sample)
    documents = []
    for key, same in samples.items():
        tokens, stored = prepared.lengths[same[0]], stored_positions(prepared, same, positions)
        rows = {tap: tokens if tap in layout.whole else int(stored[tap].sum()) for tap in layout.taps}
        documents.append(Document(key, tuple(same), tokens, rows))
    return documents


def stored_positions(prepared: PreparedData, samples: Sequence[int], positions: Positions) -> dict[str, Tensor]:
    """Whether each position of a document is stored, [T] by tap: what any of its samples reads."""
    stored: dict[str, Tensor] = {}
    for sample in samples:
        for tap, read_T in positions(*prepared.sample(sample)).items():
            stored[tap] = stored[tap] | read_T if tap in stored else read_T
    return stored
