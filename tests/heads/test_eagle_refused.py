"""What a format cannot express is refused, with the setting, the rule and what works."""

import pytest

from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.eagle_layer import LayerShape
from heads.export.eagle_writer import export_heads
from heads.identity import identify
from heads.layout import save_heads
from heads.target import Target
from tests.heads.test_eagle import LLAMA3, make
from tests.heads.test_eagle_import import deep_target


@pytest.fixture(scope="module")
def target() -> Target:
    return deep_target()


WINDOW, NORMED_RESIDUAL = LayerShape(sliding_window=8), Eagle3Config(norm_before_residual=True)
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}
REFUSED = [
    ("sglang", NORMED_RESIDUAL, "norm_before_residual=True: its residual stream .* Use format=vllm or format=specul"),
    ("specforge", NORMED_RESIDUAL, "norm_before_residual=True"),
    ("specforge", Eagle3Config(norm_before_fc=True), "norm_before_fc=True: .*Use format=sglang or format=vllm"),
    ("specforge", Eagle3Config(taps=[1, 2]), r"taps=\[1, 2\]: it joins exactly 3"),
    ("specforge", Eagle3Config(layer=LayerShape(rope_parameters=LONG)), "rope_type=longrope with .*: it computes"),
    ("safeailab", Eagle3Config(fc_norm=True), "fc_norm=True: it has no norms of single taps"),
    ("safeailab", Eagle3Config(norm_output=True), "norm_output=True: it feeds back the state before the norm"),
    ("safeailab", Eagle3Config(taps=[1, 2, 3]), r"always takes \[1, 3, 4\].* or train with heads.taps=\[1, 3, 4\]"),
    ("safeailab", Eagle3Config(layer=LayerShape(rope_parameters=LLAMA3)), "rope_type=llama3 with .* it computes def"),
    ("safeailab", Eagle3Config(layer=LayerShape(rope_parameters=LINEAR)), "linear with .*=5000: .*=10000 whatever"),
    ("safeailab", Eagle3Config(layer=LayerShape(head_dim=4)), r"head_dim=4: it derives .* 32 / 4"),
    ("safeailab", Eagle3Config(layer=WINDOW), "sliding_window=8: .*Use format=vllm or format=speculators or train"),
    ("sglang", Eagle3Config(layer=WINDOW), "heads.layer.sliding_window=null"),
    ("sglang", Eagle3Config(layer=LayerShape(qk_norm=True)), "qk_norm=True: its layer has no norms of queries"),
    ("sglang", Eagle3Config(taps=[3]), "SGLang leaves out fc for a single tap"),
    ("modelopt", Eagle3Config(taps=[1, 3, 7]), "SGLang does not collect the output of the last block, 7.*format=vllm"),
    ("modelopt", Eagle3Config(layer=LayerShape(attention_bias=True)), "attention_bias=True: its attention has no"),
    ("modelopt", Eagle3Config(fc_norm=True, norm_output=True), "fc_norm=True: .*; heads.norm_output=True: "),
    ("tensorrt-llm", NORMED_RESIDUAL, "norm_before_residual=True: its residual .* Use format=vllm or format=specul"),
    ("tensorrt-llm", Eagle3Config(taps=[3]), "TensorRT-LLM makes no fc for a single tap"),
    ("tensorrt-llm", Eagle3Config(layer=WINDOW), "sliding_window=8: its attention sees all positions"),
    ("tensorrt-llm", Eagle3Config(layer=LayerShape(rope_parameters=LONG)), "rope_type=longrope with .*: it computes"),
    ("tensorrt-llm", EagleConfig(), "TensorRT-LLM's PyTorch backend drafts with EAGLE-3 only: train heads.kind=eagle3"),
    ("llama.cpp", Eagle3Config(taps=[1, 2]), r"taps=\[1, 2\]: it joins exactly 3.*Use format=sglang or format=vllm"),
    ("llama.cpp", Eagle3Config(fc_norm=True), "fc_norm=True: it has no norms of single taps"),
    ("llama.cpp", Eagle3Config(norm_output=True), "norm_output=True: it feeds back the state before the norm"),
    ("llama.cpp", Eagle3Config(layer=LayerShape(qk_norm=True)), "qk_norm=True: its layer has no norms of queries"),
    ("llama.cpp", Eagle3Config(layer=LayerShape(attention_bias=True)), "attention_bias=True: its attention has no"),
    ("llama.cpp", EagleConfig(), "llama.cpp drafts with EAGLE-3 only: train heads.kind=eagle3"),
    ("vllm", EagleConfig(bias=True), "bias=True: it drops fc.bias .*Use format=safeailab or train with heads.bias="),
    ("vllm", EagleConfig(layer=WINDOW), "sliding_window=8.*Use train with heads.layer.sliding_window=null"),
    ("safeailab", EagleConfig(layer=LayerShape(qk_norm=True)), "qk_norm=True"),
    ("sglang", EagleConfig(), "holds eagle heads, format=sglang takes eagle3 heads; .* format=safeailab, format=vllm"),
    ("fasterdecoding", Eagle3Config(), "format=fasterdecoding takes medusa heads; eagle3 heads go to format=safeailab"),
    ("onnx", Eagle3Config(), "format=onnx is unknown; known are fasterdecoding, llama.cpp, modelopt, safeailab"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config", "message"), REFUSED)
def test_what_a_format_cannot_express_is_refused(target, tmp_path, name, config, message):
    save_heads(make(target, config), tmp_path / "heads", identify(target))
    with pytest.raises(ValueError, match=message):
        export_heads(tmp_path / "heads", tmp_path / "out", target, name)
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]
