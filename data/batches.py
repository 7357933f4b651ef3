"""Prepared samples -> rows -> optimiser steps -> the micro-batches of this process.

The rows of a step depend on (data, batch_size, max_length, packing, seed, step) alone, never on the number of
processes or on micro_batch_size: the same run on other hardware sees the same steps.

    step 0, batch_size 8:            rows  r0 r1 r2 r3 r4 r5 r6 r7
    2 processes, micro_batch_size 2: rank 0: (r0 r2) (r4 r6)      rank 1: (r1 r3) (r5 r7)

# Shapes: B rows, T tokens of the longest row of the batch
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.packing import pack
from data.prepared import PreparedData

LENGTH_WINDOW = 50  # batches whose rows are sorted by length together, as in transformers' group_by_length


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of equal length. Padding is where documents_BT is -1, whatever the id there: pad may equal EOS."""

    ids_BT: Tensor  # int64
    supervised_BT: Tensor  # bool, False on padding
    documents_BT: Tensor  # int64, number of the document (sample) within its row, -1 on padding
    positions_BT: Tensor  # int64, from 0 in each document, 0 on padding

    @property
    def num_supervised(self) -> int:
        """Supervised tokens; waits for the device."""
        return int(self.supervised_BT.sum())

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on `device`."""
        return Batch(
            ids_BT=self.ids_BT.to(device),
            supervised_BT=self.supervised_BT.to(device),
            documents_BT=self.documents_BT.to(device),
            positions_BT=self.positions_BT.to(device),
        )


@dataclass(frozen=True, eq=False)
class Step:
    """One optimiser step: this process's micro-batches, and all rows of all processes (on the CPU).

    `whole` gives every process the normaliser of the loss without communication.
    """

    number: int
    epoch: int
    micro_batches: list[Batch]
    whole: Batch


class BatchLoader:
    """Endless, seeded, resumable: the step number is the whole state."""

    def __init__(
        self,
        prepared: PreparedData,
        *,
        batch_size: int,
        micro_batch_size: int,
        max_length: int,
        packing: bool,
        pad_id: int,
        seed: int = 0,
        world_size: int = 1,
        rank: int = 0,
    ) -> None:
        """Plans the rows: with packing several samples, up to `max_length` tokens, in each; without, one.

        `batch_size`: rows per optimiser step over all processes. `micro_batch_size`: rows per forward of one
        process. Raises ValueError if batch_size does not divide among processes and micro-batches, if a
        sample is longer than max_length, or if there are fewer rows than batch_size.
        """
        _check_sizes(batch_size, micro_batch_size, world_size)
        assert 0 <= rank < world_size, (rank, world_size)
        longest = max(prepared.lengths)
        if longest > max_length:
            raise ValueError(f"max_length={max_length} must be at least {longest}, the longest sample; prepare again")
        self.prepared, self.packing, self.seed, self.pad_id = prepared, packing, seed, pad_id
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.world_size, self.rank = world_size, rank
        # Packed once: the number of rows, and so of steps, is the same in every epoch.
        self.rows = pack(prepared.lengths, max_length, seed) if packing else [[i] for i in range(len(prepared))]
        self.steps_per_epoch = len(self.rows) // batch_size
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"batch_size={batch_size} must be at most {len(self.rows)}, the number of rows "
                f"({len(prepared)} samples, packing={packing}); lower batch_size or give more data"
            )
        self._order: tuple[int, list[int]] = (-1, [])

    def steps(self, start_step: int = 0) -> Iterator[Step]:
        """Steps from `start_step` on, without end; each epoch has its own order."""
        number = start_step
        while True:
            yield self.step(number)
            number += 1

    def step(self, number: int) -> Step:
        """Step `number`, counted from 0 over all epochs."""
        rows = self.step_rows(number)
        mine = rows[self.rank :: self.world_size]
        micro = [mine[i : i + self.micro_batch_size] for i in range(0, len(mine), self.micro_batch_size)]
        return Step(
            number=number,
            epoch=number // self.steps_per_epoch,
            micro_batches=[collate(self.prepared, part, self.pad_id) for part in micro],
            whole=collate(self.prepared, rows, self.pad_id),
        )

    def step_rows(self, number: int) -> list[list[int]]:
        """The rows of step `number` over all processes; a row is a list of sample indices."""
        epoch, index = divmod(number, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, self._epoch_order(epoch))
        start = index * self.batch_size
        return [self.rows[row] for row in self._order[1][start : start + self.batch_size]]

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        random.Random(f"epoch {epoch} of seed {self.seed}").shuffle(order)
        if self.packing:
            return order
        lengths, window = self.prepared.lengths, LENGTH_WINDOW * self.batch_size
        windows = [order[start : start + window] for start in range(0, len(order), window)]
        return [row for part in windows for row in sorted(part, key=lambda row: -lengths[row])]


def collate(prepared: PreparedData, rows: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """One batch of `rows` (lists of sample indices), padded at the row ends to the longest row."""
    longest = max(sum(prepared.lengths[index] for index in row) for row in rows)
    shape = (len(rows), longest)
    batch = Batch(
        ids_BT=torch.full(shape, pad_id),
        supervised_BT=torch.zeros(shape, dtype=torch.bool),
        documents_BT=torch.full(shape, -1),
        positions_BT=torch.zeros(shape, dtype=torch.int64),
    )
    for b, row in enumerate(rows):
        start = 0
        for document, index in enumerate(row):
            ids, supervised = prepared.sample(index)
            span = slice(start, start + len(ids))
            batch.ids_BT[b, span] = ids
            batch.supervised_BT[b, span] = supervised
            batch.documents_BT[b, span] = document
            batch.positions_BT[b, span] = torch.arange(len(ids))
            start += len(ids)
    return batch


def _check_sizes(batch_size: int, micro_batch_size: int, world_size: int) -> None:
    for name, size in (("batch_size", batch_size), ("micro_batch_size", micro_batch_size)):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    unit = world_size * micro_batch_size
    if batch_size % unit:
        below = batch_size // unit * unit
        fixes = f"{below} or {below + unit}" if below else f"{unit}"
        raise ValueError(
            f"batch_size={batch_size} must be divisible by {unit} "
            f"({world_size} processes x micro_batch_size {micro_batch_size}); use {fixes}"
        )
