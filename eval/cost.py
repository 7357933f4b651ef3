"""What one step costs on this machine: plain step, verify by number of tokens, draft step."""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from eval.decode import AcceptanceConfig, Generation, clock_for, speculative_generate
from eval.drafters import Drafter
from eval.fixed_verify import FixedVerify, captured
from eval.stopping import StopConditions
from heads.cache import TreeCache
from heads.target import FINAL_NORM, Target

# Shapes: N tokens of a verify, V vocabulary, T tokens, D hidden

SIZES = (2, 4, 8, 16, 32)
PLAIN, DRAFT, LEVEL = "plain", "draft", "draft level"
# How steps are run. Decoding here is eager; the others show what the launches of its kernels cost.
EAGER, GRAPH, COMPILED = "eager", "CUDA graph", "compiled"
FORMS = (EAGER, GRAPH, COMPILED)

Step = Callable[[], object]


@torch.inference_mode()
def measure_costs(
    target: Target,
    drafter: Drafter,
    sizes: Sequence[int] = SIZES,
    context: int = 256,
    rounds: int = 5,
    form: str = EAGER,
) -> dict[str, float]:
    """Median milliseconds {"plain", "verify 8" ..., "draft", "draft level"} at `context` cached tokens, batch 1.

    "draft" is a draft of one level, "draft level" each further one (0 for heads that guess all levels at once).
    form: "eager" as decoding runs, or on a GPU "CUDA graph", or "compiled" by torch.compile inside a graph. A graph of
        a verify serves every length, that of a draft only the measured one; no draft is compiled.

    All kinds of step take turns in every round, so that a slow moment of the machine falls on all of them alike.
    A step's time is that from its launch until the device is done, since decoding waits for every cycle's tokens.
    A verify of one token is the plain step without its host synchronisation; LM head and argmax are included.
    """
    assert form == EAGER or (form in FORMS and target.device.type == "cuda")
    cache = target.new_cache(context + max(sizes))
    prompt = torch.arange(context, device=target.device) % target.vocab_size
    features = target.prefill(prompt[None], cache, drafter.taps)
    drafter.reset(prompt, features)
    drafter.propose(prompt[0], drafter.depth)
    last = {tap: feature_1TD[:, -1:] for tap, feature_1TD in features.items()}
    root_1 = torch.zeros(1, dtype=torch.long, device=target.device)

    def draft(depth: int) -> Step:
        def step() -> Tensor:
            drafter.observe(last, root_1)
            return drafter.propose(prompt[0], depth).tokens_N

        return step if form == EAGER else captured(step)

    steps = {PLAIN: _verify_step(target, cache, 1, form)}
    steps.update({f"verify {size}": _verify_step(target, cache, size, form) for size in sizes})
    steps[DRAFT], steps[LEVEL] = draft(1), draft(drafter.depth)
    costs = _in_turns(steps, rounds, target.device)
    costs[LEVEL] = max(0.0, costs[LEVEL] - costs[DRAFT]) / max(1, drafter.depth - 1)
    return costs


def _verify_step(target: Target, cache: TreeCache, size: int, form: str) -> Step:
    """A verify of a chain of `size` tokens: logits and argmax."""
    tokens_N = torch.arange(size, device=target.device) % target.vocab_size
    ancestors_NN = torch.ones(size, size, dtype=torch.bool, device=target.device).tril()
    depths_N = torch.arange(size, device=target.device)
    if form == EAGER:
        return lambda: target.logits(target.forward(tokens_N, ancestors_NN, depths_N, cache)[FINAL_NORM][0]).argmax(-1)
    verify = FixedVerify(target, cache, size)

    def compute() -> Tensor:
        return verify.compute().argmax(-1)

    verify.load(tokens_N, ancestors_NN, depths_N)
    run = captured(torch.compile(compute, dynamic=False) if form == COMPILED else compute)
    return lambda: (verify.load(tokens_N, ancestors_NN, depths_N), run())


def _in_turns(steps: dict[str, Step], rounds: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of each step."""
    clock = clock_for(device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            started = clock()
            step()
            times[name].append(1000 * (clock() - started))
    return {name: median(values[1:]) for name, values in times.items()}  # the first round warms up


def loop_overhead(target: Target, drafter: Drafter, context: int = 256, new_tokens: int = 64) -> float:
    """Milliseconds of a cycle of greedy decoding that are neither draft nor verify: acceptance, commit, host."""
    prompt = [token % target.vocab_size for token in range(context)]
    conditions = StopConditions(max_new_tokens=new_tokens)
    cache = target.new_cache(context + new_tokens + drafter.tree_size)
    clock = clock_for(target.device)

    def decode() -> Generation:
        return speculative_generate(target, drafter, prompt, conditions, AcceptanceConfig(), cache, clock=clock)

    decode()  # warms up
    run = decode()
    timing = run.timing
    return 1000 * (timing.decode_s - timing.draft_s - timing.verify_s) / len(run.cycles)


def relative_costs(costs: dict[str, float]) -> tuple[dict[int, float], float, float]:
    """Split into the verify cost by number of tokens, the draft cost and that of a further level, in plain steps."""
    verify = {int(name.split()[1]): cost / costs[PLAIN] for name, cost in costs.items() if name.startswith("verify")}
    return {1: 1.0, **verify}, costs[DRAFT] / costs[PLAIN], costs[LEVEL] / costs[PLAIN]


def interpolated(verify: dict[int, float], size: int) -> float:
    """The verify cost at `size` tokens, linear between the measured sizes.

    Raises:
        ValueError: beyond the largest measured size.
    """
    if size in verify:
        return verify[size]
    below, above = max((n for n in verify if n < size), default=0), min((n for n in verify if n > size), default=0)
    if not above:
        raise ValueError(f"no verify cost above {max(verify)} tokens was measured; the tree has {size}")
    return verify[below] + (verify[above] - verify[below]) * (size - below) / (above - below)
