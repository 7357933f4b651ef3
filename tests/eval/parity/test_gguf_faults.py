"""Faults planted in the GGUF file of an export, under right checksums: each is caught by name."""

import re
import shutil

import gguf
import pytest

from tests.eval.parity.conftest import faults, refresh

Q, D2T = "blk.0.attn_q.weight", "d2t"


def tensor(name, change):
    """Change the numbers of a tensor in place."""

    def apply(reader):
        (found,) = (tensor for tensor in reader.tensors if tensor.name == name)
        found.data[...] = change(found.data)

    return apply


def key(name, value, at=0):
    """Change a number of a key in place."""

    def apply(reader):
        field = reader.fields[name]
        field.parts[field.data[at]][0] = value

    return apply


def halves(rows):
    """Rows of four heads of eight, as Hugging Face orders them."""
    return rows.reshape(4, 4, 2, -1).swapaxes(1, 2).reshape(rows.shape)


FAULTS = {
    "rows in Hugging Face's order": (tensor(Q, halves), f"{Q} has its rows in the order of Hugging Face, not of ggml"),
    "another weight": (tensor("fc.weight", lambda rows: rows * 2), "fc.weight is not fc.weight"),
    "another norm": (
        tensor("blk.0.attn_norm_2.weight", lambda row: row + 1),
        "attn_norm_2.weight is not layer.hidden_",
    ),
    "offsets in d2t": (tensor(D2T, lambda ids: ids - range(len(ids))), "d2t holds offsets; llama.cpp takes token ids"),
    "another d2t": (tensor(D2T, lambda ids: ids + 1), "d2t is of another draft vocabulary"),
    "rotation not scaled": (
        tensor("rope_freqs.weight", lambda row: row * 0 + 1),
        "rope_freqs.weight is not the scaling",
    ),
    "taps one too low": (
        key("eagle3.target_layers", 1),
        r"eagle3.target_layers=\[1, 4, 5\], by config.json it must be",
    ),
    "residual not normed": (key("eagle3.norm_before_residual", False), "norm_before_residual=False, by config.json"),
    "another epsilon": (key("eagle3.attention.layer_norm_rms_epsilon", 1e-5), "layer_norm_rms_epsilon=.*e-0"),
    "RoPE base": (key("eagle3.rope.freq_base", 1e6), "eagle3.rope.freq_base=1000000.0, by config.json it must be"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_gguf_file_is_named(pristine, target, tmp_path, name):
    change, message = FAULTS[name]
    shutil.copytree(pristine("llama.cpp"), tmp_path / "out")
    change(gguf.GGUFReader(tmp_path / "out" / "heads.gguf", "r+"))
    refresh(tmp_path / "out")
    (fault,) = faults(tmp_path / "out", target)
    assert re.search(f"heads.gguf: .*{message}", fault), fault


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_rounded_gguf_file_is_exact(pristine, target, dtype):
    assert faults(pristine("llama.cpp", dtype), target) == []
