"""Heads come back bit for bit, or loading says what is wrong with the files."""

import dataclasses
import errno
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads import layout
from heads.export import files
from heads.identity import TargetIdentity, identify
from heads.layout import load_heads, save_heads
from heads.medusa import MedusaConfig, MedusaHeads
from heads.target import Target, TargetConfig
from heads.tiny import tiny_model_and_tokenizer

DRAFT_IDS = torch.tensor([3, 5, 90, 258])


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(*tiny_model_and_tokenizer("llama"), TargetConfig("tiny", "random:llama"))


def make_heads(target: Target, draft_ids: torch.Tensor | None = None, **settings) -> MedusaHeads:
    ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
    size = None if draft_ids is None else len(ids)
    config = MedusaConfig(draft_vocab_size=size, **settings)
    heads = MedusaHeads(config, target.hidden_size, target.vocab_size, ids).bind(target)
    torch.manual_seed(1)
    for parameter in heads.parameters():
        parameter.data.normal_()
    return heads


@pytest.fixture
def saved(target, tmp_path):
    heads = make_heads(target, DRAFT_IDS, num_heads=2)
    save_heads(heads, tmp_path / "heads", identify(target), {"coverage": 0.5})
    return heads, tmp_path / "heads"


def edit_tensors(directory, **changes) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()} | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        directory / "model.safetensors",
    )


def edit_config(directory, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
@pytest.mark.parametrize(("num_heads", "num_layers"), [(1, 1), (3, 2)])
def test_round_trip_is_exact(target, tmp_path, dtype, lm_head, draft_ids, num_heads, num_layers):
    settings = {"num_heads": num_heads, "num_layers": num_layers, "lm_head": lm_head}
    heads = make_heads(target, draft_ids, **settings).to(dtype).bind(target)
    save_heads(heads, tmp_path / "heads", identify(target))
    loaded = load_heads(tmp_path / "heads", target)
    assert loaded.config == heads.config
    assert loaded.state_dict().keys() == heads.state_dict().keys()
    for name, tensor in heads.state_dict().items():
        assert loaded.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(loaded.state_dict()[name], tensor)
    hidden_D = torch.randn(target.hidden_size)
    assert torch.equal(loaded.draft_logits(hidden_D), heads.draft_logits(hidden_D))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_files_say_what_they_hold(saved):
    _, directory = saved
    text = (directory / "config.json").read_text()
    config = json.loads(text)
    assert text == json.dumps(config, indent=2, sort_keys=True) + "\n"
    assert (config["format"], config["format_version"], config["kind"]) == ("headstart", 1, "medusa")
    assert (config["taps"], config["dtype"], config["draft_vocab_size"]) == (["final_norm"], "float32", 4)
    assert config["heads"]["lm_head"] == "own"
    assert config["extra"] == {"coverage": 0.5}
    tensors = load_file(directory / "model.safetensors")
    assert tensors["d2t"].tolist() == [3, 4, 88, 255]
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == DRAFT_IDS.tolist()
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    modes = [path.stat().st_mode for path in directory.iterdir()]
    assert modes[0] == modes[1]


def test_saving_again_replaces_but_never_other_files(target, saved):
    _, directory = saved
    heads = make_heads(target, num_heads=1)
    save_heads(heads, directory, identify(target))
    assert torch.equal(load_heads(directory, target).block_weight, heads.block_weight)
    assert [path.name for path in directory.parent.iterdir()] == ["heads"]
    (directory / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"holds notes\.txt, which would be lost"):
        save_heads(heads, directory, identify(target))
    with pytest.raises(ValueError, match="is a file"):
        save_heads(heads, directory / "notes.txt", identify(target))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("where", ["save_file", "write_json"])
def test_full_disk_leaves_what_was_there(target, tmp_path, monkeypatch, again, where):
    directory = tmp_path / "heads"
    heads = make_heads(target, num_heads=1)
    if again:
        save_heads(heads, directory, identify(target))

    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files if where == "save_file" else layout, where, fail)
    with pytest.raises(OSError, match="No space left"):
        save_heads(make_heads(target, num_heads=2), directory, identify(target))
    assert [path.name for path in tmp_path.iterdir()] == (["heads"] if again else [])
    if again:
        assert load_heads(directory, target).depth == 1


def test_a_failed_write_of_safetensors_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="could not write"):
        files.write_tensors(tmp_path / "missing" / "model.safetensors", {"a": torch.zeros(1)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_bias": None}, "block_bias is missing"),
        ({"extra": torch.zeros(1)}, "extra is unexpected"),
        ({"block_bias": torch.zeros(1, 2, 31)}, r"block_bias has shape \[1, 2, 31\], not \[1, 2, 32\]"),
        ({"block_bias": torch.zeros(1, 2, 32).half()}, r"block_bias is torch\.float16, not torch\.float32"),
        ({"d2t": None}, "d2t is missing"),
        ({"d2t": torch.tensor([3, 4, 88, 255]).int()}, r"d2t is torch\.int32 \[4\], not torch\.int64 \[4\]"),
        ({"d2t": torch.tensor([3, 4, 88])}, r"d2t is torch\.int64 \[3\], not torch\.int64 \[4\]"),
        ({"d2t": torch.tensor([3, 5, 90, 258])}, "disagree on token id 5; d2t must hold offsets"),
        ({"d2t": torch.tensor([3, 4, 88, 318])}, r"outside .* 320 \(draft index 3 gives 321\)"),
        ({"d2t": torch.tensor([3, 4, 2, 255])}, r"ascending token ids \(draft index 2 gives 4\)"),
        ({"t2d": torch.zeros(320, dtype=torch.bool)}, "t2d and d2t disagree on token id 3"),
    ],
)
def test_wrong_tensors_are_named(target, saved, changes, message):
    _, directory = saved
    edit_tensors(directory, **changes)
    with pytest.raises(ValueError, match=message):
        load_heads(directory, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "eagle"}, "format='eagle' is not 'headstart'; .*import_heads"),
        ({"format_version": 2}, "format_version=2, this version of Headstart reads 1"),
        ({"kind": "oracle"}, "kind='oracle' is unknown; known are .*medusa"),
        ({"taps": ["post_block[1]"]}, r"taps=\['post_block\[1\]'\], but these medusa heads read \['final_norm'\]"),
        ({"norm": "none"}, "norm='none'"),
        ({"dtype": "float16"}, "dtype='float16' must be one of float32, bfloat16"),
        ({"dtype": "bfloat16"}, r"block_weight is torch\.float32, not torch\.bfloat16"),
        ({"colour": 1}, "unknown keys: colour"),
        ({"heads": {"num_heads": 2, "depth": 3}}, "heads has unknown keys: depth"),
        ({"heads": {"num_heads": "2"}}, r"heads\.num_heads='2' must be int"),
        ({"heads": {"num_heads": 2, "objective": {"decay": 2.0}}}, r"heads\.objective\.decay=2\.0"),
        ({"heads": {"num_heads": 3}}, r"block_weight has shape \[1, 2, 32, 32\], not \[1, 3, 32, 32\]"),
        ({"heads": {"num_heads": 2, "lm_head": "shared"}}, "lm_head_weight is unexpected"),
        ({"target": {"name": "tiny"}}, "target lacks hidden_size, model_type"),
    ],
)
def test_wrong_config_is_named(target, saved, changes, message):
    _, directory = saved
    edit_config(directory, **changes)
    with pytest.raises(ValueError, match=message):
        load_heads(directory, target)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TargetIdentity)][1:])
def test_heads_of_another_target_are_refused(target, saved, field):
    _, directory = saved
    identity = json.loads((directory / "config.json").read_text())["target"]
    other = identity[field] + 1 if isinstance(identity[field], int) else "other"
    edit_config(directory, target=identity | {field: other})
    with pytest.raises(ValueError, match=f"{field}={other}"):
        load_heads(directory, target)
    if field == "weights_sha256":
        load_heads(directory, target, allow_other_weights=True)


@pytest.mark.parametrize("size", [0, 7, 200, -1])
def test_truncated_weights_are_refused(target, saved, size):
    _, directory = saved
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged"):
        load_heads(directory, target)


def test_missing_and_damaged_files_are_named(target, saved, tmp_path):
    _, directory = saved
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        load_heads(tmp_path / "nowhere", target)
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"d2t": "../../x.safetensors"}}')
    with pytest.raises(ValueError, match=r"model\.safetensors does not exist"):
        load_heads(directory, target)
    for text, message in (("{", "is not JSON"), ("[]", "must hold one JSON object, not a list")):
        (directory / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_heads(directory, target)


def test_half_precision_heads_are_not_saved(target, tmp_path):
    with pytest.raises(ValueError, match="heads are float16; save them as all float32 or all bfloat16"):
        save_heads(make_heads(target, num_heads=1).half(), tmp_path / "heads", identify(target))
