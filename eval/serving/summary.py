"""From a bench's log to numbers: one row for each arm and concurrency, as plain JSON types."""

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from hashlib import sha256
from operator import add
from statistics import median
from typing import Any

import torch

from eval import metrics
from eval.records import Timing
from eval.serving.counters import Counters
from eval.serving.records import OFF, ON, BlockResult, RequestResult, Run
from eval.serving.speedup import Row, compare

Summary = dict[str, Any]

FEW_UNDRAFTED = 0.05  # of the forwards that verified a draft: the ends of answers
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def summarise(run: Run) -> Summary:
    """Everything that the log says: times in seconds, rates in tokens/s; null where it cannot be known."""
    cells = dict.fromkeys((block.arm, block.concurrency) for block in run.plan)
    rows = [_row(run, arm, concurrency) for arm, concurrency in cells]
    return {
        "stopped": run.stopped,
        "settings": run.settings,
        "rows": rows,
        "speedups": compare(rows, rows),
        "notes": [note for row in rows for note in _arm_notes(row)],
    }


def _row(run: Run, arm: str, concurrency: int) -> Row:
    indices = [block.index for block in run.plan if (block.arm, block.concurrency) == (arm, concurrency)]
    results = [result for index, result in run.requests if index in indices]
    answered = [result for result in results if result.failure is None]
    timings = [timing for result in answered if (timing := result.timing)]
    blocks = [block for block in run.blocks if block.block.index in indices]
    prompts = _prompts(answered)
    typical = [Timing(**prompt["timing"]) for prompt in prompts if prompt["timing"]]
    return {
        "arm": arm,
        "concurrency": concurrency,
        "requests": {
            "planned": run.prompts * len(indices),
            "answered": len(answered),
            "failed": len(results) - len(answered),
            "not_run": run.prompts * len(indices) - len(results),
            "retries": sum(result.retries for result in results),
            "untimed": len(answered) - len(timings),
        },
        "failures": _failures(results),
        "tokens": sum(result.completion_tokens or 0 for result in answered),
        "prompt_tokens": _sum([result.prompt_tokens for result in answered]),
        "cached_tokens": _sum([result.cached_tokens for result in answered]),
        "ttft_s": percentiles([result.ttft_s for result in answered if result.ttft_s is not None]),
        "tpot_s": percentiles([timing.decode_s / timing.tokens for timing in timings]),
        "latency_s": percentiles([latency for result in answered if (latency := result.latency_s) is not None]),
        "user_tokens_per_s": metrics.tokens_per_s(typical) if typical else None,
        **_throughput(run, blocks),
        **_acceptance(blocks, drafting=arm == ON),
        "prompts": prompts,
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The median, 90th and 99th percentile of `values`, linear between neighbours; None of no values."""
    if not values:
        return None
    at = torch.tensor(list(QUANTILES.values()), dtype=torch.float64)
    found = torch.quantile(torch.tensor(values, dtype=torch.float64), at).tolist()
    return dict(zip(QUANTILES, found, strict=True))


def _prompts(answered: Sequence[RequestResult]) -> list[Row]:
    """Each prompt's typical timing over its repeats, and a digest of its first answer."""
    repeats: dict[str, list[RequestResult]] = {}
    for result in answered:
        repeats.setdefault(result.prompt, []).append(result)
    rows = []
    for name, results in repeats.items():
        timings = [timing for result in results if (timing := result.timing)]
        digest = sha256(results[0].text.encode()).hexdigest()[:16]
        rows.append({"name": name, "timing": vars(metrics.typical(timings)) if timings else None, "answer": digest})
    return rows


def _failures(results: Sequence[RequestResult]) -> dict[str, Row]:
    counts = Counter(result.failure for result in results if result.failure)
    first = {result.failure: result.detail for result in reversed(results)}
    return {kind: {"count": count, "first": first[kind]} for kind, count in counts.most_common() if kind}


def _throughput(run: Run, blocks: Sequence[BlockResult]) -> Row:
    """Tokens per second of all users together, for each block that was not broken off, and their median."""
    whole = []
    for block in blocks:
        tokens = [result.completion_tokens or 0 for index, result in run.requests if index == block.block.index]
        if block.complete and sum(tokens):
            rate = sum(tokens) / block.seconds
            whole.append({"repeat": block.block.repeat, "seconds": block.seconds, "tokens_per_s": rate})
    rates = [block["tokens_per_s"] for block in whole]
    return {"blocks": whole, "tokens_per_s": median(rates) if rates else None}


def _acceptance(blocks: Sequence[BlockResult], drafting: bool) -> Row:
    """tau and alpha_k over the blocks whose counters are known, and what is to be said of the others."""
    known = [block.counters for block in blocks if block.counters]
    notes = list(dict.fromkeys(block.unknown for block in blocks if block.unknown))
    if not known:
        return {"acceptance": None, "acceptance_notes": notes}
    counters = reduce(add, known)
    notes += _counter_notes(counters) if drafting else []
    if not counters.drafts:
        return {"acceptance": None, "acceptance_notes": notes}
    counts = counters.alphas
    acceptance = {
        "tau": counters.tau,
        "alpha": metrics.alpha_rates(counts),
        "alpha_counts": [list(pair) for pair in counts],
        "drafts": counters.drafts,
        "draft_tokens": counters.draft_tokens,
        "accepted_tokens": counters.accepted_tokens,
    }
    return {"acceptance": acceptance, "acceptance_notes": notes}


def _counter_notes(counters: Counters) -> list[str]:
    notes = []
    if counters.drafts == 0:
        notes.append("the server verified no draft")
    elif not counters.alphas:
        notes.append(f"{counters.engine} does not count acceptance by position, so alpha_k is unknown")
    if counters.missing:
        notes.append(f"the server does not show {', '.join(counters.missing)}")
    if counters.drafts and (others := counters.undrafted or 0) > FEW_UNDRAFTED * counters.drafts:
        notes.append(f"tau leaves out about {others} target forwards that verified no draft, {counters.drafts} did")
    if counters.has_short_drafts:
        notes.append("some drafts were shorter than the longest, so each alpha_k past the first is a lower bound")
    return notes


def _arm_notes(row: Row) -> list[str]:
    """Where a row contradicts what its arm is said to be, or holds less than it seems."""
    where, requests, drafting = f"{row['arm']}, concurrency {row['concurrency']}", row["requests"], row["acceptance"]
    notes = [f"{where}: {note}" for note in row["acceptance_notes"]]
    if row["arm"] == OFF and drafting:
        notes.append(f"{where}: the server verified {drafting['drafts']} drafts, so it is not plain decoding")
    for kind, failure in row["failures"].items():
        notes.append(f"{where}: {failure['count']} requests failed, {kind}; the first said: {failure['first']}")
    if requests["not_run"]:
        notes.append(f"{where}: {requests['not_run']} requests of {requests['planned']} were not run")
    if requests["untimed"]:
        notes.append(f"{where}: {requests['untimed']} answers came in one piece, which has no time per token")
    if row["cached_tokens"]:
        notes.append(
            f"{where}: {row['cached_tokens']} of {row['prompt_tokens']} prompt tokens came from the prefix cache"
        )
    return notes


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
