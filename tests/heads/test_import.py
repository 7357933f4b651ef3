"""Reading an engine's format names what is missing, unknown, damaged or for another target."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.export.files import refuse_pickle
from heads.export.medusa_reader import import_heads
from heads.export.medusa_writer import export_heads
from heads.identity import identify
from heads.layout import save_heads
from heads.medusa import MedusaConfig, MedusaHeads
from heads.target import Target, TargetConfig
from heads.tiny import tiny_model_and_tokenizer

FORMATS = {"fasterdecoding": "medusa_lm_head.safetensors", "vllm": "model.safetensors"}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(*tiny_model_and_tokenizer("llama"), TargetConfig("tiny", "random:llama"))


@pytest.fixture(params=FORMATS)
def damaged(request, target, tmp_path):
    """The format, its directory, and edit(config changes, tensor changes) that forgets the checksums."""
    heads = MedusaHeads(MedusaConfig(num_heads=2), 32, 320, torch.arange(320)).bind(target).initialise()
    save_heads(heads, tmp_path / "heads", identify(target))
    export_heads(tmp_path / "heads", tmp_path / "out", target, request.param)
    directory, weights = tmp_path / "out", tmp_path / "out" / FORMATS[request.param]

    def edit(config=None, tensors=None, rename=lambda name: name):
        (directory / "SHA256SUMS").unlink(missing_ok=True)
        values = json.loads((directory / "config.json").read_text()) | (config or {})
        values = {key: value for key, value in values.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(values))
        found = {name: tensor.clone() for name, tensor in load_file(weights).items()} | (tensors or {})
        save_file({rename(key): value for key, value in found.items() if value is not None}, weights)

    return request.param, directory, edit


BIAS = {"fasterdecoding": "1.0.linear.bias", "vllm": "blocks.1.layers.0.bias"}
LM_HEAD = {"fasterdecoding": "{}.1.weight", "vllm": "lm_heads.{}.weight"}


def test_tensors_that_are_missing_unexpected_or_of_another_shape_are_named(target, damaged):
    name, directory, edit = damaged
    edit(tensors={BIAS[name]: None, "token_map": torch.zeros(3), LM_HEAD[name].format(0): torch.zeros(319, 32)})
    with pytest.raises(ValueError, match=f"{BIAS[name]} is missing; token_map is unexpected") as error:
        import_heads(directory, target, name)
    assert f"{LM_HEAD[name].format(0)} has shape [319, 32], not [320, 32]" in str(error.value)


def test_mixed_dtypes_are_refused(target, damaged):
    name, directory, edit = damaged
    edit(tensors={BIAS[name]: torch.zeros(32).bfloat16()})
    with pytest.raises(ValueError, match=r"torch\.bfloat16, torch\.float32; all must share one of"):
        import_heads(directory, target, name)


def test_wrong_declarations_are_refused(target, damaged):
    name, directory, edit = damaged
    shared = {"version": "2"} if name == "fasterdecoding" else {"original_lm_head": True}
    edit(config=shared, tensors={"lm_head.weight": target.lm_head.weight} if name == "vllm" else None)
    with pytest.raises(ValueError, match=r"declares the target's LM head .* but the file holds"):
        import_heads(directory, target, name)


def test_missing_lm_heads_are_not_taken_for_shared_ones(target, damaged):
    name, directory, edit = damaged
    edit(tensors={LM_HEAD[name].format(head): None for head in (0, 1)})
    with pytest.raises(ValueError, match=r"declares an LM head for each head .* but the file lacks"):
        import_heads(directory, target, name)


def test_config_keys_are_checked_by_name(target, damaged):
    name, directory, edit = damaged
    count = "medusa_num_heads" if name == "fasterdecoding" else "num_heads"
    edit(config={"truncated_vocab_size": 100})
    with pytest.raises(ValueError, match="not followed: truncated_vocab_size"):
        import_heads(directory, target, name)
    edit(config={"truncated_vocab_size": None, count: "2"})
    with pytest.raises(ValueError, match=f"{count}='2' must be a whole number"):
        import_heads(directory, target, name)
    edit(config={count: 3})
    with pytest.raises(ValueError, match=re.escape(BIAS[name].replace("1", "2", 1)) + " is missing"):
        import_heads(directory, target, name)
    edit(config={count: 2, "model_type": "eagle"})
    with pytest.raises(ValueError, match=r"model_type='eagle', but .* must be 'medusa'"):
        import_heads(directory, target, name)


def test_old_prefix_and_vllms_other_name_are_read(target, damaged):
    name, directory, edit = damaged
    before = import_heads(directory, target, name)
    edit(rename=lambda key: f"medusa_heads.{key}")
    after = import_heads(directory, target, name)
    assert torch.equal(before.block_bias, after.block_bias)
    edit(tensors={BIAS[name]: torch.zeros(32)})
    with pytest.raises(ValueError, match=r"both with and without the prefix medusa_heads\."):
        import_heads(directory, target, name)


def test_heads_for_another_width_or_vocabulary_are_refused(target, damaged):
    name, directory, edit = damaged
    edit(config={"vocab_size": 321} if name == "vllm" else None)
    if name == "vllm":
        with pytest.raises(ValueError, match=r"vocab_size=321, but .* must be 320"):
            import_heads(directory, target, name)
    else:
        edit_target = Target(*tiny_model_and_tokenizer("llama"), target.config)
        edit_target.vocab_size = 321
        with pytest.raises(ValueError, match=r"0\.1\.weight has shape \[320, 32\], not \[321, 32\]"):
            import_heads(directory, edit_target, name)


def test_changed_and_truncated_files_are_refused(target, damaged):
    name, directory, _ = damaged
    weights = directory / FORMATS[name]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="is not the file that was exported"):
        import_heads(directory, target, name)
    weights.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="is truncated or damaged"):
        import_heads(directory, target, name)


@pytest.mark.parametrize("name", ["../heads/config.json", "/etc/passwd", "..", ""])
def test_checksums_never_leave_the_directory(target, damaged, name):
    form, directory, _ = damaged
    (directory / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(ValueError, match="is not a file of this directory"):
        import_heads(directory, target, form)


class Payload:
    """Leaves a file behind where a pickle of it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


def test_pickles_are_refused_with_the_way_to_convert_them(target, damaged, tmp_path):
    name, directory, _ = damaged
    pickle = directory / "medusa_lm_head.pt"
    torch.save({"0.0.linear.weight": Payload(tmp_path / "marker")}, pickle)
    (directory / FORMATS[name]).unlink()
    for given in (directory, pickle):
        with pytest.raises(ValueError, match=r"medusa_lm_head\.pt is a pickle.*python -c"):
            import_heads(given, target, name)
    assert not (tmp_path / "marker").exists()


def test_the_conversion_of_a_pickle_works(tmp_path):
    weights = {"0.0.linear.bias": torch.randn(4), "0.0.linear.weight": torch.randn(4, 4).T}
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="is a pickle") as error:
        refuse_pickle(tmp_path / "medusa_lm_head.pt")
    code = re.search(r'python -c "(.*)"', str(error.value))
    assert code is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(code[1], {})
    read = load_file(tmp_path / "medusa_lm_head.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
