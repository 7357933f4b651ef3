"""A target and a drafter's stepper whose distributions stand in a table, for the real drafting and decoding code.

Both look up the whole sequence before a token, so a row that is read for a wrong prefix gives a wrong law.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from eval.drafters import Draft
from heads.target import FINAL_NORM
from tests.eval.enumeration import Drafted, Model, Tokens


def after(model: Model, prefix: Tokens) -> Model:
    """The model behind a prefix that is left out of what it is asked."""
    return lambda tokens: model((*prefix, *tokens))


class TableStepper:
    """A `Stepper` whose law behind a node is the table's row [Vd] for all tokens up to it, the root included."""

    taps: tuple[str, ...] = ()
    max_depth: int | None = None

    def __init__(self, model: Model, vocab_size: int, draft_ids: Sequence[int] | None = None):
        self.model, self.vocab_size = model, vocab_size
        self.draft_ids = torch.tensor(range(vocab_size) if draft_ids is None else draft_ids)
        self.committed: Tokens = ()

    def reset(self, prompt_T: Tensor, features: dict[str, Tensor]) -> None:
        self.committed = tuple(prompt_T.tolist())

    def observe(self, features: dict[str, Tensor], tokens_P: Tensor, path_P: Tensor) -> None:
        self.committed += tuple(tokens_P.tolist())

    def begin(self, root: Tensor) -> Tensor:
        self._paths: list[Tokens] = [(*self.committed, int(root))]
        return self._logits()

    def step(self, tokens_N: Tensor, parents_N: Tensor) -> Tensor:
        nodes = zip(tokens_N.tolist(), parents_N.tolist(), strict=True)
        self._paths = [(*self._paths[parent], token) for token, parent in nodes]
        return self._logits()

    def _logits(self) -> Tensor:
        return torch.stack([self.model(path) for path in self._paths]).log()


class TableCache:
    """Stands for a `TreeCache`: the committed tokens, and those of the last forward."""

    def __init__(self):
        self.committed: Tokens = ()
        self.uncommitted: Tokens = ()

    def clear(self) -> None:
        self.committed = ()

    def advance(self, count: int) -> None:
        self.committed += self.uncommitted[:count]

    def commit(self, path_P: Tensor) -> None:
        self.committed += tuple(self.uncommitted[node] for node in path_P.tolist())


class TableTarget:
    """Stands for a `Target` whose feature at a token is the logarithm of the table's row after it."""

    device = torch.device("cpu")
    tokenizer = SimpleNamespace(decode=str)

    def __init__(self, model: Model):
        self.model = model

    def prefill(self, ids_BT: Tensor, cache: TableCache, taps: Sequence[str] = ()) -> dict[str, Tensor]:
        T = ids_BT.shape[1]
        features = self.forward(ids_BT[0], torch.ones(T, T).tril().bool(), torch.arange(T), cache)
        cache.advance(T)
        return features

    def forward(
        self, tokens_N: Tensor, ancestors_NN: Tensor, depths_N: Tensor, cache: TableCache, taps: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        cache.uncommitted = tuple(tokens_N.tolist())
        rows = []
        for sees_N, depth in zip(ancestors_NN, depths_N.tolist(), strict=True):
            path = tokens_N[sees_N].tolist()  # an ancestor has a lower id
            assert len(path) == depth + 1
            rows.append(self.model((*cache.committed, *path)))
        return {FINAL_NORM: torch.stack(rows).log()[None]}

    def logits(self, features: Tensor) -> Tensor:
        return features


def drafted(draft: Draft) -> Drafted:
    """A real draft in the enumeration's terms."""
    tokens = draft.tokens_N.tolist()
    prefixes = [tuple(tokens[node] for node in path[1:] if node >= 0) for path in draft.tree.paths_NP.tolist()]
    return Drafted(draft.tree, draft.tokens_N, prefixes, draft.proposal)
