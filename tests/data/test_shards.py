"""Prepared data: same settings, same file; any other setting, another; damage is noticed."""

import dataclasses
import json
import logging
from pathlib import Path

import datasets
import pytest
import torch
from safetensors import safe_open

from data.fingerprint import tokenizer_fingerprint
from data.prepared import PreparedData
from data.render import render
from data.shards import DataConfig, prepare

LONG = "Tell me all that you know. " * 4


def row(prompt, answer, category=""):
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "category": category}


ROWS = [row("Hi", "Hello", "chat"), row("2+2?", "4", "maths"), row("Sea?", "Blue", "chat"), row(LONG, "No")]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def setting(tmp_path, chatml):
    """(sources, config, tokenizer, eos ids) over ROWS."""
    source = write(tmp_path / "rows.jsonl", ROWS)
    return [source], DataConfig(train=[source], cache_dir=str(tmp_path / "cache")), *chatml


def stored(config):
    return sorted(Path(config.cache_dir).glob("*.safetensors"))


def test_prepared_data_is_kept_in_the_cache_of_all_else(setting, tmp_path, monkeypatch):
    sources, config, tokenizer, eos_ids = setting
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "elsewhere"))
    prepare(sources, dataclasses.replace(config, cache_dir=""), tokenizer, eos_ids)
    assert len(list((tmp_path / "elsewhere" / "data").glob("*.safetensors"))) == 1


def same(first, second):
    tensors = ("ids_N", "supervised_N", "offsets_S1", "category_S")
    equal = all(torch.equal(vars(first)[name], vars(second)[name]) for name in tensors)
    return equal and (first.digest, first.summary) == (second.digest, second.summary)


def test_samples_are_those_of_render(setting):
    sources, config, tokenizer, eos_ids = setting
    prepared = prepare(sources, config, tokenizer, eos_ids)
    assert len(prepared) == 4
    for index, expected in enumerate(ROWS):
        (sample,) = render(expected["messages"], tokenizer, eos_ids, {})
        ids, supervised = prepared.sample(index)
        assert (ids.dtype, supervised.dtype) == (torch.int64, torch.bool)
        assert ids.tolist() == sample.ids
        assert supervised.tolist() == sample.supervised
    assert prepared.categories == ["chat", "maths", "chat", ""]
    assert prepared.lengths == [len(prepared.sample(i)[0]) for i in range(4)]
    assert prepared.supervised_tokens == sum(int(prepared.sample(i)[1].sum()) for i in range(4))
    with pytest.raises(IndexError):
        prepared.sample(4)


def test_counts_are_of_supervised_tokens_only(setting):
    sources, config, tokenizer, eos_ids = setting
    prepared = prepare(sources, config, tokenizer, eos_ids)
    counts = prepared.token_counts(300)
    expected = torch.zeros(300, dtype=torch.int64)
    for index in range(4):
        for token, supervised in zip(*map(torch.Tensor.tolist, prepared.sample(index)), strict=True):
            expected[token] += supervised
    assert torch.equal(counts, expected)
    assert counts[eos_ids[0]] == 4  # TOK-01: one end of turn per answer, although pad is EOS
    with pytest.raises(ValueError, match=r"token id 257, vocab_size=200 does not; prepare the data with"):
        prepared.token_counts(200)


def test_same_settings_hit(setting, caplog, monkeypatch):
    sources, config, tokenizer, eos_ids = setting
    first = prepare(sources, config, tokenizer, eos_ids)
    tokenizer(["a", "bc"], padding=True, truncation=True, max_length=2)  # these settings stay in the tokenizer
    monkeypatch.setattr("data.shards.SampleBuilder", None)
    config = dataclasses.replace(config, packing=False)
    with caplog.at_level(logging.INFO, "data.shards"):
        second = prepare(sources, config, tokenizer, eos_ids)
    assert "prepared data taken from" in caplog.text
    assert same(first, second)


def test_the_place_of_a_source_does_not_matter(setting, tmp_path):
    sources, config, tokenizer, eos_ids = setting
    first = prepare(sources, config, tokenizer, eos_ids)
    (tmp_path / "elsewhere").mkdir()
    moved = write(tmp_path / "elsewhere" / "rows.jsonl", ROWS)
    assert prepare([moved], config, tokenizer, eos_ids).digest == first.digest


CONFIG_CHANGES = {
    "max_length": {"max_length": 100},
    "kwargs": {"template_kwargs": {"enable_thinking": False}},
    "system": {"system_prompt": "Be brief"},
    "limit": {"limit": 3},
    "bad_share": {"max_bad_share": 0.5},
}


@pytest.mark.parametrize("change", [*CONFIG_CHANGES, "template", "token", "special", "line", "eos"])
def test_any_other_setting_misses(setting, tmp_path, change):  # DAT-16
    sources, config, tokenizer, eos_ids = setting
    first = prepare(sources, config, tokenizer, eos_ids)
    config = dataclasses.replace(config, **CONFIG_CHANGES.get(change, {}))
    if change == "template":
        tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n' }}", "assistant\\n\\n' }}")
    elif change == "token":
        tokenizer.add_tokens(["Hello"])
    elif change == "special":
        tokenizer.bos_token = "<|im_start|>"
    elif change == "eos":
        eos_ids = [*eos_ids, 0]
    elif change == "line":
        size = (tmp_path / "rows.jsonl").stat().st_size
        write(tmp_path / "rows.jsonl", [row("Hi", "Hallo", "chat"), *ROWS[1:]])
        assert (tmp_path / "rows.jsonl").stat().st_size == size
    second = prepare(sources, config, tokenizer, eos_ids)
    assert second.digest != first.digest
    assert len(stored(config)) == 2
    if change in ("max_length", "template", "token", "line", "system", "limit"):
        assert second.ids_N.tolist() != first.ids_N.tolist()


def test_order_of_sources_counts(setting, tmp_path):
    sources, config, tokenizer, eos_ids = setting
    more = write(tmp_path / "more.jsonl", ROWS[:1])
    first = prepare([*sources, more], config, tokenizer, eos_ids)
    assert prepare([more, *sources], config, tokenizer, eos_ids).digest != first.digest


def test_splits_of_one_folder_do_not_share_a_key(setting, tmp_path):
    _, config, tokenizer, eos_ids = setting
    folder = tmp_path / "saved"
    splits = {"a": datasets.Dataset.from_list(ROWS[:2]), "b": datasets.Dataset.from_list(ROWS[2:])}
    datasets.DatasetDict(splits).save_to_disk(folder)
    a, b = (prepare([f"{folder}:{split}"], config, tokenizer, eos_ids) for split in "ab")
    assert a.digest != b.digest
    assert a.categories == ["chat", "maths"]
    assert b.categories == ["chat", ""]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone", "manifest", "manifest keys"])
def test_damage_is_noticed_and_mended(setting, damage, caplog):
    sources, config, tokenizer, eos_ids = setting
    first = prepare(sources, config, tokenizer, eos_ids)
    (file,) = stored(config)
    good = file.read_bytes()
    if damage == "cut":
        file.write_bytes(good[:-10])
    elif damage == "flipped":
        file.write_bytes(good[:-10] + bytes([good[-10] ^ 1]) + good[-9:])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "gone":
        file.unlink()
    elif damage == "manifest":
        file.with_suffix(".json").write_text('{"key": ')
    else:
        file.with_suffix(".json").write_text("{}")
    with caplog.at_level(logging.WARNING, "data.prepared"):
        second = prepare(sources, config, tokenizer, eos_ids)
    assert "is damaged" in caplog.text
    assert same(first, second)
    assert file.read_bytes() == good


def test_a_crash_while_writing_leaves_nothing_to_be_taken(setting, monkeypatch):
    sources, config, tokenizer, eos_ids = setting

    def crash(tensors, name):
        name.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("data.prepared.save_file", crash)
        with pytest.raises(KeyboardInterrupt):
            prepare(sources, config, tokenizer, eos_ids)
    assert stored(config) == []
    assert len(prepare(sources, config, tokenizer, eos_ids)) == 4


def test_manifest_is_readable_and_says_all(setting):
    sources, config, tokenizer, eos_ids = setting
    prepared = prepare(sources, config, tokenizer, eos_ids)
    (file,) = stored(config)
    manifest = json.loads(file.with_suffix(".json").read_text())
    assert manifest["key"] == prepared.digest == file.stem
    assert manifest["parameters"]["max_length"] == 1024
    assert manifest["tokenizer"] == tokenizer_fingerprint(tokenizer)
    assert manifest["eos_ids"] == eos_ids
    assert manifest["paths"] == sources
    assert list(manifest["sources"][0]["size_and_sha256"]) == ["rows.jsonl"]
    assert manifest["summary"]["num_samples"] == 4
    with safe_open(file, "pt") as tensors:
        assert {name: str(tensors.get_tensor(name).dtype) for name in tensors.keys()} == {  # noqa: SIM118
            "ids": "torch.int32",
            "supervised": "torch.uint8",
            "offsets": "torch.int64",
            "category": "torch.int32",
        }


def test_truncation_is_counted(setting):  # DAT-06
    sources, config, tokenizer, eos_ids = setting
    prepared = prepare(sources, dataclasses.replace(config, max_length=40), tokenizer, eos_ids)
    assert max(prepared.lengths) <= 40
    assert prepared.summary.num_unsupervised_after_truncation == 1
    assert "unsupervised after truncation: 1" in str(prepared.summary)
    assert len(prepared) == 3
    with pytest.raises(ValueError, match="no sample has a supervised token within max_length=5"):
        prepare(sources, dataclasses.replace(config, max_length=5), tokenizer, eos_ids)


def test_problems_of_reading_and_rendering_are_counted_together(setting, tmp_path):
    sources, config, tokenizer, eos_ids = setting
    ended = row("Hi", "The mark <|im_end|> ends it")
    sources = [write(tmp_path / "bad.jsonl", [*ROWS, {"prompt": "no answer"}, ended])]
    with pytest.raises(
        ValueError, match=r"2 of 6 rows (?s:.*)bad.jsonl:5: no assistant turn\n .*bad.jsonl:6: the answer"
    ):
        prepare(sources, config, tokenizer, eos_ids)
    assert stored(config) == []
    prepared = prepare(sources, dataclasses.replace(config, max_bad_share=0.5), tokenizer, eos_ids)
    assert prepared.summary.problems == {"no assistant turn": 1, "the answer holds an end-of-turn token": 1}
    assert prepared.summary.num_rows == 6


def test_answers_without_end_are_reported(setting, caplog):
    sources, config, tokenizer, _ = setting
    with caplog.at_level(logging.WARNING, "data.samples"):
        prepared = prepare(sources, config, tokenizer, [0])
    assert "4 of 4 answers end in no eos id [0]" in caplog.text
    assert prepared.summary.num_turns_without_end == 4


def test_system_prompt_and_tools_reach_the_template(setting, tmp_path):
    _, config, tokenizer, eos_ids = setting
    tokenizer.chat_template = "{{ tools | length if tools else 'none' }}" + tokenizer.chat_template
    source = write(tmp_path / "tools.jsonl", [{**ROWS[0], "tools": [{"type": "function"}] * 3}, ROWS[1]])
    config = dataclasses.replace(config, system_prompt="Be brief")
    prepared = prepare([source], config, tokenizer, eos_ids)
    texts = [tokenizer.decode(prepared.sample(i)[0]) for i in range(2)]
    assert texts[0].startswith("3<|im_start|>system\nBe brief<|im_end|>")
    assert texts[1].startswith("none<|im_start|>system\nBe brief<|im_end|>")


def test_progress_goes_to_standard_error(setting, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    sources, config, tokenizer, eos_ids = setting
    prepare(sources, config, tokenizer, eos_ids, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "4 conversations" in captured.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": []}, r"data.train=\[\] must name at least one source"),
        ({"heldout": ["a"]}, r"must not share sources with data.train; remove \['a'\]"),
        ({"max_length": 1}, "data.max_length=1 must be at least 2"),
        ({"max_bad_share": 1.5}, "data.max_bad_share=1.5 must lie in 0..1"),
        ({"limit": 0}, "data.limit=0 must be at least 1; use null"),
        ({"system_prompt": " "}, "data.system_prompt=' ' must hold text; use null"),
        ({"template_kwargs": {"tokenize": True}}, r"data.template_kwargs must not set \['tokenize'\]"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"train": ["a"], **changes})


def test_load_without_files(tmp_path):
    assert PreparedData.load(tmp_path, "0" * 64) is None
