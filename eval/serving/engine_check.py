"""The check by a real engine: the same prompts, token by token, through it and through our decoder."""

import contextlib
import json
import logging
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from data.progress import track
from eval.prompts import EvalPrompt, load_prompts
from eval.serving.check_config import ServeCheckConfig
from eval.serving.conformance import Comparison, differences, problems
from eval.serving.conformance_report import markdown, summarise
from eval.serving.engine import Answer, Engine, EngineClient
from eval.serving.engine_process import running
from eval.serving.engine_setup import build_engine, target_file
from eval.serving.own_decoding import OwnDecoder
from eval.serving.served_heads import ServedHeads, served_heads
from heads.target import Target, dtype_name, load_target

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 8


def check_engine(config: ServeCheckConfig, plain: EngineClient | None = None) -> dict[str, Any]:
    """Run the check, write `report.json` and `report.md`, and return the summary.

    plain: a server of the engine with this target and no heads that runs already (`serving`); None starts one.

    Raises:
        ValueError: for heads that the engine does not take, unusable prompts, or an engine that is not to be had.
        EngineFailed: if the engine does not start or does not answer.
    """
    target = load_target(config.model)
    gguf = target_file(config, target)
    served = served_heads(
        config.source,
        target,
        config.num_speculative_tokens,
        config.directory,
        form=config.format,
        target_gguf=gguf,
        allow_other_weights=config.allow_other_weights,
    )
    prompts = load_prompts(config.prompts, target, config.limit)
    context = _context(prompts, config.max_new_tokens + served.chain + 1, target)
    engine = build_engine(config, target, served, context, gguf)
    version, theirs = _decode_by_engine(config, engine, plain, prompts, target.eos_ids)
    ours = _decode_here(config, engine, prompts, target, served)
    rows = [
        Comparison(prompt.name, len(prompt.ids), *engines, *own)
        for prompt, engines, own in zip(prompts, theirs, ours, strict=True)
    ]
    exact = engine.exact and target.dtype == torch.float32
    failures = problems(rows, engine.name, exact)
    notes = [] if exact else differences(rows, engine.name)
    summary = summarise(rows, failures, notes, _settings(config, engine, version, target, served))
    (config.directory / "report.json").write_text(json.dumps(summary, indent=1) + "\n")
    (config.directory / "report.md").write_text(markdown(summary))
    return summary


def _context(prompts: Sequence[EvalPrompt], room: int, target: Target) -> int:
    """Tokens of one sequence with its last draft. Raises ValueError if a prompt leaves no room for them."""
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    needed = len(longest.ids) + room
    if needed > target.max_context:
        raise ValueError(
            f"prompt {longest.name} has {len(longest.ids)} tokens and {room} more are to be decoded and drafted, but "
            f"the context of {target.config.name} holds {target.max_context}; lower max_new_tokens or remove the prompt"
        )
    return needed


@contextlib.contextmanager
def serving(config: ServeCheckConfig, engine: Engine, with_heads: bool) -> Iterator[EngineClient]:
    """A client of the engine's server, which runs as long as the context and logs to the check's directory."""
    log = config.directory / f"{config.engine}-{'with' if with_heads else 'without'}-heads.log"
    with (
        running(engine.launch(with_heads), log, config.start_timeout_s) as address,
        EngineClient(engine, address, config.request_timeout_s) as client,
    ):
        yield client


def _decode_by_engine(
    config: ServeCheckConfig,
    engine: Engine,
    plain: EngineClient | None,
    prompts: Sequence[EvalPrompt],
    stop_ids: Sequence[int],
) -> tuple[str, list[tuple[Answer, Answer]]]:
    """The engine's version and its answers without and with heads; both servers run, so that they take turns."""

    def ask(client: EngineClient, prompt: EvalPrompt, with_heads: bool) -> Answer:
        return client.answer(prompt.ids, config.max_new_tokens, stop_ids, counted=with_heads)

    with contextlib.ExitStack() as servers:
        if plain is None:
            plain = servers.enter_context(serving(config, engine, with_heads=False))
        clients = (plain, servers.enter_context(serving(config, engine, with_heads=True)))
        for client in clients:
            client.answer(prompts[0].ids, min(WARM_UP_TOKENS, config.max_new_tokens), stop_ids, counted=False)
        answers = []
        for number, prompt in enumerate(track(prompts, f"{engine.name} decoding", "prompts", len(prompts))):
            given = {with_heads: ask(clients[with_heads], prompt, with_heads) for with_heads in _turns(number)}
            answers.append((given[False], given[True]))
        return clients[0].version(), answers


def _decode_here(
    config: ServeCheckConfig, engine: Engine, prompts: Sequence[EvalPrompt], target: Target, served: ServedHeads
) -> list[tuple[Answer, Answer]]:
    own = OwnDecoder(target, served, prompts, config.max_new_tokens, engine.drafts_past_end)
    answers = []
    for number, prompt in enumerate(track(prompts, "decoding here", "prompts", len(prompts))):
        given = {with_heads: own.answer(prompt.ids, with_heads) for with_heads in _turns(number)}
        answers.append((given[False], given[True]))
    return answers


def _turns(number: int) -> tuple[bool, bool]:
    """Whether with heads or without comes first: in turns, so that neither gains from a machine that warms up."""
    return (False, True) if number % 2 == 0 else (True, False)


def _settings(
    config: ServeCheckConfig, engine: Engine, version: str, target: Target, served: ServedHeads
) -> dict[str, Any]:
    return {
        "engine": engine.name,
        "version": version,
        "target": target.config.name,
        "dtype": dtype_name(target.dtype),
        "kind": served.kind,
        "format": served.format,
        "heads": config.source,
        "num_speculative_tokens": served.chain,
        "max_new_tokens": config.max_new_tokens,
        "prompts": config.prompts,
        "machine": f"{platform.machine()} {platform.processor()}".strip(),
    }
