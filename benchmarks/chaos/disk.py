"""A disk that is full: writes that fail half-way, at a random place.

A trial makes room for a few bytes only, at some moment of a run, by a limit on the size of files or by a small file
system of its own that is filled up. The run must then be refused in one sentence, with what was there before as it was
and nothing half written beside it. Once there is room again, the same run must end as if nothing had happened.
"""

from __future__ import annotations

import csv
import ctypes
import json
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from twinboot import Estimate

from .contents import digest, estimate, files_in, half_written, network, told
from .kills import EPOCHS, training
from .trials import RAW, REFUSED, DiedError, Record, Trial, forked, verdict

KIND, TITLE, ROWS_ARE = "disk", "Full disks", "what was written, and what ended it"
ABOUT = """Writes fail at a random byte. What was there before must be as it was, nothing half written may be left, and
once there is room again the same call must end as if nothing had happened."""
ROOM, SKIPPED, HALF, LOST, DIFFERENT = (
    "had room enough",
    "not tried: no mount here",
    "left half a file",
    "changed what was there",
    "not the same in the end",
)
OUTCOMES = (REFUSED, ROOM, SKIPPED, HALF, LOST, DIFFERENT, RAW)
EXPECTED = (REFUSED, ROOM, SKIPPED)
SECONDS = 120.0
WIDTH = 60  # of the network whose estimate is saved: a file of some 30 kB

Full = Callable[[], None]  # makes the disk full


def new_file(folder: Path, seed: int, turn: int, full: Full) -> Any:
    full()
    estimate(WIDTH, 1).save(folder / "estimate.safetensors")
    return digest(told(Estimate.load(folder / "estimate.safetensors", network(WIDTH))))


def old_file(folder: Path, seed: int, turn: int, full: Full) -> Any:
    if not (folder / "estimate.safetensors").exists():
        estimate(WIDTH, 0).save(folder / "estimate.safetensors")
    return new_file(folder, seed, turn, full)


def at(turn: int, full: Full) -> Callable[..., None]:
    """A callback of `fit` after which there is no room."""
    return lambda epoch, *_: full() if epoch == 1 + turn % EPOCHS else None


def checkpoints(folder: Path, seed: int, turn: int, full: Full) -> Any:
    return training(folder, seed, callback=at(turn, full))


def log(folder: Path, seed: int, turn: int, full: Full) -> Any:
    training(folder, seed, checkpoint=None, callback=at(turn, full), log=folder / "log.csv")
    with (folder / "log.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


# What is written, and the most bytes that a file of it has.
WORKS: dict[str, tuple[Callable[[Path, int, int, Full], Any], int]] = {
    "estimate.save, a new file": (new_file, 33_000),
    "estimate.save over an older file": (old_file, 33_000),
    "fit, checkpoints": (checkpoints, 16_000),
    "fit, a log": (log, 600),
}
LIMITED, FILLED = "a limit on the size of files", "a file system that is full"
SIZE = 2**20  # bytes of that


@cache
def whole(name: str, seed: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return forked(lambda: WORKS[name][0](Path(folder), seed, 0, lambda: None), SECONDS)


def prepare(numbers: Iterable[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        training(Path(folder), 0)  # PyTorch imports much at the first step of an optimizer


def run(trial: Trial) -> Record:
    draw = trial.random
    turn, place = divmod(trial.number, len(WORKS))
    name, means = list(WORKS)[place], (LIMITED, FILLED)[turn % 2]
    seed, room = draw.randrange(3), int(draw.random() * WORKS[name][1])
    expected = whole(name, seed)
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcome, said = forked(lambda: attempt(name, Path(folder), seed, turn // 2, means, room, expected), SECONDS)
    except DiedError as error:
        outcome, said = RAW, str(error)
    note = f"room for {room} bytes by {means}, seed {seed} -> {said}"
    return trial.record(f"{name}; {means}", outcome, note, bad=outcome not in EXPECTED)


def attempt(name: str, folder: Path, seed: int, turn: int, means: str, room: int, expected: Any) -> tuple[str, str]:
    if means == FILLED and not mounted(folder):
        return SKIPPED, ""
    before: dict[str, bytes] = {}
    filler, limit = folder / "filler", resource.getrlimit(resource.RLIMIT_FSIZE)

    def full() -> None:
        before.update(files_in(folder))
        if means == LIMITED:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit[1]))
        else:
            disk = os.statvfs(folder)
            filler.write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - room)))

    def work(full: Full) -> Any:
        return json.loads(json.dumps(WORKS[name][0](folder, seed, turn, full)))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # else to write beyond the limit would end the process
    try:
        outcome, said = (ROOM if work(full) == expected else DIFFERENT), ""
    except BaseException as error:
        outcome, said = verdict(error)
        said = said.replace(str(folder), "")
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    filler.unlink(missing_ok=True)
    if outcome != REFUSED:
        return outcome, said
    if left := half_written(folder):
        return HALF, f"{left}; {said}"
    if lost := _lost(before, files_in(folder)):
        return LOST, f"{lost}; {said}"
    return REFUSED if work(lambda: None) == expected else DIFFERENT, said


def _lost(before: dict[str, bytes], after: dict[str, bytes]) -> str:
    """What was there and is not as it was. A log may grow by whole rows, and checkpoints give way to newer ones."""
    for file, content in before.items():
        there = after.get(file)
        grown = file == "log.csv" and there is not None and there.startswith(content) and there.endswith(b"\n")
        newer = there is None and any(f != file and Path(f).suffix == Path(file).suffix for f in after)
        if there != content and not grown and not newer:
            return file
    return ""


def mounted(folder: Path) -> bool:
    """Give this process, and no other, a small file system in the folder; it is gone with the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user, private = 0x20000, 0x10000000, 1 << 18 | 1 << 14
    if libc.unshare(new_mounts | (0 if os.getuid() == 0 else new_user)):
        return False
    libc.mount(b"none", b"/", None, private, None)  # what is mounted here stays here
    return not libc.mount(b"none", bytes(folder), b"tmpfs", 0, f"size={SIZE}".encode())
