import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import TensorDataset

from twinboot import Blocks, Bootstrap, PairedLoader, Twins
from twinboot.groups import assign, fixed_entries
from twinboot.partition import Partition


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
    return {name: part.flatten().tolist() for name, part in partition.named(partition.sizes).items()}


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


def test_units_that_do_not_match_are_kept_apart() -> None:
    attention = nn.MultiheadAttention(4, 2)
    assert sizes(attention, "unit") == {"(model)": [5] * 12, "out_proj": [5] * 4}

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.zeros(s)) for s in [(2, 3), (5,), ()])

    assert sizes(Odd(), "unit") == {"(model)": [3, 3], "(model)[5]": [1] * 5, "c": [1]}


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_layer_is_the_module_that_was_written_whatever_parametrization_it_carries(norm: Any) -> None:
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
    assert partition.named(partition.sizes)["v"].shape == (10, 10)
    assert (partition.sizes == 9).all()
    partition = Partition.of(Field(2, 5, 4), Blocks((2, 3)))
    assert partition.named(partition.sizes)["v"].tolist() == [[[6, 2], [6, 2], [3, 1]]] * 2
    labels = partition.labels()["v"]
    assert labels[0, 2, 1] == labels[0, 3, 2] != labels[0, 3, 3]
    assert sizes(Field(7), Blocks((3,))) == {"v": [3, 3, 1]}


def test_a_users_function_may_name_groups_or_label_entries() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert sizes(model, lambda name, p: name.split(".")[1]) == {"weight": [20], "bias": [6]}

    def halves(name: str, p: Tensor) -> tuple[str, Tensor]:
        return "all", (torch.arange(p.shape[-1]) >= p.shape[-1] // 2).long()

    assert sizes(model, halves) == {"all": [4 * 1 + 2 + 2 * 2 + 1, 4 * 2 + 2 + 2 * 2 + 1]}


@pytest.mark.parametrize(
    ("answer", "error", "sentence"),
    [
        (3, TypeError, "groups must give a name, or a name and labels; for parameter 'weight' it gave 3"),
        (("a", torch.rand(2, 3)), TypeError, "labels of parameter 'weight' must be a tensor of integers"),
        (("a", torch.tensor(-1)), ValueError, "labels of parameter 'weight' must be 0 or more"),
        (("a", torch.zeros(4).long()), ValueError, r"shape \(4,\), which does not broadcast to its shape \(2, 3\)"),
        (("a", torch.tensor([0, 2, 2])), ValueError, "label 1 of group 'a' has no entries"),
        (("a", torch.arange(3), (2,)), ValueError, r"parameter 'weight' has label 2, beyond the shape \(2,\)"),
    ],
)
def test_a_bad_answer_of_a_users_function_gets_a_sentence(answer: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        Partition.of(nn.Linear(3, 2, bias=False), lambda name, p: answer)


def test_a_group_has_labels_in_all_its_parameters_or_in_none() -> None:
    def mixed(name: str, p: Tensor) -> Any:
        return "a" if name == "bias" else ("a", torch.arange(3))

    with pytest.raises(ValueError, match=r"group 'a' has sigmas of shape \(3,\), but parameter 'bias' wants \(\)"):
        Partition.of(nn.Linear(3, 2), mixed)


def test_the_norms_of_a_weight_normed_transposed_convolution_belong_to_no_output() -> None:
    model = parametrizations.weight_norm(nn.ConvTranspose2d(4, 4, 3))
    assert sizes(model, "unit") == {"(model)": [4 * 9 + 1] * 4, "parametrizations.weight.original0": [4]}


def test_groups_are_the_same_under_another_default_device() -> None:
    loader = PairedLoader(TensorDataset(torch.zeros(20, 1)), Bootstrap(20), 5)
    with torch.device("meta"):
        assert sizes(nn.Linear(3, 4, device="cpu"), "unit") == {"(model)": [4] * 4}
        assert sizes(Field(3, 3).to_empty(device="cpu"), Blocks((2, 2))) == {"v": [4, 2, 2, 1]}
        assert len(Bootstrap(20).unseen) > 0
        assert len(list(loader.jobs())) == 4


@pytest.mark.parametrize(
    ("model", "groups", "error", "sentence"),
    [
        (nn.Linear(2, 2), "neuron", ValueError, 'unknown groups \'neuron\': use "layer", "tensor", "unit"'),
        (nn.ReLU(), "layer", ValueError, "the model has no trainable parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "layer", ValueError, "the model has no trainable parameters"),
        (nn.LazyLinear(2), "layer", ValueError, "run one batch through the lazy model first"),
        (nn.Linear(2, 2, dtype=torch.complex64), "layer", TypeError, "twins need real floating-point parameters"),
        (Field(0, 3), "layer", ValueError, "parameter 'v' has no entries"),
        (nn.Linear(2, 2), Blocks((2, 2)), ValueError, r"Blocks\(\(2, 2\)\) needs .* 'bias' has shape \(2,\)"),
    ],
)
def test_models_and_groups_that_cannot_be_get_a_sentence(
    model: nn.Module, groups: Any, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        assign(model, groups)


def test_blocks_of_no_size_are_refused() -> None:
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


def test_the_padding_row_of_a_tied_weight_is_trained_by_the_other_layer() -> None:
    model = Tied()
    model.embed.padding_idx = 0
    assert fixed_entries(model) == {}
    model.head(model.embed(torch.tensor([1, 2]))).sum().backward()
    assert bool(model.embed.weight.grad[0].any())
