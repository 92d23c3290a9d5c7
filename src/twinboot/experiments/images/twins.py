"""Twins on the images, by a recipe, and the ways to predict with them."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from ..._core.randomness import own_randomness
from ...estimate.estimate import Estimate
from ...training.checkpoints import DamagedError
from ...training.fit import Fit, fit
from ...training.optimizers import adam
from ...training.protocol import Protocol
from ...twins import Twins
from ..runner import sealed
from ..runner.experiment import Tick
from .recipes import Recipe
from .single import LOOK, Split, accuracy
from .task import Predict, Task, Trained, of_mean

T = TypeVar("T")


def twins(task: Task, scratch: Path, tick: Tick, *, name: str, recipe: Recipe) -> Trained:
    data, bootstrap = TensorDataset(task.x, task.y), recipe.bootstrap(len(task.y), task.seed)
    images = Split(task.x, task.y, held_out=bootstrap.unseen)
    earlier, last = scratch / "earlier.safetensors", scratch / "last.safetensors"
    network = partial(task.network, dropout=recipe.dropout, seed=task.seed)
    epochs, shown = recipe.epochs(task.epochs), recipe.shown(task.epochs)
    sooner = min(shown, task.epochs)  # of the two epochs that are shown, if they are two

    def as_the_recipe_says(estimate: Estimate) -> None:
        estimate.scale, estimate.dropout = recipe.scale, recipe.dropout > 0

    def keep(estimate: Estimate, file: Path) -> None:
        with own_randomness(_device(estimate), task.seed, "statistics"):
            estimate.update_batchnorm(task.x[images.trained_on].split(task.batch))
        as_the_recipe_says(estimate)
        estimate.save(file)

    def load(file: Path) -> Estimate:
        return Estimate.load(file, network())

    def look(epoch: int, estimate: Estimate, twins: Twins) -> None:
        sigma = {layer: value.square().mean().sqrt().item() for layer, value in estimate.sigma.items()}
        seen: dict[str, Any] = {"sigma": sigma}
        if not recipe.cover:  # what is not judged has no BatchNorm statistics of its own, and no accuracy yet
            seen["train"] = accuracy(estimate.module, images, images.trained_on[:LOOK])[0]
        sealed.write(_look(scratch, epoch), seen)
        if epoch == sooner < epochs:
            keep(copy.deepcopy(estimate), earlier)
        if epoch == task.epochs:
            keep(twins.estimate(scale=bootstrap.scale), last)
        if epoch > before:
            tick()

    before = sum(_look(scratch, epoch).exists() for epoch in range(1, epochs + 1))  # a stop
    for _ in range(before):
        tick()
    found = fit(
        network(),
        data,
        optimizer=lambda p: adam(p, task.rate),
        scheduler=(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, epochs)) if recipe.decay else None,
        epochs=epochs,
        batch_size=task.batch,
        protocol=Protocol(
            groups=recipe.groups,
            reset=recipe.schedule(task),  # type: ignore[arg-type]
            mode=recipe.mode,
            noise=recipe.noise,
            pooled=recipe.pooled,
            resample=recipe.resample,
        ),
        bootstrap=bootstrap,
        seed=task.seed,
        checkpoint=scratch,
        progress=False,
        callback=look,
    )
    as_the_recipe_says(found.estimate)
    looks = [_kept(_look(scratch, epoch), sealed.read) for epoch in range(1, epochs + 1)]
    sigma = [
        {"epoch": epoch, "layer": layer, "sigma": value}
        for epoch, look in enumerate(looks, start=1)
        for layer, value in look["sigma"].items()
    ]
    curve = {"epoch": found.history["epoch"], "train": [look.get("train", math.nan) for look in looks]}
    if not recipe.cover:
        curve |= {"validation": found.history["accuracy"], "loss": found.history["unseen"]}
    curve["seconds"] = found.history["seconds"]
    after = {epochs: found.estimate}
    if sooner < epochs:
        after[sooner] = _kept(earlier, load)
    end, took = after[task.epochs], {}
    ways = {name: _drawn(end, task), f"{name}, mean": of_mean(end.module)}
    if shown != task.epochs:
        row = f"{name}, {recipe.longer} times as long"
        ways[row], took[row] = _drawn(after[shown], task), shown / task.epochs
    if not recipe.cover:
        ways[f"{name}, calibrated"] = _drawn(_calibrated(found, Subset(data, bootstrap.unseen.tolist()), task), task)
    # What Algorithm 1 leaves, if the recipe is the paper's, after as many epochs as the others have: no choice of the
    # epoch, no average.
    ways[f"{name}, last epoch alone"] = _drawn(_kept(last, load), task)
    unseen = None if recipe.cover else bootstrap.unseen
    return Trained(ways, images.trained_on, pd.DataFrame(curve), pd.DataFrame(sigma), took, unseen)


def _calibrated(found: Fit, unseen: Subset[Any], task: Task) -> Estimate:
    estimate = copy.deepcopy(found.estimate)
    with warnings.catch_warnings():  # that no noise may be best: the table shows what comes of it
        warnings.simplefilter("ignore")
        estimate.calibrate(unseen, samples=task.samples, seed=task.seed)
    return estimate


def _kept(file: Path, read: Callable[[Path], T]) -> T:
    """What was written during the training, perhaps before a stop."""
    try:
        return read(file)
    except (ValueError, OSError):
        raise DamagedError(f"{file} is damaged: delete {file.parent}, and this part begins anew.") from None


def _look(scratch: Path, epoch: int) -> Path:
    return scratch / f"look-{epoch}.json"


def _drawn(estimate: Estimate, task: Task) -> Predict:
    return lambda x: estimate.predict(x, task.samples, "classification", seed=task.seed).probs.cpu()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
