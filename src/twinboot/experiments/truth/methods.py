"""The methods that are compared. To add one, write a function below with `@method` before it, and add its name to
`METHODS` of config.py.

A method is a function of a task (one training set), of the plain model trained on it, and of the sizes of ensembles. It
returns a row of the table for each way to get a spread: draws of predictions, or the predictions of members.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from ... import Estimate, error_bars, fit
from ..._core.seeds import derive, own_randomness
from ...training.protocol import FIT
from ..images.methods import require_ivon
from .tasks import CPU, Plain, Task, number_of_batches, steps, train, update_statistics

DROPOUT = 0.2  # after each pooling, or each hidden layer of an MLP
KEPT: dict[Literal["members", "sigma"], str] = {
    "members": "error_bars",
    "sigma": "error_bars, sigma",
}  # what it keeps -> row of the table
SNAPSHOTS = 20  # of SWAG: the rank of its covariance (Maddox et al. 2019)
LONGER = 4  # SWAG goes on for this part of the epochs of the training
PRECISIONS = torch.logspace(-4, 4, 81, dtype=torch.float64)  # of Laplace's prior
NOISES = torch.logspace(0, 1, 41, dtype=torch.float64)  # of a regression, relative to the mean squared residual


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


def _of_estimate(task: Task, estimate: Estimate) -> Tensor:
    """Its draws, as in `predict`."""
    drawn = torch.stack([task.predict(estimate.sample(seed=k).eval()) for k in range(task.samples)])
    if not estimate.centered:
        return drawn
    mean = task.predict(estimate.module)
    if task.kind == "regression":
        return drawn - drawn.mean(0) + mean
    logits = drawn.log()  # up to a number for each draw and input, which softmax takes away
    return (logits - logits.mean(0) + mean.log()).softmax(2)


def _from_draws(draws: Iterable[Tensor], seconds: float) -> Found:
    """The prediction is the mean of the draws."""
    stacked = torch.stack(list(draws))
    return Found(stacked, stacked.mean(0), seconds)


@method("error_bars")
def by_error_bars(task: Task, plain: Plain, sizes: Sequence[int]) -> dict[str, Found]:
    """`error_bars` around the plain model, whose prediction stays as it is: members, and draws of a matched sigma."""
    found, point, began = {}, task.predict(plain.model), time.process_time()
    with TemporaryDirectory() as checkpoint:  # one training for both
        for keep in KEPT:
            estimate = error_bars(
                plain.copy(),
                TensorDataset(task.x, task.y),
                task.kind,
                rounds=task.rounds,
                epochs=max(1, round(task.epochs / task.rounds)),
                keep=keep,
                optimizer=lambda parameters: torch.optim.Adam(parameters, task.lr, fused=True),
                batch_size=task.batch,
                checkpoint=checkpoint,
                seed=derive(task.seed, "error_bars"),
                progress=False,
            )
            seconds = plain.seconds + time.process_time() - began
            found[KEPT[keep]] = _of_bars(task, estimate, point, seconds)
    return found


def _of_bars(task: Task, estimate: Estimate, point: Tensor, seconds: float) -> Found:
    members = estimate.members
    if members is None:
        return Found(_of_estimate(task, estimate), point, seconds)
    draws = [task.predict(_member(estimate.module, members[k])) for k in range(len(members))]
    return Found(torch.stack(draws), point, seconds, df=len(members) - 1)


def _member(model: nn.Module, weights: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: cast(Tensor, functional_call(model, weights, (x,)))


@method("dropout")
def by_dropout(task: Task, plain: Plain, sizes: Sequence[int]) -> dict[str, Found]:
    """MC dropout after the plain training; and with the weights averaged over the epochs of a training with a constant
    learning rate, as in the image experiment. A rate that falls to 0 leaves nothing to average."""
    began, seed = time.process_time(), derive(task.seed, "dropout")
    last, _ = train(task, seed, dropout=DROPOUT)
    middle, average = time.process_time(), list[AveragedModel]()

    def take(model: nn.Module) -> None:
        if not average:
            average.append(AveragedModel(model, avg_fn=_later_ones_more))
        average[0].update_parameters(model)

    train(task, seed, dropout=DROPOUT, falls=False, after_epoch=take)
    mean: nn.Module = average[0].module
    update_statistics(task, mean)
    end = time.process_time()
    return {
        "MC dropout": _from_draws(_masked(task, last, seed), middle - began),
        "MC dropout, averaged": _from_draws(_masked(task, mean, seed), end - middle),
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
    """IVON with its authors' settings for CIFAR-10, except that the learning rate falls from the first step on. With
    their rate of 0.2 half of the regressions diverge, so these have 0.05."""
    kind = require_ivon()
    began, seed = time.process_time(), derive(task.seed, "ivon")
    seconds, lr, scale = 0.0, 0.2, 1.0
    if task.kind == "regression":  # the loss must be a negative log-likelihood: the plain model tells the noise
        seconds, lr, scale = plain.seconds, 0.05, 0.5 / _residual(task, plain)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return kind(model.parameters(), lr=lr, ess=len(task.x), hess_init=0.5, weight_decay=2e-4)  # type: ignore[no-any-return]

    model, optimizer = train(task, seed, optimizer=make, scale=scale)
    seconds += time.process_time() - began
    draws = []
    for k in range(task.samples):
        with own_randomness(CPU, seed, "draws", k), cast(Any, optimizer).sampled_params():
            draws.append(task.predict(model))
    return {"IVON": _from_draws(draws, seconds)}


def _residual(task: Task, plain: Plain) -> float:
    """The mean squared residual of the plain model on its training set."""
    return max((task.predict(plain.model, task.x) - task.y).square().mean().item(), 1e-6)


@method("laplace")
def by_laplace(task: Task, plain: Plain, sizes: Sequence[int]) -> dict[str, Found]:
    """A Gaussian over the last layer of the plain model: its precision is the generalized Gauss-Newton matrix plus that
    of a prior. The prior, and the noise of a regression, are chosen by the marginal likelihood (Daxberger et al.
    2021)."""
    began = time.process_time()
    layers = cast(nn.Sequential, plain.model)
    features, last = layers[:-1], cast(nn.Linear, layers[-1])
    weights = torch.cat([last.weight, last.bias[:, None]], 1).detach().double()  # [outputs, units + 1]
    values, vectors = torch.linalg.eigh(gauss_newton(task, plain, _with_one(features, task.x)))
    values = values.clamp(min=0)  # rounding may leave some slightly below
    residual = _residual(task, plain) if task.kind == "regression" else 0.0
    precision, noise = best_prior(values, weights, len(task.x), residual)
    deviations = (values / noise + precision).rsqrt()
    generator = torch.Generator().manual_seed(derive(task.seed, "laplace"))
    normal = torch.randn(task.samples, weights.numel(), generator=generator, dtype=torch.float64)
    drawn = weights + ((normal * deviations) @ vectors.T).view(task.samples, *weights.shape)
    seconds = plain.seconds + time.process_time() - began
    outputs = _with_one(features, task.test_x) @ drawn.mT  # [draws, inputs, outputs]
    draws = outputs.softmax(2) if task.kind == "classification" else outputs
    return {"Laplace, last layer": Found(draws, task.predict(plain.model), seconds)}


def _with_one(features: nn.Module, x: Tensor) -> Tensor:
    """The inputs of the last layer, with a 1 for its bias."""
    with torch.no_grad():
        found = torch.cat([features(part).double() for part in x.split(250)])
    return torch.cat([found, torch.ones(len(found), 1, dtype=found.dtype)], 1)


def gauss_newton(task: Task, plain: Plain, inputs: Tensor) -> Tensor:
    """The generalized Gauss-Newton matrix of the sum of the losses of all samples, for the weights [outputs, units + 1]
    of the last layer, flattened. The loss of a regression is half of the squared error."""
    if task.kind == "classification":
        probs = task.predict(plain.model, task.x)
        curvature = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]
    else:
        curvature = torch.ones(len(inputs), 1, 1, dtype=torch.float64)
    size = inputs.shape[1] * curvature.shape[1]
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for x, c in zip(inputs.split(500), curvature.split(500), strict=True):
        matrix += torch.einsum("ni,nj,nab->aibj", x, x, c).reshape(size, size)
    return matrix


def best_prior(eigenvalues: Tensor, weights: Tensor, n: int, residual: float) -> tuple[float, float]:
    """The precision of the prior and the variance of the noise with the largest marginal likelihood. For classes, which
    have a residual of 0 here, the noise is 1: the likelihood at the weights is then the same for all precisions."""
    noise = residual * NOISES if residual else torch.ones(1, dtype=torch.float64)
    likelihood = -n * (noise.log() + residual / noise)  # [noises], twice the logarithm
    prior = weights.numel() * PRECISIONS.log() - PRECISIONS * weights.square().sum()  # [precisions]
    volume = (eigenvalues / noise[:, None, None] + PRECISIONS[:, None]).log().sum(2)  # [noises, precisions]
    best = int((likelihood[:, None] + prior - volume).argmax())
    return PRECISIONS[best % len(PRECISIONS)].item(), noise[best // len(PRECISIONS)].item()


@method("swag")
def by_swag(task: Task, plain: Plain, sizes: Sequence[int]) -> dict[str, Found]:
    """SWAG: a Gaussian around the mean of the weights along a further training with a constant learning rate (Maddox et
    al. 2019). Snapshots are more frequent than once per epoch, because this training is short."""
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
            snapshots.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    seconds, found = plain.seconds + time.process_time() - began, torch.stack(snapshots)
    draws, generator = [], torch.Generator().manual_seed(derive(seed, "draws"))
    for _ in range(task.samples):
        own = swag_draw(found, generator).split([p.numel() for p in model.parameters()])
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), own, strict=True):
                parameter.copy_(values.view(parameter.shape))
        update_statistics(task, model)
        draws.append(task.predict(model))
    return {"SWAG": _from_draws(draws, seconds)}


def swag_draw(snapshots: Tensor, generator: torch.Generator) -> Tensor:
    """A draw around the mean of snapshots [snapshots, weights] with half of the sum of two covariances: a diagonal one,
    and one whose rank is the number of the last snapshots."""
    mean = snapshots.mean(0)
    last = (snapshots - mean)[-SNAPSHOTS:]
    diagonal = snapshots.std(0, correction=0) * torch.randn(mean.shape, generator=generator)
    low_rank = torch.randn(len(last), generator=generator) @ last / math.sqrt(max(len(last) - 1, 1))
    return mean + (diagonal + low_rank) / math.sqrt(2)
