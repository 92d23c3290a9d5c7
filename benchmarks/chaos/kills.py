"""Processes that are killed at a random instant, and started again.

A trial starts a run in a child process, kills it without warning at a moment of its expected duration, and starts it
again; a quarter of them is killed twice. What the run leaves in the end must equal what an uninterrupted run leaves,
bit for bit, and nothing half written may be left beside it.
"""

from __future__ import annotations

import csv
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, Estimate, Protocol, fit, resets

from .contents import digest, estimate, files_in, half_written, network, told
from .trials import DiedError, Record, Trial, forked, start, stop

KIND, TITLE, ROWS_ARE = "kill", "Kills at random instants", "what was killed"
ABOUT = """A child process is killed by SIGKILL at a random moment of its expected duration and started again; a quarter
of them is killed twice. The columns say when the first kill came. In the end the estimate, the history without the
seconds, and the tables must equal those of an uninterrupted run bit for bit, and no partial file may be left. After a
kill of `estimate.save` the file must be the old or the new one."""
BEFORE, DURING, BETWEEN, AFTER = "before a file was written", "while one was", "between two", "after the end"
DIFFERENT = "not the same in the end"
OUTCOMES = (BEFORE, DURING, BETWEEN, AFTER, DIFFERENT)
SECONDS = 120.0  # for a run that takes half of one
WIDTH = 700  # of the network whose estimate is saved: a file of some 4 MB
SEEDS = 3

Work = Callable[[Path, int], Any]  # a run in a folder with a seed, from the start or from where it was left
SAMPLES, EPOCHS = 48, 5


def training(folder: Path, seed: int, **options: Any) -> Any:
    """A small run of `fit`, and all that it leaves: the estimate, and the history but for the time."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0)
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 8), *options.pop("between", ()), nn.ReLU(), nn.Linear(8, options.pop("outputs", 3))]
    target = x[:, :2] if options.get("loss") == "gaussian" else y
    common: dict[str, Any] = {
        "epochs": EPOCHS,
        "batch_size": 16,
        "seed": seed,
        "checkpoint": folder / "run",
        "progress": False,
    }
    found = fit(nn.Sequential(*layers), TensorDataset(x, target), **common | options)
    history = {name: values for name, values in found.history.items() if name != "seconds"}
    return {"estimate": digest(told(found.estimate)), "history": history, "best": found.best_epoch}


def logged(folder: Path, seed: int) -> Any:
    found = training(folder, seed, log=folder / "log.csv")
    with (folder / "log.csv").open(newline="") as file:
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]
    return [found, rows]


def options(**given: Any) -> Work:
    return lambda folder, seed: training(folder, seed, **given)


def normed(folder: Path, seed: int) -> Any:
    return training(folder, seed, between=(nn.BatchNorm1d(8), nn.Dropout(0.3)), protocol=Protocol(groups="unit"))


def split(folder: Path, seed: int) -> Any:
    return training(folder, seed, bootstrap=Bootstrap(SAMPLES, kind="split", seed=seed))


def covered(folder: Path, seed: int) -> Any:
    return training(folder, seed, bootstrap=Bootstrap(SAMPLES, 3, seed=seed, cover=True))


def overwritten(folder: Path, seed: int) -> Any:
    """Two estimates, files of some megabytes, take each other's place; the newer one is the last."""
    for newer in (True, False, True, False, True):
        estimate(WIDTH, 100 * newer + seed).save(folder / "estimate.safetensors")
    return saved(folder)


def saved(folder: Path) -> str:
    return digest(told(Estimate.load(folder / "estimate.safetensors", network(WIDTH))))


def experiment(folder: Path, seed: int) -> Any:
    from twinboot.experiments import gaussian
    from twinboot.experiments.runner import store

    sizes = {"points": 100, "epochs": 10, "batch": 50, "sizes": (50, 100, 200), "seeds": 20, "replicas": (10,)}
    config = gaussian.Config(seed=seed, constant=30, falling=60, **sizes)  # type: ignore[arg-type]
    store.carry_out("gaussian", gaussian, config, folder / "run")
    about = json.loads((folder / "run" / "run.json").read_text())
    return [about["config"], {path.name: path.read_text() for path in sorted((folder / "run").glob("*.csv"))}]


FITS: dict[str, Work] = {
    "fit, counts": options(),
    "fit, draws": options(protocol=Protocol(resample="draws")),
    "fit, BatchNorm and dropout": normed,
    "fit, a scheduler and momentum": options(
        optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        scheduler=lambda o: CosineAnnealingLR(o, EPOCHS),
        protocol=Protocol(mode="centered"),
    ),
    "fit, a rate that falls on a plateau": options(scheduler=lambda o: ReduceLROnPlateau(o, patience=0)),
    "fit, pooled gradients": options(protocol=Protocol(pooled=0.7, noise=2.0)),
    "fit, patience": options(patience=2, optimizer=lambda p: torch.optim.Adam(p, 0.1)),
    "fit, a split": split,
    "fit, three twins that see all": covered,
    "fit, a variance, resets by steps": options(
        loss="gaussian",
        outputs=4,
        protocol=Protocol(reset=resets.steps(resets.growing(2, 1.5)), average=math.inf),
    ),
    "fit, a log": logged,
}
SAVE, EXPERIMENT = "estimate.save over an older file", "an experiment"
WORKS = {**FITS, SAVE: overwritten, EXPERIMENT: experiment}


def name_of(number: int) -> str:
    """One in twenty is an experiment, one in ten an estimate that is saved, the rest are trainings."""
    return EXPERIMENT if number % 20 == 19 else SAVE if number % 10 == 4 else list(FITS)[number % len(FITS)]


def begin(name: str, folder: Path, seed: int) -> None:
    """What is there before."""
    if name == SAVE:
        estimate(WIDTH, seed).save(folder / "estimate.safetensors")


@cache
def whole(name: str, seed: int) -> tuple[Any, float]:
    """What an uninterrupted run leaves, and how long it takes: in a child, as the others."""
    with tempfile.TemporaryDirectory() as folder:
        begin(name, Path(folder), seed)
        began = time.monotonic()
        found = forked(lambda: WORKS[name](Path(folder), seed), SECONDS)
        return found, time.monotonic() - began


@cache
def duration(name: str) -> float:
    """Of the fastest of some runs: others had to wait."""
    return min(whole(name, seed)[1] for seed in range(SEEDS))


def prepare(numbers: Iterable[int]) -> None:
    """Once, in the process that all runs are forks of, whatever they need to import or to have at hand."""
    names = {name_of(number) for number in numbers}
    with tempfile.TemporaryDirectory() as folder:
        training(Path(folder), 0)
        if EXPERIMENT in names:
            experiment(Path(folder), 0)
    for seed in range(SEEDS if SAVE in names else 0):
        estimate(WIDTH, seed), estimate(WIDTH, 100 + seed)


def run(trial: Trial) -> Record:
    name, draw = name_of(trial.number), trial.random
    seed = draw.randrange(SEEDS)
    expected, most = whole(name, seed)[0], 1.02 * duration(name)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        begin(name, folder, seed)
        old = files_in(folder)
        phases = [killed(name, folder, seed, draw.uniform(0, most), old)]
        if draw.random() < 0.25:
            phases.append(killed(name, folder, seed, draw.uniform(0, most), old))
        note = f"seed {seed}, killed {', then '.join(phases)}"
        try:
            if name == SAVE and saved(folder) not in (digest(told(estimate(WIDTH, seed))), expected):
                return trial.record(name, DIFFERENT, f"{note}: the file was neither the old nor the new one", bad=True)
            found = forked(lambda: WORKS[name](folder, seed), SECONDS)
        except (DiedError, RuntimeError, ValueError, OSError) as error:
            return trial.record(name, DIFFERENT, f"{note}: {error}", bad=True)
        left = half_written(folder)
    if found != expected:
        return trial.record(name, DIFFERENT, f"{note}: {differences(found, expected)}", bad=True)
    if left:
        return trial.record(name, DIFFERENT, f"{note}: {left} was left", bad=True)
    return trial.record(name, phases[0], note)


def killed(name: str, folder: Path, seed: int, after: float, old: dict[str, bytes]) -> str:
    """Start a run and kill it after so many seconds; when that was."""
    child = start(lambda: WORKS[name](folder, seed))
    time.sleep(after)
    if stop(child) >= 0:
        return AFTER
    if half_written(folder):
        return DURING
    return BEFORE if files_in(folder) == old else BETWEEN


def differences(found: Any, expected: Any) -> str:
    one, other = (json.dumps(value, indent=1).splitlines() for value in (found, expected))
    lines = [f"{a.strip()} instead of {b.strip()}" for a, b in zip(one, other, strict=False) if a != b]
    return "; ".join(lines[:3]) or f"{len(one)} lines instead of {len(other)}"
