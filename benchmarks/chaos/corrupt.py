"""Damaged files: estimates and checkpoints, and a few runs of an experiment and logs.

A trial takes a file that the library wrote, damages it, and reads it back. It must load as exactly what was written,
bit for bit, or be refused in one sentence.
"""

from __future__ import annotations

import csv
import json
import random
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from twinboot import Blocks, Estimate, Protocol, Twins, fit
from twinboot.training.checkpoints import Checkpoints

from .contents import digest, files_in, told
from .trials import RAW, REFUSED, DiedError, Record, Trial, forked, verdict

KIND, TITLE, ROWS_ARE = "corrupt", "Damaged files", "file and damage"
ABOUT = """Half of them are estimates, half checkpoints of `fit`; one in fifty is a table or the `run.json` of an
experiment, or a log, which a resumed run writes anew. The damage is as often in the header, or in the directory of the
zip archive, as in the body. A file must load as what was written, bit for bit, or be refused."""
SAME, OTHER = "loads the same", "accepted as something else"
OUTCOMES = (REFUSED, SAME, OTHER, RAW)
SECONDS = 60.0


@dataclass(frozen=True)
class Sample:
    """Files that the library wrote, the one of them that is to be damaged, and how they are read."""

    kind: str
    files: dict[str, bytes]
    target: str
    edges: tuple[int, int]  # bytes at the start and at the end that say what the rest is
    load: Callable[[Path], Any]
    truth: str  # the digest of what is read if nothing is damaged


# What is written


class Tied(nn.Module):
    """An embedding whose weights are those of the output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.words(x))
        return found


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Parameter(torch.ones(9, 7, dtype=torch.float64))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Flatten(), nn.Linear(12, 3))


# Of each model: how it is made, the groups, and what of its estimate is not as usual.
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "layers": (layers, "layer", {"task": "regression"}),
    "units": (layers, "unit", {"temperature": 1.7, "scale": 0.5}),
    "tied": (Tied, "tensor", {}),
    "normed": (normed, "unit", {"dropout": True, "scale": 2.0}),
    "bfloat16": (lambda: layers().bfloat16(), "layer", {"task": "gaussian", "temperature": 0.3}),
    "blocks": (Field, Blocks((3, 3)), {"task": "regression"}),
}


@cache
def of_estimate(name: str) -> Sample:
    make, groups, changes = MODELS[name]
    torch.manual_seed(0)
    twins = Twins(make(), groups=groups)
    with torch.no_grad():
        for p in twins.parameters():
            p.add_(0.1 * torch.randn_like(p))
    twins.update()
    estimate = twins.estimate()
    for attribute, value in {"task": "classification", **changes}.items():
        setattr(estimate, attribute, value)

    def load(folder: Path) -> Any:
        return told(Estimate.load(folder / "estimate.safetensors", make()))

    with tempfile.TemporaryDirectory() as folder:
        estimate.save(Path(folder) / "estimate.safetensors")
        content, header = _in_order((Path(folder) / "estimate.safetensors").read_bytes())
    files = {"estimate.safetensors": content}
    return Sample("estimate", files, "estimate.safetensors", (header, 0), load, digest(told(estimate)))


def _in_order(content: bytes) -> tuple[bytes, int]:
    """A safetensors file with the entries of its header in one order, and how long that is: the library that writes it
    takes another order each time, and a trial that is repeated needs the same bytes."""
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    entries["__metadata__"] = dict(sorted(entries["__metadata__"].items()))
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[8 + size :], 8 + len(header)


def training(name: str, folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    x, y = torch.randn(24, 2, 5), torch.arange(24) % 3
    model = normed() if name == "normed" else nn.Sequential(nn.Flatten(), nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 3))
    if name == "normed":
        options |= {"optimizer": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "protocol": Protocol(groups="unit")}
        options |= {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)}
    return fit(model, TensorDataset(x, y), epochs=2, batch_size=8, checkpoint=folder, progress=False, **options)


def read_checkpoint(folder: Path) -> Any:
    return Checkpoints(folder, 2).latest(torch.device("cpu"))


@cache
def of_checkpoint(name: str) -> Sample:
    with tempfile.TemporaryDirectory() as folder:
        training(name, Path(folder))
        files, truth = files_in(folder), digest(read_checkpoint(Path(folder)))
    return Sample("checkpoint", files, "epoch-2.pt", (1024, _directory(files["epoch-2.pt"])), read_checkpoint, truth)


def _directory(archive: bytes) -> int:
    """Bytes of the directory at the end of a zip archive."""
    end = archive.rindex(b"PK\5\6")
    return len(archive) - int.from_bytes(archive[end + 16 : end + 20], "little")


@cache
def of_log() -> Sample:
    """A log is never read: a run that goes on writes it anew."""

    def load(folder: Path) -> Any:
        training("layers", folder / "run", log=folder / "log.csv")
        with (folder / "log.csv").open(newline="") as file:
            return list(csv.reader(file))

    with tempfile.TemporaryDirectory() as folder:
        truth = digest(load(Path(folder)))
        files = files_in(folder)
    return Sample("log", files, "log.csv", (len(files["log.csv"]), 0), load, truth)


@cache
def of_run(target: str) -> Sample:
    """A run of an experiment: what it is and its tables."""
    from twinboot.experiments import gaussian
    from twinboot.experiments.runner import store

    def load(folder: Path) -> Any:
        found = store.load(folder, {"gaussian": gaussian})
        tables = {name: table.to_csv() for name, table in found.tables.items()}
        return [found.name, asdict(found.config), tables, found.about]

    config = gaussian.Config(points=20, epochs=1, batch=10, sizes=(5, 9), seeds=2, replicas=(), constant=9, falling=2)
    with tempfile.TemporaryDirectory() as folder:
        store.carry_out("gaussian", gaussian, config, Path(folder))
        files, truth = files_in(folder), digest(load(Path(folder)))
    return Sample("run", files, target, (len(files[target]), 0), load, truth)


# What is done to it


def _start(draw: random.Random, size: int, edges: tuple[int, int]) -> int:
    """A place: in what says how to read the rest as often as in that."""
    head, tail = min(edges[0], size), min(edges[1], size)
    if draw.random() < 0.5 and head + tail < size:
        return draw.randrange(head, size - tail)
    place = draw.randrange(max(head + tail, 1))
    return place if place < head else size - tail + place - head


def _with(content: bytes, start: int, new: bytes, length: int | None = None) -> bytes:
    """New bytes in the place of as many others, or of so many."""
    return content[:start] + new + content[start + (len(new) if length is None else length) :]


def _some(draw: random.Random) -> int:
    return draw.choice((1, 2, 4, 8, draw.randint(1, 64), draw.randint(64, 1024)))


Damage = Callable[[bytes, int, random.Random], bytes]  # of the content, the place, and what is drawn
DAMAGES: dict[str, Damage] = {
    "a bit flipped": lambda c, i, draw: _with(c, i, bytes([c[i] ^ 1 << draw.randrange(8)])),
    "a byte overwritten": lambda c, i, draw: _with(c, i, draw.randbytes(1)),
    "bytes zeroed": lambda c, i, draw: _with(c, i, bytes(min(_some(draw), len(c) - i))),
    "bytes randomized": lambda c, i, draw: _with(c, i, draw.randbytes(min(_some(draw), len(c) - i))),
    "truncated": lambda c, i, draw: c[:i],
    "bytes inserted": lambda c, i, draw: _with(c, i, draw.randbytes(_some(draw)), 0),
    "bytes deleted": lambda c, i, draw: _with(c, i, b"", _some(draw)),
    "blocks swapped": lambda c, i, draw: _swapped(c, i, draw),
    "garbage appended": lambda c, i, draw: c + draw.randbytes(_some(draw)),
    "a part repeated": lambda c, i, draw: _with(c, i, c[i : i + _some(draw)], 0),
    "digits changed": lambda c, i, draw: _redrawn(c, i, draw),
    "emptied": lambda c, i, draw: b"",
}


def _swapped(content: bytes, first: int, draw: random.Random) -> bytes:
    second, size = draw.randrange(len(content)), _some(draw)
    first, second = sorted((first, second))
    size = min(size, second - first, len(content) - second)
    one, other = content[first : first + size], content[second : second + size]
    return _with(_with(content, first, other), second, one)


def _redrawn(content: bytes, start: int, draw: random.Random) -> bytes:
    """The next digit is another one: what JSON or a table still takes for a number."""
    place = next((i for i in range(start, len(content)) if chr(content[i]).isdigit()), start)
    return _with(content, place, draw.choice("0123456789").encode())


def damaged(sample: Sample, draw: random.Random) -> tuple[str, bytes]:
    """A kind of damage, and the damaged content."""
    content = sample.files[sample.target]
    while True:
        name = draw.choices(list(DAMAGES), [1.0] * (len(DAMAGES) - 1) + [0.05])[0]
        found = DAMAGES[name](content, _start(draw, len(content), sample.edges), draw)
        if found != content:
            return name, found


# A trial

RUN_FILES = ("run.json", "run.json", "estimates.csv", "path.csv")


def sample_of(number: int) -> Sample:
    """Estimates and checkpoints in turn; one in fifty is a file of a run, or a log."""
    turn, place = divmod(number, 50)
    if place == 49:
        return of_log() if turn % 4 == 3 else of_run(RUN_FILES[turn % 4])
    if number % 2:
        return of_checkpoint(("layers", "normed")[number // 2 % 2])
    return of_estimate(list(MODELS)[number // 2 % len(MODELS)])


def prepare(numbers: Iterable[int]) -> None:
    for number in numbers:
        sample_of(number)


def run(trial: Trial) -> Record:
    [found] = run_all([trial])
    return found


def run_all(trials: list[Trial]) -> list[Record]:
    """In one child process, as a fork takes longer than to read a file; unless one of them ends that process."""
    cases = [(trial, sample := sample_of(trial.number), *damaged(sample, trial.random)) for trial in trials]
    try:
        found = forked(lambda: [read_back(sample, content) for _, sample, _, content in cases], SECONDS, limited=True)
    except DiedError as error:
        if len(trials) > 1:
            return [run(trial) for trial in trials]
        found = [(RAW, str(error))]
    return [_record(*case, *outcome) for case, outcome in zip(cases, found, strict=True)]


def _record(trial: Trial, sample: Sample, name: str, content: bytes, outcome: str, said: str) -> Record:
    where = f"{sample.target}, first at byte {first_difference(content, sample.files[sample.target])}"
    what = f"{sample.kind}: {name}" if sample.kind in ("estimate", "checkpoint") else f"{sample.kind}: any"
    return trial.record(what, outcome, f"{name} in {where} -> {said}", bad=outcome in (OTHER, RAW))


def first_difference(one: bytes, other: bytes) -> int:
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def read_back(sample: Sample, content: bytes) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, whole in sample.files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content if file == sample.target else whole)
        try:
            found = sample.load(folder)
        except BaseException as error:
            outcome, said = verdict(error)
            return outcome, said.replace(name, "")
        same = digest(found) == sample.truth
        return (SAME, "") if same else (OTHER, "")
