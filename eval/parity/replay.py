"""What replayed drafters of all families have in common: they enter a prompt, then draft behind its anchors."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

# Shapes: K drafted steps, Ve ids that the engine drafts


class Entered(ABC):
    """A prompt and its continuation, taken in by a drafter."""

    @abstractmethod
    def drafts(self, anchor: int, forced_K: Tensor | None = None, columns: Tensor | None = None) -> Iterator[Tensor]:
        """Logits [1, Ve] of one step of a greedy chain after the other, computed when they are asked for.

        forced_K: feed these token ids instead of the best ones. columns: only these of the engine's ids.
        """

    def chain(self, anchor: int, steps: int, forced_K: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        """The logits [K, Ve] of the first `steps` steps."""
        return torch.cat(list(islice(self.drafts(anchor, forced_K, columns), steps)))
