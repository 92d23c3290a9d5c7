"""Twins on images: the recipes that are published, any other recipe by its settings, and their training."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, cast, get_args, get_type_hints

import pandas as pd
import torch
from torch.utils.data import Subset, TensorDataset

from ... import Bootstrap, Estimate, Fit, Protocol, Twins, fit, resets
from ..._core.seeds import own_randomness
from ...training.checkpoints import DamagedError
from ...training.protocol import FIT
from ..runner import sealed
from ..runner.experiment import Tick
from .single import SHOWN, Predict, Problem, Trained, accuracy_and_loss, adam, by_one_model

TRAINED = ", sigma of the training"  # the row of twins whose spread is not matched, after the name of the one that is
FIRST = 10  # steps before the first early reset
# Smallest and largest value of each setting that is a number.
BOUNDS: dict[str, tuple[float, float]] = {"noise": (0, 100), "pooled": (0, 0.99), "scale": (0, 100), "reset": (1, 1000)}
BOUNDS |= {"dropout": (0, 0.9), "longer": (0.1, 10), "spread": (0, 10)}


@dataclass(frozen=True)
class Recipe:
    """Settings of twins, by default those of `fit`."""

    mode: resets.Mode = FIT.mode  # of the reset
    resample: Literal["counts", "draws"] = FIT.resample
    decay: bool = False  # lower the learning rate along a cosine
    noise: float = FIT.noise  # times sigma, in training
    local: bool = FIT.local  # noise per output of linear layers
    pooled: float = FIT.pooled  # share of the gradients that is the mean of both twins'
    scale: float = 1.0  # times sigma, in draws for a prediction
    # As `spread` of `fit`. 0 as in the paper; above 0 draws with the sigma of training have a row of their own.
    spread: float = 0.0
    reset: int | None = None  # epochs between resets; by default that of `fit`
    early: bool = False  # reset after 10 steps, then at intervals that grow by a tenth, up to an epoch
    groups: Literal["layer", "tensor", "unit", "weight"] = cast(Any, FIT.groups)  # one of these, not any grouping
    dropout: float = 0.0  # in training and in draws for a prediction
    kind: Literal["multinomial", "poisson", "split"] = "multinomial"  # of the bootstrap
    cover: bool = False  # train on all images, so none is out-of-bag
    longer: float = 1.0  # show the twins after this many times the epochs of a single model, too

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} must be from {least} to {most}, not {value}.")

    def bootstrap(self, n: int, seed: int) -> Bootstrap:
        return Bootstrap(n, seed=seed, kind=self.kind, cover=self.cover)

    def protocol(self, problem: Problem) -> Protocol:
        settings: dict[str, Any] = {
            name: getattr(self, name) for name in ("groups", "mode", "noise", "local", "pooled", "resample")
        }
        if self.early:
            steps = math.ceil(len(problem.y) / problem.batch)  # of an epoch of a single model
            settings["reset"] = resets.steps(resets.growing(FIRST, 1.1, most=max(FIRST, steps)))
        elif self.reset is not None:
            settings["reset"] = resets.every(self.reset)
        return Protocol(**settings)

    def shown(self, epochs: int) -> int:
        """The other epoch that is shown, if a single model has this many."""
        return math.ceil(self.longer * epochs)

    def epochs(self, epochs: int) -> int:
        """Epochs in all, if a single model has this many."""
        return max(self.shown(epochs), epochs)


# With pooled gradients, sigma is 2.4 times smaller with Adam (`pool_gradients`), so draws are scaled by 2.4. Noise of
# 3, 3.3, 4 and 5.5 was tried with one seed, on training images that nothing trained on: twins overfit at 3 and learn
# slowly at 5.5. With dropout, noise of 1, 2 and 3.3 with dropout of 0.1, and 3 with 0.05 were tried the same way; the
# last was best. It is also shown after 23 of 24 epochs, which take less than 1.4 times the time of a single model.
POOLED = Recipe(kind="split", cover=True, pooled=0.7, noise=4.0, scale=2.4, longer=1.08)
TWINS = {  # method -> its row in the table, and its settings
    "twins": ("Twin-Boot", Recipe()),
    "twins-draws": ("Twin-Boot with draws", Recipe(resample="draws")),
    "twins-pooled": ("Twin-Boot with pooled gradients", POOLED),
    "twins-pooled-dropout": (
        "Twin-Boot with pooled gradients and dropout",
        replace(POOLED, noise=3.0, dropout=0.05, longer=0.958),
    ),
}


def recipe_of(method: str) -> tuple[str, Recipe]:
    """Row and recipe of a method in `TWINS`, or of one with changed settings.

    >>> row, recipe = recipe_of("twins:noise=2,kind=split")
    >>> row, recipe.noise, recipe.kind
    ('Twin-Boot, noise=2, kind=split', 2.0, 'split')
    """
    base, colon, changes = method.partition(":")
    row, recipe = TWINS[base]
    if not colon:
        return row, recipe
    settings = [change.partition("=") for change in changes.split(",")]
    if bare := [name for name, equals, _ in settings if not equals]:
        raise ValueError(f"{bare[0]!r} has no value: write NAME=VALUE for each setting, such as noise=2.")
    names = [name for name, _, _ in settings]
    known = [setting.name for setting in fields(Recipe)]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"twins have no setting {unknown[0]!r}: use one of {', '.join(known)}, such as noise=2.")
    if len(set(names)) < len(names):
        raise ValueError(f"{changes} has a setting twice: give each one once.")
    values = {name: _value(name, text) for name, _, text in settings}
    return f"{row}, {changes.replace(',', ', ')}", replace(recipe, **values)


def _value(name: str, text: str) -> Any:
    kind = get_type_hints(Recipe)[name]
    if kind in (float, int | None):
        try:
            return float(text) if kind is float else int(text)
        except ValueError:
            raise ValueError(f"{name} must be a {'' if kind is float else 'whole '}number, not {text!r}.") from None
    choices = {"true": True, "false": False} if kind is bool else {choice: choice for choice in get_args(kind)}
    if text not in choices:
        raise ValueError(f"{name} must be {' or '.join(choices)}, not {text!r}.")
    return choices[text]


def train(problem: Problem, scratch: Path, tick: Tick, *, row: str, recipe: Recipe) -> Trained:
    """Twins, and a row for each way to predict with them."""
    bootstrap, epochs = recipe.bootstrap(len(problem.y), problem.seed), recipe.epochs(problem.epochs)
    sooner, later = sorted((recipe.shown(problem.epochs), problem.epochs))  # the epochs that are shown
    shown = bootstrap.seen[:SHOWN]
    files = {name: scratch / f"{name}.safetensors" for name in ("earlier", "last")}
    # A stopped run needs these again.
    looks = _read(scratch / "epochs.json", sealed.read) if (scratch / "epochs.json").exists() else {}
    for _ in looks:
        tick()

    def save(estimate: Estimate, name: str) -> None:
        with own_randomness(next(estimate.parameters()).device, problem.seed, "statistics"):
            estimate.update_batchnorm(problem.x[bootstrap.seen].split(problem.batch))
        _configure(estimate, recipe)
        estimate.save(files[name])

    def look(epoch: int, estimate: Estimate, twins: Twins) -> None:
        new, found = str(epoch) not in looks, {}
        if not recipe.cover:  # else the estimate has no BatchNorm statistics of its own yet
            found["train"] = accuracy_and_loss(estimate.module, problem.x[shown], problem.y[shown])[0]
        sigma = {layer: value.square().mean().sqrt().item() for layer, value in estimate.sigma.items()}
        looks[str(epoch)] = found | {"sigma": sigma}
        sealed.write(scratch / "epochs.json", looks)
        if epoch == sooner < later:
            save(copy.deepcopy(estimate), "earlier")
        if epoch == problem.epochs:
            save(twins.estimate(scale=bootstrap.scale), "last")
        if new:
            tick()

    result = _fit(problem, recipe, scratch, epochs, look)
    _configure(result.estimate, recipe)
    sigma = [
        {"epoch": int(epoch), "layer": layer, "sigma": value}
        for epoch, found in looks.items()
        for layer, value in found["sigma"].items()
    ]
    curve = {"epoch": result.history["epoch"], "train": [found.get("train", math.nan) for found in looks.values()]}
    if not recipe.cover:
        curve |= {"validation": result.history["accuracy"], "loss": result.history["unseen"]}
    curve["seconds"] = result.history["seconds"]
    network = partial(problem.network, dropout=recipe.dropout, seed=problem.seed)
    load = partial(_read, read=lambda file: Estimate.load(file, network()))
    after = {later: result.estimate}
    if sooner < later:
        after[sooner] = load(files["earlier"])
    end, took = after[problem.epochs], {}
    rows, best = {row: _by_draws(end, problem), f"{row}, mean": by_one_model(end.module)}, result.estimate
    if recipe.spread:
        best, seconds = _settled(problem, recipe, scratch, epochs)
        rows |= {f"{row}{TRAINED}": rows[row], row: _by_draws(best, problem)}
        took[row] = 1 + seconds / (fmean(result.history["seconds"]) * problem.epochs)
    if sooner < later:
        longer = f"{row}, {recipe.longer} times as long"
        epoch = recipe.shown(problem.epochs)
        rows[longer], took[longer] = _by_draws(after[epoch], problem), epoch / problem.epochs
    if not recipe.cover:
        unseen = Subset(TensorDataset(problem.x, problem.y), bootstrap.unseen.tolist())
        rows[f"{row}, calibrated"] = _by_draws(_calibrated(best, unseen, problem), problem)
    # With the paper's settings, this is what Algorithm 1 gives: no choice of the epoch, and no average.
    rows[f"{row}, last epoch alone"] = _by_draws(load(files["last"]), problem)
    unseen_images = None if recipe.cover else bootstrap.unseen
    return Trained(rows, bootstrap.seen, pd.DataFrame(curve), pd.DataFrame(sigma), took, unseen_images)


def clock(problem: Problem, scratch: Path, recipe: Recipe) -> Callable[[int], float]:
    """A function that trains the next epoch and returns its seconds."""
    return lambda epoch: _fit(problem, recipe, scratch, epoch).history["seconds"][-1]


def _settled(problem: Problem, recipe: Recipe, scratch: Path, epochs: int) -> tuple[Estimate, float]:
    """The estimate of a finished training with a matched spread, and how many seconds that took."""
    file, began = scratch / "settling.json", time.perf_counter()
    estimate = _fit(problem, recipe, scratch, epochs, spread=recipe.spread).estimate
    estimate.dropout = recipe.dropout > 0
    if not file.exists():  # else a stopped run had it already
        sealed.write(file, {"seconds": time.perf_counter() - began})
    return estimate, _read(file, sealed.read)["seconds"]


def _fit(
    problem: Problem,
    recipe: Recipe,
    scratch: Path,
    epochs: int,
    callback: Callable[[int, Estimate, Twins], object] | None = None,
    spread: float = 0.0,
) -> Fit:
    end = recipe.epochs(problem.epochs)
    return fit(
        problem.network(dropout=recipe.dropout, seed=problem.seed),
        TensorDataset(problem.x, problem.y),
        optimizer=lambda p: adam(p, problem.lr),
        scheduler=(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, end)) if recipe.decay else None,
        epochs=epochs,
        batch_size=problem.batch,
        protocol=recipe.protocol(problem),
        bootstrap=recipe.bootstrap(len(problem.y), problem.seed),
        spread=spread,
        seed=problem.seed,
        checkpoint=scratch,
        progress=False,
        callback=callback,
    )


def _configure(estimate: Estimate, recipe: Recipe) -> None:
    estimate.dropout, estimate.scale = recipe.dropout > 0, recipe.scale


def _calibrated(estimate: Estimate, unseen: Subset[Any], problem: Problem) -> Estimate:
    estimate = copy.deepcopy(estimate)
    with warnings.catch_warnings():  # the warning that no noise may be best: the table shows the result
        warnings.simplefilter("ignore")
        estimate.calibrate(unseen, samples=problem.samples, seed=problem.seed)
    return estimate


def _read(file: Path, read: Callable[[Path], Any]) -> Any:
    """Read what an earlier part of the training wrote."""
    try:
        return read(file)
    except (ValueError, OSError):
        raise DamagedError(f"{file} is damaged: delete {file.parent}, and this part begins anew.") from None


def _by_draws(estimate: Estimate, problem: Problem) -> Predict:
    return lambda x: estimate.predict(x, problem.samples, "classification", seed=problem.seed).probs.cpu()
