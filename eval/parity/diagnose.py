"""Naming a fault: which single mistake would give the recorded logits?

The files, read as an engine reads them, did not. So the usual mistakes are tried in turn; the one that gives the
recorded logits is what the trained heads did otherwise, or what was done to the files.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from eval.parity.exported import Exported, Replay
from eval.parity.hypotheses import hypotheses

# Shapes: R probed anchors of all prompts, K steps, C columns

SAMPLE = 64  # ids that are looked for among all others
ZERO_BY_DESIGN = "layer.self_attn.o_proj.bias"  # engines have a place for it, heads have none


@torch.inference_mode()
def gaps(exported: Exported, replay: Replay, recorded: str) -> Tensor:
    """Largest differences [R, K] between replayed and recorded logits, as a share of the largest logit.

    recorded: `trained_RSC` or `logits_RKC`.
    """
    steps = getattr(exported.golden.prompts[0], recorded).shape[1]
    return torch.stack([gap for _, gap in _gaps(exported, replay, recorded)]).view(-1, steps)


def _gaps(exported: Exported, replay: Replay, recorded: str) -> Iterator[tuple[int, Tensor]]:
    """(step, largest difference) one after the other, for those who need not see all."""
    golden = exported.golden
    for prompt in golden.prompts:
        entered = replay.sequence(prompt)
        for row_KC, anchor in zip(getattr(prompt, recorded), golden.probes_R.tolist(), strict=True):
            drafts = entered.drafts(anchor, prompt.proposals_AK[anchor], exported.columns)
            for step, (golden_C, logits_1C) in enumerate(zip(row_KC, drafts, strict=False)):
                yield step, (logits_1C[0] - golden_C).abs().max() / golden.scale


@torch.inference_mode()
def explain(exported: Exported, recorded: str, limit_K: Tensor) -> str:
    """The mistake that explains why logits are further apart than `limit_K`, else where they begin to be."""
    for name, replay in hypotheses(exported):
        if all(gap <= limit_K[step] for step, gap in _gaps(exported, replay, recorded)):
            return name
    if _permuted(exported, recorded, limit_K):
        return "the rows of the LM head are in another order"
    return "; ".join([*_suspects(exported), _where(gaps(exported, exported.replay, recorded), limit_K)])


def _permuted(exported: Exported, recorded: str, limit_K: Tensor) -> bool:
    """Whether the recorded logits of most of the first ids are those that the replay gives to some other id."""
    prompt = exported.golden.prompts[0]
    entered, ours, theirs = exported.replay.sequence(prompt), [], []
    for row_KC, anchor in zip(getattr(prompt, recorded), exported.golden.probes_R.tolist(), strict=True):
        theirs.append(row_KC[:, :SAMPLE])
        ours.append(entered.chain(anchor, len(row_KC), prompt.proposals_AK[anchor]))
    apart = torch.cdist(torch.cat(theirs).T, torch.cat(ours).T, p=float("inf"))
    return (apart.amin(1) <= limit_K.max() * exported.golden.scale).float().mean().item() > 0.9


def _suspects(exported: Exported) -> list[str]:
    """Tensors that look as if they had been frozen, zeroed or rounded."""
    trained = {
        name: t
        for name, t in exported.tensors.items()
        if t.is_floating_point() and name not in ("embed_tokens.weight", ZERO_BY_DESIGN)
    }
    notes = [f"{name} is all ones, as if never trained" for name, t in trained.items() if (t == 1).all()]
    notes += [f"{name} is all zeros" for name, t in trained.items() if not t.any()]
    coarse = [name for name, t in trained.items() if torch.equal(t.bfloat16().to(t.dtype), t)]
    if len(coarse) < len(trained):
        notes += [f"{name} holds bfloat16 values in a {exported.certificate.dtype} file" for name in coarse]
    return notes


def _where(gaps_RK: Tensor, limit_K: Tensor) -> str:
    """At which anchors and steps logits begin to differ."""
    wrong_RK = ~(gaps_RK <= limit_K)
    anchors = "at all anchors" if wrong_RK.any(1).all() else "at some anchors"
    first = int(wrong_RK.any(0).long().argmax())
    return f"no single usual mistake explains it: logits differ {anchors}, from step {first} on"
