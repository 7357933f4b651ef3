"""Whether the target at hand is the one that the certificate was recorded with, and gives the same features."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from data.render import render_prompt
from eval.parity.certificate import GoldenPrompt
from eval.parity.digests import shared_digests
from eval.parity.exported import Exported, Finding
from eval.parity.layouts import block_of
from eval.parity.tolerance import feature_tolerance
from heads.identity import TargetIdentity, identify
from heads.target import FINAL_NORM, Target

# Shapes: T tokens, F featured positions, D hidden

WRONG_TARGET = {
    "weights_sha256": "wrong weights: another revision, or a fine-tune",
    "tokenizer_sha256": "wrong tokenizer: token ids would mean other text",
    "template_sha256": "wrong chat template: prompts would not look as in training",
}
ROWS = {"tokenizer_sha256": "tokenizer", "template_sha256": "chat template", "weights_sha256": "target's weights"}


def check_identity(exported: Exported) -> Iterator[Finding]:
    """The target's shape, tokenizer, template and weights."""
    recorded, present = exported.certificate.target, identify(exported.target)
    others = [field.name for field in fields(TargetIdentity) if field.name not in {"name", *ROWS}]
    wrong = [f"{name}={getattr(present, name)}, not {getattr(recorded, name)}" for name in others
             if getattr(present, name) != getattr(recorded, name)]  # fmt: skip
    yield Finding("target", recorded.name, present.name, f"another target: {'; '.join(wrong)}" if wrong else "")
    for name, row in ROWS.items():
        expected, found = getattr(recorded, name)[:12], getattr(present, name)[:12]
        yield Finding(row, expected, found, WRONG_TARGET[name] if expected != found else "")


def check_shared(exported: Exported) -> Iterator[Finding]:
    """The whole embedding and LM head, of which the identity holds a sample."""
    recorded, found = exported.certificate.shared, shared_digests(exported.target)
    for name, row in (("embedding", "target's embedding"), ("lm_head", "target's LM head")):
        same = recorded[name] == found[name]
        cause = "" if same else f"the {row} is of another model, or has its rows in another order"
        yield Finding(row, recorded[name][:12], found[name][:12], cause)


def check_prompts(exported: Exported) -> Iterator[Finding]:
    """Whether the chat template still renders the prompts to the recorded token ids."""
    certificate, target = exported.certificate, exported.target
    changed = []
    for text, prompt in zip(certificate.prompts, exported.golden.prompts, strict=True):
        recorded = prompt.ids_T[: prompt.prompt_length].tolist()
        messages = [{"role": "user", "content": text}]
        if render_prompt(messages, target.tokenizer, certificate.template_kwargs) != recorded:
            changed.append(text)
    cause = f"the chat template renders {changed} to other token ids than in the certificate" if changed else ""
    served = target.config.template_kwargs
    if served != certificate.template_kwargs:
        cause = f"model.template_kwargs={served}, the heads were certified with {certificate.template_kwargs}"
    yield Finding("prompts", f"{len(certificate.prompts)} as recorded", f"{len(changed)} changed", cause)


@dataclass(frozen=True)
class States:
    """All states of one forward: those that enter each block, and behind the last block [n + 1], each [T, D]."""

    entered: list[Tensor]
    final: Tensor

    def named(self, tap: str) -> Tensor:
        """The state that heads know by this name."""
        return self.final if tap == FINAL_NORM else self.entered[block_of(tap) + 1]


@torch.inference_mode()
def run_target(target: Target, ids_T: Tensor) -> States:
    """One plain forward of the decoder, without a cache, observed from outside."""
    entered: list[Tensor] = []
    modules = [*target.decoder.get_submodule("layers").children(), target.final_norm]

    def keep(module, positional, named):
        entered.append((positional[0] if positional else named["hidden_states"])[0].float().cpu())

    # Models with norms on queries and keys may share the class of the final norm, never its instance.
    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    try:
        output = target.decoder(input_ids=ids_T[None].to(target.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return States(entered, output.last_hidden_state[0].float().cpu())


def check_features(exported: Exported) -> Iterator[Finding]:
    """Recompute the features from the target, and whether its greedy continuation is the recorded one."""
    limit = feature_tolerance(exported)
    runs = [(prompt, run_target(exported.target, prompt.ids_T)) for prompt in exported.golden.prompts]
    for tap in exported.certificate.taps:
        gap = max(distance(prompt.features[tap], states.named(tap)) for prompt, states in runs)
        cause = "" if gap <= limit else _explain(exported, tap, *runs[0], limit)
        yield Finding(f"features {tap}", f"within {limit:.1e}", f"{gap:.1e} apart", cause)
    lost = max(_shortfall(exported.target, prompt, states) for prompt, states in runs)
    cause = "" if lost <= limit else "the target would not say the recorded continuation"
    yield Finding("continuation", "greedy", f"{lost:.1e} below the best logit", cause)


def distance(recorded_FD: Tensor, states_TD: Tensor) -> float:
    """Mean absolute difference over mean absolute value: a few huge channels must not hide the others."""
    there_FD = states_TD[: len(recorded_FD)]
    return ((recorded_FD - there_FD).abs().mean() / there_FD.abs().mean()).item()


def _explain(exported: Exported, tap: str, prompt: GoldenPrompt, states: States, limit: float) -> str:
    """Which other state of the target the recorded features are, if any."""
    target = exported.target
    normed = states.final.to(target.device, target.dtype)
    candidates = {
        "the recorded ones are the embeddings": states.entered[0],
        **{f"the recorded ones are outputs of block {block}": state for block, state in enumerate(states.entered[1:])},
        "the recorded ones are from before the final norm": states.entered[-1],
        "the recorded ones went through the final norm twice": target.final_norm(normed).float().cpu(),
        "the recorded ones are one position late": states.named(tap)[1:],
        "the recorded ones are one position early": states.named(tap).roll(1, 0),
    }
    gaps = {name: distance(prompt.features[tap][1:-1], state[1:]) for name, state in candidates.items()}
    best = min(gaps, key=lambda name: gaps[name])
    return best if gaps[best] <= limit else "the recorded ones are no state of this target"


def _shortfall(target: Target, prompt: GoldenPrompt, states: States) -> float:
    """How far below the best logit a token of the continuation ever is, as a share of the largest logit."""
    first = prompt.prompt_length - 1
    hidden = states.final[first:-1].to(target.device, target.dtype)
    logits_NV = target.logits(hidden).float().cpu()
    said_N = logits_NV.gather(1, prompt.ids_T[first + 1 :, None]).squeeze(1)
    return ((logits_NV.amax(1) - said_N).max() / logits_NV.abs().max()).item()
