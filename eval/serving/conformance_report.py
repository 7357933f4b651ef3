"""What the check of an engine says: a summary for programs, and Markdown with the same numbers for people."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from eval.markdown_table import table
from eval.metrics import bootstrap_ratio, tokens_per_s
from eval.serving.conformance import PLAIN_TEXTS, Comparison, Problem, counts, tau, total
from eval.serving.engine import Answer

Row = dict[str, Any]
COLUMNS = ("prompt", "tokens", "text", "drafts", "accepted per position")
RATES = (
    "Tokens per second are of whole requests, prefill included, one at a time, with heads and without in turns; the "
    "ratio is over these prompts, on this machine."
)
NUMBERS = (
    "Where two numbers stand, the first is the engine's. A prompt is not judged where the engine's answer without "
    "heads is not ours."
)


def summarise(
    rows: Sequence[Comparison], failures: Sequence[Problem], notes: Sequence[Problem], settings: dict[str, Any]
) -> dict[str, Any]:
    """JSON-able: verdict, totals, prompts and the settings they hold for.

    Tokens per second are of whole requests, prefill included, one at a time.
    """
    arms = {
        "engine": ([row.engine_plain for row in rows], [row.engine_heads for row in rows]),
        "own": ([row.own_plain for row in rows], [row.own_heads for row in rows]),
    }
    return {
        "passed": not failures,
        "failures": [asdict(problem) for problem in failures],
        "notes": [asdict(problem) for problem in notes],
        "plain_texts_equal": sum(row.plain_texts_equal for row in rows),
        "texts_equal": sum(row.texts_equal for row in rows),
        "counters_equal": sum(row.counters_equal for row in rows),
        **{side: _side(plain, heads) for side, (plain, heads) in arms.items()},
        "prompts": [_prompt(row) for row in rows],
        "settings": settings,
    }


def sentence(summary: dict[str, Any]) -> str:
    """The outcome in one sentence. Only prompts that the engine answers as we do without heads can be judged."""
    engine, of, judged = summary["settings"]["engine"], len(summary["prompts"]), summary["plain_texts_equal"]
    texts, counters = summary["texts_equal"], summary["counters_equal"]
    found = f"texts equal on {texts} of {judged} prompts, counters on {counters} of {judged}"
    scope = ""
    if judged < of:
        scope = ", as far as can be judged"
        found += f"; {of - judged} of {of} cannot be judged, since without heads {engine} answers otherwise than we do"
    if any(failure["name"] != PLAIN_TEXTS for failure in summary["failures"]):
        return f"{engine} does not serve these heads as they decode here: {found}"
    if not judged:
        return (
            f"whether {engine} serves these heads as they decode here cannot be judged: without heads it answers none "
            f"of the {of} prompts as we do"
        )
    if texts == counters == judged:
        return f"{engine} serves these heads as they decode here{scope}: {found}"
    theirs, ours = _shown(summary["engine"]["tau"]), _shown(summary["own"]["tau"])
    return f"{engine} serves these heads at tau {theirs}, where they decode at tau {ours} here: {found}"


def prompt_cells(prompt: Row) -> tuple[str, ...]:
    """One line of the table, under COLUMNS: the engine's number beside ours where they differ."""
    text = "equal" if prompt["texts_equal"] else "differs" if prompt["plain_texts_equal"] else "not judged"
    return (
        prompt["name"],
        _both(prompt["engine_tokens"], prompt["own_tokens"]),
        text,
        _both(prompt["engine_drafts"], prompt["own_drafts"]),
        _both(_positions(prompt["engine_accepted"]), _positions(prompt["own_accepted"])),
    )


def total_cells(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows (what, the engine's, ours) of the totals."""
    engine, own = summary["engine"], summary["own"]
    names = {"drafts": "drafts", "accepted": "accepted per position", "tau": "tau"}
    rows = [(title, _shown(engine[name]), _shown(own[name])) for name, title in names.items()]
    rows.append(("tokens/s without heads", _shown(engine["plain_tokens_per_s"]), _shown(own["plain_tokens_per_s"])))
    rows.append(("tokens/s with heads", _shown(engine["heads_tokens_per_s"]), _shown(own["heads_tokens_per_s"])))
    rows.append(("ratio [95 %]", _ratio(engine["speedup"]), _ratio(own["speedup"])))
    return rows


def markdown(summary: dict[str, Any]) -> str:
    """The whole report."""
    settings = summary["settings"]
    what = (
        f"{settings['kind']} heads from `{settings['heads']}` in the format {settings['format']}, on "
        f"{settings['target']} in {settings['dtype']}, chains of {settings['num_speculative_tokens']}, at most "
        f"{settings['max_new_tokens']} tokens of answer, {settings['engine']} {settings['version']}."
    )
    found = [f"- **{problem['name']}**: {problem['text']}" for problem in summary["failures"]]
    found += [f"- note, {problem['name']}: {problem['text']}" for problem in summary["notes"]]
    paragraphs = [
        [f"# {settings['engine']} against our decoder"],
        [f"{sentence(summary)}."],
        found,
        [what],
        [table(("", str(settings["engine"]), "here"), total_cells(summary))],
        [RATES],
        [table(COLUMNS, [prompt_cells(prompt) for prompt in summary["prompts"]])],
        [NUMBERS],
    ]
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines) + "\n"


def _side(plain: Sequence[Answer], heads: Sequence[Answer]) -> Row:
    drafts, accepted = counts(total(heads))
    plain_timings, heads_timings = [answer.timing for answer in plain], [answer.timing for answer in heads]
    return {
        "drafts": drafts,
        "accepted": list(accepted),
        "tau": tau(heads),
        "plain_tokens_per_s": tokens_per_s(plain_timings),
        "heads_tokens_per_s": tokens_per_s(heads_timings),
        "speedup": asdict(bootstrap_ratio(heads_timings, plain_timings)),
    }


def _prompt(row: Comparison) -> Row:
    engine, own = counts(row.engine_heads.counters), counts(row.own_heads.counters)
    return {
        "name": row.name,
        "prompt_tokens": row.prompt_tokens,
        "engine_tokens": len(row.engine_heads.tokens),
        "own_tokens": len(row.own_plain.tokens),
        "plain_texts_equal": row.plain_texts_equal,
        "texts_equal": row.texts_equal,
        "counters_equal": row.counters_equal,
        "engine_drafts": engine[0],
        "own_drafts": own[0],
        "engine_accepted": list(engine[1]),
        "own_accepted": list(own[1]),
        "token_ids": {
            "engine_plain": row.engine_plain.tokens,
            "engine_heads": row.engine_heads.tokens,
            "own_plain": row.own_plain.tokens,
            "own_heads": row.own_heads.tokens,
        },
    }


def _both(theirs: Any, ours: Any) -> str:
    return str(theirs) if theirs == ours else f"{theirs} / {ours}"


def _positions(accepted: Sequence[int]) -> str:
    return " ".join(map(str, accepted)) or "-"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return _positions(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _ratio(speedup: Row) -> str:
    return f"{speedup['median']:.2f} [{speedup['low']:.2f}, {speedup['high']:.2f}]"
