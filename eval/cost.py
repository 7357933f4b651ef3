"""What one step costs on this machine: plain step, verify by number of tokens, draft step."""

from collections.abc import Callable, Sequence
from statistics import median

import torch

from eval.decode import clock_for
from eval.drafters import Drafter
from heads.target import FINAL_NORM, Target

SIZES = (2, 4, 8, 16, 32)
PLAIN, DRAFT, LEVEL = "plain", "draft", "draft level"


@torch.inference_mode()
def measure_costs(
    target: Target, drafter: Drafter, sizes: Sequence[int] = SIZES, context: int = 256, rounds: int = 5
) -> dict[str, float]:
    """Median milliseconds {"plain", "verify 8" ..., "draft", "draft level"} at `context` cached tokens, batch 1.

    "draft" is a draft of one level, "draft level" each further one (0 for heads that guess all levels at once).

    All kinds of step take turns in every round, so that a slow moment of the machine falls on all of them alike.
    A verify of one token is the plain step without its host synchronisation; LM head and argmax are included.
    """
    cache = target.new_cache(context + max(sizes))
    prompt = torch.arange(context, device=target.device) % target.vocab_size
    features = target.prefill(prompt[None], cache, drafter.taps)
    drafter.reset(prompt, features)
    drafter.propose(prompt[0], drafter.depth)
    last = {tap: feature_1TD[:, -1:] for tap, feature_1TD in features.items()}
    root_1 = torch.zeros(1, dtype=torch.long, device=target.device)

    def verify(size: int) -> Callable[[], object]:
        tokens_N = torch.arange(size, device=target.device) % target.vocab_size
        ancestors_NN = torch.ones(size, size, dtype=torch.bool, device=target.device).tril()
        depths_N = torch.arange(size, device=target.device)
        return lambda: target.logits(target.forward(tokens_N, ancestors_NN, depths_N, cache)[FINAL_NORM][0]).argmax(-1)

    steps: dict[str, Callable[[], object]] = {PLAIN: verify(1)}
    steps.update({f"verify {size}": verify(size) for size in sizes})

    def draft(depth: int) -> Callable[[], object]:
        return lambda: (drafter.observe(last, root_1), drafter.propose(prompt[0], depth))

    steps[DRAFT], steps[LEVEL] = draft(1), draft(drafter.depth)
    clock = clock_for(target.device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            started = clock()
            step()
            times[name].append(1000 * (clock() - started))
    costs = {name: median(values[1:]) for name, values in times.items()}  # the first round warms up
    costs[LEVEL] = max(0.0, costs[LEVEL] - costs[DRAFT]) / max(1, drafter.depth - 1)
    return costs


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
