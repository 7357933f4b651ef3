"""The `speculators` package itself loads our export for it, whole, and its forward gives our logits.

A minute where the package is installed already. It is installed by the test, into an environment of its own.
"""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eval.serving.engine_process import without_ours
from eval.serving.environment import EngineUnavailable, environment_python
from heads.eagle import anchor_table
from heads.eagle3 import Eagle3Config, Eagle3Heads
from heads.export.eagle_writer import export_heads
from heads.identity import identify
from heads.layout import save_heads
from heads.target import Target, TargetConfig, load_target
from tests.heads.test_eagle import make

pytestmark = pytest.mark.slow

# Shapes: T tokens, S training steps, R anchors, D hidden, Vd draft vocabulary

REQUIREMENTS = Path(__file__).parents[1] / "conf" / "engines" / "speculators.txt"
TAPS, STEPS, TOKENS = [0, 1, 2], 3, 20
SOME_IDS = torch.arange(20, 220)
OPTIONS = {
    "plain": {},
    "normed residual": {"norm_before_residual": True},
    "norms of EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "joined norm": {"norm_before_fc": True, "norm_before_residual": True},
}
# What speculators takes from the verifier, for its training: no export has them.
FROM_VERIFIER = ["verifier_lm_head.weight", "verifier_norm.weight"]
PROGRAM = """
import json, sys
import torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from transformers import PreTrainedModel

given = load_file("given.safetensors")
found = {}
for folder in map(Path, sys.argv[1:]):
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # its own attention is written for GPUs
    model = SpeculatorModel.from_pretrained(folder, config=config).eval()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    with torch.no_grad():
        model(
            hidden_states=given[folder.name],
            input_ids=given["next_ids"],
            document_ids=torch.zeros_like(given["next_ids"]),
            position_ids=torch.arange(given["next_ids"].shape[1])[None],
            ttt_steps=int(given["steps"]),
        )
    save_file({**tensors, "logits": torch.stack(logits)}, folder / "loaded.safetensors")
    kind = type(model)
    kind._keys_to_ignore_on_load_missing = []  # nothing is excused
    _, report = PreTrainedModel.from_pretrained.__func__(kind, folder, config=config, output_loading_info=True)
    found[folder.name] = {
        "class": kind.__name__,
        "taps": model.config.eagle_aux_hidden_state_layer_ids,
        "verifier": model.config.speculators_config.verifier.name_or_path,
        **{key: sorted(map(str, report[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")},
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return environment_python("speculators-0.9.0", REQUIREMENTS, "import speculators")
    except EngineUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(name="verifier", path="random:llama"), "cpu")


def our_logits(heads: Eagle3Heads, fused_BTD: Tensor, ids_BT: Tensor) -> Tensor:
    """[S, R, Vd]: what training sees from every anchor behind which all steps have a token."""
    documents_BT = torch.zeros_like(ids_BT)
    places_BA, valid_BA = anchor_table(torch.arange(TOKENS - STEPS), 1, TOKENS)
    states_SBAD = heads.unroll(fused_BTD, ids_BT, documents_BT, torch.arange(TOKENS)[None], places_BA)
    return heads.draft_logits(states_SBAD[:, valid_BA])


def test_speculators_loads_what_we_export_and_computes_what_we_trained(python, target, tmp_path):
    target.model.save_pretrained(tmp_path / "verifier")  # the name in the export is a directory to whoever runs here
    ids_BT = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    given = {"next_ids": torch.cat([ids_BT[:, 1:], ids_BT[:, :1]], 1), "steps": torch.tensor(STEPS)}
    expected = {}
    for name, options in OPTIONS.items():
        heads = make(target, Eagle3Config(num_steps=STEPS, taps=TAPS, **options), draft_ids=SOME_IDS)
        assert isinstance(heads, Eagle3Heads)
        save_heads(heads, tmp_path / "heads" / name, identify(target))
        export_heads(tmp_path / "heads" / name, tmp_path / name, target, "speculators")
        features = target.features(ids_BT, torch.arange(TOKENS)[None], torch.zeros_like(ids_BT), heads.training_taps)
        given[name] = torch.cat([features[tap] for tap in heads.taps], -1)
        with torch.no_grad():
            expected[name] = our_logits(heads, heads.fuse(features), ids_BT)
    save_file(given, tmp_path / "given.safetensors")
    done = subprocess.run(
        [str(python), "-c", PROGRAM, *OPTIONS], cwd=tmp_path, env=without_ours(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in OPTIONS:
        assert found[name] == {
            "class": "Eagle3DraftModel", "taps": [tap + 1 for tap in TAPS], "verifier": "verifier",
            "missing_keys": FROM_VERIFIER, "unexpected_keys": [], "mismatched_keys": [],
        }  # fmt: skip
        loaded, exported = (
            load_file(tmp_path / name / "loaded.safetensors"),
            load_file(tmp_path / name / "model.safetensors"),
        )
        theirs_SRV = loaded.pop("logits")[:, : TOKENS - STEPS]
        assert set(loaded) == {*exported, *FROM_VERIFIER}
        for key, tensor in exported.items():
            assert torch.equal(loaded[key], tensor), f"{name}: {key}"
        assert torch.equal(loaded["d2t"] + torch.arange(len(SOME_IDS)), SOME_IDS)
        torch.testing.assert_close(theirs_SRV, expected[name], rtol=1e-4, atol=1e-4)
