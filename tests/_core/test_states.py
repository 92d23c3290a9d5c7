import pytest
import torch

from twinboot._core.states import pack, require_same, unpack


def test_unpack_inverts_pack() -> None:
    data = {"a": 1, "b": {"ß": [1, None, "x"]}}
    assert pack(data).dtype == torch.uint8
    assert unpack(pack(data)) == data


@pytest.mark.parametrize("damaged", [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1.5]), "text"])
def test_damaged_bytes_are_refused_in_one_sentence(damaged: object) -> None:
    with pytest.raises(ValueError, match="the checkpoint is damaged"):
        unpack(damaged)  # type: ignore[arg-type]


def test_the_first_difference_is_named() -> None:
    require_same({"a": 1, "more": 2}, {"a": 1}, "advice")
    with pytest.raises(ValueError, match="the checkpoint does not fit: a was 1 and is 2 here; do this"):
        require_same({"a": 1}, {"a": 2}, "do this")
    with pytest.raises(ValueError, match="'y' of the groups was 5 and is missing here; do this"):
        require_same({"groups": {"x": 1, "y": 5}}, {"groups": {"x": 1}}, "do this")
    with pytest.raises(ValueError, match="'y' of the groups was missing and is 5 here; do this"):
        require_same({"groups": {"x": 1}}, {"groups": {"x": 1, "y": 5}}, "do this")
    with pytest.raises(ValueError, match="it says nothing of 'b'"):
        require_same({"a": 1}, {"b": 1}, "do this")
