import pytest
import torch

from eval.calibrate import measure_accuracy
from eval.cost import interpolated, measure_costs, relative_costs
from eval.decode import plain_generate
from eval.drafters import MedusaDrafter
from eval.sampling import SamplingConfig
from eval.stopping import StopConditions
from eval.tree import Tree


def test_accuracy_is_counted_at_every_position_of_the_answer(tiny_target, random_heads):
    """Against a naive loop that asks draft_logits, the decoder's own path, position by position."""
    target = tiny_target()
    heads = random_heads(target, num_heads=2, noise=0.02)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    right, asked = torch.zeros(2, 4), torch.zeros(2)
    for prompt in prompts:
        conditions = StopConditions(target.eos_ids, max_new_tokens=30)
        answer = plain_generate(target, prompt, conditions, SamplingConfig(), target.new_cache(64)).tokens
        ids = [*prompt, *answer]
        hidden = target.prefill(torch.tensor([ids]), target.new_cache(64))["final_norm"][0]
        for t in range(len(prompt) - 1, len(ids)):
            for k in range(2):
                if t + 2 + k < len(ids):
                    candidates = heads.draft_logits(hidden[t])[k].topk(4).indices
                    right[k] += candidates == ids[t + 2 + k]
                    asked[k] += 1
    accuracy = measure_accuracy(target, heads, prompts, 30, 4)
    torch.testing.assert_close(accuracy, right / asked[:, None])
    assert accuracy.sum() > 0


def test_answers_too_short_to_ask_the_last_head_are_refused(tiny_target, random_heads):
    heads = random_heads(tiny_target(), num_heads=3)
    with pytest.raises(ValueError, match="too short for 3 heads"):
        measure_accuracy(tiny_target(), heads, [[1, 2]], 3, 2)


def test_costs_name_every_step_and_are_read_relative_to_the_plain_one(tiny_target, random_heads):
    costs = measure_costs(
        tiny_target(), MedusaDrafter(random_heads(tiny_target()), Tree.chain(2)), sizes=(2, 4), context=16, rounds=2
    )
    assert list(costs) == ["plain", "verify 2", "verify 4", "draft", "draft level"]
    assert all(costs[name] > 0 for name in list(costs)[:-1])
    verify, draft, level = relative_costs(
        {"plain": 10.0, "verify 2": 12.0, "verify 4": 16.0, "draft": 1.0, "draft level": 0.5}
    )
    assert (verify, draft, level) == ({1: 1.0, 2: 1.2, 4: 1.6}, 0.1, 0.05)
    assert interpolated(verify, 3) == pytest.approx(1.4)
    with pytest.raises(ValueError, match="no verify cost above 4 tokens was measured; the tree has 5"):
        interpolated(verify, 5)
