"""Shows which tokens are supervised: python scripts/show_mask.py --tokenizer DIR SOURCE [--rows 2]

Supervised tokens are green and bold, all others dim; a line below says whether each answer ends in an eos id.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import groupby, islice
from pathlib import Path

from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from data.conversations import read_conversations
from data.problems import Problems, RowError
from data.render import Sample, render, supervised_spans, truncate


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the samples of the first rows of a source, and why rows before them cannot be used."""
    parser = argparse.ArgumentParser(description="Show which tokens of a source are supervised.")
    parser.add_argument("source", help="file, folder[:split] or hub:owner/name[@config][:split]")
    parser.add_argument("--tokenizer", required=True, help="folder of the target, with its tokenizer")
    parser.add_argument("--rows", type=int, default=2, help="how many conversations to show")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens after which a sample is cut")
    parser.add_argument("--system-prompt", help="put first in conversations without one")
    parser.add_argument("--template-kwargs", type=json.loads, default={}, help='JSON, {"enable_thinking": false}')
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, local_files_only=True)
    eos_ids = _eos_ids(Path(options.tokenizer), tokenizer)
    console, problems = Console(soft_wrap=True), Problems()
    for conversation in islice(read_conversations(options.source, problems), options.rows):
        messages = conversation.with_system(options.system_prompt).messages
        tools = {"tools": conversation.tools} if conversation.tools else {}
        try:
            samples = render(messages, tokenizer, eos_ids, {**options.template_kwargs, **tools})
        except RowError as error:
            problems.add(conversation.origin, error)
            continue
        for number, sample in enumerate(samples, start=1):
            console.print(f"--- {conversation.origin}, sample {number} of {len(samples)}", markup=False)
            _show(console, sample, options.max_length, tokenizer, eos_ids)
    for origin, text in problems.examples:
        console.print(f"left out: {origin}: {text}", style="red", markup=False)


def _show(
    console: Console,
    sample: Sample,
    max_length: int,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
) -> None:
    cut = truncate(sample, max_length)
    if cut is None:
        console.print(f"unsupervised after truncation to {max_length} of {len(sample.ids)} tokens", style="red")
        return
    text = Text()
    for supervised, group in groupby(zip(cut.ids, cut.supervised, strict=True), key=lambda pair: pair[1]):
        text.append(str(tokenizer.decode([token for token, _ in group])), "bold green" if supervised else "dim")
    console.print(text)
    ends = [cut.ids[stop - 1] for _, stop in supervised_spans(cut)]
    names = " ".join(repr(tokenizer.decode([token])) for token in ends)
    num_ended = sum(token in eos_ids for token in ends)
    counts = f"{len(cut.ids)} of {len(sample.ids)} tokens, {cut.num_supervised} supervised, "
    console.print(f"{counts}{num_ended} of {len(ends)} answers end in an eos id (they end in {names})", markup=False)


def _eos_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if (folder / "generation_config.json").exists():
        named = GenerationConfig.from_pretrained(folder).eos_token_id
        return [named] if isinstance(named, int) else list(named or [])
    eos_token = tokenizer.special_tokens_map.get("eos_token")
    return [] if eos_token is None else tokenizer.encode(str(eos_token), add_special_tokens=False)


if __name__ == "__main__":
    main()
