import copy
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from loops import assert_same_bits
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure

from twinboot._core.batches import collate, copied, loader_of, moved, parted, usable


def test_options_that_a_dataloader_does_not_take_get_a_sentence() -> None:
    assert len(loader_of([1, 2, 3], batch_size=2)) == 2
    with pytest.raises(TypeError, match="num_workers must be a whole number, not 'x'"):
        loader_of([1], num_workers="x")
    with pytest.raises(ValueError, match=r"^the options of the DataLoader do not fit together: [^\n]*\.$"):
        loader_of([1], num_workers=-1)


def test_samples_that_cannot_be_collated_get_a_sentence() -> None:
    assert collate([1, 2]).tolist() == [1, 2]
    for odd in ([object(), object()], [torch.zeros(2), torch.zeros(3)], list(np.zeros(2, ">f4").reshape(2, 1))):
        with pytest.raises(TypeError, match=r"^the samples cannot be collated into a batch, give a collate_fn: .*\.$"):
            collate(odd)


def test_the_target_is_the_last_of_a_tuple_or_what_a_mapping_has_under_labels() -> None:
    x, z, y = torch.zeros(2), torch.ones(2), torch.arange(2)
    assert parted((x, y)) == ((x,), y)
    assert parted([x, z, y]) == ((x, z), y)
    for kind in (dict, UserDict):
        assert parted(kind({"x": x, "labels": y, "z": z})) == ({"x": x, "z": z}, y)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            torch.zeros(3),
            r"^samples must be tuples of an input and a target, such as those of TensorDataset\(X, Y\)\.$",
        ),
        ([torch.zeros(3)], "^samples must be tuples of an input and a target"),
        ({"x": torch.zeros(3)}, r'^samples that are mappings need their target under the key "labels"\.$'),
        (
            {"x": [torch.zeros(3)], "labels": torch.zeros(3)},
            "^batches have a list for 'x', not a tensor: give a collat",
        ),
    ],
)
def test_a_batch_without_a_target_or_with_lists_gets_a_sentence(batch: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        parted(batch)


def test_a_device_that_is_there_is_given_and_another_is_named_in_a_sentence() -> None:
    assert usable("cpu") == usable(torch.device("cpu")) == torch.device("cpu")
    missing = "mps" if torch.cuda.is_available() else "cuda"
    for name in ("cudaa", missing):
        with pytest.raises(ValueError, match=rf"^the device '{name}' can't be used: [^\n]*[^.]\.$"):
            usable(name)


def test_tensors_move_however_deep_they_lie_and_the_rest_stays() -> None:
    batch = ({"a": torch.zeros(2), "b": [torch.ones(1), "word"]}, (torch.zeros(3), 4))
    found = moved(batch, torch.device("meta"))
    assert found[0]["a"].device.type == found[0]["b"][0].device.type == found[1][0].device.type == "meta"
    assert found[0]["b"][1] == "word"
    assert found[1][1] == 4
    assert batch[0]["a"].device.type == "cpu"  # type: ignore[index, union-attr]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_copies_have_all_that_the_tensors_have_and_no_memory_in_common() -> None:
    batch = (
        {"a": torch.randn(2, 3), "b": [torch.tensor(1.0), "word"]},
        (torch.arange(3), 4, None),
        Pair(torch.zeros(4).expand(2, 4), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        torch.zeros(3, dtype=torch.bfloat16, requires_grad=True),
    )
    before = copy.deepcopy(batch)
    found = copied(batch, torch.device("cpu"))
    assert_same_bits(found, batch)
    assert tree_structure(found) == tree_structure(batch)
    assert found[2].second.is_contiguous(memory_format=torch.channels_last)
    assert not found[3].requires_grad
    for t in tree_leaves(found):
        if isinstance(t, Tensor):
            t.add_(1)
    assert_same_bits(batch, before)


def test_copies_are_on_the_device() -> None:
    batch: dict[str, Any] = {"a": torch.zeros(2), "b": (torch.tensor(1.0), "word")}
    found = copied(batch, torch.device("meta"))
    assert [t if isinstance(t, str) else t.device.type for t in tree_leaves(found)] == ["meta", "meta", "word"]
    assert batch["a"].device.type == "cpu"


def test_mappings_of_any_kind_are_looked_into() -> None:
    batch = (UserDict({"a": torch.zeros(2), "b": {"c": [torch.ones(1)]}}), 4)
    found = copied(batch, torch.device("cpu"))
    found[0]["a"].add_(1)
    found[0]["b"]["c"][0].add_(1)
    assert batch[0]["a"].tolist() == [0.0, 0.0]
    assert batch[0]["b"]["c"][0].tolist() == [1.0]
    assert moved(batch, torch.device("meta"))[0]["b"]["c"][0].device.type == "meta"


def test_a_tensor_without_values_gets_a_sentence() -> None:
    for change in (moved, copied):
        with pytest.raises(ValueError, match=r"a tensor is on the meta device, and has no values: load the data first"):
            change([torch.zeros(2, device="meta")], torch.device("cpu"))
