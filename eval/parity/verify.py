"""Everything that is checked of one export, from the files to tau, in the order in which a fault is best named."""

from collections.abc import Callable, Iterator
from pathlib import Path

from eval.parity.draft_checks import check_logits, check_proposals, check_rounding
from eval.parity.exported import Exported, Finding, open_export
from eval.parity.gguf_checks import check_gguf
from eval.parity.static_checks import (
    check_config,
    check_copies,
    check_digests,
    check_files,
    check_taps,
    check_tensors,
    check_vocabulary,
)
from eval.parity.target_checks import check_features, check_identity, check_prompts, check_shared
from heads.target import Target

Check = Callable[[Exported], Iterator[Finding]]
FILES: tuple[Check, ...] = (check_files, check_digests)
READING: tuple[Check, ...] = (check_config, check_tensors, check_vocabulary, check_taps, check_copies, check_gguf)
TARGET: tuple[Check, ...] = (check_shared, check_prompts, check_features)
DRAFTS: tuple[Check, ...] = (check_rounding, check_logits, check_proposals)


def verify(directory: Path, target: Target) -> list[Finding]:
    """All checks of an export.

    Raises:
        ValueError: if the directory holds no export with a certificate, or a file is damaged.
    """
    return list(_findings(open_export(directory, target)))


def _findings(exported: Exported) -> Iterator[Finding]:
    yield from _run(FILES, exported)
    try:
        complete = not exported.expected.problems(exported.tensors) and exported.comparable
    except ValueError as error:
        yield Finding("config", "keys of the format", "cannot be followed", str(error))
        complete = False
    else:
        yield from _run(READING, exported)
    identity = list(check_identity(exported))
    yield from identity
    if identity[0].cause:  # another shape: nothing can be computed with it
        yield Finding("features, drafts", "", "another target", ran=False)
        return
    yield from _run(TARGET, exported)
    if not complete:
        yield Finding("drafts", "", "the drafter cannot be built", ran=False)
        return
    yield from _run(DRAFTS, exported)


def _run(checks: tuple[Check, ...], exported: Exported) -> Iterator[Finding]:
    """Every finding; what a check cannot follow is one, too."""
    for check in checks:
        name = check.__name__.removeprefix("check_")
        try:
            yield from check(exported)
        except ValueError as error:
            yield Finding(name, "", "cannot be followed", str(error))
