"""Tiny tokenizers made on the spot, and the chat templates of tests/data/templates."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE_NAMES = {file.name for file in TEMPLATES.iterdir()}
TRAINING_TEXT = [
    "user\nWhat is the capital of France?\nassistant\nThe capital is Paris.\n\nmodel\nThe sea is blue.\n\n" * 3,
    " USER: Name a colour ASSISTANT: Blue and green. [INST] Hello [/INST] The answer is four.",
]


def byte_tokenizer(merges: list[tuple[str, str]] | None = None, trained: bool = False) -> Tokenizer:
    """Byte-level; without merges one ASCII character is one token. No regex: tokens may cross boundaries."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    for a, b in merges or []:
        vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges or []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if trained:
        trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """SentencePiece-like: spaces are part of tokens, and a text gets one in front."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer


KINDS = {
    "byte": byte_tokenizer,
    "trained": lambda: byte_tokenizer(trained=True),
    "metaspace": metaspace_tokenizer,
    "joined-breaks": lambda: byte_tokenizer([("Ċ", "Ċ")]),
}


@cache
def _serialised(kind: str) -> str:
    return KINDS[kind]().to_str()


def _make(
    template: str,
    specials: Sequence[str],
    eos_token: str,
    *,
    bos: str | None = None,
    words: Sequence[str] = (),
    kind: str = "byte",
) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(_serialised(kind))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in words])
    if kind == "metaspace" and bos is not None:
        special = (bos, backend.token_to_id(bos))
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos_token, pad_token=eos_token
    )
    file = TEMPLATES / f"{template}.jinja"
    tokenizer.chat_template = file.read_text() if file.name in TEMPLATE_NAMES else template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """make(template, specials, eos_token, *, bos=None, words=(), kind="byte").

    `template` is the stem of a file in templates/ or a text; `words` are added
    tokens that are not special. The pad token is the EOS token, as in SmolLM2-Instruct.
    """
    return _make


@pytest.fixture
def chatml() -> tuple[PreTrainedTokenizerFast, list[int]]:
    """A ChatML tokenizer (one character, one token) whose pad is its EOS, and its eos ids."""
    tokenizer = _make("chatml", ["<|im_start|>", "<|im_end|>"], "<|im_end|>")
    return tokenizer, [tokenizer.eos_token_id]
