"""What is trained on the same images to be compared: single models in several ways, and twins.

Each method gives rows of the table, one for each way to predict with what it trained: the mean model, or a mean over
draws of weights or of dropout's masks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from .. import calibration, seeds
from ..bootstrap import Bootstrap
from ..estimate import Estimate
from ..fit import fit
from ..training import own_randomness
from ..twins import Twins
from .experiment import Tick, UnavailableError
from .single import LOOK, Images, MakeOptimizer, Single, accuracy, logits_of

HELD_OUT = 0.135  # of the images: as many as no twin sees, (1 - 1/n)^(2n) or e^-2 of them
MORE = 1.4  # times the epochs: what twins may cost at most
DROPOUT = 0.2  # after each pooling
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
    """Row of the table -> how it predicts; which images were trained on; how training went."""

    rows: dict[str, Predict]
    trained_on: Tensor
    curve: pd.DataFrame
    sigma: pd.DataFrame = field(default_factory=pd.DataFrame)


def hold_out(task: Task, scratch: Path, tick: Tick) -> Trained:
    """A single model, stopped where it predicts best what was set aside."""
    order = torch.Generator().manual_seed(seeds.derive(task.seed, "hold-out"))
    held = torch.randperm(len(task.y), generator=order)[: round(HELD_OUT * len(task.y))]
    run = _single(task, scratch, tick, held=held)
    at_best, y = run.of("loss"), task.y[held]
    temperature = calibration.best(lambda scale: logits_of(at_best, task.x[held])[None], y)[0]
    return _told(
        run,
        {
            "single, best loss on a hold-out": _mean(at_best),
            "single, best accuracy on a hold-out": _mean(run.of("accuracy")),
            "single, best loss, temperature by the hold-out": _mean(at_best, temperature),
        },
    )


def single(task: Task, scratch: Path, tick: Tick) -> Trained:
    """A single model on all images; and, with a second one of other weights and order, an ensemble."""
    run = _single(task, scratch / "first", tick)
    other = _single(task, scratch / "second", tick, seed=seeds.derive(task.seed, "second"))
    first, second = _mean(run.of("last")), _mean(other.of("last"))
    return _told(run, {"single, all images": first, "ensemble of 2": lambda x: (first(x) + second(x)) / 2})


def longer(task: Task, scratch: Path, tick: Tick) -> Trained:
    run = _single(task, scratch, tick, epochs=round(MORE * task.epochs))
    return _told(run, {f"single, {MORE} times as long": _mean(run.of("last"))})


def swa(task: Task, scratch: Path, tick: Tick) -> Trained:
    run = _single(task, scratch, tick, average_from=round(AVERAGED * task.epochs) + 1)
    return _told(run, {"SWA": _mean(run.of("average"))})


def dropout(task: Task, scratch: Path, tick: Tick) -> Trained:
    run = _single(task, scratch, tick, network=task.network(dropout=DROPOUT, seed=task.seed))
    model = run.of("last")

    def drawn(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for sample in range(task.samples):
            with own_randomness(_device(model), task.seed, "masks", sample):
                total = total + logits_of(model, x, dropping=True).softmax(1)
        return total / task.samples

    return _told(run, {"MC dropout": drawn, "dropout, mean": _mean(model)})


def ivon(task: Task, scratch: Path, tick: Tick) -> Trained:
    """Variational learning, with the settings its authors chose for CIFAR-10."""
    try:
        from ivon import IVON
    except ImportError as error:
        raise UnavailableError("the method ivon needs ivon-opt: pip install 'twinboot[compare]'.") from error

    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = IVON(model.parameters(), lr=0.2, ess=len(task.y), hess_init=0.5, weight_decay=2e-4)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.epochs)

    run = _single(task, scratch, tick, make=make)
    optimizer: Any = run.optimizer

    def drawn(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for sample in range(task.samples):
            with own_randomness(run.device, task.seed, "draws", sample), optimizer.sampled_params():
                total = total + logits_of(run.model, x).softmax(1)
        return total / task.samples

    return _told(run, {"IVON": drawn, "IVON, mean": _mean(run.of("last"))})


@dataclass(frozen=True)
class Recipe:
    """How twins are trained; the defaults are those of `fit`."""

    mode: Literal["sample", "mean", "centered"] = "sample"
    resample: Literal["draws", "counts"] = "counts"
    decay: bool = False  # of the learning rate, along a cosine
    groups: str = "layer"
    dropout: float = 0.0


def twins(task: Task, scratch: Path, tick: Tick, *, name: str, recipe: Recipe) -> Trained:
    data, bootstrap = TensorDataset(task.x, task.y), Bootstrap(len(task.y), seed=task.seed)
    images = Images(task.x, task.y, held_out=bootstrap.unseen)
    looks, last = scratch / "looks.jsonl", scratch / "last.safetensors"
    network = partial(task.network, dropout=recipe.dropout, seed=task.seed)

    def look(epoch: int, estimate: Estimate, twins: Twins) -> None:
        shown, _ = accuracy(estimate.module, images, images.trained_on[:LOOK])
        sigma = {layer: value.square().mean().sqrt().item() for layer, value in estimate.sigma.items()}
        with looks.open("a") as file:
            print(json.dumps({"epoch": epoch, "train": shown, "sigma": sigma}), file=file)
        if epoch == task.epochs:
            plain = twins.estimate()
            plain.update_batchnorm(task.x[images.trained_on].split(task.batch * 4))
            plain.save(last)
        tick()

    found = fit(
        network(),
        data,
        optimizer=lambda p: torch.optim.Adam(p, task.rate),
        scheduler=(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, task.epochs)) if recipe.decay else None,
        epochs=task.epochs,
        batch_size=task.batch,
        groups=recipe.groups,
        mode=recipe.mode,
        resample=recipe.resample,
        bootstrap=bootstrap,
        seed=task.seed,
        checkpoint=scratch,
        keep=1,
        progress=False,
        callback=look,
    )
    # After a stop between the look and the checkpoint, an epoch was looked at twice: the last look counts.
    seen = {row["epoch"]: row for row in map(json.loads, looks.read_text().splitlines())}
    rows = [{"epoch": e, "layer": layer, "sigma": s} for e, row in seen.items() for layer, s in row["sigma"].items()]
    history = {"validation": "accuracy", "loss": "unseen", "seconds": "seconds"}
    curve = {"epoch": list(seen), "train": [row["train"] for row in seen.values()]}
    curve |= {column: found.history[of] for column, of in history.items()}
    calibrated = copy.deepcopy(found.estimate)
    calibrated.calibrate(Subset(data, bootstrap.unseen.tolist()), samples=task.samples)
    ways = {
        name: _drawn(found.estimate, task),
        f"{name}, mean": _mean(found.estimate.module),
        f"{name}, calibrated": _drawn(calibrated, task),
        # What Algorithm 1 leaves, if the recipe is the paper's: no choice of the epoch, no average.
        f"{name}, last epoch alone": _drawn(Estimate.load(last, network()), task),
    }
    return Trained(ways, images.trained_on, pd.DataFrame(curve), pd.DataFrame(rows))


def _drawn(estimate: Estimate, task: Task) -> Predict:
    return lambda x: estimate.predict(x, task.samples).probs.cpu()


def _single(
    task: Task,
    scratch: Path,
    tick: Tick,
    *,
    network: nn.Module | None = None,
    make: MakeOptimizer | None = None,
    epochs: int | None = None,
    held: Tensor | None = None,
    average_from: int | None = None,
    seed: int | None = None,
) -> Single:
    seed = task.seed if seed is None else seed
    model = network or task.network(seed=seed)
    adam: MakeOptimizer = lambda m: (torch.optim.Adam(m.parameters(), task.rate), None)  # noqa: E731
    run = Single(model, Images(task.x, task.y, held), make or adam, task.batch, seed, average_from)
    run.train(epochs or task.epochs, scratch, tick)
    return run


def _told(run: Single, rows: dict[str, Predict]) -> Trained:
    return Trained(rows, run.images.trained_on, pd.DataFrame(run.curve))


def _mean(model: nn.Module, temperature: float = 1.0) -> Predict:
    return lambda x: (logits_of(model, x) / temperature).softmax(1)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


Method = Callable[[Task, Path, Tick], Trained]
TWINS = {
    "twins": ("Twin-Boot", Recipe()),
    "twins-draws": ("Twin-Boot with draws", Recipe(resample="draws")),
    "twins-units": ("Twin-Boot with a sigma for each unit", Recipe(groups="unit")),
    "twins-centered": ("Twin-Boot with the centered reset", Recipe(mode="centered")),
    "twins-mean": ("Twin-Boot with the mean reset", Recipe(mode="mean")),
    "twins-decay": ("Twin-Boot with decay of the rate, centered reset", Recipe(mode="centered", decay=True)),
    "twins-dropout": ("Twin-Boot with dropout", Recipe(dropout=DROPOUT / 2)),
}
METHODS: dict[str, Method] = {
    "hold-out": hold_out,
    "single": single,
    "longer": longer,
    "swa": swa,
    "dropout": dropout,
    "ivon": ivon,
    **{method: partial(twins, name=name, recipe=recipe) for method, (name, recipe) in TWINS.items()},
}
