"""The target's features of a batch, and a memory of those that a later epoch will ask for again."""

import torch
from torch import Tensor

from data.batches import Batch
from heads.target import Target

# Shapes: B rows, T tokens, D hidden


class FeatureSource:
    """Runs the target over batches.

    With `keep` every row is run once, alone, and kept in memory, 2 or 4 bytes for each of D numbers of a token; its
    features then depend on nothing but the row, so that a resumed run sees the same. Worth it where the target is
    the larger part of a step and the data fits: several epochs, or a warm start before the first.
    """

    def __init__(self, target: Target, taps: tuple[str, ...], dtype: torch.dtype, keep: bool):
        self.target, self.taps, self.dtype, self.keep = target, taps, dtype, keep
        self.rows: dict[bytes, dict[str, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Features {tap: [B, T, D]} in the compute dtype, on the target's device."""
        if not self.keep:
            return self._run(batch.ids_BT, batch.positions_BT, batch.documents_BT)
        rows = [self._row(batch, b) for b in range(len(batch.ids_BT))]
        T = batch.ids_BT.shape[1]
        return {
            tap: torch.stack([torch.nn.functional.pad(row[tap], (0, 0, 0, T - len(row[tap]))) for row in rows])
            for tap in self.taps
        }

    def _row(self, batch: Batch, b: int) -> dict[str, Tensor]:
        length = int((batch.documents_BT[b] >= 0).sum())
        ids_T, documents_T = batch.ids_BT[b, :length], batch.documents_BT[b, :length]
        key = torch.stack([ids_T, documents_T]).cpu().numpy().tobytes()
        if key not in self.rows:
            features = self._run(ids_T[None], batch.positions_BT[b : b + 1, :length], documents_T[None])
            self.rows[key] = {tap: feature_BTD[0] for tap, feature_BTD in features.items()}
        return self.rows[key]

    def _run(self, ids_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor) -> dict[str, Tensor]:
        features = self.target.features(ids_BT, positions_BT, documents_BT, self.taps)
        return {tap: features[tap].to(self.dtype) for tap in self.taps}
