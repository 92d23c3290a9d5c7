import os
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import mlp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from twinboot import Estimate, Twins, files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "estimate.safetensors"
    Twins(mlp()).estimate().save(path)
    return path


def test_the_header_names_the_format_its_version_and_the_groups(saved: Path) -> None:
    with safe_open(saved, "pt") as file:
        header = file.metadata()
        assert set(file.keys()) == {
            "sigma",
            *(f"module.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")),
        }
    assert header["format"] == "twinboot.estimate"
    assert header["version"] == "1"
    assert '"groups": {"0": [], "2": []}' in header["partition"]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_files_get_a_sentence(saved: Path, share: float) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(
        ValueError, match=r"estimate.safetensors' is damaged or no safetensors file .* save the estimate"
    ):
        Estimate.load(saved, mlp())


def test_a_file_that_is_something_else_gets_a_sentence(saved: Path) -> None:
    save_file({"a": torch.zeros(2)}, saved)
    with pytest.raises(ValueError, match="is a safetensors file, but holds no twinboot estimate"):
        Estimate.load(saved, mlp())
    torch.save({"a": 1}, saved)
    with pytest.raises(ValueError, match="is damaged or no safetensors file"):
        Estimate.load(saved, mlp())
    with pytest.raises(FileNotFoundError, match="there is no estimate at"):
        Estimate.load(saved.with_name("nowhere"), mlp())


def test_a_file_of_a_newer_version_gets_a_sentence(saved: Path) -> None:
    with safe_open(saved, "pt") as file:
        header = {**file.metadata(), "version": "7"}
    save_file(load_file(saved), saved, metadata=header)
    with pytest.raises(ValueError, match="has format version 7; this twinboot reads 1"):
        Estimate.load(saved, mlp())


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (mlp(hidden=9), r"is of another model: '0.weight' is of shape \(8, 4\) in the file and of shape \(9, 4\)"),
        (nn.Sequential(nn.Linear(4, 8)), r"'2.bias' is of shape \(3,\) in the file and missing in the model given"),
        (nn.Sequential(*mlp(), nn.Linear(3, 3)), r"'3.weight' is missing in the file"),
    ],
)
def test_a_model_that_does_not_fit_gets_a_sentence(saved: Path, model: nn.Module, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Estimate.load(saved, model)


@pytest.mark.parametrize(("field", "value"), [("aliases", None), ("aliases", "{"), ("partition", None)])
def test_a_damaged_header_gets_a_sentence(saved: Path, field: str, value: str | None) -> None:
    with safe_open(saved, "pt") as file:
        header = {key: text for key, text in file.metadata().items() if key != field}
    save_file(load_file(saved), saved, metadata=header if value is None else {**header, field: value})
    with pytest.raises(ValueError, match="is damaged or no safetensors file"):
        Estimate.load(saved, mlp())


def test_weights_tied_in_the_file_must_be_tied_in_the_model_and_the_reverse(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            if tied:
                self.b.weight = self.a.weight

    for tied, where in [(True, "in the file, but not in the model"), (False, "in the model, but not in the file")]:
        Twins(Pair(tied)).estimate().save(tmp_path / "pair.safetensors")
        with pytest.raises(ValueError, match=f"'b.weight' is tied to another weight {where}"):
            Estimate.load(tmp_path / "pair.safetensors", Pair(not tied))


def test_saving_into_a_folder_that_is_not_there_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere' to save the estimate in"):
        Twins(mlp()).estimate().save(tmp_path / "nowhere" / "e.safetensors")


def test_a_failed_save_leaves_the_old_file_and_no_other(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def fail(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half of")
        raise OSError("No space left on device")

    monkeypatch.setattr(files, "save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        Twins(mlp(seed=1)).estimate().save(saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_state_that_is_no_tensor_gets_a_sentence(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(
        TypeError, match="the model's state holds '_extra_state' of type dict; only tensors can be saved"
    ):
        Twins(Odd(2, 2)).estimate().save(tmp_path / "e.safetensors")
