"""Exported EAGLE heads mean in an engine what they mean here, and their cards say how they are served."""

import json
import subprocess
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.eagle_layer import LayerShape
from heads.export.eagle_writer import export_heads
from heads.identity import identify
from heads.layout import save_heads
from heads.medusa import MedusaConfig, MedusaHeads
from heads.target import Target, TargetConfig
from heads.tiny import tiny_tokenizer
from tests.heads.test_eagle import make
from tests.heads.test_eagle_import import DRAFT_IDS, DRAFTED, EVERY_ID, TAPS, TOKENS, deep_target, rollout

EAGLE3_FORMATS = (
    "safeailab", "specforge", "sglang", "vllm", "speculators", "modelopt", "tensorrt-llm", "llama.cpp",
)  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return deep_target()


@pytest.fixture
def saved(target, tmp_path):
    """saved(config, ids) -> heads, also saved as "heads"."""

    def saved_(config, ids=EVERY_ID, extra=None):
        heads = make(target, config, draft_ids=ids)
        save_heads(heads, tmp_path / "heads", identify(target), extra)
        return heads

    return saved_


def norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Engine:
    """How an engine reads a directory of EAGLE heads, written from the sources of SGLang, vLLM and SafeAILab."""

    def __init__(self, directory, target, name):
        config = json.loads((directory / "config.json").read_text())
        self.top = config
        self.config = {**config, **config.get("transformer_layer_config", {})}
        self.weights = load_file(directory / "model.safetensors")
        self.target, self.name = target, name
        if name == "tensorrt-llm":
            self.server = json.loads((directory / "trtllm-serve.yaml").read_text())
            nested = config["eagle_config"]
            self.config["norm_before_fc"] = nested["norm_before_fc"]
            self.config["norm_output"] = nested["return_hidden_post_norm"]
        self.block = "midlayer" if "midlayer.mlp.up_proj.weight" in self.weights else "layers.0"
        self.keys, self.values = [], []

    def taps(self):
        """Blocks that the tapped states enter."""
        n = self.target.num_layers
        nested = self.top.get("eagle_config", {}).get(TAPS)
        if self.name == "sglang":
            return [2, n // 2, n - 3] if nested is None else [i + 1 for i in nested]
        if self.name == "tensorrt-llm":
            return [i + 1 for i in self.server["speculative_config"]["eagle3_layers_to_capture"]]
        return self.top.get(TAPS) or nested or [2, n // 2, n - 3]

    def features(self, tokens_T):
        entered = []  # by blocks 0 ... n - 1; then what leaves the last one, which Hugging Face shows only normed
        layers = self.target.decoder.layers
        hooks = [layer.register_forward_pre_hook(lambda _, given: entered.append(given[0][0])) for layer in layers]
        hooks.append(layers[-1].register_forward_hook(lambda _, given, output: entered.append(output[0])))
        normed_TD = self.target.decoder(tokens_T[None]).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        if "norm.weight" not in self.weights:
            return normed_TD
        assert self.name in ("vllm", "tensorrt-llm") or max(self.taps()) < len(layers)
        parts = [entered[i] for i in self.taps()]
        eps = self.config["rms_norm_eps"]
        if self.config.get("fc_norm"):
            parts = [norm(part, self.weights[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if self.config.get("norm_before_fc"):
            joined = norm(joined, self.weights["input_norm.weight"], eps)
        return F.linear(joined, self.weights["fc.weight"])

    def linear(self, x, name):
        bias = self.weights.get(f"{self.block}.{name}.bias")
        return F.linear(x, self.weights[f"{self.block}.{name}.weight"], bias)

    def normed(self, x, name):
        return norm(x, self.weights[f"{self.block}.{name}.weight"], self.config["rms_norm_eps"])

    def rotate(self, x_HTd, positions_T):
        d = x_HTd.shape[-1]
        frequencies = self.config.get("rope_theta", 1e4) ** (-torch.arange(0, d, 2) / d)
        angles = (positions_T[:, None] * frequencies).repeat(1, 2)
        turned = torch.cat([-x_HTd[..., d // 2 :], x_HTd[..., : d // 2]], -1)
        return x_HTd * angles.cos() + turned * angles.sin()

    def step(self, feature_TD, tokens_T, positions_T):
        """The state behind the last token: (for the LM head, for the next step)."""
        own = "embed_tokens.weight" in self.weights
        table_VD = self.weights["embed_tokens.weight"] if own else self.target.embedding.weight
        embedding = table_VD[tokens_T]
        if "norm.weight" in self.weights:
            hidden = self.normed(feature_TD, "hidden_norm")
            inputs = torch.cat([self.normed(embedding, "input_layernorm"), hidden], -1)
            # SGLang and SafeAILab know no other residual than the feature itself.
            before = self.config.get("norm_before_residual") and self.name == "vllm"
            residual = hidden if before else feature_TD
        else:
            joined = torch.cat([embedding, feature_TD], -1)
            bias = self.weights.get("fc.bias") if self.name == "safeailab" else None  # vLLM drops it
            inputs = residual = F.linear(joined, self.weights["fc.weight"], bias)
        hidden = residual + self.linear(self.attend(inputs, positions_T), "self_attn.o_proj")
        normed = self.normed(hidden, "post_attention_layernorm")
        gated = F.silu(self.linear(normed, "mlp.gate_proj")) * self.linear(normed, "mlp.up_proj")
        state = hidden + self.linear(gated, "mlp.down_proj")
        if "norm.weight" not in self.weights:
            return state, state
        read = norm(state, self.weights["norm.weight"], self.config["rms_norm_eps"])
        return read, read if self.config.get("norm_output") else state

    def attend(self, inputs, positions_T):
        d = self.config["head_dim"]
        query, key, value = (
            self.linear(inputs, f"self_attn.{part}_proj").unflatten(-1, (-1, d)).transpose(0, 1) for part in "qkv"
        )
        if self.config["model_type"] == "qwen3":
            query, key = self.normed(query, "self_attn.q_norm"), self.normed(key, "self_attn.k_norm")
        self.keys.append(self.rotate(key, positions_T))
        self.values.append(value)
        keys, values = torch.cat(self.keys, 1), torch.cat(self.values, 1)
        apart = positions_T[:, None] - torch.arange(keys.shape[1])
        sliding = self.config.get("layer_types") == ["sliding_attention"]
        visible = (apart >= 0) & (apart < (self.config["sliding_window"] if sliding else 10**6))
        query = self.rotate(query, positions_T)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, enable_gqa=True)
        return mixed.transpose(0, 1).flatten(1)

    def logits(self, state_1D):
        if "lm_head.weight" not in self.weights:
            return self.target.lm_head(state_1D)
        drafted = F.linear(state_1D, self.weights["lm_head.weight"])
        ids = torch.arange(drafted.shape[1]) + self.weights.get("d2t", 0)
        return torch.full((1, self.config["vocab_size"]), float("-inf")).index_copy(1, ids, drafted)

    @torch.no_grad()
    def rollout(self, tokens_T, drafted_S):
        T = len(tokens_T)
        read, feed = self.step(self.features(tokens_T)[:-1], tokens_T[1:], torch.arange(T - 1))
        logits = [self.logits(read[-1:])]
        for position, token in enumerate(drafted_S, T - 1):
            read, feed = self.step(feed[-1:], token[None], torch.tensor([position]))
            logits.append(self.logits(read))
        return torch.cat(logits)


PLAIN = Eagle3Config(num_steps=3)
EAGLE31 = Eagle3Config(fc_norm=True, norm_output=True)
SERVED = {
    "safeailab": ("safeailab", "safeailab", PLAIN),
    "safeailab for SGLang": ("safeailab", "sglang", PLAIN),
    "specforge": ("specforge", "sglang", EAGLE31),
    "sglang": ("sglang", "sglang", replace(EAGLE31, taps=[0, 2, 5, 6])),
    "vllm": ("vllm", "vllm", replace(EAGLE31, norm_before_residual=True, taps=[6])),
    "vllm for SGLang": ("vllm", "sglang", replace(EAGLE31, taps=[2, 6])),
    "vllm, qk_norm, biases": ("vllm", "vllm", Eagle3Config(layer=LayerShape(qk_norm=True, attention_bias=True))),
    "speculators": ("speculators", "vllm", Eagle3Config(norm_before_fc=True, norm_before_residual=True, taps=[2, 7],
                                                        norm_output=True, layer=LayerShape(sliding_window=4))),
    "modelopt": ("modelopt", "sglang", replace(PLAIN, taps=[0, 3])),
    "tensorrt-llm": ("tensorrt-llm", "tensorrt-llm", replace(EAGLE31, taps=[2, 7],
                                                              layer=LayerShape(attention_bias=True))),
    "tensorrt-llm, joint norm": ("tensorrt-llm", "tensorrt-llm", Eagle3Config(norm_before_fc=True)),
    # The directory that llama.cpp converts is vLLM's, of heads that both can serve.
    "llama.cpp": ("llama.cpp", "vllm", Eagle3Config(norm_before_residual=True, norm_before_fc=True, taps=[0, 2, 7])),
    "eagle safeailab": ("safeailab", "safeailab", EagleConfig(bias=True, layer=LayerShape(attention_bias=True))),
    "eagle vllm": ("vllm", "vllm", EagleConfig(layer=LayerShape(attention_bias=True, num_key_value_heads=1))),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVED)
def test_engines_draft_the_same(saved, target, tmp_path, case):
    name, engine, config = SERVED[case]
    heads = saved(config, DRAFT_IDS if isinstance(config, Eagle3Config) else EVERY_ID)
    export_heads(tmp_path / "heads", tmp_path / "out", target, name)
    served = Engine(tmp_path / "out", target, engine).rollout(TOKENS, DRAFTED)
    torch.testing.assert_close(served, rollout(heads, TOKENS, DRAFTED), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["specforge", "sglang", "modelopt"])
def test_taps_written_for_sglang_would_be_wrong_in_vllm_and_the_card_says_so(saved, target, tmp_path, name):
    heads = saved(PLAIN)
    done = export_heads(tmp_path / "heads", tmp_path / "out", target, name)
    assert any("one block too early, use format=vllm" in limit for limit in done.limits)
    assert Engine(tmp_path / "out", target, "sglang").taps() == [2, 4, 5]
    assert Engine(tmp_path / "out", target, "vllm").taps() == [1, 3, 4]
    assert heads.taps == ("post_block[1]", "post_block[3]", "post_block[4]")


SHAPES = {
    "fc.weight": [32, 96],
    "midlayer.hidden_norm.weight": [32],
    "midlayer.input_layernorm.weight": [32],
    "midlayer.mlp.down_proj.weight": [32, 64],
    "midlayer.mlp.gate_proj.weight": [64, 32],
    "midlayer.mlp.up_proj.weight": [64, 32],
    "midlayer.post_attention_layernorm.weight": [32],
    "midlayer.self_attn.k_proj.weight": [16, 64],
    "midlayer.self_attn.o_proj.weight": [32, 32],
    "midlayer.self_attn.q_proj.weight": [32, 64],
    "midlayer.self_attn.v_proj.weight": [16, 64],
    "norm.weight": [32],
    "lm_head.weight": [5, 32],
    "d2t": [5],
    "t2d": [320],
}


def test_names_shapes_and_dtypes_are_those_of_the_engines(saved, target, tmp_path):
    saved(PLAIN, DRAFT_IDS)
    export_heads(tmp_path / "heads", tmp_path / "out", target, "sglang", dtype="bfloat16")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in weights.items()} == SHAPES
    assert weights["d2t"].tolist() == [3, 4, 4, 87, 254]
    assert weights["t2d"].nonzero().flatten().tolist() == DRAFT_IDS.tolist()
    assert {tensor.dtype for name, tensor in weights.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_shallow_targets_have_no_usual_taps(tmp_path, tiny_target):
    target = tiny_target("llama")
    save_heads(make(target, PLAIN), tmp_path / "heads", identify(target))
    with pytest.raises(ValueError, match=r"4 blocks of the target are too few.*Use format=sglang or format=vllm"):
        export_heads(tmp_path / "heads", tmp_path / "out", target, "safeailab")


def test_eagle1_over_some_ids_is_refused_unless_the_engine_may_draft_all(saved, target, tmp_path):
    heads = saved(EagleConfig(), DRAFT_IDS)
    with pytest.raises(ValueError, match=r"draft 5 of 320 token ids.*expand_vocabulary=true.*draft_vocab_size=null"):
        export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm")
    done = export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm", expand_vocabulary=True)
    assert any("the engine drafts all" in limit for limit in done.limits)
    served = Engine(tmp_path / "out", target, "vllm").rollout(TOKENS, DRAFTED)
    ours = rollout(heads, TOKENS, DRAFTED)
    torch.testing.assert_close(served[:, DRAFT_IDS], ours[:, DRAFT_IDS], rtol=1e-4, atol=1e-4)


def test_eagle3_carries_its_vocabulary(saved, target, tmp_path):
    saved(PLAIN, DRAFT_IDS)
    with pytest.raises(ValueError, match="expand_vocabulary=true is for heads without a d2t"):
        export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm", expand_vocabulary=True)


def test_eagle1_on_a_target_that_scales_its_embeddings_is_refused(tmp_path, tiny_target):
    target = tiny_target("gemma3")
    save_heads(make(target, EagleConfig()), tmp_path / "heads", identify(target))
    with pytest.raises(ValueError, match=r"gemma3_text scale their embeddings.*train heads\.kind=eagle3"):
        export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm")


def test_other_heads_are_refused_with_the_formats_that_take_them(target, tmp_path):
    heads = MedusaHeads(MedusaConfig(num_heads=1), 32, 320, EVERY_ID).bind(target).initialise()
    save_heads(heads, tmp_path / "heads", identify(target))
    with pytest.raises(ValueError, match=r"holds medusa heads, format=sglang takes eagle3 .*=fasterdecoding, "):
        export_heads(tmp_path / "heads", tmp_path / "out", target, "sglang")
    with pytest.raises(ValueError, match="holds medusa heads, which this exporter does not write"):
        export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm")


def test_values_that_overflow_are_named(saved, target, tmp_path):
    heads = saved(PLAIN)
    heads.final_norm.weight.data[0] = 1e6
    save_heads(heads, tmp_path / "heads", identify(target))
    with pytest.raises(ValueError, match=r"norm\.weight holds values that are not finite in float16"):
        export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm", dtype="float16")


VLLM = """vllm serve tiny-8 --speculative-config '{"method":"eagle3","model":"out","num_speculative_tokens":3}'"""
SGLANG = (
    "python -m sglang.launch_server --model-path tiny-8 --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path out --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)
LLAMA_CPP = [
    "python convert_hf_to_gguf.py tiny-8 --outtype f32 --outfile target.gguf",
    "python convert_hf_to_gguf.py out --target-model-dir tiny-8 --outtype f32 --outfile out.gguf",
    "llama-server -m target.gguf -md out.gguf --spec-type draft-eagle3 --spec-draft-n-max 3",
]
COMMANDS = {
    "safeailab": ["python -m eagle.application.webui --base-model-path tiny-8 --ea-model-path out --model-type"],
    "specforge": [SGLANG],
    "sglang": [SGLANG],
    "vllm": [VLLM],
    "speculators": [VLLM],
    "modelopt": [SGLANG],
    "tensorrt-llm": ["cd out && trtllm-serve tiny-8 --backend pytorch --config trtllm-serve.yaml"],
    "llama.cpp": LLAMA_CPP,
}


@pytest.mark.parametrize("name", EAGLE3_FORMATS)
def test_card_checksums_and_command(saved, target, tmp_path, name):
    saved(PLAIN, DRAFT_IDS, {"coverage": 0.9})
    done = export_heads(tmp_path / "heads", tmp_path / "out", target, name)
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (
        "# EAGLE-3 heads for tiny-8",
        "| taps (outputs of decoder blocks, from 0) | 1, 3, 4 |",
        "| norm options | none |",
        "| trained draft vocabulary | 5 of 320 token ids, which cover 90.00% of the training tokens |",
        *COMMANDS[name],
    ):
        assert text in card
    assert str(tmp_path / "out") in done.command
    beside = ["trtllm-serve.yaml"] if name == "tensorrt-llm" else []
    written = ["model.safetensors", "config.json", "README.md", *beside, "SHA256SUMS"]
    assert [path.name for path in done.files] == written
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "out", check=True)


def test_the_server_of_tensorrt_llm_is_told_the_taps_by_the_blocks_that_they_leave(saved, target, tmp_path):
    saved(replace(PLAIN, taps=[0, 3, 7]), DRAFT_IDS)
    done = export_heads(tmp_path / "heads", tmp_path / "out", target, "tensorrt-llm")
    assert json.loads((tmp_path / "out" / "trtllm-serve.yaml").read_text()) == {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "max_draft_len": 3,
            "speculative_model": ".",
            "eagle3_layers_to_capture": [0, 3, 7],
        }
    }
    assert load_file(tmp_path / "out" / "model.safetensors")["d2t"].dtype == torch.int32
    assert any("eagle3_layers_to_capture: the blocks that they leave" in limit for limit in done.limits)


def test_eagle1_card(saved, target, tmp_path):
    saved(EagleConfig())
    done = export_heads(tmp_path / "heads", tmp_path / "out", target, "safeailab")
    assert "--no-eagle3" in done.command
    assert "| LM head | the target's |" in (tmp_path / "out" / "README.md").read_text()
    done = export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm")
    assert '"method":"eagle"' in done.command
    assert '"num_speculative_tokens":3' in done.command


def test_a_fine_tune_is_allowed_and_named(saved, tmp_path):
    saved(PLAIN)
    tuned = Target(deep_target(seed=1).model, tiny_tokenizer(), TargetConfig("tuned", "random:llama"))
    with pytest.raises(ValueError, match="weights_sha256"):
        export_heads(tmp_path / "heads", tmp_path / "out", tuned, "vllm")
    done = export_heads(tmp_path / "heads", tmp_path / "out", tuned, "vllm", allow_other_weights=True)
    assert any("trained on tiny-8 with other weights" in limit for limit in done.limits)
