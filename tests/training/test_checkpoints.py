"""States on disk: the last few, whole, and read without unpickling."""

import errno
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loops import assert_same_bits

from twinboot.training import checkpoints
from twinboot.training.checkpoints import Checkpoints

CPU = torch.device("cpu")


def test_the_last_few_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path / "made" / "here", keep=2)
    assert saved.latest(CPU) is None
    for epoch in (8, 9, 10):
        saved.save(epoch, {"weights": torch.full((3,), float(epoch)), "history": {"loss": [0.5] * epoch}})
    assert sorted(p.name for p in saved.directory.iterdir()) == ["epoch-10.pt", "epoch-9.pt"]
    newest = saved.latest(CPU)
    assert newest is not None
    assert newest["epoch"] == 10
    assert_same_bits(newest["weights"], torch.full((3,), 10.0))


def test_a_flipped_bit_in_the_weights_is_noticed(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path, keep=1)
    saved.save(1, {"weights": torch.arange(1000.0)})
    path = tmp_path / "epoch-1.pt"
    content = bytearray(path.read_bytes())
    place = content.find(torch.arange(1000.0).numpy().tobytes()[400:440])
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"epoch-1.pt is damaged, or no .* fit: delete it, and the run begins anew"):
        saved.latest(CPU)
    (tmp_path / "epoch-2.pt").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"epoch-2.pt is damaged, .*: delete it, and the run goes on from the one before"
    ):
        saved.latest(CPU)


def test_a_good_file_that_cannot_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Checkpoints(tmp_path, keep=1)
    saved.save(1, {})

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(OSError, match=r"can't read .*epoch-1.pt: Permission denied"):
        saved.latest(CPU)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(1)}, tmp_path / "epoch-3.pt")
    with pytest.raises(ValueError, match="no checkpoint of this version of fit"):
        Checkpoints(tmp_path, keep=1).latest(CPU)
    # 2 had "rate" in its history, where there is "lr" now.
    for state in (
        {"format": 1, "epoch": 3},
        {"format": 2, "epoch": 3},
        {"format": checkpoints.FORMAT, "epoch": 2},
        [1, 2],
    ):
        checkpoints.write(state, tmp_path / "epoch-3.pt")  # with a right digest
        with pytest.raises(ValueError, match="no checkpoint of this version of fit: use another directory"):
            Checkpoints(tmp_path, keep=1).latest(CPU)


def test_a_healthy_file_that_cannot_be_loaded_is_not_called_damaged(tmp_path: Path) -> None:
    checkpoints.write({"weights": torch.zeros(3)}, tmp_path / "state.pt")
    missing = "mps" if torch.cuda.is_available() else "cuda"
    with pytest.raises(OSError, match=r"^can't load .*state.pt: [^\n]*\.$"):
        checkpoints.read(tmp_path / "state.pt", torch.device(missing))


def test_pytorch_reads_a_checkpoint_as_any_other_file(tmp_path: Path) -> None:
    checkpoints.write({"weights": torch.arange(5.0)}, tmp_path / "state.pt")
    assert_same_bits(torch.load(tmp_path / "state.pt")["weights"], torch.arange(5.0))
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        assert archive.testzip() is None


def test_each_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Those of the archive's own records, too: a bit of a record's attributes makes a reader skip its checksum."""
    path = tmp_path / "epoch-1.pt"
    Checkpoints(tmp_path, keep=1).save(1, {"weights": torch.arange(4.0)})
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(checkpoints.DamagedError):
            checkpoints.read(path, CPU)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(checkpoints.DamagedError):
            checkpoints.read(path, CPU)


@pytest.mark.parametrize("directory", ["", 5, None, b"run"])
def test_a_directory_that_is_none_gets_a_sentence(directory: object) -> None:
    with pytest.raises(ValueError, match=r"checkpoint must be the path of a directory, such as 'run', not"):
        Checkpoints(directory, keep=1)  # type: ignore[arg-type]


def test_a_place_that_cannot_be_a_directory_and_none_to_keep(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="can't write checkpoints to"):
        Checkpoints(tmp_path / "file", keep=1)
    with pytest.raises(ValueError, match="at least one checkpoint must be kept"):
        Checkpoints(tmp_path, keep=0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_called_one_by_whatever_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def to_a_full_device(path: Path) -> Iterator[Path]:
        yield Path("/dev/full")

    monkeypatch.setattr(checkpoints, "replacing", to_a_full_device)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(OSError, match=rf"can't write .*epoch-1.pt: {os.strerror(errno.ENOSPC)}; the checkpoint before"):
        Checkpoints(tmp_path, keep=1).save(1, {"weights": torch.zeros(10_000)})


def test_what_stops_the_writer_is_said_without_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(state: object, path: Path) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", stops)
    with pytest.raises(OSError, match=r"epoch-1.pt: PyTorch could not write all of it; the checkpoint before it"):
        Checkpoints(tmp_path, keep=1).save(1, {})
    monkeypatch.setattr(torch, "save", lambda state, path: torch.zeros(1, device="meta").item())
    with pytest.raises(OSError, match=r"epoch-1.pt: Tensor.item\(\) cannot be called on meta tensors; the checkpoint"):
        Checkpoints(tmp_path, keep=1).save(1, {})


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path, keep=1)
    saved.save(1, {})
    (tmp_path / ".epoch-2.pt.4711.partial").write_bytes(b"half of it")
    assert saved.latest(CPU) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-1.pt"]
