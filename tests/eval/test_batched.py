import pytest
import torch

from eval.batched import generate_batch
from eval.sampling import SamplingConfig


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_greedy_batch_is_every_prompt_alone(family, tiny_target):
    target = tiny_target(family)
    prompts = [list(range(5, 5 + n)) for n in (1, 4, 9, 17)]
    batch = generate_batch(target, prompts, SamplingConfig(), 25, [0] * 4)
    for prompt, answer in zip(prompts, batch, strict=True):
        ids = torch.tensor([prompt])
        alone = target.model.generate(
            ids, max_new_tokens=25, do_sample=False, eos_token_id=258, attention_mask=torch.ones_like(ids)
        )
        assert answer == alone[0, len(prompt) :].tolist()


def test_a_sequence_draws_the_same_whoever_is_beside_it(tiny_target):
    target = tiny_target()
    prompts, sampling = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]], SamplingConfig(temperature=1.0)
    together = generate_batch(target, prompts, sampling, 40, [11, 12, 13, 14])
    assert len({len(answer) for answer in together}) > 1, "all end alike: nothing is dropped from the batch"
    for prompt, answer, seed in zip(prompts, together, [11, 12, 13, 14], strict=True):
        assert generate_batch(target, [prompt], sampling, 40, [seed]) == [answer]


def test_a_prompt_that_occurs_several_times_is_read_once(tiny_target, monkeypatch):
    target = tiny_target()
    prompts, sampling = [[1, 2, 3], [4, 5], [1, 2, 3], [4, 5], [6]], SamplingConfig(temperature=1.0)
    alone = [generate_batch(target, [prompt], sampling, 30, [seed])[0] for seed, prompt in enumerate(prompts)]
    read, run_decoder = [], target.run_decoder
    monkeypatch.setattr(target, "run_decoder", lambda ids, *rest: read.append(len(ids)) or run_decoder(ids, *rest))
    assert generate_batch(target, prompts, sampling, 30, list(range(5))) == alone
    assert alone[0] != alone[2], "two draws of one prompt are alike"
    assert read[:2] == [3, 5]


def test_end_of_text_ends_an_answer_and_is_kept(tiny_target):
    target = tiny_target()
    answers = generate_batch(target, [[i] for i in range(16)], SamplingConfig(temperature=2.0), 60, list(range(16)))
    ended = [answer for answer in answers if 258 in answer]
    assert ended
    assert all(answer.index(258) == len(answer) - 1 for answer in ended)


def test_sequences_that_ended_at_different_steps_leave_the_batch_and_are_counted_no_more(tiny_target, monkeypatch):
    target = tiny_target()
    rows, counts, run_decoder = [], [], target.run_decoder
    monkeypatch.setattr(target, "run_decoder", lambda ids, *rest: rows.append(len(ids)) or run_decoder(ids, *rest))
    prompts, sampling = [[i] for i in range(32)], SamplingConfig(temperature=2.0)
    answers = generate_batch(target, prompts, sampling, 200, list(range(32)), counts.append)
    lengths = [len(answer) for answer in answers]
    ended = [length for length in lengths if length < 200]
    assert len(ended) > 10, "few end: none is dropped"
    assert max(map(ended.count, ended)) < 4, "many end at once: they are dropped at once"
    assert sum(counts) == sum(lengths)
    going_on = [sum(length > step for length in lengths) for step in range(len(rows))]
    assert all(beside * 0.75 <= left <= beside for left, beside in zip(going_on, rows, strict=True))


def test_what_it_cannot_do_is_refused(tiny_target):
    with pytest.raises(ValueError, match="exceed the target's context of 512"):
        generate_batch(tiny_target(), [[1] * 500], SamplingConfig(), 20, [0])
    with pytest.raises(ValueError, match="handles full attention only"):
        generate_batch(tiny_target("mistral"), [[1]], SamplingConfig(), 2, [0])
