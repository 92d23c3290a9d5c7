import torch
from torch import nn

from twinboot.replicate import Places, mean, replicate


class Quantized(nn.Parameter):
    """A parameter that is more than its data."""


def test_copies_have_trainable_weights_of_their_own_and_one_set_of_frozen_ones() -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    model[0].bias = Quantized(torch.zeros(2), requires_grad=False)
    first, second = replicate(model, 2)
    assert first[0].weight is second[0].weight
    assert first[0].weight is not model[0].weight
    assert first[0].weight.data_ptr() == model[0].weight.data_ptr()
    assert first[0].bias is model[0].bias
    assert len({m[1].weight.data_ptr() for m in (first, second, model)}) == 3
    [alone] = replicate(model, share_frozen=False)
    assert alone[0].weight.data_ptr() != model[0].weight.data_ptr()


def test_places_follow_parameters_that_are_replaced() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    places = Places(model, ["0.weight"])
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
    assert places.read()[0] is model[0].weight


def test_the_mean_of_equal_tensors_is_exactly_their_value() -> None:
    t = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mean([t] * 3), t)
    half = [torch.tensor([1.0], dtype=torch.float16), torch.tensor([1.0009765625], dtype=torch.float16)]
    assert mean(half).item() == 1.00048828125  # between two neighbours of half precision
