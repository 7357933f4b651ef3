"""A server's own count of its drafts: Prometheus text -> counters, and what their difference says (tau, alpha_k).

The engines do not export the same counters, and what one lacks is None here, never 0:

    counter                 vLLM (vllm:)                         llama.cpp (llamacpp:)   SGLang (sglang:)
    drafts                  spec_decode_num_drafts               same name               spec_verify_calls
    draft_tokens            spec_decode_num_draft_tokens         same name               -
    accepted_tokens         spec_decode_num_accepted_tokens      same name               -
    accepted_per_position   ..._accepted_tokens_per_pos          same name               -
    generated_tokens        generation_tokens                    tokens_predicted        generation_tokens
    requests                request_success                      -                       num_requests

All end in `_total`. vLLM and llama.cpp count a position whenever it was accepted, whatever was offered; alpha_k is
conditional, so it divides by how often position k-1 was accepted. SGLang has acceptance only as gauges of the latest
batch, which say nothing of a period: its tau comes from tokens and verifications. llama.cpp prints six digits, so
its counts are rounded from a million on.
"""

from dataclasses import dataclass, fields, replace

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_SPECULATION = {
    "drafts": "spec_decode_num_drafts_total",
    "draft_tokens": "spec_decode_num_draft_tokens_total",
    "accepted_tokens": "spec_decode_num_accepted_tokens_total",
    "accepted_per_position": "spec_decode_num_accepted_tokens_per_pos_total",
}
NAMES = {
    "vllm": {**_SPECULATION, "generated_tokens": "generation_tokens_total", "requests": "request_success_total"},
    "llamacpp": {**_SPECULATION, "generated_tokens": "tokens_predicted_total"},
    "sglang": {
        "drafts": "spec_verify_calls_total",
        "generated_tokens": "generation_tokens_total",
        "requests": "num_requests_total",
    },
}

LLAMACPP_EXACT_BELOW = 10**6


@dataclass(frozen=True)
class Counters:
    """One reading of a server's counters, summed over models and engine processes, or the difference of two.

    None: the server shows no such counter. engine: "vllm", "llamacpp" or "sglang".
    """

    engine: str
    drafts: int | None = None  # target forwards that verified a draft
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    accepted_per_position: tuple[int, ...] | None = None  # [k-1]: drafts of which the first k tokens all stood
    generated_tokens: int | None = None
    requests: int | None = None  # finished requests

    def __sub__(self, before: "Counters") -> "Counters":
        """What was counted between `before` and this reading; a counter that is new since then began at 0.

        Raises:
            ValueError: if the readings are of two engines, or a counter fell or vanished.
        """
        if self.engine != before.engine:
            raise ValueError(f"counters of {self.engine} and of {before.engine} have no difference; read one server")
        return replace(self, **{name: self._gained(before, name) for name in _counted()})

    def __add__(self, other: "Counters") -> "Counters":
        """The counts of two periods; None where either lacks a counter. `ValueError` for two engines."""
        if self.engine != other.engine:
            raise ValueError(f"counters of {self.engine} and of {other.engine} have no sum; add those of one engine")
        return replace(self, **{name: _total(_of(self, name), _of(other, name)) for name in _counted()})

    @property
    def tau(self) -> float | None:
        """Tokens per target forward that verified a draft, the target's own included; None without such forwards.

        vLLM and llama.cpp count accepted tokens past an end of turn or token limit too, so a run of short answers
        reads a little high; forwards without a draft are left out (`undrafted`). SGLang counts tokens that were
        answered; the first of each request comes from prefill and is taken off.
        """
        if not self.drafts:
            return None
        if self.accepted_tokens is not None:
            return 1 + self.accepted_tokens / self.drafts
        if self.generated_tokens is not None and self.requests is not None:
            return (self.generated_tokens - self.requests) / self.drafts
        return None

    @property
    def undrafted(self) -> int | None:
        """Target forwards that decoded a token without verifying a draft, which tau does not hold; None if unknown.

        Heads draft every time; lookups and limits on batches or context leave such forwards. What was accepted past
        the end of an answer hides as many of them.
        """
        if None in (self.generated_tokens, self.requests, self.accepted_tokens, self.drafts):
            return None
        assert self.generated_tokens is not None
        assert self.requests is not None
        assert self.accepted_tokens is not None
        assert self.drafts is not None
        return max(0, self.generated_tokens - self.requests - self.accepted_tokens - self.drafts)

    @property
    def alphas(self) -> tuple[tuple[int, int], ...]:
        """(accepted, offered) of the k-th draft token, given that drafts 1..k-1 stood; () if not exported.

        `eval.metrics.alpha_rates` makes rates of them. Where an engine drafts fewer tokens than its limit
        (`has_short_drafts`), offered is an upper bound and so each rate a lower one.
        """
        if self.drafts is None or self.accepted_per_position is None:
            return ()
        offered = (self.drafts, *self.accepted_per_position)
        return tuple(zip(self.accepted_per_position, offered, strict=False))

    @property
    def has_short_drafts(self) -> bool:
        """Whether some drafts were shorter than the deepest position that the engine counts."""
        if self.drafts is None or self.draft_tokens is None or self.accepted_per_position is None:
            return False
        return self.draft_tokens < self.drafts * len(self.accepted_per_position)

    @property
    def is_rounded(self) -> bool:
        """Whether the engine rounded a count of this reading, so that differences from it are not exact."""
        counts = [part for name in _counted() for part in _parts(_of(self, name))]
        return self.engine == "llamacpp" and max(counts, default=0) >= LLAMACPP_EXACT_BELOW

    @property
    def missing(self) -> tuple[str, ...]:
        """Names, as the engine spells them, of the counters that it could show and did not."""
        return tuple(f"{self.engine}:{name}" for field, name in NAMES[self.engine].items() if _of(self, field) is None)

    def _gained(self, before: "Counters", name: str) -> int | tuple[int, ...] | None:
        now, then = _of(self, name), _of(before, name)
        if then is None:
            return now
        pairs = list(zip(_parts(now), _parts(then), strict=False))
        if now is None or len(_parts(now)) < len(_parts(then)) or any(late < early for late, early in pairs):
            raise ValueError(f"the server's {name} fell from {then} to {now}: it was restarted between the readings")
        if isinstance(now, int):
            return now - pairs[0][1]
        return tuple(late - early for late, early in pairs) + now[len(pairs) :]


def parse_counters(text: str) -> Counters:
    """The counters in `text`, the body of a server's /metrics.

    Raises:
        ValueError: if the text is not in Prometheus' format, or holds no metric of an engine that we know.
    """
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise ValueError(f"/metrics is not in Prometheus' text format ({error}); is this the engine's port?") from error
    engine = next((name for name in NAMES if any(family.name.startswith(f"{name}:") for family in families)), None)
    if engine is None:
        raise ValueError(
            "/metrics shows nothing of vLLM, SGLang or llama.cpp; start SGLang with --enable-metrics, llama.cpp with "
            "--metrics, vLLM without --disable-log-stats"
        )
    samples = [sample for family in families for sample in family.samples]
    counts: dict[str, int | tuple[int, ...] | None] = {}
    for field, name in NAMES[engine].items():
        found = [sample for sample in samples if sample.name == f"{engine}:{name}"]
        counts[field] = _by_position(found) if field == "accepted_per_position" else _sum(found)
    return Counters(engine, **counts)  # type: ignore[arg-type]


def _sum(samples: list[Sample]) -> int | None:
    return round(sum(sample.value for sample in samples)) if samples else None


def _by_position(samples: list[Sample]) -> tuple[int, ...] | None:
    positions = sorted({_position(sample) for sample in samples})
    if positions != list(range(len(positions))):
        raise ValueError(f"accepted tokens are counted at positions {positions}; positions must be 0, 1, 2, ...")
    at = [[sample for sample in samples if _position(sample) == position] for position in positions]
    return tuple(round(sum(sample.value for sample in group)) for group in at) or None


def _position(sample: Sample) -> int:
    label = sample.labels.get("position", "")
    if not label.isdecimal():
        raise ValueError(f"{sample.name} has the position {label!r}; positions must be 0, 1, 2, ...")
    return int(label)


def _counted() -> list[str]:
    return [field.name for field in fields(Counters) if field.name != "engine"]


def _of(counters: Counters, name: str) -> int | tuple[int, ...] | None:
    return getattr(counters, name)


def _parts(count: int | tuple[int, ...] | None) -> tuple[int, ...]:
    if count is None:
        return ()
    return (count,) if isinstance(count, int) else count


def _total(one: int | tuple[int, ...] | None, other: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
    if one is None or other is None:
        return None
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    length = max(len(_parts(one)), len(_parts(other)))
    padded = [parts + (0,) * (length - len(parts)) for parts in (_parts(one), _parts(other))]
    return tuple(map(sum, zip(*padded, strict=True)))
