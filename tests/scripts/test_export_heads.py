"""The commands export and import heads of the tiny target; what goes wrong is one line."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.identity import identify
from heads.layout import load_heads, save_heads
from heads.medusa import MedusaConfig, MedusaHeads
from heads.target import TargetConfig, load_target
from tests.heads.test_eagle import make

BOTH = [("eagle3", "vllm"), ("eagle", "vllm")]
SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(script, *overrides) -> what it printed. The run directory `run` holds heads of the tiny target."""
    target = load_target(TargetConfig("tiny", "random:llama"), "cpu")
    heads = MedusaHeads(MedusaConfig(num_heads=2), 32, 320, torch.arange(320)).bind(target).initialise()
    save_heads(heads, tmp_path / "run" / "heads", identify(target))
    monkeypatch.chdir(tmp_path)

    def run_(script: str, *overrides: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, "model=tiny", *overrides])
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_, target, heads


@pytest.mark.parametrize("given", ["run", "run/heads"])
def test_exports_beside_the_heads_and_imports_again(run, tmp_path, given):
    run_, target, heads = run
    printed = run_("export_heads", f"heads={given}", "format=vllm")
    assert "wrote run/export-vllm/model.safetensors (0.1 MB)" in printed
    assert "note: vLLM 0.32 is the last release with Medusa" in printed
    command = """'{"method":"medusa","model":"run/export-vllm","num_speculative_tokens":2}'"""
    assert f"serve with: vllm serve tiny --speculative-config {command}" in printed
    printed = run_("import_heads", "source=run/export-vllm", "kind=medusa", "format=vllm", "output=back")
    assert "wrote back: 2 heads of 1 layers, LM head own" in printed
    back = load_heads(tmp_path / "back", target)
    assert torch.equal(back.state_dict()["lm_head_weight"], heads.lm_head_weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "run"]


SERVED = {"modelopt": "python -m sglang", "tensorrt-llm": "trtllm-serve tiny --backend", "llama.cpp": "llama-server -m"}


@pytest.mark.parametrize(("kind", "format_name"), [*(("eagle3", name) for name in SERVED), *BOTH])
def test_the_kind_of_the_heads_decides_what_a_format_means(run, tmp_path, kind, format_name):
    run_, target, _ = run
    heads = make(target, Eagle3Config(taps=[0, 1, 2]) if kind == "eagle3" else EagleConfig())
    save_heads(heads, tmp_path / "run" / "heads", identify(target))
    printed = run_("export_heads", "heads=run", f"format={format_name}")
    assert f"run/export-{format_name}/config.json" in printed
    served = {**SERVED, "vllm": f'vllm serve tiny --speculative-config \'{{"method":"{kind}"'}
    assert served[format_name] in printed.partition("serve with:")[2]
    named = [] if format_name in SERVED else [f"kind={kind}"]
    printed = run_("import_heads", f"source=run/export-{format_name}", *named, f"format={format_name}", "output=back")
    taps = "post_block[0], post_block[1], post_block[2]" if kind == "eagle3" else "final_norm"
    assert f"wrote back: {kind} heads over {taps}, 320 of 320 token ids can be drafted" in printed
    back = load_heads(tmp_path / "back", target)
    assert all(torch.equal(tensor, heads.state_dict()[name]) for name, tensor in back.state_dict().items())


@pytest.mark.parametrize(
    ("script", "overrides", "message"),
    [
        ("export_heads", ["heads=run", "format=onnx"], "error: format=onnx is unknown; known are"),
        ("export_heads", ["heads=nowhere", "format=vllm"], r"error: heads=nowhere holds no config\.json"),
        ("export_heads", ["source=run"], r"error: format has no value; give it .* format=\.\.\."),
        (
            "export_heads",
            ["heads=run", "format=vllm", "output=run"],
            "error: .*holds heads, which would be lost",
        ),
        (
            "export_heads",
            ["heads=run", "format=vllm", "model.path=random:qwen3"],
            "error: .*model_type=llama",
        ),
        (
            "export_heads",
            ["heads=run", "format=sglang"],
            "error: run/heads holds medusa heads, format=sglang takes eagle3 heads; medusa heads go to format=faster",
        ),
        (
            "export_heads",
            ["heads=run", "format=tensorrt-llm"],
            "error: .*TensorRT-LLM serves Medusa from a pickle only, .*export with format=fasterdecoding and follow",
        ),
        (
            "export_heads",
            ["heads=run", "format=vllm", "target_gguf=target.gguf"],
            r"error: target_gguf=target\.gguf is for format=llama\.cpp, not for format=vllm",
        ),
        (
            "export_heads",
            ["heads=run", "format=vllm", "model.adapter=run/adapter"],
            r"error: model\.adapter=run/adapter is merged in memory only, .*write it with scripts/merge_adapter\.py",
        ),
        (
            "import_heads",
            ["source=run", "format=vllm", "kind=medusa", "output=x"],
            r"error: run/config\.json does not exist",
        ),
        (
            "import_heads",
            ["source=run", "format=vllm", "output=x"],
            r"error: format=vllm exists for medusa, eagle3, eagle heads; say which with kind=\.\.\.",
        ),
        (
            "import_heads",
            ["source=run", "format=vllm", "kind=hydra", "output=x"],
            "error: kind= says hydra heads, format=vllm takes .*hydra heads go to no engine: decode with eval",
        ),
    ],
)
def test_mistakes_are_one_line(run, script, overrides, message):
    run_, _, _ = run
    with pytest.raises(SystemExit, match=message) as error:
        run_(script, *overrides)
    assert "\n" not in str(error.value)
