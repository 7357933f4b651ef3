import pytest
import torch
import torch.nn.functional as F

from heads.medusa import MedusaConfig, MedusaHeads


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_fresh_heads_are_exactly_the_target(lm_head, tiny_target):
    target = tiny_target()
    heads = MedusaHeads(MedusaConfig(lm_head=lm_head, num_layers=2), 32, 320, torch.arange(320))
    heads.bind(target).initialise()
    hidden = torch.randn(32)
    for logits_V in heads.draft_logits(hidden):
        torch.testing.assert_close(logits_V, target.logits(hidden))
    assert torch.equal(heads.states(hidden[None])[0, 0], hidden)


def test_the_stacked_product_is_a_loop_over_heads_and_distinct_layers(tiny_target, random_heads):
    heads = random_heads(tiny_target(), num_heads=3, num_layers=2)
    hidden_ND = torch.randn(5, 32)
    for k in range(3):
        state = hidden_ND
        for layer in range(2):
            state = state + F.silu(F.linear(state, heads.block_weight[layer, k], heads.block_bias[layer, k]))
        torch.testing.assert_close(heads.states(hidden_ND)[k], state)
    assert not torch.equal(heads.block_weight[0], heads.block_weight[1])


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_only_the_heads_get_gradients(lm_head, tiny_target, random_heads):
    target = tiny_target()
    heads = random_heads(target, num_heads=2, lm_head=lm_head, draft_ids=torch.arange(10, 200))
    ids = torch.randint(0, 256, (2, 12))
    places, documents = torch.arange(12).expand(2, 12), torch.zeros(2, 12, dtype=torch.long)
    features = target.features(ids, places, documents)
    loss, _ = heads(features, ids, torch.ones(2, 12).bool(), documents, places, torch.tensor([20, 18]))
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in heads.parameters())
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert {name for name, _ in heads.named_parameters()} == {"block_weight", "block_bias"} | (
        {"lm_head_weight"} if lm_head == "own" else set()
    )


def test_padding_and_company_do_not_change_the_loss(tiny_target, random_heads):
    """DAT-10: a row alone, padded to twice its length, and beside another row."""
    target = tiny_target()
    heads = random_heads(target, num_heads=2)
    row = torch.randint(0, 256, (1, 10), generator=torch.Generator().manual_seed(0))
    supervised = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0]]).bool()
    counts = torch.tensor([4, 3])

    def loss_of(ids, supervised, documents):
        places = torch.arange(ids.shape[1]).expand_as(ids) * (documents >= 0)
        return heads(target.features(ids, places, documents), ids, supervised, documents, places, counts)[0]

    alone = loss_of(row, supervised, torch.zeros_like(row))
    padded = loss_of(
        F.pad(row, (0, 10), value=258), F.pad(supervised, (0, 10)), F.pad(torch.zeros_like(row), (0, 10), value=-1)
    )
    torch.testing.assert_close(alone, padded)
    silent = loss_of(
        torch.cat([row, row.flip(1)]), torch.cat([supervised, supervised & False]), torch.zeros(2, 10).long()
    )
    torch.testing.assert_close(alone, silent)


def test_settings_are_checked(tiny_target):
    with pytest.raises(ValueError, match=r"heads\.num_heads=0 must be at least 1"):
        MedusaConfig(num_heads=0)
    with pytest.raises(ValueError, match=r"heads\.lm_head=tied must be one of own, shared"):
        MedusaConfig(lm_head="tied")
    with pytest.raises(ValueError, match="heads were made for hidden_size=16 but the target has 32"):
        MedusaHeads(MedusaConfig(), 16, 320, torch.arange(320)).bind(tiny_target())
