"""The command prints what rendering says."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from scripts.show_mask import main

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ROW = {"prompt": "Hi", "response": "Hello [bold]you[/bold]"}


@pytest.fixture
def target(tmp_path):
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = ["<|user|>", "<|assistant|>", "<|end|>", "<|stop|>"]
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|stop|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target", tokenizer


def test_shows_spans_ends_and_bad_rows(target, tmp_path, capsys):
    folder, tokenizer = target
    ends = tokenizer.convert_tokens_to_ids(["<|end|>", "<|stop|>"])
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ({"prompt": "no answer"}, ROW, ROW, ROW)))
    main(["--tokenizer", str(folder), str(source), "--rows", "2"])
    out = capsys.readouterr().out
    assert out.count("<|user|>Hi<|end|><|assistant|>Hello [bold]you[/bold]<|end|>") == 2
    assert "28 of 28 tokens, 23 supervised, 1 of 1 answers end in an eos id (they end in '<|end|>')" in out
    assert "rows.jsonl:2, sample 1 of 1" in out
    assert "rows.jsonl:1: no assistant turn" in out


def test_without_generation_config_only_the_tokenizers_eos_ends(target, tmp_path, capsys):
    folder, _ = target
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(ROW))
    main(["--tokenizer", str(folder), str(source)])
    assert "0 of 1 answers end in an eos id (they end in '<|end|>')" in capsys.readouterr().out
    main(["--tokenizer", str(folder), str(source), "--max-length", "5"])
    assert "unsupervised after truncation to 5 of 28 tokens" in capsys.readouterr().out
