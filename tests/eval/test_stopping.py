import pytest

from eval.stopping import StopConditions, Stopper
from heads.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def decode():
    return tiny_tokenizer().decode


@pytest.fixture(scope="module")
def encode():
    return tiny_tokenizer().encode


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_a_stop_string_ends_at_the_token_that_completes_it_whatever_the_blocks(block, decode, encode):
    tokens = encode("abc END def é END")
    stopper = Stopper(StopConditions(stop_strings=("END",)), 3, decode)
    for start in range(0, len(tokens), block):
        stopper.push(tokens[start : start + block])
        if stopper.reason:
            break
    assert decode(stopper.tokens) == "abc END"
    assert stopper.reason == "stop string"


def test_multi_byte_stop_strings_are_seen(decode, encode):
    stopper = Stopper(StopConditions(stop_strings=("é!",)), 3, decode)
    stopper.push(encode("caf" + "é" + "! more"))
    assert decode(stopper.tokens) == "café!"


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7])
def test_exactly_the_limit_is_emitted(limit, decode):
    stopper = Stopper(StopConditions(max_new_tokens=limit), 3, decode)
    emitted = 0
    while stopper.reason is None:
        emitted += stopper.push([65, 66, 67, 68])
    assert emitted == len(stopper.tokens) == limit
    assert stopper.reason == "length"


def test_the_context_counts_the_prompt(decode):
    stopper = Stopper(StopConditions(max_new_tokens=100, max_context=10), 7, decode)
    assert stopper.push([65] * 8) == 3


def test_an_end_of_text_id_inside_a_block_ends_it(decode):
    stopper = Stopper(StopConditions(eos_ids=(9, 10)), 1, decode)
    assert stopper.push([65, 10, 66, 9]) == 2
    assert stopper.tokens == [65, 10]
    assert stopper.reason == "eos"


def test_settings_are_checked():
    with pytest.raises(ValueError, match="max_new_tokens=0 must be at least 1"):
        StopConditions(max_new_tokens=0)
    with pytest.raises(ValueError, match="a stop string must not be empty"):
        StopConditions(stop_strings=("",))
