"""Plain batched decoding: how the target answers many prompts at once (regeneration, not measurement).

Prompts are padded on the left so that all sequences grow at the same slot; positions count real tokens only. A prompt
that occurs several times is read once. Every sequence draws from its own seeded stream, so its randomness does not
depend on its neighbours in the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.sampling import SamplingConfig, probabilities
from heads.cache import TreeCache
from heads.masks import additive
from heads.target import Target

# Shapes: B sequences still running, S slots of the cache, P prompt slots, V vocabulary, K kept tokens

# Dropping finished sequences copies the cache: worth it once a quarter of the batch only fills space.
COMPACT_BELOW = 0.75


@dataclass
class _Sequence:
    stream: torch.Generator
    tokens: list[int]
    ended: bool = False

    def take(self, token: int, eos_ids: Sequence[int]) -> None:
        """Go on with `token`; what an ended one draws is nobody's."""
        if not self.ended:
            self.tokens.append(token)
            self.ended = token in eos_ids


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    max_new_tokens: int,
    seeds: Sequence[int],
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """Continue each prompt until an end-of-text id (kept) or `max_new_tokens`; `seeds` has one number per prompt.

    Raises:
        ValueError: if a prompt leaves no room for `max_new_tokens` in the target's context.
    """
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > target.max_context:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the target's context of "
            f"{target.max_context}; shorten one of them"
        )
    if any(window is not None for window in target.windows.values()):
        raise ValueError("batched generation handles full attention only; use a target without sliding windows")
    running = sequences = [_Sequence(torch.Generator().manual_seed(seed), []) for seed in seeds]
    cache = target.new_cache(longest + max_new_tokens)
    hidden_BD, visible_BS = _read_prompts(target, prompts, max_new_tokens, cache)
    lengths_B = visible_BS[:, :longest].sum(1)
    for step in range(max_new_tokens):
        tokens = _draw(target.logits(hidden_BD), sampling, [sequence.stream for sequence in running])
        on_tokens(sum(not sequence.ended for sequence in running))
        for sequence, token in zip(running, tokens, strict=True):
            sequence.take(token, target.eos_ids)
        alive = [row for row, sequence in enumerate(running) if not sequence.ended]
        if not alive or step == max_new_tokens - 1:
            break
        if len(alive) < len(running) * COMPACT_BELOW:
            rows_B = torch.tensor(alive, device=target.device)
            cache.select(rows_B)
            visible_BS, lengths_B = visible_BS[rows_B], lengths_B[rows_B]
            running, tokens = [running[row] for row in alive], [tokens[row] for row in alive]
        ids_B1 = torch.tensor(tokens, device=target.device)[:, None]
        hidden_BD = _forward(target, ids_B1, visible_BS, (lengths_B + step)[:, None], cache)
    return [sequence.tokens for sequence in sequences]


def _read_prompts(
    target: Target, prompts: Sequence[Sequence[int]], extra: int, cache: TreeCache
) -> tuple[Tensor, Tensor]:
    """Fill the cache with every prompt: features [B, D] of their last tokens, and which slots [B, S] they see."""
    row_of: dict[tuple[int, ...], int] = {}
    rows = [row_of.setdefault(tuple(prompt), len(row_of)) for prompt in prompts]
    longest = max(map(len, row_of))
    ids_BP, visible_BS = _left_pad(list(row_of), longest, extra, target.device)
    hidden_BD = _forward(target, ids_BP, visible_BS, (visible_BS[:, :longest].cumsum(1) - 1).clamp_min(0), cache)
    if len(row_of) == len(prompts):
        return hidden_BD, visible_BS
    rows_B = torch.tensor(rows, device=target.device)
    cache.select(rows_B)
    return hidden_BD[rows_B], visible_BS[rows_B]


def _left_pad(prompts, longest: int, extra: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids_BP = torch.zeros(len(prompts), longest, dtype=torch.long)
    visible_BS = torch.ones(len(prompts), longest + extra, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids_BP[row, longest - len(prompt) :] = torch.tensor(prompt)
        visible_BS[row, : longest - len(prompt)] = False
    return ids_BP.to(device), visible_BS.to(device)


def _forward(target: Target, ids_BT: Tensor, visible_BS: Tensor, positions_BT: Tensor, cache: TreeCache) -> Tensor:
    """Run T new slots and return the features [B, D] of the last one."""
    start, T = cache.length, ids_BT.shape[1]
    end = start + T
    causal_TS = torch.arange(end, device=ids_BT.device) <= torch.arange(start, end, device=ids_BT.device)[:, None]
    # A padded query would see nothing at all: let it see itself, so that its softmax stays finite.
    own_TS = torch.arange(end, device=ids_BT.device) == torch.arange(start, end, device=ids_BT.device)[:, None]
    mask = additive((causal_TS & visible_BS[:, None, :end]) | own_TS, target.dtype)[:, None]
    features_BTD = target.run_decoder(ids_BT, positions_BT, mask, cache)
    cache.advance(T)
    return features_BTD[:, -1]


def _draw(logits_BV: Tensor, sampling: SamplingConfig, streams: list[torch.Generator]) -> list[int]:
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).tolist()
    # Only the kept tokens are summed up, a tenth of the time of a whole vocabulary; in the order of their ids, since
    # the order of their logits can change with the rounding of another batch.
    kept = min(sampling.top_k or logits_BV.shape[-1], logits_BV.shape[-1])
    ids_BK = logits_BV.topk(kept).indices.sort(-1).values
    logits_BK = logits_BV.gather(1, ids_BK)
    mass_BK = probabilities(logits_BK, sampling).double().cumsum(-1)
    uniform_B = torch.cat([torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams])
    points_B1 = uniform_B.to(mass_BK.device)[:, None] * mass_BK[:, -1:]
    return ids_BK.gather(1, torch.searchsorted(mass_BK, points_B1, right=True).clamp_max(kept - 1))[:, 0].tolist()
