"""Our decoder counts what an engine counts, also where the token limit cuts inside a draft."""

from types import SimpleNamespace

import pytest
import torch

from eval.benchmark import Bench, BenchmarkConfig
from eval.drafters import Draft
from eval.drafting import build_drafter
from eval.prompts import EvalPrompt
from eval.records import Cycle
from eval.sampling import TorchCoin
from eval.serving import own_decoding
from eval.serving.own_decoding import OwnDecoder, counted_cycles, counters_of
from eval.serving.served_heads import VLLM, ServedHeads
from eval.tree import Tree
from heads.eagle import EagleConfig
from heads.target import FINAL_NORM
from tests.heads.test_eagle import make

PROMPT = EvalPrompt("p", "kind", [65, 66, 67, 68])


@pytest.fixture(scope="module")
def truth(tiny_target) -> list[int]:
    """The target's own continuation of PROMPT, forward by forward, without a cache."""
    ids = list(PROMPT.ids)
    for _ in range(24):
        with torch.inference_mode():
            ids.append(tiny_target().model(torch.tensor([ids])).logits[0, -1].argmax().item())
    assert not set(ids) & set(tiny_target().eos_ids)
    return ids[len(PROMPT.ids) :]


class Oracle:
    """Drafts the true continuation, but for every `period`-th token."""

    taps, depth, tree_size = (FINAL_NORM,), 3, 4

    def __init__(self, truth: list[int], period: int):
        self.truth, self.period = truth, period

    def reset(self, prompt_T, features):
        self.at = 1

    def observe(self, features, path_P):
        self.at += len(path_P)

    def propose(self, root, max_depth):
        tree = Tree.chain(min(3, max_depth))
        places = range(self.at, self.at + tree.depth)
        drafts = [(self.truth[place] + (place % self.period == 0)) % 320 for place in places]
        return Draft(tree, torch.tensor([int(root), *drafts]))


@pytest.fixture
def decoder(tiny_target, truth, monkeypatch):
    """decoder(limit, past_end, period) decodes PROMPT with an oracle whose every `period`-th token is wrong."""

    def make_decoder(limit: int, past_end: bool, period: int = 1000) -> OwnDecoder:
        monkeypatch.setattr(own_decoding, "for_serving", lambda heads, target: heads)
        monkeypatch.setattr(own_decoding, "build_drafter", lambda heads, tree: Oracle(truth, period))
        served = ServedHeads(SimpleNamespace(), SimpleNamespace(), 3, VLLM)
        return OwnDecoder(tiny_target(), served, [PROMPT], limit, past_end)

    return make_decoder


@pytest.mark.parametrize(("past_end", "positions"), [(True, (2, 2, 2)), (False, (2, 2, 1))])
def test_the_drawn_example(decoder, truth, past_end, positions):
    answer = decoder(8, past_end).answer(PROMPT.ids, with_heads=True)
    assert answer.tokens == truth[:8]
    assert (answer.counters.drafts, answer.counters.accepted_per_position) == (2, positions)
    assert answer.counters.draft_tokens == (6 if past_end else 5)


@pytest.mark.parametrize("period", [2, 3, 5])
@pytest.mark.parametrize("limit", [2, 5, 6, 7, 8, 9, 17])
def test_whole_drafts_until_the_limit(decoder, truth, period, limit):
    """Against a count on paper: the place of the root moves on by what is accepted and one more."""
    answer = decoder(limit, past_end=True, period=period).answer(PROMPT.ids, with_heads=True)
    drafts, accepted, emitted = 0, [0, 0, 0], 1
    while emitted < limit:
        drafts += 1
        right = next((k for k in range(3) if (emitted + k) % period == 0), 3)
        accepted = [count + (k < right) for k, count in enumerate(accepted)]
        emitted += right + 1
    assert answer.tokens == truth[:limit]
    assert (answer.counters.drafts, list(answer.counters.accepted_per_position)) == (drafts, accepted)


def test_plain_answers_have_no_counters(decoder, truth):
    answer = decoder(8, past_end=True).answer(PROMPT.ids, with_heads=False)
    assert (answer.tokens, answer.counters) == (truth[:8], None)
    assert answer.timing.decode_s > 0


def test_an_end_of_turn_inside_a_draft_counts_the_whole_draft():
    ended = [Cycle(offered=3, accepted=3, emitted=4, node=3), Cycle(offered=3, accepted=2, emitted=1, node=2)]
    assert counters_of(counted_cycles(ended, 100), 3).accepted_per_position == (2, 2, 1)


def test_it_is_the_chain_of_the_heads_themselves(tiny_target):
    target = tiny_target()
    heads = make(target, EagleConfig())
    served = ServedHeads(SimpleNamespace(), heads, 3, VLLM)
    answer = OwnDecoder(target, served, [PROMPT], 12, True).answer(PROMPT.ids, True)
    bench = Bench(target, build_drafter(heads, Tree.chain(3)), BenchmarkConfig(max_new_tokens=12), len(PROMPT.ids))
    done = bench.heads(PROMPT.ids, TorchCoin(torch.Generator()))
    assert answer.tokens == done.tokens
    assert answer.counters.drafts == len(done.cycles)
