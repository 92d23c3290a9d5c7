"""A module that uses the weights of a copy computes what the copy would, and changes its buffers."""

import copy
import threading
from functools import partial
from typing import Any

import pytest
import torch
from loops import assert_same_bits, mlp, seeded
from torch import Tensor, nn

from twinboot.integrations.lightning.swapping import copy_attributes, merge_optimizers, use_weights, using_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outer.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


def models() -> list[nn.Module]:
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return [
        mlp(outputs=4),
        nn.LSTM(4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        normed,
        Tied(),
        nn.MultiheadAttention(4, 1),
    ]


@pytest.mark.parametrize("which", range(len(models())))
def test_a_module_with_the_weights_of_a_copy_computes_and_learns_as_the_copy(which: int) -> None:
    source = models()[which]
    module = copy.deepcopy(source)
    with torch.no_grad():
        for p in source.parameters():
            p.normal_(generator=seeded(3))
    alone = copy.deepcopy(source)
    x = torch.randn(6, 4, generator=seeded(4))
    inputs = (x, x, x) if isinstance(source, nn.MultiheadAttention) else (x,)

    def run(model: nn.Module) -> Any:
        output = model(*inputs)
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()
        return output

    with using_weights(module, source):
        assert_same_bits(run(module), run(alone))
    assert_same_bits([p.grad for p in source.parameters()], [p.grad for p in alone.parameters()])
    assert_same_bits(dict(source.state_dict()), dict(alone.state_dict()))  # BatchNorm's statistics, too
    assert {id(p) for p in module.parameters()} == {id(p) for p in source.parameters()}


def test_a_buffer_that_the_module_replaces_goes_back_to_the_copy() -> None:
    source = nn.Module()
    source.register_buffer("count", torch.tensor(1))
    module = copy.deepcopy(source)
    with using_weights(module, source):
        module.count = module.count + 1  # type: ignore[operator]
    assert source.count == 2
    with using_weights(module, copy.deepcopy(source)):
        module.count = module.count + 1
    assert source.count == 2


def test_merged_optimizers_train_all_weights_in_the_groups_of_the_first() -> None:
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    twins = [mlp(seed=seed) for seed in (1, 2, 3)]
    made: list[Any] = []
    for twin in twins:
        groups = [{"params": [*twin[0].parameters(), frozen], "lr": 0.5}, {"params": list(twin[2].parameters())}]
        optimizer = torch.optim.Adagrad(groups, lr=0.1)
        made.append({"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)})
    merge_optimizers(made)
    groups = made[0]["optimizer"].param_groups
    assert [len(group["params"]) for group in groups] == [7, 6]
    assert [group["lr"] for group in groups] == [0.5, 0.1]
    before = [p.detach().clone() for twin in twins for p in twin.parameters()]
    for twin in twins:
        twin(torch.ones(1, 4)).sum().backward()
    made[0]["optimizer"].step()
    made[0]["lr_scheduler"].step()
    assert [group["lr"] for group in groups] == [0.45, pytest.approx(0.09)]
    after = [p.detach() for twin in twins for p in twin.parameters()]
    assert all((a != b).any() for a, b in zip(before, after, strict=True))


def test_optimizers_of_named_parameters_keep_their_names() -> None:
    twins = [mlp(seed=seed) for seed in (1, 2)]
    made = [torch.optim.SGD(twin.named_parameters(), lr=0.1) for twin in twins]
    merge_optimizers(made)
    [group] = made[0].param_groups
    assert len(group["params"]) == len(group["param_names"]) == 8


def test_all_return_values_of_configure_optimizers_are_understood() -> None:
    for form in (
        lambda o: o,
        lambda o: [o],
        lambda o: ([o], []),
        lambda o: {"optimizer": o},
        lambda o: ({"optimizer": o},),
    ):
        twins = [mlp(seed=seed) for seed in (1, 2)]
        optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in twins]
        merge_optimizers([form(optimizer) for optimizer in optimizers])
        assert len(optimizers[0].param_groups[0]["params"]) == 8
    merge_optimizers([None, None])


def test_use_weights_is_permanent() -> None:
    source, module = mlp(seed=1), mlp(seed=2)
    use_weights(module, source)
    assert all(p is q for p, q in zip(module.parameters(), source.parameters(), strict=True))


class Helper:
    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner


class Holding(nn.Module):
    """It refers to its own parts in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.again = self.layer
        self.stack = [self.layer, nn.ReLU()]
        self.method = self.layer.forward
        self.half = partial(torch.mul, self.layer.weight)
        self.helper = Helper(self)


def test_copied_attributes_refer_to_the_parts_of_the_copy() -> None:
    module = Holding()
    other = copy.deepcopy(module)
    module.rate, module.seen = 3, [torch.ones(1)]
    copy_attributes(module, other)
    assert other.stack[0] is other.layer
    assert other.stack[1] is not module.stack[1]
    assert other.method.__self__ is other.layer
    assert other.half.args[0] is other.layer.weight
    assert other.helper.owner is other
    assert other.rate == 3
    other.seen[0] += 1  # type: ignore[operator, index]
    assert module.seen == [torch.ones(1)]


def test_attributes_that_cannot_be_copied_are_shared_or_copied_in_part() -> None:
    module = Holding()
    other = copy.deepcopy(module)
    module.late, module.lock, module.owner = nn.Dropout(), threading.Lock(), object()
    loss = module.layer(torch.ones(1, 2)).sum()
    module.mixed = [loss, module.lock, {"inner": [loss, module.layer]}]
    module.secret = "not for copies"
    copy_attributes(module, other, shared=[module.owner], skip=["secret"])
    assert isinstance(other.late, nn.Dropout)
    assert other.late is not module.late
    assert other.lock is module.lock
    assert other.owner is module.owner
    assert other.mixed[0].grad_fn is None  # type: ignore[index]
    assert other.mixed[2]["inner"][0] == loss  # type: ignore[index]
    assert other.mixed[2]["inner"][1] is other.layer  # type: ignore[index]
    assert not hasattr(other, "secret")
