"""The target's features of a batch: from the target itself, from memory, or from a feature store on disk."""

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from data.batches import Batch, Step
from data.features import FeatureStore, document_key
from heads.target import Target

# Shapes: B rows, T tokens, D hidden


class FeatureSource:
    """Features {tap: [B, T, D]} of batches, in the compute dtype, on the target's device.

    keep: every document is run once, alone, and kept in memory, 2 or 4 bytes for each of D numbers of a token. Worth
        it where the target is the larger part of a step and the data fits: several epochs, or a warm start.
    store: documents are read from disk, and the target's decoder is never run. What a float32 store gives is what
        `keep` gives, to the bit, but for positions that no training reads.

    With both, features depend on nothing but the document, so that a resumed run sees the same.
    """

    def __init__(
        self,
        target: Target,
        taps: tuple[str, ...],
        dtype: torch.dtype,
        keep: bool = False,
        store: FeatureStore | None = None,
    ):
        assert not (keep and store)
        self.target, self.taps, self.dtype, self.keep, self.store = target, taps, dtype, keep, store
        self.kept: dict[bytes, dict[str, Tensor]] = {}
        self.reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="features")
        self.upcoming: Iterator[Batch] = iter(())
        self.started: tuple[Batch, Future[dict[str, Tensor]]] | None = None

    @torch.no_grad()
    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Features of one batch; 0 on padding unless the target is run on the batch itself.

        Raises:
            ValueError: if the store lacks a document or is damaged.
        """
        if self.store is not None:
            return self._prefetched(batch)
        if self.keep:
            return self._assemble(batch, self.target.device)
        return self.run(batch)

    def run(self, batch: Batch) -> dict[str, Tensor]:
        """What the target gives on the batch itself; with gradients if it is trained and they are on."""
        features = self.target.features(batch.ids_BT, batch.positions_BT, batch.documents_BT, self.taps)
        return {tap: features[tap].to(self.dtype) for tap in self.taps}

    def begin(self, fraction: float) -> None:
        """A step begins, with `fraction` of the run done; a frozen target does not care."""

    def own_loss(self, batch: Batch, features: dict[str, Tensor], step: Step) -> Tensor:
        """The target's own loss on a batch of `step`, beside that of the heads: 0 while it is frozen."""
        return torch.zeros((), device=self.target.device)

    def metrics(self) -> dict[str, float]:
        """What there is to log of the target itself."""
        return {}

    def ahead(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The same steps; while a batch is worked on, a thread reads the next one's features from the store."""
        if self.store is None:
            return steps
        steps, further = itertools.tee(steps)
        self.upcoming = (batch for step in further for batch in step.micro_batches)
        self._start_next()
        return steps

    def _prefetched(self, batch: Batch) -> dict[str, Tensor]:
        cpu_batch = batch.to("cpu")
        features = None
        if self.started is not None:
            expected, reading = self.started
            found = reading.result()  # waits in any case: the store is read by one thread at a time
            same = expected.ids_BT.equal(cpu_batch.ids_BT) and expected.documents_BT.equal(cpu_batch.documents_BT)
            features = found if same else None
        if features is None:
            return self._read(cpu_batch)
        self._start_next()
        return features

    def _start_next(self) -> None:
        following = next(self.upcoming, None)
        self.started = None if following is None else (following, self.reader.submit(self._read, following))

    def _read(self, cpu_batch: Batch) -> dict[str, Tensor]:
        features = self._assemble(cpu_batch, torch.device("cpu"))
        return {tap: feature_BTD.to(self.target.device) for tap, feature_BTD in features.items()}

    def _assemble(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        shape = (*batch.ids_BT.shape, self.target.hidden_size)
        features = {tap: torch.zeros(shape, dtype=self.dtype, device=device) for tap in self.taps}
        for row, span in document_spans(batch.documents_BT.cpu()):
            document = self._document(batch.ids_BT[row, span])
            for tap in self.taps:
                features[tap][row, span] = document[tap]
        return features

    def _document(self, ids_T: Tensor) -> dict[str, Tensor]:
        if self.store is not None:
            return self.store.read(ids_T, self.taps, self.dtype)
        key = document_key(ids_T)
        if key not in self.kept:
            features = document_features(self.target, ids_T, self.taps)
            self.kept[key] = {tap: feature_TD.to(self.dtype) for tap, feature_TD in features.items()}
        return self.kept[key]


@torch.no_grad()
def document_features(target: Target, ids_T: Tensor, taps: tuple[str, ...]) -> dict[str, Tensor]:
    """The features {tap: [T, D]} of one document that is run alone, in the target's dtype.

    Alone, as matrix kernels round differently for other batch shapes: so a document has one value everywhere.
    """
    ids_BT = ids_T[None].to(target.device)
    positions_BT = torch.arange(len(ids_T), device=target.device)[None]
    features = target.features(ids_BT, positions_BT, torch.zeros_like(ids_BT), taps)
    return {tap: features[tap][0] for tap in taps}


def document_spans(documents_BT: Tensor) -> Iterator[tuple[int, slice]]:
    """Row and place of each document of a batch on the CPU."""
    for row, documents_T in enumerate(documents_BT):
        numbers, lengths = documents_T.unique_consecutive(return_counts=True)
        ends = lengths.cumsum(0).tolist()
        for number, start, end in zip(numbers.tolist(), [0, *ends], ends, strict=False):
            if number >= 0:
                yield row, slice(start, end)
