"""What is trained on the same images to be compared: single models in several ways, and twins.

Each method gives rows of the table, one for each way to predict with what it trained: the mean model, or a mean over
draws of weights or of dropout's masks.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from .. import calibration, resets, seeds
from ..atomic import replacing
from ..averaging import POWER, Average
from ..bootstrap import UNSEEN, Bootstrap
from ..estimate import Estimate
from ..extras import how_to_install
from ..fit import Fit, fit
from ..optimizers import adam
from ..randomness import own_randomness
from ..twins import Twins
from .experiment import Tick, UnavailableError
from .recipes import DROPOUT, TWINS, Recipe
from .single import LOOK, MakeOptimizer, Single, Split, accuracy, logits_of, plain

HELD_OUT = round(UNSEEN, 3)  # of the images: as many as no twin sees
MORE = 1.4  # times the epochs: a limit for what twins may cost, not what they do cost, which `images_cost.py` measures
AVERAGED = 0.75  # of the epochs are over when SWA begins to average

Predict = Callable[[Tensor], Tensor]  # images -> probabilities [images, classes]


@dataclass(frozen=True, eq=False)
class Task:
    """Images for training, a network for them, and how to train it."""

    x: Tensor
    y: Tensor
    network: Callable[..., nn.Module]  # of dropout and seed
    epochs: int
    batch: int
    rate: float
    samples: int
    seed: int


@dataclass(frozen=True, eq=False)
class Trained:
    """Row of the table -> how it predicts, and how many epochs it took for one of a single model on all images; which
    images were trained on, and which were not and chose the epoch; how training went."""

    rows: dict[str, Predict]
    trained_on: Tensor
    curve: pd.DataFrame
    sigma: pd.DataFrame = field(default_factory=pd.DataFrame)
    epochs: dict[str, float] = field(default_factory=dict)  # 1 where nothing is said
    unseen: Tensor | None = None


def hold_out(task: Task, scratch: Path, tick: Tick) -> Trained:
    """A single model, stopped where it predicts best what was set aside; and the same of its average over the epochs,
    to tell what the average of the twins' mean brings by itself."""
    order = torch.Generator().manual_seed(seeds.derive(task.seed, "hold-out"))
    held = torch.randperm(len(task.y), generator=order)[: round(HELD_OUT * len(task.y))]
    run = _single(task, scratch, tick, held=held, average=Average(POWER), averaged=range(1, task.epochs + 1))
    at_best, logits = run.of("loss"), logits_of(run.of("loss"), task.x[held])[None]
    temperature = calibration.temperature(logits, task.y[held])
    rows = {
        "single, best loss on a hold-out": _mean(at_best),
        "single, best accuracy on a hold-out": _mean(run.of("accuracy")),
        "single, best loss, temperature by the hold-out": _mean(at_best, temperature),
        "single, averaged, best loss on a hold-out": _mean(run.of("average, loss")),
    }
    return _told(run, rows, dict.fromkeys(rows, 1 - HELD_OUT))


def single(task: Task, scratch: Path, tick: Tick) -> Trained:
    """A single model on all images. On its way lie SWA, the mean of its last quarter, and what it is when it is given
    `MORE` time; with a second one, of other weights and order, it makes an ensemble."""
    end = task.epochs
    quarter = range(min(round(AVERAGED * end) + 1, end), end + 1)
    run = _single(task, scratch / "first", tick, longer(end), average=Average(0.0), averaged=quarter, keep=(end,))
    other = _single(task, scratch / "second", tick, seed=seeds.derive(task.seed, "second"))
    first, second = _mean(run.of(f"after {end}")), _mean(other.of("last"))
    rows: dict[str, Predict] = {
        "single, all images": first,
        f"single, {MORE} times as long": _mean(run.of("last")),
        "SWA": _mean(run.of("average")),
        "ensemble of 2": lambda x: (first(x) + second(x)) / 2,
    }
    return _told(run, rows, {f"single, {MORE} times as long": MORE, "ensemble of 2": 2.0})


def longer(epochs: int) -> int:
    return round(MORE * epochs)


def dropout(task: Task, scratch: Path, tick: Tick) -> Trained:
    """MC dropout as it is after the last epoch; and averaged over the epochs as the mean of the twins is, to tell what
    that brings by itself."""
    return _dropout(task, scratch, tick)


def dropout_seen(task: Task, scratch: Path, tick: Tick) -> Trained:
    """MC dropout without the images that no twin sees, to tell what those bring it."""
    return _dropout(task, scratch, tick, ", on what twins see", Bootstrap(len(task.y), seed=task.seed).unseen)


def _dropout(task: Task, scratch: Path, tick: Tick, on: str = "", held: Tensor | None = None) -> Trained:
    network, epochs = task.network(dropout=DROPOUT, seed=task.seed), range(1, task.epochs + 1)
    run = _single(task, scratch, tick, network=network, held=held, average=Average(POWER), averaged=epochs)
    last, average = run.of("last"), run.of("average")
    rows = {
        f"MC dropout{on}": _over_draws(task, run.device, lambda x: logits_of(last, x, dropping=True)),
        f"MC dropout, averaged{on}": _over_draws(task, run.device, lambda x: logits_of(average, x, dropping=True)),
        f"dropout, mean{on}": _mean(last),
    }
    return _told(run, rows, dict.fromkeys(rows, len(run.images.trained_on) / len(task.y)))


def ivon(task: Task, scratch: Path, tick: Tick) -> Trained:
    run = _single(task, scratch, tick, make=variational(task))
    sampled = cast(Any, run.optimizer).sampled_params
    draws = _over_draws(task, run.device, lambda x: logits_of(run.model, x), sampled)
    return _told(run, {"IVON": draws, "IVON, mean": _mean(run.of("last"))})


def variational(task: Task) -> MakeOptimizer:
    """IVON with the settings that its authors chose for CIFAR-10 and 200 epochs; not tuned for fewer."""
    kind = require_ivon()

    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = kind(model.parameters(), lr=0.2, ess=len(task.y), hess_init=0.5, weight_decay=2e-4)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.epochs)

    return make


def require_ivon() -> Any:
    try:
        from ivon import IVON
    except ImportError:
        raise UnavailableError(f"the method ivon needs ivon-opt: {how_to_install('compare')}") from None
    return IVON


def twins(task: Task, scratch: Path, tick: Tick, *, name: str, recipe: Recipe) -> Trained:
    data, bootstrap = TensorDataset(task.x, task.y), recipe.bootstrap(len(task.y), task.seed)
    images = Split(task.x, task.y, held_out=bootstrap.unseen)
    usual, last = scratch / "usual.safetensors", scratch / "last.safetensors"
    network = partial(task.network, dropout=recipe.dropout, seed=task.seed)
    epochs = recipe.epochs(task.epochs)

    def keep(estimate: Estimate, file: Path) -> None:
        with own_randomness(_device(estimate), task.seed, "statistics"):
            estimate.update_batchnorm(task.x[images.trained_on].split(task.batch))
        estimate.save(file)

    def look(epoch: int, estimate: Estimate, twins: Twins) -> None:
        sigma = {layer: value.square().mean().sqrt().item() for layer, value in estimate.sigma.items()}
        # What is not judged has no BatchNorm statistics of its own, and no accuracy yet.
        shown = math.nan if recipe.cover else accuracy(estimate.module, images, images.trained_on[:LOOK])[0]
        with replacing(_look(scratch, epoch)) as file:
            file.write_text(json.dumps({"train": shown, "sigma": sigma}))
        if epoch == task.epochs:
            if epochs > task.epochs:
                keep(copy.deepcopy(estimate), usual)
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
        batch_size=round(recipe.batch * task.batch),
        groups=recipe.groups,
        reset=resets.every(recipe.reset),
        mode=recipe.mode,
        noise=recipe.noise,
        resample=recipe.resample,
        bootstrap=bootstrap,
        seed=task.seed,
        checkpoint=scratch,
        keep=1,
        progress=False,
        callback=look,
    )
    looks = [json.loads(_look(scratch, epoch).read_text()) for epoch in range(1, epochs + 1)]
    sigma = [
        {"epoch": epoch, "layer": layer, "sigma": value}
        for epoch, look in enumerate(looks, start=1)
        for layer, value in look["sigma"].items()
    ]
    curve = {"epoch": found.history["epoch"], "train": [look["train"] for look in looks]}
    if not recipe.cover:
        curve |= {"validation": found.history["accuracy"], "loss": found.history["unseen"]}
    curve["seconds"] = found.history["seconds"]
    end, took = found.estimate, {}
    ways: dict[str, Predict] = {}
    if epochs > task.epochs:
        ways[f"{name}, {recipe.longer} times as long"] = _drawn(end, task)
        took[f"{name}, {recipe.longer} times as long"] = epochs / task.epochs
        end = Estimate.load(usual, network())
    ways = {name: _drawn(end, task), f"{name}, mean": _mean(end.module), **ways}
    if not recipe.cover:
        ways[f"{name}, calibrated"] = _drawn(_calibrated(found, Subset(data, bootstrap.unseen.tolist()), task), task)
    # What Algorithm 1 leaves, if the recipe is the paper's, after as many epochs as the others have: no choice of the
    # epoch, no average.
    ways[f"{name}, last epoch alone"] = _drawn(Estimate.load(last, network()), task)
    unseen = None if recipe.cover else bootstrap.unseen
    return Trained(ways, images.trained_on, pd.DataFrame(curve), pd.DataFrame(sigma), took, unseen)


def _calibrated(found: Fit, unseen: Subset[Any], task: Task) -> Estimate:
    estimate = copy.deepcopy(found.estimate)
    with warnings.catch_warnings():  # that no noise may be best: the table shows what comes of it
        warnings.simplefilter("ignore")
        estimate.calibrate(unseen, samples=task.samples, seed=task.seed)
    return estimate


def _look(scratch: Path, epoch: int) -> Path:
    return scratch / f"look-{epoch}.json"


def _drawn(estimate: Estimate, task: Task) -> Predict:
    return lambda x: estimate.predict(x, task.samples, seed=task.seed).probs.cpu()


def _over_draws(
    task: Task, device: torch.device, logits: Predict, drawn: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Predict:
    """Probabilities, averaged over what a model draws by itself or what `drawn` draws for it."""

    def predict(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for sample in range(task.samples):
            with own_randomness(device, task.seed, "draws", sample), drawn():
                total = total + logits(x).softmax(1)
        return total / task.samples

    return predict


def _single(
    task: Task,
    scratch: Path,
    tick: Tick,
    epochs: int | None = None,
    *,
    network: nn.Module | None = None,
    make: MakeOptimizer | None = None,
    held: Tensor | None = None,
    average: Average | None = None,
    averaged: Container[int] = (),
    keep: Container[int] = (),
    seed: int | None = None,
) -> Single:
    seed = task.seed if seed is None else seed
    model = network or task.network(seed=seed)
    images = Split(task.x, task.y, held)
    run = Single(model, images, make or plain(task.rate), task.batch, seed, average, averaged, keep)
    run.train(epochs or task.epochs, scratch, tick)
    return run


def _told(run: Single, rows: dict[str, Predict], epochs: dict[str, float] | None = None) -> Trained:
    held = run.images.held_out
    return Trained(rows, run.images.trained_on, pd.DataFrame(run.curve), epochs=epochs or {}, unseen=held)


def _mean(model: nn.Module, temperature: float = 1.0) -> Predict:
    return lambda x: (logits_of(model, x) / temperature).softmax(1)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


Method = Callable[[Task, Path, Tick], Trained]
METHODS: dict[str, Method] = {
    "hold-out": hold_out,
    "single": single,
    "dropout": dropout,
    "dropout-seen": dropout_seen,
    "ivon": ivon,
    **{method: partial(twins, name=name, recipe=recipe) for method, (name, recipe) in TWINS.items()},
}
