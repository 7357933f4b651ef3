"""One bench of one or two servers: check, warm up, sweep; what was measured lies in its log."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.regenerate import Prompt
from eval.serving.client import ChatClient, ClientConfig
from eval.serving.display import ProgressDisplay
from eval.serving.load import ServerGone
from eval.serving.log import BenchLog, require_unused
from eval.serving.prompts import digest, load_prompts
from eval.serving.records import OFF, ON
from eval.serving.speedup import read_bench, require_comparable
from eval.serving.sweep import plan_blocks, sweep, warm_up

WORK = ("max_tokens", "temperature", "seed", "extra_body")
HOW = ("prompts", "limit", "concurrency", "repeats", "warmup", "timeout", "retry", "settle_s")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(ClientConfig):
    """`conf/bench_server.yaml`.

    url, with_heads: a server, and whether it drafts with heads. url_off: the same target served without.
    repeats: times that each prompt is asked at each concurrency. warmup: requests to each server that do not count.
    compare: bench.json of an earlier bench of the other kind. source: an output directory; only report it again.
    """

    url: str | None = None
    url_off: str | None = None
    with_heads: bool = True
    prompts: list[str] = field(default_factory=list)
    limit: int | None = None
    concurrency: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    repeats: int = 3
    warmup: int = 4
    output: str = "outputs/bench"
    compare: str | None = None
    source: str | None = None

    def __post_init__(self):
        super().__post_init__()
        for name in ("repeats", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} must be at least 1, or null for all prompts")
        if not self.concurrency or min(self.concurrency) < 1 or len(set(self.concurrency)) < len(self.concurrency):
            raise ValueError(f"concurrency={self.concurrency} must be different numbers of at least 1, like [1,4]")
        if (self.url is None) == (self.source is None):
            raise ValueError("give url= of a server to measure, or source= of a bench to report again, and not both")
        if self.url_off is not None and not self.with_heads:
            raise ValueError("heads=off with url_off= leaves no server with heads; give url= one, and heads=on")
        if self.url_off is not None and self.compare is not None:
            raise ValueError("url_off= and compare= are two baselines; give one")

    @property
    def urls(self) -> dict[str, str]:
        """The server of each arm, in the order in which they take turns."""
        assert self.url is not None
        if self.url_off is not None:
            return {OFF: self.url_off, ON: self.url}
        return {ON if self.with_heads else OFF: self.url}


async def bench(config: BenchConfig, circumstances: Mapping[str, Any]) -> None:
    """Measure into `config.output`; `circumstances` (command, versions, machine) go into the log beside it.

    Cancelled, it leaves what was measured until then.

    Raises:
        ValueError: if a server does not answer as it should, before anything is measured.
        ServerGone: if one dies while it is measured.
    """
    require_unused(Path(config.output))
    prompts = load_prompts(config.prompts, config.limit)
    if max(config.concurrency) > len(prompts):
        raise ValueError(f"concurrency={config.concurrency} needs as many prompts, of which there are {len(prompts)}")
    earlier = None if config.compare is None else read_bench(Path(config.compare))
    plan = plan_blocks(list(config.urls), config.concurrency, config.repeats)
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            arm: await stack.enter_async_context(ChatClient(url, config, max(config.concurrency)))
            for arm, url in config.urls.items()
        }
        display = stack.enter_context(ProgressDisplay(len(plan) * len(prompts), config.repeats))
        arms = {arm: await _prepare(client, prompts, config) for arm, client in clients.items()}
        settings = _settings(config, prompts, arms)
        if earlier is not None:
            require_comparable(settings, earlier)
        log = stack.enter_context(BenchLog(Path(config.output)))
        log.run({**settings, **circumstances}, plan, len(prompts))
        stopped: str | None = "it was interrupted"
        try:
            await sweep(clients, prompts, plan, log, display)
            stopped = None
        except ServerGone as error:
            stopped = str(error)
            raise
        finally:
            log.end(stopped)


async def _prepare(client: ChatClient, prompts: Sequence[Prompt], config: BenchConfig) -> dict[str, Any]:
    """Find the model, warm the server up, and see which engine it is; None if its /metrics do not say."""
    model = await client.find_model()
    await warm_up(client, prompts[: config.warmup], max(config.concurrency))
    try:
        engine = (await client.counters()).engine
    except ValueError:
        engine = None  # each block will say why it has no counters
    return {"url": client.url, "model": model, "engine": engine}


def _settings(config: BenchConfig, prompts: Sequence[Prompt], arms: dict[str, Any]) -> dict[str, Any]:
    """What was measured; `work` is what two benches must share for a ratio between them to speak of the heads."""
    asked = asdict(config)
    return {
        "work": {**{name: asked[name] for name in WORK}, "prompts_digest": digest(prompts)},
        "arms": arms,
        **{name: asked[name] for name in HOW},
    }
