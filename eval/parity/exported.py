"""An exported directory opened for checking: its files, its certificate, and what the engine makes of its config."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.parity.certificate import Certificate, Golden, read
from eval.parity.expected import Expected, eagle_tensors, own_names
from eval.parity.layouts import LAYOUTS, EagleSpec, Layout, read_spec
from eval.parity.replay_eagle import EagleReplay
from eval.parity.replay_medusa import MedusaReplay, MedusaSpec, read_medusa_spec
from heads.export.engines import GGUF_FILE
from heads.export.files import CONFIG_FILE, read_json, read_tensors
from heads.target import Target

# Shapes: V vocabulary, Ve ids that the engine drafts, D hidden

Replay = EagleReplay | MedusaReplay


@dataclass(frozen=True)
class Finding:
    """One check: what was expected, what was found, and what is wrong ("" where nothing is)."""

    check: str
    expected: str
    found: str
    cause: str = ""
    ran: bool = True


@dataclass(frozen=True)
class Exported:
    """config: config.json, with what the engine's server is started with. tensors: in the engine's names of `expected`,
    with the decoder layer as `layer`.
    """

    directory: Path
    weights_file: str
    certificate: Certificate
    golden: Golden
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: Target

    @property
    def engine(self) -> str:
        return self.spec.engine if isinstance(self.spec, MedusaSpec) else self.layout.engine

    @property
    def layout(self) -> Layout:
        """How the engine reads EAGLE heads in this format."""
        return LAYOUTS[self.certificate.kind, self.certificate.format]

    @property
    def engine_files(self) -> set[str]:
        """All files that the engine reads."""
        names = {self.weights_file, CONFIG_FILE}
        if self.certificate.kind != "medusa" and self.layout.server_file is not None:
            names.add(self.layout.server_file)
        return names | ({GGUF_FILE} if (self.directory / GGUF_FILE).is_file() else set())

    @cached_property
    def spec(self) -> EagleSpec | MedusaSpec:
        """What the engine makes of config.json. Raises ValueError where it cannot follow it."""
        kind, target = self.certificate.kind, self.target
        if kind == "medusa":
            return read_medusa_spec(self.certificate.format, self.config, target.hidden_size, target.vocab_size)
        return read_spec(self.layout, kind, self.config, target.num_layers)

    @cached_property
    def expected(self) -> Expected:
        if isinstance(self.spec, MedusaSpec):
            return self.spec.expected()
        return eagle_tensors(self.layout, self.spec)

    @cached_property
    def engine_ids(self) -> Tensor:
        """The token ids that the engine takes its draft logits for; out of range where d2t is wrong."""
        size = self.spec.draft_vocab_size if isinstance(self.spec, EagleSpec) else self.target.vocab_size
        every_E = torch.arange(size)
        return every_E + self.tensors["d2t"] if "d2t" in self.tensors else every_E

    @cached_property
    def replay(self) -> Replay:
        """The drafter, in float32. Needs all tensors that are expected."""
        ids_E = self.engine_ids.clamp(0, self.target.vocab_size - 1)  # whose check has failed where that changes one
        weights = {name: tensor.float() for name, tensor in self.tensors.items() if name not in ("d2t", "t2d")}
        lm_head_VD = self.target.lm_head.get_parameter("weight").detach().cpu().float()
        if isinstance(self.spec, MedusaSpec):
            rows = tuple(weights[name] for name in self.spec.lm_heads) or (lm_head_VD,)
            every = rows * self.spec.num_heads if self.spec.shared else rows
            return MedusaReplay(self.spec, weights, every, ids_E)
        embedding_VD = self.target.embedding.weight.detach().cpu().float()
        if self.engine == "vLLM":  # the others always take the target's
            embedding_VD = weights.get("embed_tokens.weight", embedding_VD)
        lm_head_ED = weights.get("lm_head.weight", lm_head_VD)
        return EagleReplay(self.spec, weights, embedding_VD, lm_head_ED, ids_E, tuple(self.certificate.taps))

    @property
    def comparable(self) -> bool:
        """Whether the engine drafts as many ids as the trained heads, or all."""
        return len(self.engine_ids) in (len(self.golden.draft_ids), self.target.vocab_size)

    @cached_property
    def columns(self) -> Tensor:
        """Where the kept logits stand among the engine's."""
        columns_C = self.golden.columns_C
        return columns_C if len(self.engine_ids) == len(self.golden.draft_ids) else self.golden.draft_ids[columns_C]


def open_export(directory: Path, target: Target) -> Exported:
    """Raises ValueError if a file is missing or damaged."""
    certificate, golden = read(directory)
    config = {key: value for key, value in read_json(directory / CONFIG_FILE).items() if value is not None}
    weights_file = "medusa_lm_head.safetensors" if certificate.format == "fasterdecoding" else "model.safetensors"
    tensors = read_tensors(directory / weights_file)
    if certificate.kind != "medusa":
        layout = LAYOUTS[certificate.kind, certificate.format]
        tensors = own_names(layout, tensors)
        if layout.server_file is not None:
            config |= read_json(directory / layout.server_file)  # JSON, as which we write YAML
    return Exported(directory, weights_file, certificate, golden, config, tensors, target)
