"""The methods that are compared. To add one, write a function below with `@method` before it, and add its name to
`METHODS` of config.py.

A method is a function of a task (one training set), of the plain model trained on it, and of the sizes of ensembles. It
returns a row of the table for each way to get a spread: draws of predictions, or the predictions of members.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from ... import Estimate, error_bars, fit
from ..._core.seeds import derive, own_randomness
from ...training.protocol import FIT
from ..images.methods import require_ivon
from .tasks import CPU, Plain, Task, number_of_batches, steps, train, update_statistics

DROPOUT = 0.2  # after each pooling, or each hidden layer of an MLP
ROUNDS = 4  # of error_bars: its default
KEPT: dict[Literal["members", "sigma"], str] = {
    "members": "error_bars",
    "sigma": "error_bars, sigma",
}  # what it keeps -> row of the table
PHASE = 5  # a round of error_bars takes this part of the epochs of the training, and has this times its learning rate
SNAPSHOTS = 20  # of SWAG: the rank of its covariance (Maddox et al. 2019)
LONGER = 4  # SWAG goes on for this part of the epochs of the training
PRECISIONS = torch.logspace(-4, 4, 81, dtype=torch.float64)  # of Laplace's prior


@dataclass(frozen=True, eq=False)
class Found:
    """Predictions for the test inputs, as probabilities or values."""

    draws: Tensor  # [draws or members, inputs, outputs]
    point: Tensor  # [inputs, outputs]: what the method predicts
    seconds: float  # of one core, for all trainings that it needs, the plain one included
    df: float = math.inf  # degrees of freedom of the spread; infinite for draws, of which there could be more


Method = Callable[[Task, Plain, Sequence[int]], dict[str, Found]]
METHODS: dict[str, Method] = {}


def method(name: str) -> Callable[[Method], Method]:
    """Register a method."""

    def register(found: Method) -> Method:
        METHODS[name] = found
        return found

    return register


@method("fit")
def by_fit(task: Task, plain: Plain, sizes: Sequence[int]) -> dict[str, Found]:
    """`fit` as it is, with the learning rate of the plain training, which does not fall here."""
    began, seed = time.process_time(), derive(task.seed, "fit")
    result = fit(
        task.network(0.0, seed),
        TensorDataset(task.x, task.y),
        task.kind,
        optimizer=lambda parameters: torch.optim.Adam(parameters, task.lr, fused=True),
        epochs=task.epochs,
        batch_size=task.batch,
        seed=seed,
        progress=False,
    )
    seconds = time.process_time() - began
    return {"fit": _from_draws(_of_estimate(task, result.estimate), seconds)}


def _of_estimate(task: Task, estimate: Estimate) -> list[Tensor]:
    return [task.predict(estimate.sample(seed=k).eval()) for k in range(task.samples)]


def _from_draws(draws: Iterable[Tensor], seconds: float) -> Found:
    """The prediction is the mean of the draws."""
    stacked = torch.stack(list(draws))
    return Found(stacked, stacked.mean(0), seconds)


@method("error_bars")
def by_error_bars(task: Task, plain: Plain, sizes: Sequence[int]) -> dict[str, Found]:
    """`error_bars` around the plain model, whose prediction stays as it is: members, and draws of a matched sigma."""
    found, point = {}, task.predict(plain.model)
    for keep in KEPT:
        began = time.process_time()
        estimate = error_bars(
            plain.copy(),
            TensorDataset(task.x, task.y),
            task.kind,
            rounds=ROUNDS,
            epochs=max(1, round(task.epochs / PHASE)),
            keep=keep,
            optimizer=lambda parameters: torch.optim.Adam(parameters, PHASE * task.lr, fused=True),
            batch_size=task.batch,
            seed=derive(task.seed, "error_bars"),
            progress=False,
        )
        seconds = plain.seconds + time.process_time() - began
        members = estimate.members
        if members is None:
            draws, df = _of_estimate(task, estimate), math.inf
        else:
            draws = [task.predict(_member(estimate.module, members[k])) for k in range(len(members))]
            df = len(members) - 1
        found[KEPT[keep]] = Found(torch.stack(draws), point, seconds, df)
    return found


def _member(model: nn.Module, weights: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: cast(Tensor, functional_call(model, weights, (x,)))


@method("dropout")
def by_dropout(task: Task, plain: Plain, sizes: Sequence[int]) -> dict[str, Found]:
    """MC dropout after the plain training, and with the weights averaged over the epochs as in `fit`."""
    began, seed = time.process_time(), derive(task.seed, "dropout")
    average: list[AveragedModel] = []

    def take(model: nn.Module) -> None:
        if not average:
            average.append(AveragedModel(model, avg_fn=_later_ones_more))
        average[0].update_parameters(model)

    last, _ = train(task, seed, dropout=DROPOUT, after_epoch=take)
    mean = average[0].module
    update_statistics(task, mean)
    seconds = time.process_time() - began
    return {
        "MC dropout": _from_draws(_masked(task, last, seed), seconds),
        "MC dropout, averaged": _from_draws(_masked(task, mean, seed), seconds),
    }


def _later_ones_more(average: Tensor, weight: Tensor, count: Tensor | int) -> Tensor:
    """Epoch s gets a weight of about s^power."""
    power = FIT.average
    return average.lerp(weight, (power + 1) / (power + int(count) + 1))


def _masked(task: Task, model: nn.Module, seed: int) -> list[Tensor]:
    model.eval()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.train()
    found = []
    for k in range(task.samples):
        with own_randomness(CPU, seed, "masks", k):
            found.append(task.predict(model))
    return found


@method("ensemble")
def by_ensemble(task: Task, plain: Plain, sizes: Sequence[int]) -> dict[str, Found]:
    """Deep ensembles: the plain model, and others on the same data with other seeds."""
    return _members(task, "ensemble of", sizes, plain)


@method("bootstrap")
def by_bootstrap(task: Task, plain: Plain, sizes: Sequence[int]) -> dict[str, Found]:
    """Separate trainings on bootstrap samples, with other seeds."""
    return _members(task, "bootstrap of", sizes, None)


def _members(task: Task, name: str, sizes: Sequence[int], first: Plain | None) -> dict[str, Found]:
    members = [task.predict(first.model)] if first else []
    seconds = [first.seconds] if first else []
    while len(members) < max(sizes):
        began, seed = time.process_time(), derive(task.seed, name, len(members))
        generator = torch.Generator().manual_seed(derive(seed, "bootstrap"))
        n = len(task.x)
        rows = None if first else torch.randint(n, (n,), generator=generator)
        model, _ = train(task, seed, rows=rows)
        seconds.append(time.process_time() - began)
        members.append(task.predict(model))
    found = {}
    for size in sizes:
        draws = torch.stack(members[:size])
        found[f"{name} {size}"] = Found(draws, draws.mean(0), sum(seconds[:size]), size - 1)
    return found


@method("ivon")
def by_ivon(task: Task, plain: Plain, sizes: Sequence[int]) -> dict[str, Found]:
    """IVON with its authors' settings for CIFAR-10, except that the learning rate falls from the first step on."""
    kind = require_ivon()
    began, seed = time.process_time(), derive(task.seed, "ivon")
    seconds = 0.0
    scale = 1.0
    if task.kind == "regression":  # the loss must be a negative log-likelihood
        seconds, scale = plain.seconds, 0.5 / _noise(task, plain)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return kind(model.parameters(), lr=0.2, ess=len(task.x), hess_init=0.5, weight_decay=2e-4)  # type: ignore[no-any-return]

    model, optimizer = train(task, seed, optimizer=make, scale=scale)
    seconds += time.process_time() - began
    draws = []
    for k in range(task.samples):
        with own_randomness(CPU, seed, "draws", k), cast(Any, optimizer).sampled_params():
            draws.append(task.predict(model))
    return {"IVON": _from_draws(draws, seconds)}


def _noise(task: Task, plain: Plain) -> float:
    """The variance of the residuals of the plain model on its training set."""
    return max((task.predict(plain.model, task.x) - task.y).square().mean().item(), 1e-6)


@method("laplace")
def by_laplace(task: Task, plain: Plain, sizes: Sequence[int]) -> dict[str, Found]:
    """A Gaussian over the last layer of the plain model: the inverse of the generalized Gauss-Newton matrix and of the
    precision of a prior, which is chosen by the marginal likelihood (Daxberger et al. 2021)."""
    began = time.process_time()
    last = cast(nn.Linear, cast(nn.Sequential, plain.model)[-1])
    features = cast(nn.Sequential, plain.model)[:-1]
    weights = torch.cat([last.weight, last.bias[:, None]], 1).detach().double().flatten()  # [outputs * (units + 1)]
    inputs = _with_one(features, task.x)
    if task.kind == "classification":
        probs = task.predict(plain.model, task.x)
        curvature = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]
    else:
        curvature = torch.full((len(inputs), 1, 1), 1 / _noise(task, plain), dtype=torch.float64)
    matrix = torch.zeros(len(weights), len(weights), dtype=torch.float64)
    for x, c in zip(inputs.split(500), curvature.split(500), strict=True):
        matrix += torch.einsum("ni,nj,nab->aibj", x, x, c).reshape(matrix.shape)
    values, vectors = torch.linalg.eigh(matrix)
    precision = best_precision(values, weights)
    variances = 1 / (values.clamp(min=0) + precision)
    noise = torch.randn(
        task.samples,
        len(weights),
        generator=torch.Generator().manual_seed(derive(task.seed, "laplace")),
        dtype=torch.float64,
    )
    drawn = weights + (noise * variances.sqrt()) @ vectors.T
    seconds = plain.seconds + time.process_time() - began
    outputs = torch.einsum(
        "ni,kai->kna", _with_one(features, task.test_x), drawn.view(task.samples, last.out_features, -1)
    )
    draws = outputs.softmax(2) if task.kind == "classification" else outputs
    return {"Laplace, last layer": Found(draws, task.predict(plain.model), seconds)}


def _with_one(features: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        found = torch.cat([features(part).double() for part in x.split(250)])
    return torch.cat([found, torch.ones(len(found), 1, dtype=found.dtype)], 1)


def best_precision(eigenvalues: Tensor, weights: Tensor) -> float:
    """The prior precision with the largest marginal likelihood: that of the data at the weights is the same for all."""
    n = len(weights)
    evidence = [
        0.5 * (n * p.log() - p * weights.square().sum() - (eigenvalues.clamp(min=0) + p).log().sum())
        for p in PRECISIONS
    ]
    return PRECISIONS[int(torch.stack(evidence).argmax())].item()


@method("swag")
def by_swag(task: Task, plain: Plain, sizes: Sequence[int]) -> dict[str, Found]:
    """SWAG: a Gaussian with the mean and half of the covariance, diagonal and of low rank, of the weights along a
    further training with a constant learning rate (Maddox et al. 2019). Snapshots are more frequent than once per
    epoch, because the further training is short."""
    began, seed = time.process_time(), derive(task.seed, "swag")
    model = plain.copy().train()
    optimizer = task.adam(model)
    epochs = max(1, round(task.epochs / LONGER))
    every = max(1, epochs * number_of_batches(task) // SNAPSHOTS)
    snapshots = []
    for step, batch in steps(task, seed, epochs):
        optimizer.zero_grad()
        task.loss(model(task.x[batch]), task.y[batch]).backward()
        optimizer.step()
        if (step + 1) % every == 0:
            snapshots.append(parameters_to_vector(model.parameters()).detach().clone())
    stack = torch.stack(snapshots)
    mean, deviations = stack.mean(0), (stack - stack.mean(0))[-SNAPSHOTS:]
    seconds = plain.seconds + time.process_time() - began
    draws, drawn = [], copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(derive(seed, "draws"))
    for _ in range(task.samples):
        diagonal = stack.var(0, correction=0).sqrt() * torch.randn(len(mean), generator=generator)
        low_rank = (
            torch.randn(len(deviations), generator=generator) @ deviations / math.sqrt(max(len(deviations) - 1, 1))
        )
        vector_to_parameters(mean + (diagonal + low_rank) / math.sqrt(2), drawn.parameters())
        update_statistics(task, drawn)
        draws.append(task.predict(drawn))
    return {"SWAG": _from_draws(draws, seconds)}
