"""What an export carries of the trained heads' own answers, so that anybody can check those of the files.

    parity.json      whose heads, for which target, in which format; digests; what a greedy chain is worth
    parity.tensors   token ids, features, logits and proposals of a few prompts

Anchor a of a prompt of P tokens drafts from position t = P - 1 + a, behind the certain token r = x[t+1] (P = 4):

    position    0 1 2 3 4 5 6 7 8
    x           p p p p c c c c c        p prompt, c the target's greedy continuation
    anchor 0          t r 1 2 3          drafted directly after the prefill; its first label is x[5]
    anchor 1            t r 1 2 3

parity.tensors is a safetensors file by content but not by name: vLLM and SGLang load every `*.safetensors` beside
config.json as weights, and vLLM then refuses the drafter.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from heads.export.files import from_json, read_json, read_tensors, write_json, write_tensors
from heads.identity import TargetIdentity

# Shapes: P prompt tokens, T tokens with the continuation, F = last anchor + 1 positions, A anchors, R probed anchors,
# K drafted steps, S trained steps, C columns (draft indices), D hidden, Vd draft vocabulary

PARITY_FILE, GOLDEN_FILE = "parity.json", "parity.tensors"
VERSION = 1


@dataclass(frozen=True)
class Certificate:
    """parity.json.

    dtype: of the exported weights. rounding: how far the logits of each step move when the trained weights are rounded
        to it, as a share of the largest one.
    tensors, shared: SHA-256 of each exported tensor, and of the target's embedding and LM head in bfloat16.
    taps: the target's states that the heads read, in our names. steps: K.
    cycles, accepted, tau: of the greedy chain along all continuations; accepted[k] counts cycles whose draft k stood.
    """

    version: int
    kind: str
    format: str
    dtype: str
    target: TargetIdentity
    target_dtype: str
    template_kwargs: dict[str, object]
    prompts: list[str]
    taps: list[str]
    steps: int
    draft_vocab_size: int
    rounding: list[float]
    shared: dict[str, str]
    tensors: dict[str, str]
    cycles: int
    accepted: list[int]
    tau: float
    packages: dict[str, str]


@dataclass(frozen=True)
class GoldenPrompt:
    """One prompt: what the trained heads read and said there.

    features: {tap: [F, D]}. proposals_AK: token ids. margins_AK: best logit minus the second. accepted_A: how many
    proposals the continuation bears out. logits_RKC: of drafting. trained_RSC: of the training forward along the same
    proposals.
    """

    prompt_length: int
    ids_T: Tensor
    features: dict[str, Tensor]
    proposals_AK: Tensor
    margins_AK: Tensor
    accepted_A: Tensor
    logits_RKC: Tensor
    trained_RSC: Tensor

    def place(self, anchor: int) -> int:
        """The position t of an anchor."""
        return self.prompt_length - 1 + anchor


@dataclass(frozen=True)
class Golden:
    """parity.tensors.

    draft_ids: token ids [Vd] of the draft vocabulary. columns_C, probes_R: the draft indices and the anchors of each
    prompt whose logits are kept.
    """

    draft_ids: Tensor
    columns_C: Tensor
    probes_R: Tensor
    prompts: list[GoldenPrompt]

    @property
    def scale(self) -> float:
        """The largest logit: what differences are measured by."""
        return max(prompt.logits_RKC.abs().max().item() for prompt in self.prompts)


def write(folder: Path, certificate: Certificate, golden: Golden) -> None:
    """Write both files."""
    tensors = {name: value for name, value in vars(golden).items() if isinstance(value, Tensor)}
    for number, prompt in enumerate(golden.prompts):
        tensors |= {f"{number}.features.{tap}": feature for tap, feature in prompt.features.items()}
        tensors |= {f"{number}.{name}": value for name, value in vars(prompt).items() if isinstance(value, Tensor)}
        tensors[f"{number}.prompt_length"] = torch.tensor(prompt.prompt_length)
    write_tensors(folder / GOLDEN_FILE, tensors)
    write_json(folder / PARITY_FILE, asdict(certificate))


def read(folder: Path) -> tuple[Certificate, Golden]:
    """Read both files.

    Raises:
        ValueError: if one is missing, damaged or of another version.
    """
    path = folder / PARITY_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {PARITY_FILE}: it was exported without a certificate; export it again")
    values = read_json(path)
    if values.get("version") != VERSION:
        raise ValueError(f"{path}: version={values.get('version')!r}, this Headstart reads {VERSION}; export again")
    certificate = from_json(Certificate, values, str(path))
    tensors = read_tensors(folder / GOLDEN_FILE)
    try:
        prompts = [_prompt(tensors, number, certificate.taps) for number in range(len(certificate.prompts))]
        return certificate, Golden(tensors["draft_ids"], tensors["columns_C"], tensors["probes_R"], prompts)
    except KeyError as error:
        raise ValueError(
            f"{folder / GOLDEN_FILE} lacks {error}, which {PARITY_FILE} announces; export again"
        ) from error


def _prompt(tensors: dict[str, Tensor], number: int, taps: list[str]) -> GoldenPrompt:
    names = [name for name, kind in GoldenPrompt.__annotations__.items() if kind is Tensor]
    return GoldenPrompt(
        prompt_length=int(tensors[f"{number}.prompt_length"]),
        features={tap: tensors[f"{number}.features.{tap}"] for tap in taps},
        **{name: tensors[f"{number}.{name}"] for name in names},
    )


def accepted_lengths(proposals_AK: Tensor, ids_T: Tensor, prompt_length: int) -> list[int]:
    """How many drafts of each anchor stand: those that equal the continuation, up to the first that does not."""
    A, K = proposals_AK.shape
    first = prompt_length + 1  # the label of anchor 0's first draft
    labels_AK = ids_T[first : first + A + K - 1].unfold(0, K, 1)
    return (proposals_AK == labels_AK).long().cumprod(1).sum(1).tolist()


def chain(accepted_A: list[int]) -> list[int]:
    """Accepted lengths of the cycles that decoding goes through: each starts behind what the last one emitted."""
    cycles, anchor = [], 0
    while anchor < len(accepted_A):
        cycles.append(accepted_A[anchor])
        anchor += accepted_A[anchor] + 1
    return cycles


def tally(cycles: list[int], steps: int) -> tuple[list[int], float]:
    """Count the cycles whose draft k = 0 ... steps - 1 stood, and tau, the tokens of a target forward."""
    lengths = Counter(cycles)
    accepted = [sum(count for length, count in lengths.items() if length > k) for k in range(steps)]
    return accepted, 1 + sum(cycles) / len(cycles)
