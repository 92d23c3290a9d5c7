import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import assert_same_bits, mlp, seeded, snapshot
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import TensorDataset

from twinboot import Blocks, Bootstrap, Estimate, PairedLoader, Twins
from twinboot._core import tensors
from twinboot.groups import KINDS, Partition, assign, fixed_entries


class Field(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(shape))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight


def sizes(model: nn.Module, groups: Any) -> dict[str, list[int]]:
    partition = Partition.of(model, groups)
    return {name: part.flatten().tolist() for name, part in partition.by_group(partition.sizes).items()}


def test_layer_is_weight_and_bias_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))
    assert sizes(model, "layer") == {"0": [16], "2.0": [10]}


def test_tensor_is_each_parameter() -> None:
    assert sizes(nn.Linear(3, 4), "tensor") == {"weight": [12], "bias": [4]}


def test_parameters_of_the_model_itself_have_a_group_of_their_own() -> None:
    assert sizes(nn.Linear(3, 4), "layer") == {"(model)": [16]}


def test_unit_is_a_row_of_the_weight_and_its_bias() -> None:
    assert sizes(nn.Linear(3, 4), "unit") == {"(model)": [4] * 4}
    assert sizes(nn.Conv2d(3, 5, 2), "unit") == {"(model)": [13] * 5}
    assert sizes(nn.BatchNorm1d(6), "unit") == {"(model)": [2] * 6}


@pytest.mark.parametrize("channel_groups", [1, 2])
def test_unit_of_a_transposed_convolution_is_an_output_channel(channel_groups: int) -> None:
    model = nn.ConvTranspose2d(4, 6, 3, groups=channel_groups)
    assert sizes(model, "unit") == {"(model)": [4 // channel_groups * 9 + 1] * 6}
    # By what it does: only the output channel of a label may change when that label's weights do.
    labels = Partition.of(model, "unit").labels()["weight"].expand_as(model.weight)
    x = torch.randn(1, 4, 5, 5)
    before = model(x)
    with torch.no_grad():
        model.weight[labels == 4] += 1
    changed = (model(x) != before).any(dim=(0, 2, 3)).nonzero().flatten().tolist()
    assert changed == [4]


def test_parameters_with_another_number_of_units_have_their_own_group() -> None:
    attention = nn.MultiheadAttention(4, 2)
    assert sizes(attention, "unit") == {"(model)": [5] * 12, "out_proj": [5] * 4}

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.zeros(s)) for s in [(2, 3), (5,), ()])

    assert sizes(Odd(), "unit") == {"(model)": [3, 3], "(model)[5]": [1] * 5, "c": [1]}


@pytest.mark.parametrize("stacked", [False, True])
def test_with_groups_of_single_weights_sigma_squared_is_half_the_squared_difference(stacked: bool) -> None:
    """With one entry per sigma, line 10 of Algorithm 1 is sigma^2 = (w_1 - w_2)^2 / 2 for each entry."""
    assert sizes(nn.Linear(2, 3), "weight") == {"weight": [1] * 6, "bias": [1] * 3}
    twins = Twins(mlp(), groups="weight", stacked=stacked)
    with torch.no_grad():
        for i, p in enumerate(twins.parameters()):
            p += torch.randn(p.shape, generator=seeded(i))
    twins.update()
    for name, (first, second) in twins.weights().items():
        torch.testing.assert_close(twins.sigma[name].square(), (first - second).square() / 2)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrization_belongs_to_the_layer_that_carries_it(norm: Any) -> None:
    model = nn.Sequential(norm(nn.Conv2d(2, 3, 3)), nn.Flatten(), norm(nn.Linear(3, 2)))
    assert list(sizes(model, "layer")) == ["0", "2"]
    assert list(sizes(model, "unit")) == ["0", "2"]
    assert sum(sizes(model, "layer")["0"]) == sum(p.numel() for p in model[0].parameters())


def test_the_old_weight_norm_is_copied_and_grouped_too() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 1))
    model(torch.ones(2, 3)).sum().backward()
    twins = Twins(model)
    assert list(twins.sigma) == ["0", "2"]
    with twins.sampled():
        sum(y.sum() for y in twins(torch.ones(2, 3), torch.ones(2, 3))).backward()


def test_a_module_called_parametrizations_is_an_ordinary_module() -> None:
    model = nn.Module()
    model.parametrizations = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    assert list(sizes(nn.Sequential(model), "layer")) == ["0.parametrizations.0", "0.parametrizations.1"]


def test_tied_weights_count_once() -> None:
    assert sizes(Tied(), "layer") == {"embed": [35]}


def test_frozen_parameters_are_in_no_group() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert sizes(model, "tensor") == {"1.weight": [8], "1.bias": [2]}


def test_blocks_tile_the_last_dimensions_and_may_be_cut_at_the_edges() -> None:
    partition = Partition.of(Field(30, 30), Blocks((3, 3)))
    assert partition.by_group(partition.sizes)["v"].shape == (10, 10)
    assert (partition.sizes == 9).all()
    partition = Partition.of(Field(2, 5, 4), Blocks((2, 3)))
    assert partition.by_group(partition.sizes)["v"].tolist() == [[[6, 2], [6, 2], [3, 1]]] * 2
    labels = partition.labels()["v"]
    assert labels[0, 2, 1] == labels[0, 3, 2] != labels[0, 3, 3]
    assert sizes(Field(7), Blocks((3,))) == {"v": [3, 3, 1]}
    assert Blocks(tuple(np.array([2, 3]))) == Blocks((2, 3))


def test_a_users_function_may_name_groups_or_label_entries() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert sizes(model, lambda name, p: name.split(".")[1]) == {"weight": [20], "bias": [6]}

    def halves(name: str, p: Tensor) -> tuple[str, Tensor]:
        return "all", (torch.arange(p.shape[-1]) >= p.shape[-1] // 2).long()

    assert sizes(model, halves) == {"all": [4 * 1 + 2 + 2 * 2 + 1, 4 * 2 + 2 + 2 * 2 + 1]}


@pytest.mark.parametrize(
    ("answer", "error", "sentence"),
    [
        (3, TypeError, "groups must return a name, or a name and labels; for parameter 'weight' it returned 3"),
        (("a", torch.rand(2, 3)), TypeError, "labels of parameter 'weight' must be a tensor of integers"),
        (("a", torch.tensor(-1)), ValueError, "labels of parameter 'weight' must be 0 or more"),
        (("a", torch.zeros(4).long()), ValueError, r"shape \(4,\), which does not broadcast to its shape \(2, 3\)"),
        (("a", torch.tensor([0, 2, 2])), ValueError, "label 1 of group 'a' has no entries"),
        (("a", torch.arange(3), (2,)), ValueError, r"parameter 'weight' has label 2, beyond the shape \(2,\)"),
    ],
)
def test_a_bad_result_of_a_users_function_gets_one_sentence(answer: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        Partition.of(nn.Linear(3, 2, bias=False), lambda name, p: answer)


def test_a_group_has_labels_in_all_its_parameters_or_in_none() -> None:
    def mixed(name: str, p: Tensor) -> Any:
        return "a" if name == "bias" else ("a", torch.arange(3))

    with pytest.raises(ValueError, match=r"group 'a' has sigmas of shape \(3,\), but parameter 'bias' wants \(\)"):
        Partition.of(nn.Linear(3, 2), mixed)


def test_the_norms_of_a_weight_normed_transposed_convolution_have_their_own_group() -> None:
    model = parametrizations.weight_norm(nn.ConvTranspose2d(4, 4, 3))
    assert sizes(model, "unit") == {"(model)": [4 * 9 + 1] * 4, "parametrizations.weight.original0": [4]}


def test_groups_do_not_depend_on_the_default_device() -> None:
    loader = PairedLoader(TensorDataset(torch.zeros(20, 1)), Bootstrap(20), 5)
    with torch.device("meta"):
        assert sizes(nn.Linear(3, 4, device="cpu"), "unit") == {"(model)": [4] * 4}
        assert sizes(Field(3, 3).to_empty(device="cpu"), Blocks((2, 2))) == {"v": [4, 2, 2, 1]}
        assert len(Bootstrap(20).unseen) > 0
        assert len(list(loader.jobs())) == 4


@pytest.mark.parametrize(
    ("model", "groups", "error", "sentence"),
    [
        (
            nn.Linear(2, 2),
            "neuron",
            ValueError,
            'unknown groups \'neuron\': use "layer", "tensor", "unit", "weight", Blocks',
        ),
        (nn.ReLU(), "layer", ValueError, "the model has no trainable parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "layer", ValueError, "the model has no trainable parameters"),
        (nn.LazyLinear(2), "layer", ValueError, "run one batch through the lazy model first"),
        (nn.Linear(2, 2, dtype=torch.complex64), "layer", TypeError, "twins need real floating-point parameters"),
        (Field(0, 3), "layer", ValueError, "parameter 'v' has no entries"),
        (nn.Linear(2, 2), Blocks((2, 2)), ValueError, r"Blocks\(\(2, 2\)\) needs .* 'bias' has shape \(2,\)"),
    ],
)
def test_unusable_models_and_groups_are_refused_in_one_sentence(
    model: nn.Module, groups: Any, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        assign(model, groups)


def test_blocks_need_positive_whole_numbers() -> None:
    for bad in [(), (0, 3), (3, 1.5)]:
        with pytest.raises(ValueError, match=r"Blocks needs whole numbers of at least 1"):
            Blocks(bad)  # type: ignore[arg-type]


def test_padding_rows_and_pruned_entries_are_fixed() -> None:
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(5, 3, padding_idx=-4),
            "bag": nn.EmbeddingBag(4, 3, padding_idx=0),
            "plain": nn.Embedding(5, 3),
            "pruned": prune.l1_unstructured(nn.Linear(4, 2), "weight", 3),
            "both": prune.random_unstructured(nn.Embedding(6, 2, padding_idx=2), "weight", 4),
        }
    )
    found = fixed_entries(model)
    assert set(found) == {"words.weight", "bag.weight", "pruned.weight_orig", "both.weight_orig"}
    assert found["words.weight"].flatten().tolist() == [False, True, False, False, False]
    assert found["bag.weight"].flatten().tolist() == [True, False, False, False]
    assert torch.equal(found["pruned.weight_orig"], model["pruned"].weight_mask == 0)
    expected = model["both"].weight_mask == 0
    expected[2] = True
    assert torch.equal(found["both.weight_orig"], expected)


def test_a_padding_row_is_fixed_where_no_owner_of_the_weight_trains_it() -> None:
    words = nn.Embedding(4, 2, padding_idx=1)
    model = nn.ModuleDict({"words": words, "again": nn.ModuleList([words]), "other": nn.Embedding(4, 2, padding_idx=1)})
    model["other"].weight = words.weight  # type: ignore[union-attr, assignment]
    found = fixed_entries(model)
    assert {name: mask.flatten().tolist() for name, mask in found.items()} == {
        "words.weight": [False, True, False, False]
    }
    model["other"].padding_idx = 2  # type: ignore[union-attr, assignment]
    assert fixed_entries(model) == {}


def test_the_padding_row_of_a_tied_weight_is_trained_by_the_other_layer() -> None:
    model = Tied()
    model.embed.padding_idx = 0
    assert fixed_entries(model) == {}
    model.head(model.embed(torch.tensor([1, 2]))).sum().backward()
    assert bool(model.embed.weight.grad[0].any())


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


groupings = st.sampled_from([*KINDS, by_parity, blocks_where_possible])


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
    assert sum(part.numel() for part in partition.by_group(partition.sizes).values()) == len(partition.sizes)
    # A function for many calls reads the same, and follows sigma.
    expand = partition.expander(parameters)
    for _ in range(2):
        for own, expected in zip(expand(), partition.expand(parameters), strict=True):
            assert torch.equal(own, expected)
        partition.sigma.add_(1)
    # And the squares of each entry are summed where it reads its sigma.
    squares = torch.cat([p.flatten() for p in parameters]).double().square()
    expected = torch.zeros(len(partition.sizes), dtype=torch.float64).index_add_(0, owner, squares)
    torch.testing.assert_close(partition.sum_of_squares(parameters).double(), expected, rtol=1e-5, atol=0)


@settings(deadline=None)
@given(shapes, groupings)
def test_a_partition_is_restored_from_its_description(shapes: list[tuple[int, ...]], grouping: Any) -> None:
    partition = Partition.of(Bag(shapes, frozen=-1), grouping)
    again = Partition.restore(partition.describe(), partition.labels(), partition.sigma, partition.fixed())
    assert again.describe() == partition.describe()
    assert torch.equal(again.sizes, partition.sizes)


def test_squares_of_half_precision_are_summed_in_float32() -> None:
    model = nn.Linear(100, 100, bias=False)
    partition = Partition.of(model, "layer")
    deviations = [torch.full((100, 100), 0.01, dtype=torch.bfloat16)]
    exact = 10_000 * float(deviations[0][0, 0]) ** 2
    assert abs(float(partition.sum_of_squares(deviations)) / exact - 1) < 1e-5
    assert Partition.of(model.double(), "layer").sum_of_squares([torch.ones(100, 100)]).dtype == torch.float64


def test_each_parameter_gets_its_sigma_on_its_own_device() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    for grouping in KINDS:
        partition = Partition.of(model, grouping)
        like = [p.detach().to("meta") if i % 2 else p.detach() for i, p in enumerate(model.parameters())]
        assert [s.device for s in partition.expand(like)] == [p.device for p in like]


@pytest.mark.parametrize("groups", KINDS)
def test_sums_parameter_by_parameter_equal_the_sum_of_all_bit_for_bit(groups: str) -> None:
    partition = Partition.of(mlp(), groups)
    deviations = [torch.randn(s, generator=seeded(i)) for i, s in enumerate(partition.parameter_shapes.values())]
    total = torch.zeros_like(partition.sigma)
    for i, deviation in enumerate(deviations):
        partition.add_squares_(total, [i], [deviation], [deviation])
    assert_same_bits(total, partition.sum_of_squares(deviations))


def test_repr_shows_the_number_of_groups_and_the_range_of_sigma() -> None:
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
    """Sentences of the tokens 0 to 8, and a reset every four steps."""
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


@pytest.mark.parametrize("groups", [*KINDS, lambda name, p: "all"])
@pytest.mark.parametrize("mode", ["sample", "centered"])
@pytest.mark.parametrize("options", [{}, {"stacked": True}, {"replicas": 3}])
def test_entries_without_a_gradient_keep_their_values(groups: Any, mode: str, options: dict[str, Any]) -> None:
    model = Reader()
    twins = Twins(model, groups=groups, **options)
    trained(twins, mode)
    pruned = model.head.weight_mask == 0
    estimate = twins.estimate()
    for found in (estimate.module, estimate.sample(seed=1)):  # the padding row and pruned weights have no noise, either
        assert_same_bits(found.words.weight[0], model.words.weight[0])
        assert_same_bits(found.head.weight_orig[pruned], model.head.weight_orig[pruned])
    assert_same_bits(estimate.module.words.weight[9], model.words.weight[9])  # a token that is in no batch
    assert_same_bits(estimate.module.spare, model.spare)
    for name in ("words.weight", "head.weight_orig", "head.bias"):
        assert not torch.equal(estimate.module.get_parameter(name), model.get_parameter(name))


def test_the_padding_row_has_no_noise() -> None:
    model = Reader()
    twins = Twins(model)
    trained(twins)
    with twins.sampled(scale=10.0):
        for twin in twins:
            assert not twin.words.weight[0].any()
            assert bool((twin.words.weight[1:] != model.words.weight[1:]).any(1).all())


def test_sigma_averages_over_trained_entries_only() -> None:
    """With the pruned weights included, sigma would be sqrt(2) too small."""
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


def test_fixed_entries_of_weights_in_several_pieces_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "AT_ONCE", 8)
    for padding in (0, 5, 9):
        model = nn.Sequential(nn.Embedding(10, 4, padding_idx=padding))
        twins = Twins(model)
        twins.partition.sigma.fill_(1.0)
        twins.reset()  # before any update: the model alone says which entries are fixed
        for twin in twins:
            still = (twin[0].weight == model[0].weight).all(1)
            assert still.tolist() == [row == padding for row in range(10)]


def test_after_a_reset_to_the_mean_a_sampling_reset_moves_all_weights() -> None:
    """After a reset to the mean all copies agree, although all weights have gradients."""
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
