"""Decoding prompts with heads and without, in turns: what an evaluation measures."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from eval.decode import (
    AcceptanceConfig,
    Generation,
    cache_capacity,
    clock_for,
    plain_generate,
    speculative_generate,
)
from eval.drafters import Draft, Drafter
from eval.drafting import as_served, build_drafter
from eval.level_drafter import DynamicTree
from eval.metrics import alpha, alpha_rates, tau, tokens_per_s
from eval.prompts import EvalPrompt
from eval.records import Divergence, PromptResult, Timing
from eval.sampling import TorchCoin
from eval.stopping import StopConditions
from eval.tree import Tree
from heads.family import DraftHeads
from heads.target import FINAL_NORM, Target

logger = logging.getLogger(__name__)

ENGINE, GENERATE = "engine", "transformers generate"
# While training: small, so that measuring is quick, and the same for all checkpoints of a run.
PROBE_TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


@dataclass(frozen=True)
class BenchmarkConfig:
    """How prompts are decoded (`conf/eval/`)."""

    max_new_tokens: int = 128
    stop_strings: list[str] = field(default_factory=list)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    repeats: int = 1
    probe_prompts: int = 3  # prompts on which the plain settings compete for being the baseline
    seed: int = 0

    def __post_init__(self):
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats} must be at least 1")

    def conditions(self, target: Target) -> StopConditions:
        return StopConditions(target.eos_ids, tuple(self.stop_strings), self.max_new_tokens, target.max_context)


class Bench:
    """One target and one drafter on one cache, decoding prompt after prompt."""

    def __init__(self, target: Target, drafter: Drafter, config: BenchmarkConfig, longest_prompt: int):
        self.target, self.drafter, self.config = target, drafter, config
        self.conditions = config.conditions(target)
        self.clock = clock_for(target.device)
        self.cache = target.new_cache(cache_capacity(longest_prompt, self.conditions, drafter.tree_size))

    def plain(self, ids: Sequence[int], coin: TorchCoin) -> Generation:
        sampling = self.config.acceptance.sampling
        return plain_generate(self.target, ids, self.conditions, sampling, self.cache, coin, self.clock)

    def heads(self, ids: Sequence[int], coin: TorchCoin) -> Generation:
        return speculative_generate(
            self.target, self.drafter, ids, self.conditions, self.config.acceptance, self.cache, coin, self.clock
        )

    @torch.inference_mode()
    def generate(self, ids: Sequence[int]) -> Timing:
        """Time transformers' own greedy generate; its prefill is timed as a generation of one token."""
        ids_BT = torch.tensor([ids], device=self.target.device)
        seconds, output = [], ids_BT
        generate = cast(Callable[..., torch.Tensor], self.target.model.generate)
        for new_tokens in (1, self.conditions.max_new_tokens):
            started = self.clock()
            output = generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=list(self.target.eos_ids),
                pad_token_id=self.target.eos_ids[0],
            )
            seconds.append(self.clock() - started)
        return Timing(output.shape[1] - len(ids) - 1, seconds[0], seconds[1] - seconds[0])

    @torch.inference_mode()
    def margin(self, prefix: Sequence[int], plain_token: int, heads_token: int) -> float:
        """How much the target preferred one token to the other after `prefix`, in plain decoding."""
        self.cache.clear()
        ids_BT = torch.tensor([prefix], device=self.target.device)
        hidden = self.target.prefill(ids_BT, self.cache)[FINAL_NORM]
        logits_V = self.target.logits(hidden[0, -1]).float()
        return (logits_V[plain_token] - logits_V[heads_token]).item()


def run_benchmark(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[tuple[int, EvalPrompt]],
    config: BenchmarkConfig,
    with_generate: bool = False,
    others: Mapping[str, Target] | None = None,
) -> Iterator[PromptResult]:
    """Decode numbered prompts with and without heads, alternating which goes first, after one warm-up of each.

    with_generate: time transformers' generate on every prompt too, for the case that it is the faster baseline.
    others: further plain settings to time on every prompt, by name: the target in other dtypes.
    """
    longest = max(len(prompt.ids) for _, prompt in prompts)
    bench = Bench(target, drafter, config, longest)
    rivals = {name: Bench(other, _NoDrafter(), config, longest) for name, other in (others or {}).items()}
    for rival in rivals.values():
        rival.plain(prompts[0][1].ids, _coin(config, target.device, 0))
    bench.plain(prompts[0][1].ids, _coin(config, target.device, 0))
    bench.heads(prompts[0][1].ids, _coin(config, target.device, 0))
    for number, prompt in prompts:
        result = measure_prompt(bench, prompt, number, with_generate)
        for name, rival in rivals.items():
            runs = [rival.plain(prompt.ids, _coin(config, rival.target.device, number)) for _ in range(config.repeats)]
            result.plain[name] = [run.timing for run in runs]
        yield result


def probe_plain(targets: dict[str, Target], prompts: Sequence[EvalPrompt], config: BenchmarkConfig) -> dict[str, float]:
    """Tokens per second of each plain setting on the first few prompts, taking turns.

    targets: the same target under the names of its settings, e.g. {"engine": ..., "engine, bfloat16": ...}; under
    the first, transformers' generate competes too where it can stop by the same rules (greedy, no stop strings).
    """
    probed = prompts[: config.probe_prompts]
    longest = max(len(prompt.ids) for prompt in probed)
    benches = {name: Bench(target, _NoDrafter(), config, longest) for name, target in targets.items()}
    runs: dict[str, Callable[[EvalPrompt], Timing]] = {
        name: lambda prompt, bench=bench: bench.plain(prompt.ids, _coin(config, bench.target.device, 0)).timing
        for name, bench in benches.items()
    }
    if config.acceptance.rule == "greedy" and not config.stop_strings:
        runs[GENERATE] = lambda prompt: next(iter(benches.values())).generate(prompt.ids)
    for run in runs.values():
        run(probed[0])
    timings = {name: [] for name in runs}
    for prompt in probed:
        for name, run in runs.items():
            timings[name].append(run(prompt))
    return {name: tokens_per_s(rows) for name, rows in timings.items()}


class _NoDrafter:
    """Stands where only plain decoding is asked for."""

    taps: tuple[str, ...] = (FINAL_NORM,)
    depth: int = 0
    tree_size: int = 1

    def reset(self, prompt_T: torch.Tensor, features: dict[str, torch.Tensor]) -> None: ...

    def observe(self, features: dict[str, torch.Tensor], path_P: torch.Tensor) -> None: ...

    def propose(self, root: torch.Tensor, max_depth: int) -> Draft:
        return Draft(Tree.chain(0), root[None])


def _coin(config: BenchmarkConfig, device: torch.device, stream: int | str) -> TorchCoin:
    """The coin of a prompt, by its number, or of the drafter: streams that know nothing of one another."""
    digest = hashlib.sha256(f"{config.seed} {stream}".encode()).digest()
    return TorchCoin(torch.Generator(device).manual_seed(int.from_bytes(digest[:8])))


def drafter_for(heads: DraftHeads, tree: Tree | DynamicTree, config: BenchmarkConfig) -> Drafter:
    """How `heads` propose `tree` in a benchmark: the likeliest drafts, or drawn ones if the acceptance asks for them.

    Raises:
        ValueError: if these heads cannot draft this tree, or cannot draw it.
    """
    sampling = config.acceptance.sampling if config.acceptance.drafts == "sampled" else None
    # A stream of its own: acceptance is lossless only if its coin knows nothing of the draws of the drafts.
    return build_drafter(heads, tree, sampling, _coin(config, heads.d2t.device, "drafts"))


def measure_prompt(bench: Bench, prompt: EvalPrompt, number: int, with_generate: bool = False) -> PromptResult:
    """Decode one prompt with heads and without; which goes first alternates with `number`."""
    config = bench.config
    plain: dict[str, list[Timing]] = {ENGINE: []}
    timings: list[Timing] = []
    reference = found = None
    for repeat in range(config.repeats):
        for with_heads in (False, True) if (number + repeat) % 2 == 0 else (True, False):
            coin = _coin(config, bench.target.device, number)
            if with_heads:
                found = bench.heads(prompt.ids, coin)
                timings.append(found.timing)
            else:
                reference = bench.plain(prompt.ids, coin)
                plain[ENGINE].append(reference.timing)
    assert reference is not None
    assert found is not None
    if with_generate:
        plain[GENERATE] = [bench.generate(prompt.ids) for _ in range(config.repeats)]
    greedy = config.acceptance.rule == "greedy"
    equal = found.tokens == reference.tokens if greedy else None
    return PromptResult(
        name=prompt.name,
        category=prompt.category,
        prompt_tokens=len(prompt.ids),
        new_tokens=len(found.tokens),
        plain=plain,
        heads=timings,
        cycles=found.cycles,
        equal=equal,
        divergence=_divergence(bench, prompt, reference.tokens, found.tokens) if equal is False else None,
        index=number,
    )


def _divergence(bench: Bench, prompt: EvalPrompt, plain: list[int], heads: list[int]) -> Divergence:
    position = next(
        (i for i, (one, other) in enumerate(zip(plain, heads, strict=False)) if one != other),
        min(len(plain), len(heads)) - 1,  # one output is a prefix of the other: the last common choice
    )
    margin = bench.margin([*prompt.ids, *plain[:position]], plain[position], heads[position])
    return Divergence(position, plain[position], heads[position], margin)


def measure_tau(
    target: Target, heads: DraftHeads, prompts: Sequence[EvalPrompt], max_new_tokens: int
) -> tuple[float, list[float]]:
    """Return tau and alpha_1..K of heads in training as they will be served: greedy, with a small fixed tree."""
    tree = Tree.from_choices(PROBE_TREE).pruned(heads.depth)
    config = BenchmarkConfig(max_new_tokens=max_new_tokens)
    drafter = build_drafter(as_served(heads, target), tree)
    bench = Bench(target, drafter, config, max(len(prompt.ids) for prompt in prompts))
    cycles = [c for prompt in prompts for c in bench.heads(prompt.ids, _coin(config, target.device, 0)).cycles]
    return tau(cycles), [rate or 0.0 for rate in alpha_rates(alpha(cycles, tree.depth))]
