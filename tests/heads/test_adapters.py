"""A LoRA-adapted or quantised target is configuration; what cannot be had is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model

from heads.adapters import chained, without_deprecation
from heads.identity import identify
from heads.target import FINAL_NORM, Target, TargetConfig, load_target
from heads.tiny import tiny_model_and_tokenizer

IDS = torch.arange(60, 90)[None]


def target(adapter: Path | str | None = None, family: str = "llama", **settings) -> Target:
    given = None if adapter is None else str(adapter)
    return load_target(TargetConfig("tiny", f"random:{family}", adapter=given, **settings), "cpu")


@torch.no_grad()
def logits(loaded: Target) -> torch.Tensor:
    features = loaded.features(IDS, torch.arange(IDS.shape[1])[None], torch.zeros_like(IDS))
    return loaded.logits(features[FINAL_NORM])


def write_adapter(directory: Path, family: str = "llama", kind=LoraConfig, **settings) -> torch.Tensor:
    """An adapter as peft itself writes it; returns the logits of the model with the adapter beside its weights."""
    model, _ = tiny_model_and_tokenizer(family)
    torch.manual_seed(0)
    with without_deprecation():
        adapted = get_peft_model(model, kind(**settings)).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    adapted.save_pretrained(str(directory), save_embedding_layers=False)
    with torch.no_grad():
        return adapted(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"target_modules": ["q_proj", "lm_head"], "r": 3}),
        ("llama-tied", {"target_modules": "all-linear", "r": 2, "use_rslora": True}),
        ("qwen2", {"target_modules": ["v_proj", "up_proj"], "r": 4, "lora_alpha": 16}),
    ],
)
def test_an_adapter_of_peft_is_merged_into_the_target(tmp_path, family, settings):
    adapted = write_adapter(tmp_path, family, **settings)
    loaded = target(tmp_path, family)
    assert (logits(loaded) - adapted).abs().max() < 1e-4
    assert (logits(target(family=family)) - adapted).abs().max() > 1e-2
    assert not any("lora" in name for name, _ in loaded.model.named_parameters())
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    original = identify(target(family=family))
    assert {
        name for name, value in vars(identify(loaded)).items() if value != vars(original)[name]
    } == {"weights_sha256"}  # fmt: skip


def test_the_digest_tells_adapters_apart_and_nothing_else(tmp_path):
    digests = []
    for number, (alpha, dtype) in enumerate([(8, "float32"), (8, "bfloat16"), (9, "float32")]):
        write_adapter(tmp_path / str(number), target_modules=["q_proj"], r=2, lora_alpha=alpha)
        digests.append(target(tmp_path / str(number), dtype=dtype).adapter_sha256)
    assert digests[0] == digests[1] != digests[2]  # of the adapter, not of the weights that it was merged into
    assert target().adapter_sha256 == ""
    assert chained("", "b") == "b"
    assert len({chained("a", "b"), chained("b", "a"), "a", "b"}) == 4


def refused(tmp_path: Path, message: str, family: str = "llama") -> None:
    with pytest.raises(ValueError, match=message):
        target(tmp_path, family)


def test_what_is_no_adapter_is_refused(tmp_path):
    refused(
        tmp_path / "nowhere", r"model\.adapter=.*nowhere is neither a directory nor a reachable hub id with adapter_"
    )
    refused(tmp_path, r"neither a directory nor a reachable hub id")
    write_adapter(tmp_path / "ia3", kind=IA3Config, target_modules=["k_proj"], feedforward_modules=[])
    refused(tmp_path / "ia3", r"model\.adapter=.*ia3 is of the type IA3; give a LoRA adapter")


def test_a_pickle_is_not_read(tmp_path):
    write_adapter(tmp_path, target_modules=["q_proj"])
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    refused(tmp_path, r"adapter_model\.safetensors \(pickles are not read\)")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_modules": ["c_attn"]}, r"does not fit the target; give a whole adapter of this target.*'c_attn'"),
        ({"r": 5}, r"does not fit the target.*size mismatch for"),
        ({"target_modules": ["q_proj", "k_proj"]}, r"does not fit the target.*missing adapter keys.*k_proj"),
    ],
)
def test_an_adapter_of_another_target_is_refused(tmp_path, changed, message):
    write_adapter(tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    refused(tmp_path, message)


def test_a_damaged_adapter_is_refused(tmp_path):
    write_adapter(tmp_path, target_modules=["q_proj"])
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(tmp_path, r"is damaged or does not fit.*deserializing")
    (tmp_path / "adapter_config.json").write_text("{")
    refused(tmp_path, r"adapter_config\.json is not JSON")


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")
@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}],
)
def test_an_adapter_that_would_break_a_tie_is_refused(tmp_path, settings):
    write_adapter(tmp_path, **settings)  # made on an untied target, where it is right
    refused(tmp_path, r"changes .*, but this target ties model\.embed_tokens and lm_head", "llama-tied")


def test_unknown_quantisation_is_refused():
    with pytest.raises(ValueError, match=r"model\.quantization=int4 must be null or one of bitsandbytes-4bit.*GPTQ"):
        TargetConfig("tiny", "random:llama", quantization="int4")
    with pytest.raises(ValueError, match=r"model\.quantization=bitsandbytes-4bit is for models on disk"):
        target(quantization="bitsandbytes-4bit")


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    model, tokenizer = tiny_model_and_tokenizer("llama")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["bitsandbytes-4bit", "bitsandbytes-8bit"])
def test_bitsandbytes_is_asked_for_where_it_is_missing(on_disk, monkeypatch, name):
    find_spec = "heads.quantization.importlib.util.find_spec"
    monkeypatch.setattr(find_spec, lambda package: None)
    with pytest.raises(ValueError, match=rf"model\.quantization={name} needs.*`pip install bitsandbytes`"):
        load_target(TargetConfig("tiny", str(on_disk), quantization=name), "cpu")


@pytest.mark.parametrize(
    ("method", "package"),
    [({"quant_method": "gptq", "bits": 4}, "gptqmodel|optimum"), ({"quant_method": "awq", "bits": 4}, "gptqmodel")],
)
def test_a_quantised_checkpoint_names_the_package_that_it_needs(on_disk, method, package):
    config = on_disk / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": method}))
    with pytest.raises(ValueError, match=rf"model\.path=.* needs a package.*pip install ({package})"):
        load_target(TargetConfig("tiny", str(on_disk)), "cpu")
