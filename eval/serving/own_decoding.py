"""What our own decoder makes of the prompts that an engine answers: plain and with the heads' chain, counted alike."""

from collections.abc import Sequence

import torch

from eval.benchmark import Bench, BenchmarkConfig
from eval.drafting import build_drafter, for_serving
from eval.prompts import EvalPrompt
from eval.records import Cycle, Timing
from eval.sampling import TorchCoin
from eval.serving.counters import Counters
from eval.serving.engine import Answer
from eval.serving.served_heads import ServedHeads
from eval.tree import Tree
from heads.target import Target


class OwnDecoder:
    """Greedy answers of `max_new_tokens` at most, by this repository's engine.

    drafts_past_end: draft the whole chain also where the token limit cuts inside it, and count what is accepted
    behind the limit: so does an engine that learns of the limit only after it has verified.

        limit 8, K = 3:   t | t t t t | t t t[t]      two drafts, accepted 3 + 3, one token behind the limit
        else              t | t t t t | t t t         two drafts, accepted 3 + 2: the last one is K = 2 long
    """

    def __init__(
        self,
        target: Target,
        served: ServedHeads,
        prompts: Sequence[EvalPrompt],
        max_new_tokens: int,
        drafts_past_end: bool,
    ):
        self.max_new_tokens, self.chain = max_new_tokens, served.chain
        drafter = build_drafter(for_serving(served.heads, target), Tree.chain(served.chain))
        room = max_new_tokens + (served.chain if drafts_past_end else 0)
        longest = max(len(prompt.ids) for prompt in prompts)
        self._bench = Bench(target, drafter, BenchmarkConfig(max_new_tokens=room), longest)
        self._coin = TorchCoin(torch.Generator(target.device))  # greedy decoding tosses none

    def answer(self, ids: Sequence[int], with_heads: bool) -> Answer:
        """With heads, it has the counters that an engine would have."""
        done = self._bench.heads(ids, self._coin) if with_heads else self._bench.plain(ids, self._coin)
        whole = Timing(len(done.tokens), prefill_s=0.0, decode_s=done.timing.prefill_s + done.timing.decode_s)
        counters = counters_of(counted_cycles(done.cycles, self.max_new_tokens), self.chain) if with_heads else None
        return Answer(done.tokens[: self.max_new_tokens], whole, counters)


def counted_cycles(cycles: Sequence[Cycle], max_new_tokens: int) -> list[Cycle]:
    """The cycles that begin before `max_new_tokens` are emitted; the first token of all comes from prefill."""
    counted, emitted = [], 1
    for cycle in cycles:
        if emitted >= max_new_tokens:
            break
        counted.append(cycle)
        emitted += cycle.emitted
    return counted


def counters_of(cycles: Sequence[Cycle], chain: int) -> Counters:
    """Cycles of a chain as vLLM counts them."""
    return Counters(
        "vllm",
        drafts=sum(cycle.offered > 0 for cycle in cycles),
        draft_tokens=sum(cycle.offered for cycle in cycles),
        accepted_tokens=sum(cycle.accepted for cycle in cycles),
        accepted_per_position=tuple(sum(cycle.accepted >= k for cycle in cycles) for k in range(1, chain + 1)),
    )
