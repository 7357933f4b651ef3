"""EAGLE heads from elsewhere: published layouts come in, draft the same and go out again; damage is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from heads.export.eagle_reader import import_heads
from heads.export.eagle_writer import export_heads
from heads.identity import identify
from heads.layout import save_heads
from heads.target import Target, TargetConfig
from heads.tiny import SHAPE, tiny_tokenizer
from tests.heads.published_eagle import (
    BLOCK,
    DRAFT_IDS,
    EVERY_ID,
    HEADS,
    TAPS,
    config_of,
    tensors_of,
)
from tests.heads.test_eagle import make


def deep_target(layers=8, seed=0) -> Target:
    """Eight blocks, so that the usual taps (1, 3, 4) are three."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(**{**SHAPE, "model_type": "llama", "num_hidden_layers": layers})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Target(model, tiny_tokenizer(), TargetConfig("tiny-8", "random:llama"))


@pytest.fixture(scope="module")
def target() -> Target:
    return deep_target()


@pytest.fixture
def publish(target, tmp_path):
    """publish(kind, name, ids) -> the heads and the directory that another project would write for them."""

    def publish_(kind, name, ids=DRAFT_IDS):
        heads = make(target, HEADS[kind, name], draft_ids=ids if kind == "eagle3" else EVERY_ID)
        directory = tmp_path / "published"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config_of(kind, name, len(ids))))
        save_file(tensors_of(kind, name, heads), directory / "model.safetensors")
        return heads, directory

    return publish_


@torch.no_grad()
def rollout(heads, tokens_T, drafted_S):
    """Logits [S + 1, V] behind a prefix of T tokens, then behind each drafted one; -inf where nothing is drafted."""
    T, target = len(tokens_T), heads.target
    everywhere = torch.arange(T)
    fused_TD = heads.fuse(target.features(tokens_T[None], everywhere[None], torch.zeros(1, T), heads.taps))[0]
    cache, window = heads.new_cache(T + len(drafted_S)), heads.config.layer.sliding_window or 10**6
    apart = everywhere[:-1, None] - everywhere[:-1]
    visible = (apart >= 0) & (apart < window)
    state_ND = heads.draft(fused_TD[:-1], tokens_T[1:], everywhere[:-1], cache, 0, visible)
    logits = [heads.draft_logits(state_ND[-1:])]
    for position, token in enumerate(drafted_S, T - 1):
        seen = (position - torch.arange(position + 1) < window)[None]
        feature_1D = heads.feed(state_ND[-1:])
        state_ND = heads.draft(feature_1D, token[None], torch.tensor([position]), cache, position, seen)
        logits.append(heads.draft_logits(state_ND))
    full_SV = torch.full((len(logits), heads.vocab_size), float("-inf"))
    full_SV[:, heads.draft_ids] = torch.cat(logits)
    return full_SV


TOKENS, DRAFTED = torch.tensor([72, 101, 108, 108, 111, 32, 119, 111, 114]), torch.tensor([108, 100, 33])


@pytest.mark.parametrize("ids", [DRAFT_IDS, EVERY_ID], ids=["reduced", "full"])
@pytest.mark.parametrize(("kind", "name"), HEADS)
def test_published_heads_come_in_draft_the_same_and_go_out_again(publish, target, tmp_path, kind, name, ids):
    heads, directory = publish(kind, name, ids)
    back = import_heads(directory, target, kind, name)
    assert back.config.layer == heads.config.layer
    assert back.taps == heads.taps
    assert torch.equal(rollout(back, TOKENS, DRAFTED), rollout(heads, TOKENS, DRAFTED))
    save_heads(back, tmp_path / "heads", identify(target))
    export_heads(tmp_path / "heads", tmp_path / "out", target, name)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config_of(kind, name, len(ids))
    published, written = (load_file(folder / "model.safetensors") for folder in (directory, tmp_path / "out"))
    assert written.keys() == published.keys()
    for key, tensor in published.items():
        assert torch.equal(written[key], tensor), key


@pytest.fixture
def damage(publish, target):
    """damage(kind, name, config changes, tensor changes) imports the damaged files; None takes something away."""

    def damage_(kind, name, config=None, tensors=None, layer=None):
        _, directory = publish(kind, name)
        values = json.loads((directory / "config.json").read_text()) | (config or {})
        if layer:
            values["transformer_layer_config"] |= layer
        (directory / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
        found = load_file(directory / "model.safetensors") | (tensors or {})
        save_file({k: v for k, v in found.items() if v is not None}, directory / "model.safetensors")
        return import_heads(directory, target, kind, name)

    return damage_


@pytest.mark.parametrize(("kind", "name"), HEADS)
def test_missing_unexpected_and_misshapen_tensors_are_named(damage, kind, name):
    up_proj = f"{BLOCK[kind, name]}.mlp.up_proj.weight"
    wrong = {"fc.weight": None, "extra.weight": torch.zeros(2), up_proj: torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=r"fc\.weight is missing; extra\.weight is unexpected; .*has shape \[3, 3\]"):
        damage(kind, name, tensors=wrong)


@pytest.mark.parametrize("name", [name for kind, name in HEADS if kind == "eagle3"])
def test_draft_vocabularies_that_do_not_fit_are_refused(damage, name):
    with pytest.raises(ValueError, match="d2t is missing"):
        damage("eagle3", name, tensors={"d2t": None})
    right, wrong = (torch.int32, torch.int64) if name == "tensorrt-llm" else (torch.int64, torch.int32)
    with pytest.raises(ValueError, match=r"outside the target's vocabulary|t2d and d2t disagree|seems to hold ids"):
        damage("eagle3", name, tensors={"d2t": DRAFT_IDS.to(right)})
    with pytest.raises(ValueError, match=f"d2t is {wrong}, not {right}"):
        damage("eagle3", name, tensors={"d2t": DRAFT_IDS.to(wrong)})
    with pytest.raises(ValueError, match=r"(strictly ascending|disagree)"):
        damage("eagle3", name, tensors={"d2t": torch.tensor([3, 2, 1, 0, 0], dtype=right)})
    with pytest.raises(ValueError, match=r"draft_vocab_size=321 is above the target's vocabulary of 320"):
        damage("eagle3", name, config={"draft_vocab_size": 321})


def test_draft_ids_in_any_order_are_sorted_with_their_rows(publish, target):
    heads, directory = publish("eagle3", "modelopt")
    tensors = load_file(directory / "model.safetensors")
    order = torch.tensor([2, 4, 0, 3, 1])  # ModelOpt's are by frequency
    tensors |= {"d2t": DRAFT_IDS[order] - torch.arange(5), "lm_head.weight": tensors["lm_head.weight"][order]}
    save_file(tensors, directory / "model.safetensors")
    back = import_heads(directory, target, "eagle3", "modelopt")
    assert torch.equal(rollout(back, TOKENS, DRAFTED), rollout(heads, TOKENS, DRAFTED))


@pytest.mark.parametrize(("kind", "name"), [key for key in HEADS if key[1] != "modelopt"])
def test_embeddings_must_be_the_targets(damage, target, kind, name):
    embeddings = target.embedding.weight.clone()
    damage(kind, name, tensors={"embed_tokens.weight": embeddings})
    embeddings[7, 1] += 0.25
    with pytest.raises(ValueError, match=r"embed_tokens\.weight differs from the target's embeddings by up to 0\.25"):
        damage(kind, name, tensors={"embed_tokens.weight": embeddings})


WRONG_CONFIGS = [
    ("eagle3", "safeailab", {"vocab_size": 321}, "vocab_size=321, but for this target .* it must be 320"),
    ("eagle3", "safeailab", {"num_hidden_layers": 2}, "num_hidden_layers=2, but .* must be 1"),
    ("eagle3", "safeailab", {"fc_norm": True}, "fc_norm=True, but .* must be False"),
    ("eagle3", "tensorrt-llm", {"attention_bias": None}, "lacks attention_bias"),
    ("eagle3", "tensorrt-llm", {"norm_before_fc": True}, "norm_before_fc=True, but .* must be False"),
    ("eagle3", "tensorrt-llm", {"eagle_config": {TAPS: [0, 7], "return_hidden_post_norm": 1}}, "must be true or false"),
    ("eagle3", "tensorrt-llm", {"eagle_config": {TAPS: [0, 7], "eh_proj_before_attn": True}}, "not followed: eagle_c"),
    ("eagle3", "llama.cpp", {TAPS: None}, f"lacks {TAPS}"),
    ("eagle3", "llama.cpp", {TAPS: [1, 5], "eagle_config": None, "num_aux_hidden_states": 2}, "it joins exactly 3"),
    ("eagle3", "llama.cpp", {"norm_output": True}, "norm_output=True: it feeds back the state before the norm"),
    ("eagle3", "llama.cpp", {"fc_norm": True, "norm_before_fc": False}, "fc_norm=True: it has no norms of single taps"),
    ("eagle3", "safeailab", {"eagle_config": {TAPS: [1, 2, 3]}}, r"\[1, 2, 3\], but it must be \[1, 3, 4\]"),
    ("eagle3", "safeailab", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type=yarn with .* it computes"),
    ("eagle3", "safeailab", {"draft_vocab_size": None}, "draft_vocab_size=None must be a whole number"),
    ("eagle3", "specforge", {"norm_output": False}, "norm_output=false means no norm before the LM head"),
    ("eagle3", "sglang", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn', .* is unknown or incomplete: .*factor"),
    ("eagle3", "specforge", {"rope_theta": 5e5}, "rope_parameters=.* disagrees with the older rope_theta"),
    ("eagle3", "specforge", {"eagle_config": {TAPS: [1, 3]}}, "exactly 3"),
    ("eagle3", "specforge", {TAPS: [1, 3, 4]}, r"\[1, 3, 4\], but for these taps it must be \[2, 4, 5\]"),
    ("eagle3", "sglang", {"norm_before_residual": True}, "cannot hold heads.norm_before_residual=True: .*format=vllm"),
    ("eagle3", "sglang", {"eagle_config": {TAPS: [0, 8]}}, "must be numbers from 0 to 7"),
    ("eagle3", "sglang", {"eagle_config": {TAPS: [0, 7]}}, "SGLang does not collect the output of the last block, 7"),
    ("eagle3", "sglang", {"quantization_config": {"bits": 4}}, "not followed: quantization_config"),
    ("eagle3", "vllm", {"num_aux_hidden_states": None}, "lacks num_aux_hidden_states"),
    ("eagle3", "vllm", {"norm_output": "yes"}, "norm_output='yes' must be true or false"),
    ("eagle3", "vllm", {"eagle_config": {TAPS: [1, 4]}}, r"eagle_config.*\[1, 4\], but it must be \[0, 3\]"),
    ("eagle3", "vllm", {"architectures": ["Eagle3Qwen3ForCausalLM"]}, "architectures=.* must be one of Llama"),
    ("eagle3", "vllm", {"rms_norm_eps": None}, "rms_norm_eps=None must be a number"),
    ("eagle3", "speculators", {"fc_norm": True}, "norm_before_fc and fc_norm would norm the taps twice"),
    ("eagle3", "speculators", {"norm_before_residual": None}, "lacks norm_before_residual"),
    ("eagle3", "speculators", {"speculators_model_type": "peagle"}, "speculators_model_type='peagle', but"),
    ("eagle3", "speculators", {"speculators_config": {}}, r"lacks speculators_config\.proposal_methods\[0\]"),
    ("eagle3", "speculators", {"transformer_layer_config": None}, "lacks transformer_layer_config"),
    ("eagle3", "modelopt", {"eagle_config": {"parallel_draft_step": 2, TAPS: [1, 3, 4]}}, "parallel_draft_step=2, but"),
    ("eagle3", "modelopt", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "must be one of LlamaForCausalLMEagle3"),
    ("eagle3", "modelopt", {"eagle_config": {"norm_before_fc": True}}, "norm_before_fc=True, but .* must be False"),
    ("eagle3", "modelopt", {"eagle_config": {"odd": 1}}, r"not followed: eagle_config\.odd"),
    ("eagle", "safeailab", {"bias": "yes"}, "bias='yes' must be true or false"),
    ("eagle", "safeailab", {"draft_vocab_size": 5}, "not followed: draft_vocab_size"),
    ("eagle", "vllm", {"attention_bias": True}, "attention_bias=True, but .* must be False"),
    ("eagle", "vllm", {"bias": True}, "bias=True, but .* must be False"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "config", "message"), WRONG_CONFIGS)
def test_configs_that_mean_something_else_are_refused(damage, kind, name, config, message):
    with pytest.raises(ValueError, match=message):
        damage(kind, name, config=config)


def test_the_layer_of_a_speculator_is_checked_too(damage):
    with pytest.raises(ValueError, match=r"transformer_layer_config: vocab_size=321, but"):
        damage("eagle3", "speculators", layer={"vocab_size": 321})
    with pytest.raises(ValueError, match=r"transformer_layer_config has keys that are not followed: logit_scale"):
        damage("eagle3", "speculators", layer={"logit_scale": 2.0})


WRONG_TENSORS = [
    ("eagle3", "speculators", "fc_norm.0.weight", r"fc_norm\.0\.weight is unexpected"),
    ("eagle3", "speculators", "verifier_norm.weight", r"verifier_norm\.weight is unexpected"),
    ("eagle3", "vllm", "layers.0.self_attn.o_proj.bias", r"o_proj\.bias is not zero; heads here have no such bias"),
    ("eagle", "vllm", "layers.0.input_layernorm.weight", r"layers\.0\.input_layernorm\.weight is unexpected"),
    ("eagle", "vllm", "fc.bias", r"fc\.bias is unexpected"),
]


@pytest.mark.parametrize(("kind", "name", "tensor", "message"), WRONG_TENSORS)
def test_tensors_that_mean_something_else_are_refused(damage, kind, name, tensor, message):
    with pytest.raises(ValueError, match=message):
        damage(kind, name, tensors={tensor: torch.ones(32)})
    with pytest.raises(ValueError, match=r"torch\.bfloat16, torch\.float32; all weights must share one of"):
        damage(kind, name, tensors={tensor: torch.ones(32).bfloat16()})


def test_what_files_may_lack_or_have_besides(damage):
    plain = damage("eagle3", "safeailab", {"head_dim": None, "num_key_value_heads": 2, "rope_theta": None})
    assert plain.config.layer.head_dim == 8
    assert plain.config.layer.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert damage("eagle3", "specforge", {"eagle_config": None, "bos_token_id": 1}).config.taps == [1, 3, 4]
    assert damage("eagle3", "vllm", {TAPS: None, "eagle_config": {TAPS: [2, 6]}}).config.taps == [1, 5]
    assert damage("eagle3", "sglang", tensors={"t2d": None}).config.draft_vocab_size == 5
    window = {"layer_types": ["full_attention"], "use_sliding_window": False, "sliding_window": 2048}
    assert damage("eagle3", "speculators", layer=window).config.layer.sliding_window is None


@pytest.mark.parametrize(
    ("name", "other"),
    [("vllm", "midlayer"), ("sglang", "layers.0"), ("tensorrt-llm", "layers.0"), ("llama.cpp", "midlayer")],
)
def test_engines_know_the_layer_by_two_names(publish, target, name, other):
    heads, directory = publish("eagle3", name)
    weights, block = load_file(directory / "model.safetensors"), BLOCK["eagle3", name]
    renamed = {key.replace(f"{block}.", f"{other}."): tensor.clone() for key, tensor in weights.items()}
    save_file(renamed, directory / "model.safetensors")
    back = import_heads(directory, target, "eagle3", name)
    assert torch.equal(rollout(back, TOKENS, DRAFTED), rollout(heads, TOKENS, DRAFTED))
    save_file(renamed | weights, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds tensors of midlayer and of layers\.0, which are one layer"):
        import_heads(directory, target, "eagle3", name)


def test_a_target_too_shallow_for_the_usual_taps_is_named(publish):
    _, directory = publish("eagle3", "safeailab")
    with pytest.raises(ValueError, match="names no taps, and of 6 blocks the usual three are not distinct"):
        import_heads(directory, deep_target(layers=6), "eagle3", "safeailab")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_in_exactly_and_rotates_in_full(publish, target, dtype):
    heads, directory = publish("eagle3", "specforge")
    weights = load_file(directory / "model.safetensors")
    halves = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    save_file(halves, directory / "model.safetensors")
    back = import_heads(directory, target, "eagle3", "specforge")
    weight = back.state_dict()["fc.weight"]
    assert weight.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert torch.equal(weight.to(dtype), halves["fc.weight"])
    assert torch.equal(back.layer.rotary.inv_freq, heads.layer.rotary.inv_freq)


def test_pickles_and_unknown_formats_are_refused(publish, target):
    _, directory = publish("eagle3", "safeailab")
    with pytest.raises(ValueError, match="format=sglang is unknown for eagle heads; known are safeailab, v"):
        import_heads(directory, target, "eagle", "sglang")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle"):
        import_heads(directory, target, "eagle3", "safeailab")
