"""Whether a device computes what the CPU does: the same tiny model, heads, batch and prompt on both, in float32.

Limits. Float32 has a relative precision of 6e-8, and both sides sum up to a few hundred products in orders of their
own: a fraction of 1e-5. TF32, which has 10 bits, would be off by some 3e-4, and a wrong mask, position or label by far
more. AdamW divides by the gradient's own size, so that where a gradient is nothing but rounding the first steps are
too: how far the weights have moved may differ by one part in a hundred.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.batches import Batch
from eval.decode import AcceptanceConfig, cache_capacity, plain_generate, speculative_generate
from eval.drafting import build_drafter, for_serving
from eval.level_drafter import DynamicTree
from eval.sampling import SamplingConfig
from eval.stopping import StopConditions
from eval.tree import Tree
from heads import HEADS
from heads.alignment import label_counts
from heads.family import DraftHeads
from heads.objectives import Objective
from heads.target import FINAL_NORM, Target, TargetConfig, load_target
from train.config import TrainerConfig
from train.optimizer import build_optimizer, trainable_parameters
from train.step_cost import inputs_of

# Shapes: B rows, T tokens

LIMITS = {"features": 1e-4, "loss": 1e-5, "gradients": 1e-4, "losses of 3 steps": 1e-4, "moves of weights": 1e-2}
STEPS = 3
OBJECTIVE = Objective(ce_weight=1.0, kl_weight=0.5, tv_weight=0.3)
SETTINGS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 3},
    "hydra": {"num_heads": 3},
    "eagle": {"num_steps": 3, "noise": 0.0},  # noise comes from the device's own generator
    "eagle3": {"num_steps": 3},
}
TREES: dict[str, Tree | DynamicTree] = {
    "static": Tree.from_choices([[0], [1], [0, 0], [1, 0], [0, 0, 0]]),
    "dynamic": DynamicTree(nodes=7, depth=3, width=2),
}


@dataclass(frozen=True)
class Agreement:
    """How far two sides are apart, relative to the CPU's; of tokens, how many differ."""

    name: str
    difference: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.limit  # False for NaN


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Float32 products in float32, not in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def compare(family: str, device: torch.device) -> list[Agreement]:
    """Training of `family` on `device` against the CPU, and its greedy decoding there against plain decoding."""
    with exact_float32():
        expected, found = training(family, torch.device("cpu")), training(family, device)
        agreements = [
            Agreement(name, relative(found[name], expected[name]), limit) for name, limit in LIMITS.items()
        ]  # fmt: skip
        return [*agreements, *decoding(family, device)]


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of `expected`."""
    return ((found - expected).norm() / expected.norm()).item()


@functools.cache
def tiny_target(device: torch.device) -> Target:
    """The same weights on every device: they are drawn on the CPU."""
    return load_target(TargetConfig(name="tiny", path="random:llama"), device)


def disturbed_heads(family: str, target: Target) -> DraftHeads:
    """Heads whose parameters are all disturbed, so that none is invisible; the same on every device."""
    kind = HEADS[family]
    config = kind.resolve(kind.config_class(objective=OBJECTIVE, **SETTINGS[family]), target)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        heads = kind(config, target.hidden_size, target.vocab_size, torch.arange(target.vocab_size))
    heads.bind(target).initialise()
    for parameter in heads.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(target.device)
    return heads


def packed_batch(vocab_size: int) -> Batch:
    """Two rows: two packed documents, and one document with padding."""
    ids_BT = torch.randint(0, vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    documents_BT = torch.tensor([[0] * 13 + [1] * 11, [0] * 17 + [-1] * 7])
    positions_BT = torch.tensor([[*range(13), *range(11)], [*range(17), *[0] * 7]])
    supervised_BT = torch.zeros(2, 24, dtype=torch.bool)
    supervised_BT[0, 3:12] = supervised_BT[0, 15:22] = supervised_BT[1, 4:17] = True
    return Batch(ids_BT, supervised_BT, documents_BT, positions_BT)


def training(family: str, device: torch.device) -> dict[str, Tensor]:
    """What a few training steps compute on `device`, on the CPU: the quantities of LIMITS."""
    target = tiny_target(device)
    heads = disturbed_heads(family, target)
    batch = packed_batch(target.vocab_size).to(device)
    counts_K = label_counts(batch.supervised_BT, batch.documents_BT, heads.depth)
    with torch.no_grad():
        features = target.features(batch.ids_BT, batch.positions_BT, batch.documents_BT, heads.training_taps)
    trained = trainable_parameters(heads, target)
    optimizer = build_optimizer(trained, TrainerConfig())
    start = flat(trained)
    losses, gradients = [], torch.empty(0)
    for step in range(STEPS):
        loss, _ = heads(features, *inputs_of(batch), counts_K)
        loss.backward()
        if not step:
            gradients = flat({name: parameter.grad for name, parameter in trained.items()})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    real_BT = (batch.documents_BT >= 0).cpu()  # what a forward gives on padding has no meaning
    return {
        "features": torch.cat([features[tap].cpu()[real_BT] for tap in heads.training_taps]),
        "loss": losses[0],
        "gradients": gradients,
        "losses of 3 steps": torch.stack(losses),
        "moves of weights": flat(trained) - start,
    }


def flat(tensors: dict[str, Any]) -> Tensor:
    """All numbers of `tensors` in one vector on the CPU, a copy."""
    return torch.cat([tensor.detach().flatten().cpu() for tensor in tensors.values()])


def decoding(family: str, device: torch.device) -> Iterator[Agreement]:
    """How many tokens of greedy decoding with heads are not plain greedy decoding's, on `device`."""
    target = tiny_target(device)
    heads = for_serving(disturbed_heads(family, target), target)
    prompt, conditions = list(range(1, 10)), StopConditions(max_new_tokens=12)
    cache = target.new_cache(cache_capacity(len(prompt), conditions, 1))
    plain = plain_generate(target, prompt, conditions, SamplingConfig(), cache).tokens
    for name, tree in TREES.items():
        if family == "medusa" and isinstance(tree, DynamicTree):
            continue  # Medusa heads guess all levels at once
        drafter = build_drafter(heads, tree)
        cache = target.new_cache(cache_capacity(len(prompt), conditions, drafter.tree_size))
        found = speculative_generate(target, drafter, prompt, conditions, AcceptanceConfig(), cache).tokens
        wrong = sum(one != other for one, other in zip(found, plain, strict=False)) + abs(len(found) - len(plain))
        yield Agreement(f"tokens unlike plain decoding, {name} tree", wrong, 0)
    yield Agreement("logits with a cache", _logits_apart(plain, device), LIMITS["features"])


def _logits_apart(tokens: list[int], device: torch.device) -> float:
    """The target's logits over one sequence, with a cache, on `device` against the CPU."""
    sides = []
    for side in (device, torch.device("cpu")):
        target = tiny_target(side)
        with torch.inference_mode():
            hidden_BTD = target.prefill(torch.tensor([tokens], device=side), target.new_cache(len(tokens)))[FINAL_NORM]
            sides.append(target.logits(hidden_BTD).cpu())
    return relative(*sides)
