from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import assert_same_bits, mlp, seeded, snapshot
from torch import Tensor, nn
from torch.nn.utils import prune

from twinboot import Blocks, Estimate, Twins
from twinboot._core import pieces
from twinboot.partition import Partition

shapes = st.lists(st.lists(st.integers(1, 5), max_size=4).map(tuple), min_size=1, max_size=4)


class Bag(nn.Module):
    """Parameters of any shapes, spread over submodules; some frozen."""

    def __init__(self, shapes: list[tuple[int, ...]], frozen: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for i, shape in enumerate(shapes):
            part = nn.Module()
            part.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i)), i != frozen)
            part.b = nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(i)))
            self.parts.append(part)


def by_parity(name: str, parameter: Tensor) -> tuple[str, Tensor] | str:
    if parameter.numel() < 2:
        return "single"
    return "parity", (torch.arange(parameter.numel()) % 2).view(parameter.shape)


def blocks_where_possible(name: str, parameter: Tensor) -> Any:
    return Blocks((2, 2))(name, parameter) if parameter.ndim >= 2 else name


groupings = st.sampled_from(["layer", "tensor", "unit", by_parity, blocks_where_possible])


@settings(deadline=None)
@given(shapes, st.integers(0, 4), groupings)
def test_every_entry_lies_in_exactly_one_group(shapes: list[tuple[int, ...]], frozen: int, grouping: Any) -> None:
    model = Bag(shapes, frozen)
    partition = Partition.of(model, grouping)
    parameters = [p.detach() for p in model.parameters() if p.requires_grad]
    # Give each sigma its own place as its value: then each entry reads the place that it belongs to.
    partition.sigma.copy_(torch.arange(len(partition.sizes)))
    read = zip(partition.expand(parameters), parameters, strict=True)
    owner = torch.cat([t.expand_as(p).flatten() for t, p in read]).long()
    assert len(owner) == sum(p.numel() for p in parameters)
    assert torch.equal(torch.bincount(owner, minlength=len(partition.sizes)), partition.sizes)
    assert sum(part.numel() for part in partition.named(partition.sizes).values()) == len(partition.sizes)
    # And the squares of each entry are summed where it reads its sigma.
    squares = torch.cat([p.flatten() for p in parameters]).double().square()
    expected = torch.zeros(len(partition.sizes), dtype=torch.float64).index_add_(0, owner, squares)
    torch.testing.assert_close(partition.sum_of_squares(parameters).double(), expected, rtol=1e-5, atol=0)


@settings(deadline=None)
@given(shapes, groupings)
def test_a_partition_survives_being_described(shapes: list[tuple[int, ...]], grouping: Any) -> None:
    partition = Partition.of(Bag(shapes, frozen=-1), grouping)
    again = Partition.restore(partition.describe(), partition.labels(), partition.sigma, partition.fixed())
    assert again.describe() == partition.describe()
    assert torch.equal(again.sizes, partition.sizes)


def test_sums_of_half_precision_are_taken_in_float32() -> None:
    model = nn.Linear(100, 100, bias=False)
    partition = Partition.of(model, "layer")
    deviations = [torch.full((100, 100), 0.01, dtype=torch.bfloat16)]
    exact = 10_000 * float(deviations[0][0, 0]) ** 2
    assert abs(float(partition.sum_of_squares(deviations)) / exact - 1) < 1e-5
    assert Partition.of(model.double(), "layer").sum_of_squares([torch.ones(100, 100)]).dtype == torch.float64


def test_each_parameter_gets_its_sigma_on_its_own_device() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    for grouping in ("layer", "unit"):
        partition = Partition.of(model, grouping)
        like = [p.detach().to("meta") if i % 2 else p.detach() for i, p in enumerate(model.parameters())]
        assert [s.device for s in partition.expand(like)] == [p.device for p in like]


@pytest.mark.parametrize("groups", ["layer", "unit"])
def test_parameters_one_after_another_add_up_to_the_sum_of_all_bit_for_bit(groups: str) -> None:
    partition = Partition.of(mlp(), groups)
    deviations = [torch.randn(s, generator=seeded(i)) for i, s in enumerate(partition.parameter_shapes.values())]
    total = torch.zeros_like(partition.sigma)
    for i, deviation in enumerate(deviations):
        partition.add_squares_(total, [i], [deviation], [deviation])
    assert_same_bits(total, partition.sum_of_squares(deviations))


def test_it_says_how_many_groups_there_are_and_sigma_once_it_is_known() -> None:
    partition = Partition.of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), "unit")
    assert repr(partition) == "Partition(groups=2)"
    partition.sigma.copy_(torch.linspace(0.25, 1, len(partition.sigma)))
    assert repr(partition) == "Partition(groups=2, sigma=0.25 to 1)"
    assert repr(partition.to("meta")) == "Partition(groups=2)"


class Reader(nn.Module):
    """Tokens 0 (padding) to 9 through an embedding and a layer, half of whose weights are pruned; `spare` is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, padding_idx=0)
        self.head = prune.l1_unstructured(nn.Linear(4, 3), "weight", 6)
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens).mean(1))


def trained(twins: Twins, mode: Any = "sample", steps: int = 40) -> None:
    """Sentences of the tokens 0 to 8, a reset after each four steps."""
    optimizer, generator = torch.optim.Adam(twins.parameters(), lr=0.05), seeded(0)
    for step in range(1, steps + 1):
        inputs = [torch.randint(0, 9, (16, 3), generator=generator) for _ in range(len(twins))]
        with twins.sampled():
            outputs = twins(*inputs)
            sum(nn.functional.cross_entropy(y, x.sum(1) % 3) for x, y in zip(inputs, outputs, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()
        if step % 4 == 0:
            twins.reset(mode)


@pytest.mark.parametrize("groups", ["layer", "tensor", "unit", lambda name, p: "all"])
@pytest.mark.parametrize("mode", ["sample", "centered"])
@pytest.mark.parametrize("options", [{}, {"stacked": True}, {"replicas": 3}])
def test_entries_without_a_gradient_do_not_walk(groups: Any, mode: str, options: dict[str, Any]) -> None:
    model = Reader()
    twins = Twins(model, groups=groups, **options)
    trained(twins, mode)
    pruned = model.head.weight_mask == 0
    estimate = twins.estimate()
    for found in (estimate.module, estimate.sample(seed=1)):  # the padding row and pruned weights have no noise, either
        assert_same_bits(found.words.weight[0], model.words.weight[0])
        assert_same_bits(found.head.weight_orig[pruned], model.head.weight_orig[pruned])
    assert_same_bits(estimate.module.words.weight[9], model.words.weight[9])  # a token that no batch has
    assert_same_bits(estimate.module.spare, model.spare)
    for name in ("words.weight", "head.weight_orig", "head.bias"):
        assert not torch.equal(estimate.module.get_parameter(name), model.get_parameter(name))


def test_inside_a_block_the_padding_row_is_what_it_is() -> None:
    model = Reader()
    twins = Twins(model)
    trained(twins)
    with twins.sampled(scale=10.0):
        for twin in twins:
            assert not twin.words.weight[0].any()
            assert bool((twin.words.weight[1:] != model.words.weight[1:]).any(1).all())


def test_sigma_counts_the_entries_that_are_trained() -> None:
    """For pruned weights, sigma is that of the others: with all entries counted it would be sqrt(2) too small."""
    twins = Twins(Reader(), groups="tensor")
    assert dict(zip(twins.sigma, twins.partition.sizes.tolist(), strict=True)) == {
        "spare": 5,
        "words.weight": 9 * 4,
        "head.weight_orig": 6,
        "head.bias": 3,
    }
    with torch.no_grad():
        for p in twins[1].parameters():
            p += 1.0
        for twin in twins:
            twin.words.weight[0] = 0.0
        twins[1].head.weight_orig -= (twins[1].head.weight_mask == 0).float()
    twins.update()
    for sigma in twins.sigma.values():  # ||1||^2 / (2 D)
        assert sigma.item() == pytest.approx(0.5**0.5)
    units = Twins(Reader(), groups="unit")  # where the padding row is a unit by itself
    units.update()
    assert not units.partition.sigma.any()


def test_fixed_entries_stay_in_pieces_of_large_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", 8)
    for padding in (0, 5, 9):
        model = nn.Sequential(nn.Embedding(10, 4, padding_idx=padding))
        twins = Twins(model)
        twins.partition.sigma.fill_(1.0)
        twins.reset()  # before any update: what is fixed is known by the model alone
        for twin in twins:
            still = (twin[0].weight == model[0].weight).all(1)
            assert still.tolist() == [row == padding for row in range(10)]


def test_a_reset_from_one_point_draws_around_it() -> None:
    """After a reset to the mean all copies agree, and that says nothing of their gradients."""
    twins = Twins(mlp())
    with torch.no_grad():
        for p in twins[1].parameters():
            p += 1.0
    twins.update()
    twins.reset("mean")
    state = snapshot(twins)
    twins.reset("sample")
    assert all(bool((a != b).all()) for a, b in zip(*(twin.parameters() for twin in twins), strict=True))
    again = Twins(mlp())
    again.load_state_dict(state)
    again.reset("sample")
    assert_same_bits(again.state_dict(), twins.state_dict())


def test_a_file_of_a_model_with_another_padding_row_is_refused(tmp_path: Any) -> None:
    Twins(nn.Sequential(nn.Embedding(4, 2, padding_idx=1))).estimate().save(tmp_path / "e.safetensors")
    Estimate.load(tmp_path / "e.safetensors", nn.Sequential(nn.Embedding(4, 2, padding_idx=1)))
    for other in (None, 2):
        with pytest.raises(ValueError, match=r"another padding row or other pruned entries in '0.weight'"):
            Estimate.load(tmp_path / "e.safetensors", nn.Sequential(nn.Embedding(4, 2, padding_idx=other)))
