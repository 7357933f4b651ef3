"""Peak memory of the training loss, chunked against naive: python scripts/bench_loss_memory.py

Each measurement runs in a process of its own, since a process' peak never falls. The naive form keeps the logits of
all heads and positions, as the published trainers do; what is listed is the growth over the inputs themselves.
"""

import argparse
import resource
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from heads.objectives import Objective, chunked_loss
from train.own_process import own_process

HIDDEN = 64  # small, so that the logits are what is measured


def peak_mib(step: Callable[..., torch.Tensor], num_heads: int, tokens: int, vocab_size: int) -> float:
    """Growth of this process' peak resident memory in MiB over forward and backward."""
    hidden = torch.randn(num_heads, tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocab_size, HIDDEN)
    labels = torch.randint(0, vocab_size, (num_heads, tokens))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(hidden, weight, labels).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def chunked(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    scale = torch.full((len(hidden),), 1.0 / labels.shape[1])
    return chunked_loss(hidden, weight, labels, labels, scale, Objective(), None)[0]


def naive(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--naive", action=argparse.BooleanOptionalAction, default=True, help="its logits fill memory")
    arguments = parser.parse_args()
    table = Table(
        "heads K", "tokens", "chunked MiB", "naive MiB", title=f"peak of the loss, vocabulary {arguments.vocab}"
    )
    for num_heads in arguments.heads:
        for tokens in arguments.tokens:
            cells = []
            for step in (chunked, naive) if arguments.naive else (chunked,):
                with own_process() as call:
                    cells.append(f"{call(peak_mib, step, num_heads, tokens, arguments.vocab):.0f}")
            table.add_row(str(num_heads), str(tokens), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
