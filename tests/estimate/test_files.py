import errno
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import assert_same_bits, classes, mlp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from twinboot import Estimate, Twins
from twinboot.estimate import files


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
    assert header["version"] == "2"
    assert '"groups": {"0": [], "2": []}' in header["partition"]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_files_get_a_sentence(saved: Path, share: float) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(
        ValueError, match=r"estimate.safetensors' is damaged \(no safetensors file: .*\): save the estimate again"
    ):
        Estimate.load(saved, mlp())


def test_a_file_that_is_something_else_gets_a_sentence(saved: Path) -> None:
    save_file({"a": torch.zeros(2)}, saved)
    with pytest.raises(ValueError, match="is a safetensors file, but has no twinboot estimate"):
        Estimate.load(saved, mlp())
    torch.save({"a": 1}, saved)
    with pytest.raises(ValueError, match="is damaged "):
        Estimate.load(saved, mlp())
    with pytest.raises(FileNotFoundError, match="there is no estimate at"):
        Estimate.load(saved.with_name("nowhere"), mlp())


def test_a_file_of_a_newer_version_gets_a_sentence(saved: Path) -> None:
    with safe_open(saved, "pt") as file:
        header = {**file.metadata(), "version": "7"}
    save_file(load_file(saved), saved, metadata=header)
    with pytest.raises(ValueError, match="has format version 7; this twinboot reads 2"):
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


def rewritten(saved: Path, sign: bool, tensors: dict[str, Any], header: dict[str, str | None]) -> None:
    """Change some of the file, with the old digest or with a matching one."""
    with safe_open(saved, "pt") as file:
        kept = {key: text for key, text in (file.metadata() | header).items() if text is not None}
    content = load_file(saved) | tensors
    if sign:
        kept["digest"] = files._digest({k: v for k, v in kept.items() if k != "digest"}, content)
    save_file(content, saved, metadata=kept)


SCORES = {"calibration": '{"temperature": 1, "scale": 1, "scores": {"noise": null, "settings": {}}}'}


@pytest.mark.parametrize("sign", [False, True])
@pytest.mark.parametrize(
    ("tensors", "header"),
    [
        ({}, {"aliases": None}),
        ({}, {"aliases": "{"}),
        ({}, {"aliases": '{"a": "nowhere"}'}),
        ({}, {"aliases": "[" * 10_000}),
        ({}, {"partition": None}),
        ({}, {"partition": "[]"}),
        ({}, {"partition": '{"groups": {"0": []}, "parameters": {"0.weight": [8, 4]}, "owners": [9]}'}),
        ({}, {"calibration": '{"temperature": 0, "scale": 1}'}),
        ({}, {"calibration": '{"temperature": 1, "scale": NaN}'}),
        ({}, {"calibration": '{"temperature": 1, "scale": 1, "task": "guess"}'}),
        ({}, {"calibration": '{"temperature": 1, "scale": 1, "dropout": 0.5}'}),
        ({}, {"calibration": '{"temperature": 1, "scale": 1, "df_per_weight": 0}'}),
        ({}, {"calibration": '{"temperature": 1, "scale": 1, "scores": {"noise": null, "settings": {}}}'}),
        ({"scores": torch.tensor([2.0, 1.0])}, SCORES),
        ({"scores": torch.tensor([1.0, float("inf")])}, SCORES),
        ({"scores": torch.tensor([-1.0, 1.0])}, SCORES),
        ({"scores": torch.tensor([1, 2])}, SCORES),
        ({"scores": torch.empty(0)}, SCORES),
        ({"scores": torch.ones(2)}, {"calibration": SCORES["calibration"].replace("null", "-1")}),
        ({"scores": torch.ones(2)}, {"calibration": SCORES["calibration"].replace("{}", "0")}),
        ({"sigma": torch.tensor([0.1, float("nan")])}, {}),
        ({"sigma": torch.tensor([0.1, -0.1])}, {}),
        ({"sigma": torch.tensor([0.1])}, {}),
        ({"sigma": torch.tensor([1, 1])}, {}),
    ],
)
def test_what_no_training_leaves_gets_a_sentence(saved: Path, sign: bool, tensors: Any, header: Any) -> None:
    rewritten(saved, sign, tensors, header)
    with pytest.raises(ValueError, match=r"^'.*' is damaged \(.*\): save the estimate again\.$"):
        Estimate.load(saved, mlp())


def test_each_flipped_bit_is_noticed_or_changes_nothing(saved: Path) -> None:
    whole, first = saved.read_bytes(), Estimate.load(saved, mlp()).state_dict()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        saved.write_bytes(damaged)
        try:
            loaded = Estimate.load(saved, mlp())
        except ValueError as error:
            said = str(error)
        else:
            assert_same_bits(loaded.state_dict(), first)
            said = "'e' is damaged."
        assert re.fullmatch(r"'.*' (is damaged|has format version|is a safetensors file).*\.", said)


def test_sigma_that_is_no_number_is_not_saved(tmp_path: Path) -> None:
    estimate = Twins(mlp()).estimate()
    estimate.partition.sigma[0] = float("nan")
    with pytest.raises(ValueError, match="sigma must be finite and at least 0"):
        estimate.save(tmp_path / "e.safetensors")
    assert not list(tmp_path.iterdir())


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

    def fail(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:50])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match=r"^can't write '.*': No space left on device; an old file is unchanged\.$"):
        Twins(mlp(seed=1)).estimate().save(saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_a_disk_that_takes_no_more_is_named_and_the_old_file_stays(saved: Path) -> None:
    resource = pytest.importorskip("resource", reason="Windows has no such limits")
    before = saved.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"^can't write '.*': File too large; an old file is unchanged\.$"):
            Twins(mlp(seed=1)).estimate().save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="only Linux has a file that not even root can read")
def test_a_file_that_cannot_be_read_is_not_said_to_be_missing() -> None:
    with pytest.raises(OSError, match=r"^can't read '/proc/self/mem': Input/output error\.$"):
        Estimate.load("/proc/self/mem", mlp())


def test_state_that_is_no_tensor_gets_a_sentence(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(TypeError, match="only tensors can be saved, but '_extra_state' of the state dict is a dict"):
        Twins(Odd(2, 2)).estimate().save(tmp_path / "e.safetensors")


def test_a_lazy_model_without_shapes_gets_a_sentence(saved: Path) -> None:
    with pytest.raises(
        ValueError, match=r"parameter '0.weight' has no shape yet: run one batch through the lazy model"
    ):
        Estimate.load(saved, nn.Sequential(nn.LazyLinear(3)))


def test_degrees_of_freedom_and_scores_are_kept_and_files_without_them_have_none(saved: Path) -> None:
    assert Estimate.load(saved, mlp()).df_per_weight == 1
    estimate = Twins(mlp(), replicas=4).estimate()
    estimate.task = "classification"
    estimate.conformalize(classes(30), samples=0)
    estimate.save(saved)
    loaded = Estimate.load(saved, mlp())
    assert loaded.df_per_weight == 3
    assert loaded.scores is not None
    assert estimate.scores is not None
    assert_same_bits(loaded.scores.values, estimate.scores.values)
    x = torch.randn(5, 4)
    assert torch.equal(loaded.predict(x, 0).set(0.8), estimate.predict(x, 0).set(0.8))
    rewritten(saved, True, {}, {"calibration": '{"temperature": 1, "scale": 1}'})
    old = Estimate.load(saved, mlp())
    assert (old.df_per_weight, old.scores) == (None, None)
    assert torch.equal(old.df["0"], torch.tensor(float("inf")))
