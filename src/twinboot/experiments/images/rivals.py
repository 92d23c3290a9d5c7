"""What twins are compared with: single models on the same images, in several ways.

Each gives rows of the table, one for each way to predict with what was trained: the model as it is, or a mean over
draws of weights or of dropout's masks.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn

from ..._core import seeds
from ..._core.extras import how_to_install
from ..._core.randomness import own_randomness
from ...data.bootstrap import UNSEEN, Bootstrap
from ...estimate import calibration
from ...training.protocol import FIT
from ...training.selection import Average
from ..runner.experiment import Tick, UnavailableError
from .recipes import DROPOUT
from .single import MakeOptimizer, Single, Split, logits_of, plain
from .task import Predict, Task, Trained, of_mean

HELD_OUT = round(UNSEEN, 3)  # of the images: as many as no twin sees
# Times the epochs of a single model: the most that twins should cost, and about what those with counts do cost.
# `cost.py` measures it.
MORE, AS_DEAR = 1.4, 1.6
AVERAGED = 0.75  # of the epochs are over when SWA begins to average
WARM = 5  # epochs in which the rate of IVON rises, in its authors' own script for CIFAR-10


def hold_out(task: Task, scratch: Path, tick: Tick) -> Trained:
    """A single model, stopped where it predicts best what was set aside; and the same of its average over the epochs,
    to tell what the average of the twins' mean brings by itself."""
    order = torch.Generator().manual_seed(seeds.derive(task.seed, "hold-out"))
    held = torch.randperm(len(task.y), generator=order)[: round(HELD_OUT * len(task.y))]
    run = _single(task, scratch, tick, held=held, average=Average(FIT.average), averaged=range(1, task.epochs + 1))
    at_best, logits = run.of("loss"), logits_of(run.of("loss"), task.x[held])[None]
    temperature = calibration.temperature(logits, calibration.Labels(task.y[held]))
    rows = {
        "single, best loss on a hold-out": of_mean(at_best),
        "single, best accuracy on a hold-out": of_mean(run.of("accuracy")),
        "single, best loss, temperature by the hold-out": of_mean(at_best, temperature),
        "single, averaged, best loss on a hold-out": of_mean(run.of("average, loss")),
    }
    return _told(run, rows, dict.fromkeys(rows, 1 - HELD_OUT))


def single(task: Task, scratch: Path, tick: Tick) -> Trained:
    """A single model on all images. On its way lie SWA, the mean of its last quarter, and what it is when it is given
    more time; with a second one, of other weights and order, it makes an ensemble."""
    end, lengths = task.epochs, {more: longer(task.epochs, more) for more in (MORE, AS_DEAR)}
    quarter = range(min(round(AVERAGED * end) + 1, end), end + 1)
    average = Average(0.0)
    keep = (end, *lengths.values())
    run = _single(task, scratch / "first", tick, max(keep), average=average, averaged=quarter, keep=keep)
    other = _single(task, scratch / "second", tick, seed=seeds.derive(task.seed, "second"))
    first, second = of_mean(run.of(f"after {end}")), of_mean(other.of("last"))
    rows: dict[str, Predict] = {
        "single, all images": first,
        "SWA": of_mean(run.of("average")),
        "ensemble of 2": lambda x: (first(x) + second(x)) / 2,
    }
    took = {"ensemble of 2": 2.0}
    for more, epochs in lengths.items():
        if epochs > end:  # not so where there is but one
            rows[f"single, {more} times as long"] = of_mean(run.of(f"after {epochs}"))
            took[f"single, {more} times as long"] = epochs / end
    return _told(run, rows, took)


def longer(epochs: int, times: float = MORE) -> int:
    return round(times * epochs)


def dropout(task: Task, scratch: Path, tick: Tick) -> Trained:
    """MC dropout as it is after the last epoch; and averaged over the epochs as the mean of the twins is, to tell what
    that brings by itself, and what more time then does."""
    return _dropout(task, scratch, tick, longer(task.epochs))


def dropout_seen(task: Task, scratch: Path, tick: Tick) -> Trained:
    """MC dropout without the images that no twin sees, to tell what those bring it."""
    unseen = Bootstrap(len(task.y), seed=task.seed).unseen
    return _dropout(task, scratch, tick, task.epochs, ", on what twins see", unseen)


def _dropout(task: Task, scratch: Path, tick: Tick, epochs: int, on: str = "", held: Tensor | None = None) -> Trained:
    network, average = task.network(dropout=DROPOUT, seed=task.seed), Average(FIT.average)
    averaged, keep = range(1, epochs + 1), (task.epochs,)
    run = _single(
        task, scratch, tick, epochs, network=network, held=held, average=average, averaged=averaged, keep=keep
    )

    def masked(state: str) -> Predict:
        model = run.of(state)
        return _over_draws(task, run.device, lambda x: logits_of(model, x, dropping=True))

    end = f"after {task.epochs}"
    rows = {f"MC dropout{on}": masked(end), f"MC dropout, averaged{on}": masked(f"average {end}")}
    rows[f"dropout, mean{on}"] = of_mean(run.of(end))
    took = dict.fromkeys(rows, len(run.images.trained_on) / len(task.y))
    if epochs > task.epochs:
        rows[f"MC dropout, averaged, {MORE} times as long{on}"] = masked("average")
        took[f"MC dropout, averaged, {MORE} times as long{on}"] = epochs / task.epochs
    return _told(run, rows, took)


def ivon(task: Task, scratch: Path, tick: Tick) -> Trained:
    run = _single(task, scratch, tick, make=variational(task))
    sampled = cast(Any, run.optimizer).sampled_params
    draws = _over_draws(task, run.device, lambda x: logits_of(run.model, x), sampled)
    return _told(run, {"IVON": draws, "IVON, mean": of_mean(run.of("last"))})


def variational(task: Task) -> MakeOptimizer:
    """IVON with the settings that its authors chose for CIFAR-10 and 200 epochs, not tuned for fewer: five epochs in
    which the rate rises, but at most half of them, then its fall along a cosine. Their batches have 50 images."""
    kind, rate = require_ivon(), torch.optim.lr_scheduler
    rise = min(WARM, task.epochs // 2)

    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = kind(model.parameters(), lr=0.2, ess=len(task.y), hess_init=0.5, weight_decay=2e-4)
        if not rise:
            return optimizer, rate.CosineAnnealingLR(optimizer, task.epochs)
        rises, falls = (
            rate.LinearLR(optimizer, 1 / rise, 1, rise),
            rate.CosineAnnealingLR(optimizer, task.epochs - rise),
        )
        return optimizer, rate.SequentialLR(optimizer, [rises, falls], [rise])

    return make


def require_ivon() -> Any:
    try:
        from ivon import IVON
    except ImportError:
        raise UnavailableError(f"the method ivon needs ivon-opt: {how_to_install('compare')}") from None
    return IVON


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
