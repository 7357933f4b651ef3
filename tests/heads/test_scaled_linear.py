"""Linear layers trained on channels brought to one size."""

import torch
import torch.nn.functional as F

from heads.scaled_linear import ScaledLinear


def started(scale_of_inputs=(1000.0, 1.0, 0.07)):
    torch.manual_seed(0)
    layer, weight = ScaledLinear(3, 4), torch.randn(4, 3)
    layer.start(weight, torch.tensor(scale_of_inputs))
    return layer, weight


def test_it_is_the_linear_map_that_it_was_started_as():
    layer, weight = started()
    inputs = torch.randn(5, 3)
    assert torch.equal(layer.unscaled, weight)
    torch.testing.assert_close(layer(inputs), F.linear(inputs, weight))
    assert layer.scale.tolist() == [1024.0, 1.0, 0.0625]


def test_a_state_holds_the_map_and_survives_the_round_trip_exactly():
    layer, weight = started()
    state = layer.state_dict()
    assert torch.equal(state["weight"], weight)
    other = ScaledLinear(3, 4)
    other.load_state_dict(state)
    assert torch.equal(other.weight, layer.weight)
    assert torch.equal(other.scale, layer.scale)


def test_a_step_of_adam_moves_the_output_alike_through_every_channel():
    layer, weight = started()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, weight_decay=0.0)
    inputs = torch.tensor([[1000.0, 1.0, 0.07]])
    layer(inputs).sum().backward()
    optimizer.step()
    moved = ((layer.unscaled - weight) * inputs).abs()
    assert moved.max() < 1.2 * moved.min()


def test_zero_and_huge_channels_stay_finite():
    layer, weight = started((0.0, 1e30, 1.0))
    assert layer.scale.isfinite().all()
    assert torch.equal(layer.unscaled, weight)
