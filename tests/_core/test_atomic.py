import errno
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from twinboot import Twins
from twinboot._core.atomic import replacing, sync
from twinboot.training import checkpoints


def test_the_file_is_the_old_one_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
        assert partial.parent == path.parent  # a rename across file systems would not be one step
        assert partial.name.startswith(".")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("old", [None, "old"])
def test_an_exception_leaves_what_was_there_and_nothing_else(tmp_path: Path, old: str | None) -> None:
    path = tmp_path / "a.txt"
    if old is not None:
        path.write_text(old)

    def fail() -> None:
        with replacing(path) as partial:
            partial.write_text("half of")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [file.read_text() for file in tmp_path.iterdir()] == ([] if old is None else [old])


def test_a_missing_folder_is_reported_by_the_write(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"), replacing(tmp_path / "nowhere" / "a.txt") as partial:
        partial.write_text("new")


@pytest.mark.skipif(sys.platform == "win32", reason="cannot ask there whether a process runs")
def test_what_a_killed_process_left_is_removed_by_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    process = multiprocessing.get_context("fork").Process(target=_killed_while_writing, args=(path,))
    process.start()
    process.join()
    [left] = tmp_path.iterdir()
    assert left.name.endswith(f".{process.pid}.partial")
    others = [".b.txt.host.1.partial", ".a.txt.another-host.1.partial", f"{left.name}x"]
    for name in others:  # of another file, another machine, and no process
        (tmp_path / name).write_text("theirs")
    with replacing(path) as partial:
        partial.write_text("new")
    assert sorted(os.listdir(tmp_path)) == sorted(["a.txt", *others])


@pytest.mark.skipif(sys.platform == "win32", reason="cannot ask there whether a process runs")
def test_what_a_running_process_writes_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with replacing(path) as outer:
        theirs = outer.with_name(outer.name.replace(f".{os.getpid()}.", f".{os.getppid()}."))
        theirs.write_text("half of it")
        outer.write_text("new")
    with replacing(path) as partial:
        partial.write_text("newer")
    assert theirs.read_text() == "half of it"


def _killed_while_writing(path: Path) -> None:
    with replacing(path) as partial:
        partial.write_text("half of it")
        os.kill(os.getpid(), signal.SIGKILL)


def test_estimates_and_checkpoints_are_on_the_disk_before_they_take_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.listdir(tmp_path)))
    Twins(nn.Linear(2, 2)).estimate().save(tmp_path / "e.safetensors")
    checkpoints.write({"a": torch.zeros(2)}, tmp_path / "state.pt")
    first, second = synced
    assert [name.endswith(".partial") for name in first] == [True]
    assert sorted(name.endswith(".partial") for name in second) == [False, True]


def test_a_file_system_that_cannot_sync_is_no_error_and_a_broken_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("new")

    def fails(number: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", lambda file: fails(errno.EINVAL))
    sync(tmp_path / "a.txt")
    monkeypatch.setattr(os, "fsync", lambda file: fails(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        sync(tmp_path / "a.txt")
