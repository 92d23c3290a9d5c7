"""The methods that are compared. To add one, write a function below with `@method` before it.

A method is a function of a problem, a directory for its files and a tick for each epoch. It returns what it trained,
with a row of the table for each way to predict: with the model as it is, or with a mean over draws.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from ... import Bootstrap
from ..._core import seeds
from ..._core.extras import how_to_install
from ..._core.seeds import own_randomness
from ...estimate import calibration
from ...training.protocol import FIT
from ..runner.experiment import Tick, UnavailableError
from . import twins
from .single import Predict, Problem, Single, Trained, by_one_model, logits_of

HELD_OUT = 0.135  # share of the images: e^-2, as many as two bootstrap samples leave out
# Epochs relative to those of a single model: the most that twins should cost, and about what those with counts cost.
MORE, AS_DEAR = 1.4, 1.6
AVERAGED = 0.75  # SWA averages the epochs after this share of them
WARM = 5  # epochs in which IVON's learning rate rises, in its authors' script for CIFAR-10
DROPOUT = 0.2  # after each max-pooling
NEEDS_IVON = f"the method ivon needs ivon-opt: {how_to_install('compare')}"


Train = Callable[[Problem, Path, Tick], Trained]  # the tick is called after each epoch


@dataclass(frozen=True)
class Method:
    train: Train
    epochs: Callable[[int], int]  # ticks in all, if a single model has this many epochs
    kind: str  # the method whose epochs take as long as this one's
    clock: Callable[[Problem, Path], Callable[[int], float]]  # gives a function: the next epoch -> its seconds


METHODS: dict[str, Method] = {}


def method(
    name: str,
    *,
    epochs: Callable[[int], int] = lambda epochs: epochs,
    kind: str | None = None,
    start: Callable[[Problem], Single] = Single,
) -> Callable[[Train], Train]:
    """Register a method. `epochs` is how many it trains in all, given those of a single model. The time of an epoch is
    measured on the model that `start` makes; give another method as `kind` if its epochs take as long."""

    def clock(problem: Problem, scratch: Path) -> Callable[[int], float]:
        run = start(problem)

        def seconds(epoch: int) -> float:
            run.train(epoch)
            return run.curve["seconds"][-1]

        return seconds

    def register(train: Train) -> Train:
        METHODS[name] = Method(train, epochs, kind or name, clock)
        return train

    return register


def find(name: str) -> Method:
    """A method by its name, such as twins, or twins:noise=2,kind=split for one with changed settings."""
    if name in METHODS:
        return METHODS[name]
    if name.partition(":")[0] not in twins.TWINS:
        raise ValueError(f"unknown method {name!r}: use {', '.join(METHODS)}, or such as twins:noise=2,kind=split.")
    return _twins(name)


def _twins(name: str) -> Method:
    row, recipe = twins.recipe_of(name)
    train, clock = partial(twins.train, row=row, recipe=recipe), partial(twins.clock, recipe=recipe)
    return Method(train, recipe.epochs, name, clock)


@method("hold-out", kind="single")
def hold_out(problem: Problem, scratch: Path, tick: Tick) -> Trained:
    """A single model, stopped by a hold-out; and its weight average over the epochs, stopped likewise."""
    order = torch.Generator().manual_seed(seeds.derive(problem.seed, "hold-out"))
    held = torch.randperm(len(problem.y), generator=order)[: round(HELD_OUT * len(problem.y))]
    run = Single(problem, held=held, power=FIT.average, averaged=range(1, problem.epochs + 1))
    run.train(problem.epochs, scratch, tick)
    model, logits = run.of("loss"), logits_of(run.of("loss"), problem.x[held])[None]
    temperature = calibration.temperature(logits, calibration.Labels(problem.y[held]))
    rows = {
        "single, best loss on a hold-out": by_one_model(model),
        "single, best accuracy on a hold-out": by_one_model(run.of("accuracy")),
        "single, best loss, temperature by the hold-out": by_one_model(model, temperature),
        "single, averaged, best loss on a hold-out": by_one_model(run.of("average, loss")),
    }
    return run.result(rows, dict.fromkeys(rows, 1 - HELD_OUT))


def longer(epochs: int, times: float = MORE) -> int:
    return round(times * epochs)


@method("single", epochs=lambda epochs: longer(epochs, AS_DEAR) + epochs)
def single(problem: Problem, scratch: Path, tick: Tick) -> Trained:
    """A single model on all images: as it is, its SWA, and after more epochs. With a second model, an ensemble."""
    end, lengths = problem.epochs, {more: longer(problem.epochs, more) for more in (MORE, AS_DEAR)}
    keep = (end, *lengths.values())
    quarter = range(min(round(AVERAGED * end) + 1, end), end + 1)
    run = Single(problem, power=0.0, averaged=quarter, keep=keep)
    run.train(max(keep), scratch / "first", tick)
    other = Single(problem, seed=seeds.derive(problem.seed, "second"))
    other.train(end, scratch / "second", tick)
    first, second = by_one_model(run.of(f"after {end}")), by_one_model(other.of("last"))
    rows: dict[str, Predict] = {
        "single, all images": first,
        "SWA": by_one_model(run.of("average")),
        "ensemble of 2": lambda x: (first(x) + second(x)) / 2,
    }
    took = {"ensemble of 2": 2.0}
    for more, epochs in lengths.items():
        if epochs > end:  # not for a single epoch
            rows[f"single, {more} times as long"] = by_one_model(run.of(f"after {epochs}"))
            took[f"single, {more} times as long"] = epochs / end
    return run.result(rows, took)


@method("dropout", epochs=longer, start=lambda problem: Single(problem, dropout=DROPOUT))
def dropout(problem: Problem, scratch: Path, tick: Tick) -> Trained:
    """MC dropout after the last epoch, with weight averaging as in `fit`, and with more epochs."""
    return _dropout(problem, scratch, tick, longer(problem.epochs))


@method("dropout-seen", kind="dropout")
def dropout_seen(problem: Problem, scratch: Path, tick: Tick) -> Trained:
    """MC dropout without the out-of-bag images of the twins, to see how much those matter."""
    unseen = Bootstrap(len(problem.y), seed=problem.seed).unseen
    return _dropout(problem, scratch, tick, problem.epochs, ", on what twins see", unseen)


def _dropout(
    problem: Problem, scratch: Path, tick: Tick, epochs: int, on: str = "", held: Tensor | None = None
) -> Trained:
    averaged, keep = range(1, epochs + 1), (problem.epochs,)
    run = Single(problem, dropout=DROPOUT, held=held, power=FIT.average, averaged=averaged, keep=keep)
    run.train(epochs, scratch, tick)

    def masked(state: str) -> Predict:
        model = run.of(state)
        return _by_draws(problem, run.device, lambda x: logits_of(model, x, dropout=True))

    end = f"after {problem.epochs}"
    rows = {f"MC dropout{on}": masked(end), f"MC dropout, averaged{on}": masked(f"average {end}")}
    rows[f"dropout, mean{on}"] = by_one_model(run.of(end))
    took = dict.fromkeys(rows, len(run.trained_on) / len(problem.y))
    if epochs > problem.epochs:
        rows[f"MC dropout, averaged, {MORE} times as long{on}"] = masked("average")
        took[f"MC dropout, averaged, {MORE} times as long{on}"] = epochs / problem.epochs
    return run.result(rows, took)


def _variational(problem: Problem) -> Single:
    """A model with IVON. The settings are its authors' for CIFAR-10 and 200 epochs with batches of 50, not tuned for
    fewer epochs: the learning rate rises for five epochs, at most half of all, then falls along a cosine."""
    kind, rise = require_ivon(), min(WARM, problem.epochs // 2)

    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        optimizer = kind(model.parameters(), lr=0.2, ess=len(problem.y), hess_init=0.5, weight_decay=2e-4)
        rises = [lr_scheduler.LinearLR(optimizer, 1 / rise, 1, rise)] if rise else []
        falls = lr_scheduler.CosineAnnealingLR(optimizer, problem.epochs - rise)
        return optimizer, lr_scheduler.SequentialLR(optimizer, [*rises, falls], [rise]) if rise else falls

    return Single(problem, make=make)


def require_ivon() -> Any:
    try:
        from ivon import IVON
    except ImportError:
        raise UnavailableError(NEEDS_IVON) from None
    return IVON


@method("ivon", start=_variational)
def ivon(problem: Problem, scratch: Path, tick: Tick) -> Trained:
    run = _variational(problem)
    run.train(problem.epochs, scratch, tick)
    sampled = cast(Any, run.optimizer).sampled_params
    draws = _by_draws(problem, run.device, lambda x: logits_of(run.model, x), sampled)
    return run.result({"IVON": draws, "IVON, mean": by_one_model(run.of("last"))})


def _by_draws(
    problem: Problem,
    device: torch.device,
    logits: Predict,
    sampled: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Predict:
    """Mean probabilities over draws, which the model makes itself or `sampled` makes for it."""

    def predict(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for sample in range(problem.samples):
            with own_randomness(device, problem.seed, "draws", sample), sampled():
                total = total + logits(x).softmax(1)
        return total / problem.samples

    return predict


METHODS |= {name: _twins(name) for name in twins.TWINS}
