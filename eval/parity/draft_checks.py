"""Whether the drafter of the exported files says what the trained heads said."""

from collections.abc import Iterator

import torch
from torch import Tensor

from eval.parity.certificate import GoldenPrompt, accepted_lengths, chain, tally
from eval.parity.diagnose import explain, gaps
from eval.parity.exported import Exported, Finding
from eval.parity.tolerance import logit_tolerance, rounding_limit

# Shapes: A anchors, R probed anchors, K drafted steps, Ve ids that the engine drafts


def check_rounding(exported: Exported) -> Iterator[Finding]:
    """State what the dtype of the export takes away from the trained heads."""
    dtype, found = exported.certificate.dtype, exported.certificate.rounding
    limit = rounding_limit(dtype)
    cause = f"rounding to {dtype} moves logits by {max(found):.1e} of the largest: export in float32"
    yield Finding(f"rounding to {dtype}, by step", _upto([limit]), _shown(found), cause * (max(found) > limit))


def check_logits(exported: Exported) -> Iterator[Finding]:
    """The training forward and the drafting of the trained heads, against the replay."""
    limit_K = logit_tolerance(exported)
    for name, recorded in (("training", "trained_RSC"), ("drafting", "logits_RKC")):
        gaps_RK = gaps(exported, exported.replay, recorded)
        limits = limit_K[: gaps_RK.shape[1]]
        cause = "" if (gaps_RK <= limits).all() else explain(exported, recorded, limits)
        expected, found = _upto(sorted(set(limits.tolist()))), _shown(gaps_RK.amax(0).tolist())
        yield Finding(f"logits of {name}, by step", expected, found, cause)


def _upto(limits: list[float]) -> str:
    return f"up to {_shown(limits)}"


def _shown(numbers: list[float]) -> str:
    return " ".join(f"{number:.1e}" for number in numbers)


def check_proposals(exported: Exported) -> Iterator[Finding]:
    """The proposed token ids of all chains, how many the target accepts, and tau."""
    certificate, prompts = exported.certificate, exported.golden.prompts
    proposed = [propose(exported, prompt) for prompt in prompts]
    limit_K = 2 * logit_tolerance(exported) * exported.golden.scale  # both of two logits may have moved
    pairs = zip(prompts, proposed, strict=True)
    wrong, ties = (sum(counts) for counts in zip(*(_differing(*pair, limit_K) for pair in pairs), strict=True))
    total = sum(len(prompt.proposals_AK) for prompt in prompts)
    found = f"{total - wrong - ties} of {total}" + (f", {ties} differ at a near tie" if ties else "")
    cause = f"{wrong} of {total} chains propose other tokens" if wrong else ""
    yield Finding("proposals", f"{total} chains", found, cause)

    recorded = [prompt.accepted_A.tolist() for prompt in prompts]
    counted = [accepted_lengths(ids_AK, p.ids_T, p.prompt_length) for p, ids_AK in zip(prompts, proposed, strict=True)]
    # A near tie may fall either way, and what follows it in its chain differs rightly.
    excused = ties > 0 and not wrong
    cause = "chains of the same prompts are accepted to other lengths" if counted != recorded and not excused else ""
    yield Finding("accepted lengths", _sums(recorded), _sums(counted), cause)

    accepted, tau = tally([length for lengths in counted for length in chain(lengths)], certificate.steps)
    same = accepted == certificate.accepted and abs(tau - certificate.tau) < 1e-9
    cause = "" if same or excused else f"accepted by position {accepted}, recorded {certificate.accepted}"
    yield Finding("tau of a greedy chain", f"{certificate.tau:.3f}", f"{tau:.3f}", cause)


def _sums(lengths: list[list[int]]) -> str:
    return f"{' + '.join(str(sum(each)) for each in lengths)} drafts"


def propose(exported: Exported, prompt: GoldenPrompt) -> Tensor:
    """Token ids [A, K] of greedy chains from all anchors, over the ids that the heads were trained to draft."""
    ids_E, columns = exported.replay.ids_E, None
    if len(ids_E) != len(exported.golden.draft_ids):
        ids_E = columns = exported.golden.draft_ids
    entered, steps = exported.replay.sequence(prompt), exported.certificate.steps
    chains = [entered.chain(anchor, steps, None, columns) for anchor in range(len(prompt.proposals_AK))]
    return torch.stack([ids_E[logits_KE.argmax(-1)] for logits_KE in chains])


def _differing(prompt: GoldenPrompt, proposed_AK: Tensor, limit_K: Tensor) -> tuple[int, int]:
    """Chains that leave the recorded one: without an excuse, and where two tokens nearly tie."""
    differ_AK = proposed_AK != prompt.proposals_AK
    left_A, tie_AK = differ_AK.any(1), prompt.margins_AK <= limit_K
    excused_A = tie_AK.gather(1, differ_AK.long().argmax(1, keepdim=True)).squeeze(1)
    return int((left_A & ~excused_A).sum()), int((left_A & excused_A).sum())
