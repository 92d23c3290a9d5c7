"""What an epoch of each kind of training costs: one of each in turn, so that all meet the same load of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import pandas as pd
import torch
from torch.utils.data import TensorDataset

from ...resets import steps_and_epochs, usual
from ...training.epoch import Training
from ...training.optimizers import adam
from ...training.protocol import FIT, Protocol, complete
from ...training.selection import Average, Selection
from ..runner.experiment import Tick
from .recipes import DROPOUT, TWINS
from .rivals import variational
from .single import Single, Split, plain
from .task import Task

TURNS = 3
# Method -> the kind of its epochs.
KINDS = {"hold-out": "single", "single": "single", "dropout": "dropout", "dropout-seen": "dropout", "ivon": "ivon"}
KINDS |= {method: method for method in TWINS}


def kinds(methods: tuple[str, ...]) -> list[str]:
    """Of the epochs of some methods; those of a single model are the unit."""
    return list(dict.fromkeys(["single", *(KINDS[method] for method in methods)]))


def turns(task: Task, methods: tuple[str, ...], tick: Tick) -> pd.DataFrame:
    """Seconds of an epoch of each kind, in turns; the first turn, in which memory is found, does not count."""
    runs = {kind: _epoch(kind, task) for kind in kinds(methods)}
    found = []
    for turn in range(TURNS + 1):
        for kind, run in runs.items():
            seconds = run(turn + 1)
            if turn:
                found.append({"kind": kind, "turn": turn, "seconds": seconds})
            tick()
    return pd.DataFrame(found)


def ratios(table: pd.DataFrame) -> pd.DataFrame:
    """Kind -> the time of its epochs relative to those of a single model in the same turn: median, least, most."""
    wide = table.pivot(index="turn", columns="kind", values="seconds")
    relative = wide.div(wide["single"], axis=0)
    return pd.DataFrame({"median": relative.median(), "least": relative.min(), "most": relative.max()})


def _epoch(kind: str, task: Task) -> Callable[[int], float]:
    """A function that trains the epoch of a number, judges it where that kind of training does, and tells its time."""
    if kind not in TWINS:
        network = task.network(dropout=DROPOUT if kind == "dropout" else 0.0, seed=task.seed)
        make = variational(task) if kind == "ivon" else plain(task.rate)
        run = Single(network, Split(task.x, task.y), make, task.batch, task.seed)

        def alone(epoch: int) -> float:
            run.train(epoch)
            return run.curve["seconds"][-1]

        return alone

    recipe = TWINS[kind][1]
    data, bootstrap = TensorDataset(task.x, task.y), recipe.bootstrap(len(task.y), task.seed)
    network = task.network(dropout=recipe.dropout, seed=task.seed)
    protocol = Protocol(
        groups=recipe.groups, mode=recipe.mode, noise=recipe.noise, pooled=recipe.pooled, resample=recipe.resample
    )
    training = Training(
        network,
        data,
        "classification",
        protocol=complete(protocol, FIT, "fit"),
        batch_size=task.batch,
        bootstrap=bootstrap,
        seed=task.seed,
    )
    stepper = adam(training.twins.parameters(), task.rate)
    scaler = torch.amp.GradScaler(training.device.type, enabled=False)
    best = Selection(training, Average(FIT.average))
    by_step, by_epoch = steps_and_epochs(recipe.schedule(task) or usual(len(training.loader)))

    def together(epoch: int) -> float:
        began = time.perf_counter()
        best.look(epoch, training.epoch(epoch, stepper, scaler, by_step), task.rate, began)
        if by_epoch(epoch):
            training.twins.reset(recipe.mode)
        return time.perf_counter() - began

    return together
