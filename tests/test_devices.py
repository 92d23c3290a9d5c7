import pytest
import torch

from twinboot.devices import moved, usable


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
