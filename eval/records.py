"""What an evaluation measures, prompt by prompt: plain data between the benchmark and the report."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cycle:
    """One draft-verify-accept-commit round."""

    offered: int  # depth of the draft tree
    accepted: int  # draft tokens that stood
    emitted: int  # tokens that reached the output: accepted + 1, fewer where a stop condition cut
    node: int  # tree node that the accepted path ends at, 0 for the root


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one generation and the tokens it emitted after the first (which prefill gives)."""

    tokens: int
    prefill_s: float
    decode_s: float
    draft_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True)
class Divergence:
    """First position where decoding with heads left plain greedy decoding, and how close the choice was."""

    position: int
    plain_token: int
    heads_token: int
    margin: float  # plain logit of the chosen token minus that of the other one: 0 is a tie


@dataclass(frozen=True)
class PromptResult:
    """Everything measured on one prompt: a timing for each repeat, of heads and of each plain setting."""

    name: str
    category: str
    prompt_tokens: int
    new_tokens: int
    plain: dict[str, list[Timing]]
    heads: list[Timing]
    cycles: list[Cycle]
    equal: bool | None  # None: not comparable (sampling)
    divergence: Divergence | None = None
    index: int = 0  # place in the prompt file: orders the results that several processes measured


@dataclass(frozen=True)
class Evaluation:
    """One evaluation run: the prompts' results and what they were measured with."""

    heads: str
    kind: str
    target: str
    acceptance: str  # "greedy", "sampling" or "typical"
    lossless: bool
    depth: int  # tokens that the heads can draft
    tree: list[list[int]]  # choices of the draft tree, without the root
    results: list[PromptResult]
    settings: dict[str, Any] = field(default_factory=dict)  # resolved config, versions, machine
    cost_ms: dict[str, float] = field(default_factory=dict)  # "plain", "verify 8", "draft": medians, milliseconds
    dtype: str = "float32"  # of the run with heads: says whether a divergence is a bug or rounding
