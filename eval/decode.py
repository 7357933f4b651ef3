"""Decoding: the loop that everything else exists for, and plain decoding beside it on the same machinery."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.accept import Accepted, accept_greedy, accept_sampling, accept_typical
from eval.block_verification import accept_block
from eval.drafters import Draft, Drafter
from eval.records import Cycle, Timing
from eval.sampling import Coin, SamplingConfig, probabilities
from eval.stopping import StopConditions, Stopper
from heads.cache import TreeCache
from heads.target import FINAL_NORM, Target

# Shapes: N tree nodes, P nodes of the accepted path with the root, V vocabulary, T tokens


@dataclass(frozen=True)
class AcceptanceConfig:
    """Which drafts stand (`conf/eval/`).

    rule: "greedy" (temperature 0), "sampling" (lossless), "block" (lossless, for chains: judges their drafts together)
        or "typical" (lossy, Medusa's).
    drafts: "top" takes the heads' most likely candidates; "sampled" draws them (rules sampling and block).
    """

    rule: str = "greedy"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    drafts: str = "top"
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self):
        if self.rule not in {"greedy", "sampling", "block", "typical"}:
            raise ValueError(f"acceptance.rule={self.rule} must be greedy, sampling, block or typical")
        if self.drafts not in {"top", "sampled"}:
            raise ValueError(f"acceptance.drafts={self.drafts} must be top or sampled")
        if (self.rule == "greedy") != (self.sampling.temperature == 0):
            raise ValueError(
                f"acceptance.rule={self.rule} does not go with temperature={self.sampling.temperature}; "
                "greedy means temperature 0, the others need one above 0"
            )
        if self.drafts == "sampled" and self.rule not in {"sampling", "block"}:
            raise ValueError("acceptance.drafts=sampled needs acceptance.rule=sampling or block")
        if self.rule == "block" and self.drafts != "sampled":
            raise ValueError(
                "acceptance.rule=block gains nothing over sampling for likeliest drafts; set acceptance.drafts=sampled"
            )

    @property
    def lossless(self) -> bool:
        return self.rule != "typical"


@dataclass(frozen=True)
class Generation:
    """Emitted token ids, why they ended, the time they took, and the cycles they took (none for plain decoding)."""

    tokens: list[int]
    reason: str
    timing: Timing
    cycles: list[Cycle] = field(default_factory=list)


class Clock(Protocol):
    """Seconds since some moment, with the work that was launched before it done."""

    def __call__(self) -> float: ...


def clock_for(device: torch.device) -> Clock:
    """A wall clock; on an accelerator it waits for the device, since kernels run on after their launch."""
    if device.type != "cuda":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


@torch.inference_mode()
def speculative_generate(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    conditions: StopConditions,
    acceptance: AcceptanceConfig,
    cache: TreeCache,
    coin: Coin | None = None,
    clock: Clock = time.perf_counter,
) -> Generation:
    """Decode one sequence with heads: draft -> verify -> accept -> commit until a stop condition holds.

    The cache must hold prompt, new tokens and one tree (see `cache_capacity`). One host synchronisation per cycle,
    for the accepted tokens, plus those of `clock`.

    Raises:
        ValueError: if the prompt does not fit the context.
    """
    stopper = Stopper(conditions, len(prompt), target.tokenizer.decode)
    choose = _chooser(acceptance.sampling, coin)
    accept = _acceptor(acceptance, coin)
    begin = clock()
    prompt_T = torch.tensor(prompt, device=target.device)
    features = _prefill(target, prompt_T, cache, drafter.taps)
    root = choose(target.logits(features[FINAL_NORM][0, -1]))
    drafter.reset(prompt_T, features)
    stopper.push([int(root)])
    after_prefill = clock()
    draft_s = verify_s = 0.0
    cycles: list[Cycle] = []
    while stopper.reason is None:
        started = clock()
        draft = drafter.propose(root, max_depth=stopper.room - 1)
        drafted = clock()
        tree = draft.tree
        features = target.forward(draft.tokens_N, tree.ancestors_NN, tree.depths_N, cache, drafter.taps)
        logits_NV = target.logits(features[FINAL_NORM][0])
        verified = clock()
        accepted = accept(draft, logits_NV)
        path, tokens = accepted.to_host(draft.tokens_N)
        emitted = stopper.push(tokens)
        path_P = F.pad(accepted.path_D[: len(path)], (1, 0))  # node 0 is the root
        cache.commit(path_P)
        drafter.observe(features, path_P)
        root = accepted.token
        cycles.append(Cycle(tree.depth, len(path), emitted, path[-1] if path else 0))
        draft_s, verify_s = draft_s + drafted - started, verify_s + verified - drafted
    timing = Timing(len(stopper.tokens) - 1, after_prefill - begin, clock() - after_prefill, draft_s, verify_s)
    return Generation(stopper.tokens, stopper.reason, timing, cycles)


@torch.inference_mode()
def plain_generate(
    target: Target,
    prompt: Sequence[int],
    conditions: StopConditions,
    sampling: SamplingConfig,
    cache: TreeCache,
    coin: Coin | None = None,
    clock: Clock = time.perf_counter,
) -> Generation:
    """Decode one sequence with the target alone: one token per forward, same cache, same stop conditions."""
    stopper = Stopper(conditions, len(prompt), target.tokenizer.decode)
    choose = _chooser(sampling, coin)
    begin = clock()
    prompt_T = torch.tensor(prompt, device=target.device)
    root = choose(target.logits(_prefill(target, prompt_T, cache)[FINAL_NORM][0, -1]))
    stopper.push([int(root)])
    after_prefill = clock()
    alone_11 = torch.ones(1, 1, dtype=torch.bool, device=root.device)
    depth_1 = torch.zeros(1, dtype=torch.long, device=root.device)
    while stopper.reason is None:
        features = target.forward(root[None], alone_11, depth_1, cache)
        cache.advance(1)
        root = choose(target.logits(features[FINAL_NORM][0, 0]))
        stopper.push([int(root)])
    timing = Timing(len(stopper.tokens) - 1, after_prefill - begin, clock() - after_prefill)
    return Generation(stopper.tokens, stopper.reason, timing)


def cache_capacity(prompt_length: int, conditions: StopConditions, tree_size: int) -> int:
    """Rows that one generation can need: everything emitted, and one whole tree behind it."""
    return min(prompt_length + conditions.max_new_tokens, conditions.max_context) + tree_size


def _prefill(
    target: Target, prompt_T: Tensor, cache: TreeCache, taps: Sequence[str] = (FINAL_NORM,)
) -> dict[str, Tensor]:
    cache.clear()
    return target.prefill(prompt_T[None], cache, taps)


def _chooser(sampling: SamplingConfig, coin: Coin | None) -> Callable[[Tensor], Tensor]:
    """How the target's own token is chosen from logits [V]."""
    if sampling.temperature == 0:
        return lambda logits_V: logits_V.argmax()
    assert coin is not None, "sampling needs a source of randomness"
    return lambda logits_V: coin.draw(probabilities(logits_V, sampling))


def _acceptor(config: AcceptanceConfig, coin: Coin | None) -> Callable[[Draft, Tensor], Accepted]:
    if config.rule == "greedy":
        return lambda draft, logits_NV: accept_greedy(draft.tree, draft.tokens_N, logits_NV)
    if config.rule == "typical":
        return lambda draft, logits_NV: accept_typical(
            draft.tree, draft.tokens_N, logits_NV, config.sampling.temperature, config.epsilon, config.delta
        )
    assert coin is not None, "sampling needs a source of randomness"

    def lossless(draft: Draft, logits_NV: Tensor) -> Accepted:
        probs_NV = probabilities(logits_NV, config.sampling)
        if config.rule == "block" and draft.proposal is not None:
            return accept_block(draft.tree, draft.tokens_N, probs_NV, draft.proposal, coin)
        return accept_sampling(draft.tree, draft.tokens_N, probs_NV, draft.proposal, coin)

    return lossless
