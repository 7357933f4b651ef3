"""Certified exports of tiny heads: each made once, copied and damaged as a faulty exporter would have written it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.parity.certificate import GOLDEN_FILE, PARITY_FILE
from eval.parity.digests import tensor_digests
from eval.parity.golden import TEXTS, certify
from eval.parity.verify import verify
from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.eagle_layer import LayerShape
from heads.export.engines import SERVER_FILE
from heads.export.files import write_checksums
from heads.export.kinds import WRITERS
from heads.export.package import Companion
from heads.identity import identify
from heads.layout import save_heads
from heads.medusa import MedusaConfig
from heads.target import Target
from tests.heads.gguf_target import write_target_gguf
from tests.heads.test_eagle import LLAMA3, make
from tests.heads.test_eagle_import import deep_target

EVERY_ID = torch.arange(320)
SOME_IDS = EVERY_ID[EVERY_ID % 3 > 0]
PLAIN = Eagle3Config(num_steps=3)
EAGLE31 = replace(PLAIN, fc_norm=True, norm_output=True)
JOINT = replace(PLAIN, norm_before_fc=True)
BIASES, SCALED = LayerShape(attention_bias=True), LayerShape(rope_parameters=LLAMA3)
BIASED = LayerShape(qk_norm=True, attention_bias=True)
WINDOWED = LayerShape(sliding_window=4, rope_parameters=LLAMA3)
CASES = {  # name: format, heads, draft vocabulary, options of the export
    "vllm": ("vllm", PLAIN, SOME_IDS, {}),
    "vllm, all ids": ("vllm", PLAIN, EVERY_ID, {}),
    "vllm, qwen3": ("vllm", replace(EAGLE31, norm_before_residual=True, taps=[2, 6], layer=BIASED), SOME_IDS, {}),
    "sglang": ("sglang", replace(PLAIN, norm_before_fc=True, norm_output=True, taps=[0, 2, 5, 6]), SOME_IDS, {}),
    "specforge": ("specforge", replace(EAGLE31, layer=LayerShape(rope_parameters=LLAMA3)), SOME_IDS, {}),
    "speculators": (
        "speculators", replace(PLAIN, norm_before_residual=True, norm_before_fc=True, layer=WINDOWED), SOME_IDS, {},
    ),
    "modelopt": ("modelopt", PLAIN, SOME_IDS, {}),
    "safeailab": ("safeailab", PLAIN, SOME_IDS, {}),
    "tensorrt-llm": ("tensorrt-llm", replace(JOINT, norm_output=True, taps=[0, 2, 7], layer=BIASES), SOME_IDS, {}),
    "llama.cpp": ("llama.cpp", replace(JOINT, norm_before_residual=True, layer=SCALED), SOME_IDS, {}),  # with GGUF
    "eagle vllm": ("vllm", EagleConfig(), EVERY_ID, {}),
    "eagle vllm, some ids": ("vllm", EagleConfig(), SOME_IDS, {"expand_vocabulary": True}),
    "eagle safeailab": ("safeailab", EagleConfig(bias=True, layer=LayerShape(attention_bias=True)), EVERY_ID, {}),
    "medusa vllm": ("vllm", MedusaConfig(num_heads=3, num_layers=2), EVERY_ID, {}),
    "medusa vllm, shared": ("vllm", MedusaConfig(num_heads=3, lm_head="shared"), SOME_IDS, {}),
    "medusa fasterdecoding": (
        "fasterdecoding", MedusaConfig(num_heads=3), SOME_IDS, {"expand_vocabulary": True},
    ),
    "medusa fasterdecoding, shared": ("fasterdecoding", MedusaConfig(num_heads=3, lm_head="shared"), EVERY_ID, {}),
}  # fmt: skip


@pytest.fixture(scope="session")
def target() -> Target:
    """Eight blocks, so that the usual taps are three; norms that are not one, so that a second one would show."""
    return disturbed(deep_target())


def disturbed(target: Target, seed: int = 5) -> Target:
    generator = torch.Generator().manual_seed(seed)
    for parameter in target.model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return target


@pytest.fixture(scope="session")
def make_heads(target, random_heads):
    """make_heads(config, ids): random heads of any family."""

    def make_(config, ids):
        if isinstance(config, MedusaConfig):
            return random_heads(target, draft_ids=ids, **vars(config))
        return make(target, config, draft_ids=ids)

    return make_


def write_certified(folder: Path, heads, target: Target, format_name: str, *, texts=TEXTS[:1], anchors=3, **options):
    """Export heads with a certificate of one prompt and a few anchors; returns the directory."""
    save_heads(heads, folder / "heads", identify(target))

    def record(fresh: Path) -> None:
        certify(fresh, heads, target, format_name, texts=texts, anchors=anchors)

    companion = Companion((PARITY_FILE, GOLDEN_FILE), record)
    WRITERS[heads.kind](folder / "heads", folder / "out", target, format_name, companion=companion, **options)
    return folder / "out"


@pytest.fixture(scope="session")
def pristine(target, make_heads, tmp_path_factory):
    """pristine(case, dtype=None) -> a directory that must not be changed."""
    made: dict[tuple[str, str | None], Path] = {}

    def pristine_(case: str, dtype: str | None = None) -> Path:
        if (case, dtype) not in made:
            format_name, config, ids, options = CASES[case]
            folder = tmp_path_factory.mktemp("export")
            heads = make_heads(config, ids)
            if format_name == "llama.cpp":
                options = {**options, "target_gguf": write_target_gguf(folder / "target.gguf", target)}
            made[case, dtype] = write_certified(folder, heads, target, format_name, dtype=dtype, **options)
        return made[case, dtype]

    return pristine_


def weights_of(directory: Path) -> Path:
    (path,) = directory.glob("*.safetensors")
    return path


def refresh(directory: Path) -> None:
    """Make all checksums right again, as if the exporter had written these files."""
    certificate = json.loads((directory / PARITY_FILE).read_text())
    certificate["tensors"] = tensor_digests(load_file(weights_of(directory)))
    (directory / PARITY_FILE).write_text(json.dumps(certificate))
    (directory / "SHA256SUMS").unlink(missing_ok=True)
    write_checksums(directory)


@pytest.fixture
def damaged(pristine, tmp_path):
    """damaged(case, change, dtype=None): a copy after `change(config, tensors)`, with all checksums right.

    config holds what a server is started with, too.
    """

    def damaged_(case: str, change: Callable[[dict, dict], object], dtype: str | None = None) -> Path:
        directory = tmp_path / "out"
        shutil.copytree(pristine(case, dtype), directory)
        config = json.loads((directory / "config.json").read_text())
        server = directory / SERVER_FILE
        told = json.loads(server.read_text()) if server.exists() else {}
        config |= told
        tensors = load_file(weights_of(directory))
        change(config, tensors)
        if told:
            server.write_text(json.dumps({key: config.pop(key) for key in told}))
        (directory / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, weights_of(directory))
        refresh(directory)
        return directory

    return damaged_


def faults(directory: Path, target: Target) -> list[str]:
    """What a verification names, the first first."""
    return [f"{finding.check}: {finding.cause}" for finding in verify(directory, target) if finding.cause]
