"""Recording a certificate: what the trained heads say, through the code that trains them and the code that decodes.

All of it is computed in float32 from the trained weights, whatever dtype they are exported in: the trained module is
the truth, and what rounding takes away from it is measured and stated beside it.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from data.render import render_prompt
from eval.eagle_stepper import EagleStepper
from eval.parity.certificate import VERSION, Certificate, Golden, GoldenPrompt, accepted_lengths, chain, tally, write
from eval.parity.digests import shared_digests, tensor_digests
from heads.eagle import EagleHeads
from heads.export.eagle_outline import LEAST_CHAIN
from heads.export.files import read_tensors
from heads.family import DraftHeads
from heads.identity import identify
from heads.medusa import MedusaHeads
from heads.target import DTYPES, FINAL_NORM, Target, dtype_name

# Shapes: P prompt tokens, T tokens with the continuation, F featured positions, A anchors, R probed anchors, K drafted
# steps, S trained steps, C columns, D hidden, Vd draft vocabulary

# Short, and with answers that go on for longer than a certificate follows them.
TEXTS = ("Describe a rainy day.", "How do I bake bread?", "Count from one to twenty.")
ANCHORS = 8  # drafted from in each prompt; logits are kept at the first and the middle one
COLUMNS = 2048  # logits kept of each step, spread evenly over the draft vocabulary
PACKAGES = ("headstart", "safetensors", "torch", "transformers")


@torch.inference_mode()
def certify(
    folder: Path,
    heads: DraftHeads,
    target: Target,
    format_name: str,
    *,
    texts: Sequence[str] = TEXTS,
    anchors: int = ANCHORS,
) -> None:
    """Write the certificate of the heads whose exported weights lie in `folder`; the heads become float32."""
    heads = heads.float().eval()
    (weights_file,) = folder.glob("*.safetensors")
    tensors = read_tensors(weights_file)
    dtype = next(dtype_name(t.dtype) for t in tensors.values() if t.is_floating_point())
    golden = record(heads, target, texts, anchors)
    steps = golden.prompts[0].proposals_AK.shape[1]
    lm_head_copied = heads.kind != "eagle3" and "lm_head.weight" in tensors
    cycles = [length for prompt in golden.prompts for length in chain(prompt.accepted_A.tolist())]
    accepted, tau = tally(cycles, steps)
    certificate = Certificate(
        version=VERSION,
        kind=heads.kind,
        format=format_name,
        dtype=dtype,
        target=identify(target),
        target_dtype=dtype_name(target.dtype),
        template_kwargs=dict(target.config.template_kwargs),
        prompts=list(texts),
        taps=list(heads.taps),
        steps=steps,
        draft_vocab_size=len(golden.draft_ids),
        rounding=measure_rounding(heads, golden, DTYPES[dtype], lm_head_copied=lm_head_copied),
        shared=shared_digests(target),
        tensors=tensor_digests(tensors),
        cycles=len(cycles),
        accepted=accepted,
        tau=tau,
        packages={name: version(name) for name in PACKAGES},
    )
    write(folder, certificate, golden)


def record(heads: DraftHeads, target: Target, texts: Sequence[str], anchors: int) -> Golden:
    """What float32 heads say behind a few prompts and along the target's greedy continuation of each."""
    size, steps = len(heads.d2t), chain_length(heads)
    columns_C = torch.arange(min(size, COLUMNS)) * size // min(size, COLUMNS)
    probes_R = torch.tensor(sorted({0, anchors // 2}))
    prompts = []
    for text in texts:
        ids = render_prompt([{"role": "user", "content": text}], target.tokenizer, target.config.template_kwargs)
        ids_T, features = follow(target, ids, heads.taps, anchors, steps)
        logits_AKV, proposals_AK = draft(heads, ids_T, len(ids), features, steps)
        best_AK2 = logits_AKV.topk(min(2, size)).values
        trained_RSV = train(heads, ids_T, len(ids), features, probes_R, proposals_AK)
        prompts.append(
            GoldenPrompt(
                prompt_length=len(ids),
                ids_T=ids_T,
                features=features,
                proposals_AK=proposals_AK,
                margins_AK=best_AK2[..., 0] - best_AK2[..., -1],
                accepted_A=torch.tensor(accepted_lengths(proposals_AK, ids_T, len(ids))),
                logits_RKC=logits_AKV[probes_R][..., columns_C],
                trained_RSC=trained_RSV[..., columns_C],
            )
        )
    return Golden(heads.draft_ids.clone(), columns_C, probes_R, prompts)


def chain_length(heads: DraftHeads) -> int:
    """K: how many tokens engines draft with these heads."""
    if not isinstance(heads, EagleHeads):
        return heads.depth
    window = heads.config.layer.sliding_window
    return min(max(heads.depth, LEAST_CHAIN), window or heads.depth + LEAST_CHAIN)


def follow(
    target: Target, prompt: Sequence[int], taps: Sequence[str], anchors: int, steps: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The prompt with its greedy continuation, as decoding goes: ids [T], and float32 features {tap: [F, D]}.

    An end of text is not heeded, so that all prompts have as many anchors, and each of these all its labels.
    """
    ids_T = torch.tensor(prompt, device=target.device)
    cache = target.new_cache(len(prompt) + anchors + steps)
    rows = [target.prefill(ids_T[None], cache, taps)]
    alone_11 = torch.ones(1, 1, dtype=torch.bool, device=target.device)
    depth_1 = torch.zeros(1, dtype=torch.long, device=target.device)
    for _ in range(anchors + steps - 1):
        token_1 = target.logits(rows[-1][FINAL_NORM][0, -1:]).argmax(-1)
        ids_T = torch.cat([ids_T, token_1])
        rows.append(target.forward(token_1, alone_11, depth_1, cache, taps))
        cache.advance(1)
    last_1 = target.logits(rows[-1][FINAL_NORM][0, -1:]).argmax(-1)
    featured = len(prompt) - 1 + anchors
    features = {tap: torch.cat([row[tap][0] for row in rows])[:featured].float() for tap in taps}
    return torch.cat([ids_T, last_1]), features


def draft(
    heads: DraftHeads,
    ids_T: Tensor,
    prompt_length: int,
    features: Mapping[str, Tensor],
    steps: int,
    forced_AK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Greedy chains from all anchors: logits [A, K, Vd] and proposed token ids [A, K].

    forced_AK: feed these tokens instead of the heads' own.
    """
    first = prompt_length - 1
    if isinstance(heads, MedusaHeads):
        logits_AKV = torch.stack([heads.draft_logits(hidden_D) for hidden_D in features[FINAL_NORM][first:]])
        return logits_AKV, heads.draft_ids[logits_AKV.argmax(-1)]
    assert isinstance(heads, EagleHeads)
    stepper = EagleStepper(heads, len(ids_T))
    stepper.reset(ids_T[:prompt_length], {tap: feature[None, :prompt_length] for tap, feature in features.items()})
    parent_1 = torch.zeros(1, dtype=torch.long, device=ids_T.device)
    chains, places = [], range(first, len(features[heads.taps[0]]))
    for anchor, t in enumerate(places):
        if anchor:
            accepted = {tap: feature[None, t : t + 1] for tap, feature in features.items()}
            stepper.observe(accepted, ids_T[t : t + 1], parent_1)
        logits = [stepper.begin(ids_T[t + 1])]
        for step in range(1, steps):
            own_1 = heads.draft_ids[logits[-1].argmax(-1)]
            token_1 = own_1 if forced_AK is None else forced_AK[anchor, step - 1 : step]
            logits.append(stepper.step(token_1, parent_1))
        chains.append(torch.cat(logits))
    logits_AKV = torch.stack(chains)
    return logits_AKV, heads.draft_ids[logits_AKV.argmax(-1)]


def train(
    heads: DraftHeads,
    ids_T: Tensor,
    prompt_length: int,
    features: Mapping[str, Tensor],
    probes_R: Tensor,
    proposals_AK: Tensor,
) -> Tensor:
    """The training forward's logits [R, S, Vd] at the probed anchors, with the proposals as the data's tokens."""
    if isinstance(heads, MedusaHeads):
        states_KRD = heads.states(features[FINAL_NORM][prompt_length - 1 + probes_R])
        return (states_KRD @ heads.lm_head().mT).transpose(0, 1)
    assert isinstance(heads, EagleHeads)
    fused_FD = heads.fuse(dict(features))
    rows = []
    for anchor in probes_R.tolist():
        t = prompt_length - 1 + anchor
        row_T = torch.cat([ids_T[: t + 2], proposals_AK[anchor, : heads.depth]])
        # No step sees a feature behind its anchor.
        fused_TD = F.pad(fused_FD[: t + 1], (0, 0, 0, len(row_T) - t - 1))
        positions_T = torch.arange(len(row_T), device=row_T.device)
        states_S11D = heads.unroll(
            fused_TD[None], row_T[None], torch.zeros_like(row_T)[None], positions_T[None], positions_T[None, t, None]
        )
        rows.append(heads.draft_logits(states_S11D[:, 0, 0])[: proposals_AK.shape[1]])
    return torch.stack(rows)


def measure_rounding(
    heads: DraftHeads, golden: Golden, dtype: torch.dtype, *, lm_head_copied: bool = False
) -> list[float]:
    """How far the probed logits of each step move when the weights are rounded to `dtype`, in shares of the scale.

    lm_head_copied: the file holds the target's LM head, so that one is rounded, too.
    """
    rounded = type(heads)(heads.config, heads.hidden_size, heads.vocab_size, heads.draft_ids)
    rounded.load_state_dict(
        {name: t.to(dtype).to(t.dtype) if t.is_floating_point() else t for name, t in heads.state_dict().items()}
    )
    rounded = rounded.bind(heads.target).eval()
    if lm_head_copied:
        rounded.target_rows_VD = rounded.target_rows_VD.to(dtype).to(rounded.target_rows_VD.dtype)
    moved = []
    for prompt in golden.prompts:
        steps, kept_AK = prompt.proposals_AK.shape[1], prompt.proposals_AK
        logits_AKV, _ = draft(rounded, prompt.ids_T, prompt.prompt_length, prompt.features, steps, kept_AK)
        moved.append((logits_AKV[golden.probes_R][..., golden.columns_C] - prompt.logits_RKC).abs().amax((0, 2)))
    return (torch.stack(moved).amax(0) / golden.scale).tolist()
