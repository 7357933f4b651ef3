import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eval.accept import Accepted, Proposal, accept_greedy, accept_sampling, accept_typical
from eval.sampling import SamplingConfig, TorchCoin, probabilities
from eval.tree import Tree

DRAWN = Tree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]])  # drawn in eval/tree.py
TREES = [
    Tree.chain(0),
    Tree.chain(1),
    Tree.chain(4),
    DRAWN,
    Tree.from_choices([[1], [3], [3, 2], [3, 2, 0], [1, 0], [1, 1]]),
]


def random_coin() -> TorchCoin:
    return TorchCoin(torch.Generator().manual_seed(0))


def peaked(*tokens: int, vocabulary: int = 6) -> Tensor:
    """Logits [N, V] whose argmax at node n is tokens[n]."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocabulary).float()


def greedy_walk(tree: Tree, tokens: list[int], choices: list[int]) -> list[int]:
    path, node = [], 0
    while matching := [child for child in tree.children[node] if tokens[child] == choices[node]]:
        node = matching[0]
        path.append(node)
    return path


@pytest.mark.parametrize(
    ("choices", "path", "emitted"),
    [
        ((5, 0, 0, 0, 0, 0), [], [5]),
        ((1, 5, 0, 0, 0, 0), [1], [1, 5]),
        ((1, 3, 0, 5, 0, 0), [1, 3], [1, 3, 5]),
        ((1, 4, 0, 0, 5, 0), [1, 4], [1, 4, 5]),
        ((2, 0, 3, 0, 0, 5), [2, 5], [2, 3, 5]),
        ((5, 3, 3, 0, 0, 0), [], [5]),  # nodes 3 and 5 match their parents, but the parents do not
    ],
)
def test_greedy_follows_the_argmax_down_the_drawn_tree(choices: tuple, path: list[int], emitted: list[int]):
    tokens_N = torch.tensor([0, 1, 2, 3, 4, 3])

    accepted = accept_greedy(DRAWN, tokens_N, peaked(*choices))

    assert accepted.to_host(tokens_N) == (path, emitted)
    assert accepted.path_D.tolist() == path + [-1] * (2 - len(path))


def siblings_apart(tree: Tree, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Random tokens_N, different among siblings."""
    tokens_N = torch.zeros(tree.size, dtype=torch.long)
    for children in tree.children:
        tokens_N[list(children)] = torch.randperm(vocabulary, generator=generator)[: len(children)]
    return tokens_N


def show(tree: Tree) -> str:
    return str(tree.choices())


@pytest.mark.parametrize("tree", TREES, ids=show)
def test_greedy_equals_a_walk_over_the_nodes(tree: Tree):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits_NV = torch.rand(tree.size, 3, generator=generator)
        tokens_N = siblings_apart(tree, 3, generator)
        path, emitted = accept_greedy(tree, tokens_N, logits_NV).to_host(tokens_N)

        choices = logits_NV.argmax(-1).tolist()
        assert path == greedy_walk(tree, tokens_N.tolist(), choices)
        assert emitted == [choices[node] for node in [0, *path]]


def test_padding_is_never_accepted():
    # Node 1 is a leaf whose argmax is token 0, the token a careless padding would hold; the last node says 5.
    tree = Tree.from_choices([[0], [1], [1, 0]])
    tokens_N = torch.tensor([0, 1, 2, 0])

    assert accept_greedy(tree, tokens_N, peaked(1, 0, 0, 5)).to_host(tokens_N) == ([1], [1, 0])


@pytest.mark.parametrize("tree", TREES, ids=show)
def test_at_temperature_zero_every_rule_is_greedy(tree: Tree):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits_NV = torch.rand(tree.size, 3, generator=generator)
        tokens_N = siblings_apart(tree, 3, generator)
        probs_NV = probabilities(logits_NV, SamplingConfig(0.0))
        greedy = accept_greedy(tree, tokens_N, logits_NV).to_host(tokens_N)

        for accepted in (
            accept_typical(tree, tokens_N, logits_NV, temperature=0.0),
            accept_typical(tree, tokens_N, logits_NV, temperature=0.0, coin=random_coin()),
            accept_sampling(tree, tokens_N, probs_NV, None, random_coin()),
            accept_sampling(tree, tokens_N, probs_NV, Proposal(torch.full_like(probs_NV, 1 / 3), False), random_coin()),
        ):
            assert accepted.to_host(tokens_N) == greedy


def typical_walk(tree: Tree, tokens: list[int], probs_NV: Tensor, epsilon: float, delta: float) -> list[int]:
    """The rule of Medusa's paper, node by node."""
    candidates = []
    for n in range(tree.size):
        path = [node for node in tree.paths_NP[n].tolist() if node >= 0]
        score, stands = 0.0, True
        for parent, node in itertools.pairwise(path):
            p_V = probs_NV[parent]
            entropy = -(p_V[p_V > 0] * p_V[p_V > 0].log()).sum()
            stands = stands and bool(p_V[tokens[node]] > min(epsilon, delta * torch.exp(-entropy)))
            score += p_V[tokens[node]].log().item()
        if stands:
            candidates.append((len(path), score, path[1:]))
    return max(candidates)[2]


@pytest.mark.parametrize("tree", TREES, ids=show)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_typical_equals_the_rule_node_by_node(tree: Tree, temperature: float):
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for _ in range(50):
        logits_NV = 2 * torch.randn(tree.size, 20, generator=generator, dtype=torch.float64)
        tokens_N = siblings_apart(tree, 20, generator)
        path, emitted = accept_typical(tree, tokens_N, logits_NV, temperature).to_host(tokens_N)

        probs_NV = (logits_NV / temperature).softmax(-1)
        assert path == typical_walk(tree, tokens_N.tolist(), probs_NV, epsilon=0.09, delta=0.3)
        assert emitted[-1] == logits_NV[path[-1] if path else 0].argmax()
        lengths.add(len(path))
    assert len(lengths) > 1 or tree.depth == 0


def test_typical_breaks_ties_by_the_likelihood_of_the_path():
    tree = Tree.from_choices([[0], [1], [0, 0], [1, 0]])
    tokens_N = torch.tensor([0, 1, 2, 3, 3])
    probs_NV = torch.tensor([[0, 0.6, 0.4, 0], [0.6, 0, 0, 0.4], [0.1, 0, 0, 0.9], [1, 0, 0, 0], [1, 0, 0, 0]])
    # node 3: 0.6 * 0.4 = 0.24; node 4: 0.4 * 0.9 = 0.36

    assert accept_typical(tree, tokens_N, probs_NV.log(), temperature=1.0).to_host(tokens_N)[0] == [2, 4]


def test_typical_accepts_what_a_flat_target_would_not_choose():
    # Uniform over 50 tokens: the threshold is 0.3 / 50 = 0.006 and each has 0.02.
    logits_NV = torch.zeros(2, 50)

    assert accept_typical(Tree.chain(1), torch.tensor([0, 37]), logits_NV, 1.0).path_D.tolist() == [1]
    assert accept_typical(Tree.chain(1), torch.tensor([0, 37]), logits_NV, 1.0, delta=1.1).path_D.tolist() == [-1]


def test_typical_draws_the_next_token_when_given_a_coin():
    coin, logits_NV = random_coin(), torch.tensor([[0.5, 0.5]]).log()

    drawn = {int(accept_typical(Tree.chain(0), torch.tensor([0]), logits_NV, 1.0, coin=coin).token) for _ in range(50)}
    assert drawn == {0, 1}


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.3), (1.0, 0.3), (0.09, 0.0), (0.09, float("nan"))])
def test_typical_refuses_thresholds_that_accept_all_or_nothing(epsilon: float, delta: float):
    with pytest.raises(ValueError, match=r"Medusa uses 0.09 and 0.3"):
        accept_typical(Tree.chain(1), torch.tensor([0, 1]), torch.zeros(2, 3), 1.0, epsilon, delta)


class Rejecting(TorchCoin):
    """Rejects even what is certain, as rounding can."""

    def accept(self, probability: float) -> bool:
        return False


@pytest.mark.parametrize("replacement", [True, False])
def test_a_zero_residual_gives_no_nan(replacement: bool):
    tree = Tree.from_choices([[0], [1], [2]])
    probs_NV = torch.tensor([0.5, 0.5, 0.0]).expand(4, 3)
    coin = Rejecting(torch.Generator().manual_seed(0))

    for tokens in itertools.product(range(3), repeat=3):
        accepted = accept_sampling(tree, torch.tensor([0, *tokens]), probs_NV, Proposal(probs_NV, replacement), coin)
        assert accepted.path_D.tolist() == [-1]
        assert accepted.token in (0, 1)


@pytest.mark.parametrize(
    "rule",
    [
        accept_greedy,
        lambda tree, tokens_N, logits_NV: accept_typical(tree, tokens_N, logits_NV, 0.7),
        lambda tree, tokens_N, logits_NV: accept_sampling(tree, tokens_N, logits_NV.softmax(-1), None, MetaCoin()),
    ],
)
def test_rules_read_nothing_on_the_host(rule: Callable[[Tree, Tensor, Tensor], Accepted]):
    # A meta tensor has no values: whatever would wait for the device raises.
    tree = DRAWN.to("meta")
    accepted = rule(tree, torch.zeros(6, dtype=torch.long, device="meta"), torch.zeros(6, 9, device="meta"))

    assert accepted.path_D.shape == (2,)
    assert accepted.token.shape == ()


class MetaCoin(TorchCoin):
    """`TorchCoin.draw` on the meta device, which has no generators."""

    def __init__(self) -> None:
        super().__init__(torch.Generator())

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, device="meta")
