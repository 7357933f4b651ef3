"""How EAGLE heads draft: their own key/value cache over the committed sequence, and a draft tree behind it.

    rows of the cache   0 ... C-1                     C ...            (row t: feature of t, token t + 1)
                        committed, true features      draft tree, states instead of features

After a verify the accepted positions are entered anew with the target's true features, over whatever the tree left.
"""

import torch
from torch import Tensor

from heads.eagle import EagleHeads

# Shapes: P newly committed positions, N nodes of a level, R tree rows so far, C committed rows, T tokens, D hidden


class EagleStepper:
    """The drafting state of EAGLE heads over one sequence (a `Stepper`)."""

    def __init__(self, heads: EagleHeads, capacity: int = 512):
        self.heads = heads
        self.taps = heads.taps
        self.draft_ids = heads.draft_ids
        self.vocab_size = heads.vocab_size
        self.window = heads.config.layer.sliding_window
        self.max_depth = self.window  # a deeper node would have to forget the first of its own path
        self.cache = heads.new_cache(capacity)

    def reset(self, prompt_T: Tensor, features: dict[str, Tensor]) -> None:
        self.cache.length = 0
        self._entering_PD = self.heads.fuse(features)[0]
        self._tokens_P = prompt_T[1:]

    def observe(self, features: dict[str, Tensor], tokens_P: Tensor, path_P: Tensor) -> None:
        self._entering_PD = self.heads.fuse({tap: features[tap][:, path_P] for tap in self.taps})[0]
        self._tokens_P = tokens_P[1:]

    def begin(self, root: Tensor) -> Tensor:
        tokens_P = torch.cat([self._tokens_P, root[None]])
        start, end = self.cache.length, self.cache.length + len(tokens_P)
        rows_S = torch.arange(end, device=root.device)
        visible_PS = None
        if len(tokens_P) > 1 or self.window is not None:
            visible_PS = self._recent(rows_S[start:], rows_S) & (rows_S <= rows_S[start:, None])
        states_PD = self.heads.draft(self._entering_PD, tokens_P, rows_S[start:], self.cache, start, visible_PS)
        self.cache.length = end
        self._states_ND = states_PD[-1:]
        self._seen_NR = torch.zeros(1, 0, dtype=torch.bool, device=root.device)
        self._position_1 = rows_S[-1:]
        return self.heads.draft_logits(self._states_ND)

    def step(self, tokens_N: Tensor, parents_N: Tensor) -> Tensor:
        N = len(tokens_N)
        own_NN = torch.eye(N, dtype=torch.bool, device=tokens_N.device)
        self._seen_NR = torch.cat([self._seen_NR[parents_N], own_NN], 1)
        self._position_1 = self._position_1 + 1
        positions_N = self._position_1.expand(N)
        committed_NC = self._recent(positions_N, torch.arange(self.cache.length, device=tokens_N.device))
        start = self.cache.length + self._seen_NR.shape[1] - N
        self._states_ND = self.heads.draft(
            self.heads.feed(self._states_ND[parents_N]), tokens_N, positions_N, self.cache, start,
            torch.cat([committed_NC, self._seen_NR], 1),
        )  # fmt: skip
        return self.heads.draft_logits(self._states_ND)

    def _recent(self, positions_N: Tensor, rows_C: Tensor) -> Tensor:
        """Which committed rows lie inside the window of each position: [N, C]."""
        if self.window is None:
            return torch.ones(len(positions_N), len(rows_C), dtype=torch.bool, device=rows_C.device)
        return positions_N[:, None] - rows_C < self.window
