"""Exports mean in an engine what the heads mean here, come back bit for bit, and damage is named."""

import json
import shlex
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from heads.export.medusa_reader import import_heads
from heads.export.medusa_writer import export_heads
from heads.identity import identify
from heads.layout import load_heads, save_heads
from heads.medusa import MedusaConfig, MedusaHeads
from heads.target import Target, TargetConfig
from heads.tiny import tiny_model_and_tokenizer

DRAFT_IDS = torch.tensor([3, 5, 90, 258])
FORMATS = {"fasterdecoding": "medusa_lm_head.safetensors", "vllm": "model.safetensors"}


@pytest.fixture(scope="module")
def target() -> Target:
    config = TargetConfig("tiny", "random:llama", licence="CC0")
    return Target(*tiny_model_and_tokenizer("llama"), config)


@pytest.fixture
def make(target, tmp_path):
    """make(draft_ids=None, extra=None, **settings of MedusaConfig): random heads, saved as "heads"."""

    def make_(draft_ids=None, extra=None, **settings) -> MedusaHeads:
        ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
        config = MedusaConfig(draft_vocab_size=None if draft_ids is None else len(ids), **settings)
        heads = MedusaHeads(config, target.hidden_size, target.vocab_size, ids)
        torch.manual_seed(1)
        for parameter in heads.parameters():
            parameter.data.normal_()
        save_heads(heads, tmp_path / "heads", identify(target), extra)
        return load_heads(tmp_path / "heads", target)

    return make_


def serve_vllm(directory, hidden_D, target):
    """vLLM's Medusa.load_weights and forward, written from its source: logits [K, V] from the files alone."""
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    logits = []
    for head in range(config["num_heads"]):
        state_D = hidden_D
        for layer in range(config["num_hidden_layers"]):
            bias = weights[f"blocks.{head}.layers.{layer}.bias"] if config["medusa_fc_bias"] else None
            state_D = state_D + F.silu(F.linear(state_D, weights[f"blocks.{head}.layers.{layer}.weight"], bias))
        lm_head = "lm_head.weight" if config["original_lm_head"] else f"lm_heads.{head}.weight"
        logits.append(F.linear(state_D, weights[lm_head]))
    return torch.stack(logits)


def serve_fasterdecoding(directory, hidden_D, target):
    """Medusa heads as TGI builds them; version 2 asks the target for its LM head."""
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "medusa_lm_head.safetensors")
    layers = config["medusa_num_layers"]
    logits = []
    for head in range(config["medusa_num_heads"]):
        x = hidden_D
        for layer in range(layers):
            name = f"{head}.{layer}.linear"
            x = x + F.silu(weights[f"{name}.weight"] @ x + weights[f"{name}.bias"])
        if config["version"] == "2":
            logits.append(target.model.lm_head(x))
        else:
            logits.append(weights[f"{head}.{layers}.weight"] @ x)
    return torch.stack(logits)


SERVE = {"vllm": serve_vllm, "fasterdecoding": serve_fasterdecoding}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_engines_see_the_same_logits_and_import_gives_the_same_bits(
    target, make, tmp_path, name, lm_head, num_heads, num_layers
):
    heads = make(num_heads=num_heads, num_layers=num_layers, lm_head=lm_head)
    export_heads(tmp_path / "heads", tmp_path / "out", target, name)
    hidden_D = torch.randn(target.hidden_size)
    served_KV = SERVE[name](tmp_path / "out", hidden_D, target)
    torch.testing.assert_close(served_KV, heads.draft_logits(hidden_D), rtol=1e-5, atol=1e-4)
    back = import_heads(tmp_path / "out", target, name)
    assert back.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(back.state_dict()[key], value) for key, value in heads.state_dict().items())
    torch.testing.assert_close(back.draft_logits(hidden_D), heads.draft_logits(hidden_D))


@pytest.mark.parametrize("name", FORMATS)
def test_own_lm_heads_over_a_reduced_vocabulary_are_refused_or_expanded(target, make, tmp_path, name):
    heads = make(DRAFT_IDS, num_heads=2)
    with pytest.raises(ValueError, match=r"4 of 320 .*expand_vocabulary=true .*draft_vocab_size=null"):
        export_heads(tmp_path / "heads", tmp_path / "out", target, name)
    assert not (tmp_path / "out").exists()
    done = export_heads(tmp_path / "heads", tmp_path / "out", target, name, expand_vocabulary=True)
    assert any(limit.startswith("316 of 320 rows") for limit in done.limits)
    hidden_D = torch.randn(target.hidden_size)
    served_KV = SERVE[name](tmp_path / "out", hidden_D, target)
    torch.testing.assert_close(served_KV[:, DRAFT_IDS], heads.draft_logits(hidden_D), rtol=1e-5, atol=1e-4)
    back = import_heads(tmp_path / "out", target, name)
    assert torch.equal(back.lm_head_weight[:, DRAFT_IDS], heads.lm_head_weight)
    others = torch.ones(320, dtype=torch.bool).index_fill(0, DRAFT_IDS, False)
    assert torch.equal(back.lm_head_weight[1][others], target.lm_head.weight[others])
    assert back.config.draft_vocab_size is None
    assert torch.equal(back.block_weight, heads.block_weight)


@pytest.mark.parametrize("name", FORMATS)
def test_shared_lm_head_over_a_reduced_vocabulary_drafts_all_ids(target, make, tmp_path, name):
    heads = make(DRAFT_IDS, num_heads=2, lm_head="shared")
    done = export_heads(tmp_path / "heads", tmp_path / "out", target, name)
    assert any("drafts all with the target's LM head" in limit for limit in done.limits)
    hidden_D = torch.randn(target.hidden_size)
    served_KV = SERVE[name](tmp_path / "out", hidden_D, target)
    torch.testing.assert_close(served_KV[:, DRAFT_IDS], heads.draft_logits(hidden_D), rtol=1e-5, atol=1e-4)
    assert torch.equal(import_heads(tmp_path / "out", target, name).block_bias, heads.block_bias)


def test_names_and_config_are_those_of_the_engines(target, make, tmp_path):
    make(num_heads=2)
    export_heads(tmp_path / "heads", tmp_path / "original", target, "fasterdecoding")
    names = {f"{head}.{rest}" for head in (0, 1) for rest in ("0.linear.weight", "0.linear.bias", "1.weight")}
    assert load_file(tmp_path / "original" / FORMATS["fasterdecoding"]).keys() == names
    assert json.loads((tmp_path / "original" / "config.json").read_text()) == {
        "model_type": "medusa",
        "base_model_name_or_path": "tiny",
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "version": "1",
    }
    make(num_heads=2, num_layers=2, lm_head="shared")
    export_heads(tmp_path / "heads", tmp_path / "vllm", target, "vllm", dtype="bfloat16")
    weights = load_file(tmp_path / "vllm" / "model.safetensors")
    blocks = {f"blocks.{h}.layers.{la}.{kind}" for h in (0, 1) for la in (0, 1) for kind in ("weight", "bias")}
    assert weights.keys() == blocks | {"lm_head.weight"}
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "vllm" / "config.json").read_text()) == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "vocab_size": 320,
        "num_heads": 2,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    assert import_heads(tmp_path / "vllm", target, "vllm").block_weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", FORMATS)
def test_heads_keep_their_order(target, make, tmp_path, name):
    heads = make(num_heads=3, num_layers=2)
    for head in range(3):
        for parameter in (heads.block_weight[:, head], heads.block_bias[:, head], heads.lm_head_weight[head]):
            parameter.data.fill_(head + 1)
        heads.block_bias.data[1, head] += 10
    save_heads(heads, tmp_path / "heads", identify(target))
    export_heads(tmp_path / "heads", tmp_path / "out", target, name, dtype="float16")
    back = import_heads(tmp_path / "out", target, name)
    assert back.block_weight.mean((0, 2, 3)).tolist() == [1, 2, 3]
    assert back.lm_head_weight.mean((1, 2)).tolist() == [1, 2, 3]
    assert back.block_bias.mean(2).tolist() == [[1, 2, 3], [11, 12, 13]]


def test_card_checksums_and_command(target, make, tmp_path):
    make(DRAFT_IDS, {"coverage": 0.9712, "data_digest": "abc123"}, num_heads=2, lm_head="shared")
    (tmp_path / "report.json").write_text(
        '{"acceptance": "greedy", "tau": 2.345, "speedup": {"median": 1.5, "low": 1.4, "high": 1.6}}'
    )
    done = export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm")
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (
        "# Medusa heads for tiny",
        "| target's licence | CC0 |",
        "| trained draft vocabulary | 4 of 320 token ids, which cover 97.12% of the training tokens |",
        "| training data digest | abc123 |",
        "| tau (tokens per target forward) | 2.35 |",
        "| speedup over plain decoding | 1.50 [1.40, 1.60] |",
        """--speculative-config '{"method":"medusa","model":"out","num_speculative_tokens":2}'""",
        "vllm serve tiny --speculative-config",
        "Measured with Headstart's draft tree and greedy acceptance.",
        "vllm==0.32.*",
        "no tree",
        identify(target).weights_sha256,
    ):
        assert text in card
    assert f'"model":"{tmp_path / "out"}"' in done.command
    assert [path.name for path in done.files] == [
        "model.safetensors",
        "config.json",
        "README.md",
        "SHA256SUMS",
    ]
    for path in done.files:
        assert str(tmp_path).encode() not in path.read_bytes()
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "out", check=True)


def test_unmeasured_heads_say_so_and_a_bad_report_is_named(target, make, tmp_path):
    make(num_heads=1)
    export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count("not measured") == 2
    assert "not recorded" in card
    (tmp_path / "heads" / "report.json").write_text('{"tau": 2.0}')
    with pytest.raises(ValueError, match=r"report\.json does not give tau and speedup"):
        export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm")


def test_card_of_an_export_for_a_fine_tune_names_what_the_heads_were_trained_on(target, make, tmp_path):
    make(num_heads=1)
    tuned = Target(*tiny_model_and_tokenizer("llama", seed=1), TargetConfig("tuned", "random:llama"))
    with pytest.raises(ValueError, match="weights_sha256"):
        export_heads(tmp_path / "heads", tmp_path / "out", tuned, "vllm")
    done = export_heads(tmp_path / "heads", tmp_path / "out", tuned, "vllm", allow_other_weights=True)
    assert any("trained on tiny with other weights" in limit for limit in done.limits)
    card = (tmp_path / "out" / "README.md").read_text()
    assert identify(target).weights_sha256 in card
    assert "vllm serve tuned" in card


@pytest.mark.slow
def test_the_pickle_that_older_decoders_read_is_made_by_the_command_in_the_note(target, make, tmp_path):
    make(num_heads=1)
    done = export_heads(tmp_path / "heads", tmp_path / "out", target, "fasterdecoding")
    (note,) = (limit for limit in done.limits if "read a pickle" in limit)
    program, flag, code = shlex.split(note.partition("so there: ")[2])
    assert (program, flag) == ("python", "-c")
    subprocess.run([sys.executable, flag, code], cwd=tmp_path / "out", check=True)
    pickled = torch.load(tmp_path / "out" / "medusa_lm_head.pt", weights_only=True)
    written = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert pickled.keys() == written.keys()
    assert all(torch.equal(pickled[name], tensor) for name, tensor in written.items())


def test_limits_of_several_layers_in_fasterdecoding(target, make, tmp_path):
    make(num_heads=1, num_layers=2)
    own = export_heads(tmp_path / "heads", tmp_path / "out", target, "fasterdecoding").limits
    assert any("only the last layer" in limit for limit in own)
    assert not any("version 2" in limit for limit in own)
    make(num_heads=1, num_layers=2, lm_head="shared")
    shared = export_heads(tmp_path / "heads", tmp_path / "out", target, "fasterdecoding").limits
    assert any("TGI reads version 2 (shared LM head) with one layer only" in limit for limit in shared)


def test_what_cannot_be_exported_is_refused_and_nothing_is_left(target, make, tmp_path):
    heads = make(num_heads=1)
    with pytest.raises(ValueError, match="format=eagle is unknown; known are fasterdecoding, vllm"):
        export_heads(tmp_path / "heads", tmp_path / "out", target, "eagle")
    with pytest.raises(ValueError, match="dtype=int8 must be one of float32"):
        export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm", dtype="int8")
    heads.block_bias.data[0, 0, 0] = 1e6
    save_heads(heads, tmp_path / "heads", identify(target))
    with pytest.raises(ValueError, match=r"blocks\.0\.layers\.0\.bias holds values that are not finite"):
        export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm", dtype="float16")
    with pytest.raises(ValueError, match=r"holds .*would be lost"):
        export_heads(tmp_path / "heads", tmp_path, target, "vllm")
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_vllm_drops_biases_without_its_flag_so_it_is_needed(target, make, tmp_path):
    make(num_heads=1)
    export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"medusa_fc_bias": False}))
    with pytest.raises(ValueError, match="medusa_fc_bias=False, but"):
        import_heads(tmp_path / "out", target, "vllm")
    del config["medusa_fc_bias"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="lacks medusa_fc_bias"):
        import_heads(tmp_path / "out", target, "vllm")


def test_vllms_other_name_of_a_shared_lm_head(target, make, tmp_path):
    heads = make(num_heads=2, lm_head="shared")
    export_heads(tmp_path / "heads", tmp_path / "out", target, "vllm")
    path = tmp_path / "out" / "model.safetensors"
    (tmp_path / "out" / "SHA256SUMS").unlink()
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({name.replace("lm_head.", "lm_heads.0."): value for name, value in weights.items()}, path)
    assert torch.equal(import_heads(tmp_path / "out", target, "vllm").block_bias, heads.block_bias)
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] + 1}, path)
    with pytest.raises(ValueError, match="is not this target's LM head"):
        import_heads(tmp_path / "out", target, "vllm")
