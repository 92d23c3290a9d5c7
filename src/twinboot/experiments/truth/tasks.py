"""What is learned: disjoint training sets, test inputs that they all share, networks, and the plain training.

A training set is a slice of a pool of samples in a fixed random order, or is generated, where there is no end of them.
"""

from __future__ import annotations

import copy
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from ..._core.seeds import derive, own_randomness, seeded
from .. import datasets, networks
from ..uci.data import read
from .config import PRESETS, Config

Kind = Literal["classification", "regression"]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
PROTEIN = "protein-tertiary-structure"
NOISE = 0.3  # standard deviation of the generated targets: their function has one of about 1
INPUTS = 4  # of the generated function
CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Pool:
    """Samples to cut training sets from, in their order, and the test inputs with their targets."""

    x: Tensor  # bytes, if these are images: floats would take four times the memory
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    prepare: Callable[[Tensor], Tensor] = lambda x: x


@dataclass(frozen=True, eq=False)
class Task:
    """One training set, the test inputs, and how a plain model is trained."""

    kind: Kind
    x: Tensor
    y: Tensor
    test_x: Tensor
    network: Callable[[float, int], nn.Module]  # of dropout and a seed
    epochs: int
    batch: int
    rounds: int  # of error_bars
    lr: float
    samples: int  # draws of the weights for a prediction
    seed: int

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y) if self.kind == "classification" else F.mse_loss(output, y)

    def adam(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.lr, fused=True)

    def predict(self, model: Callable[[Tensor], Tensor], x: Tensor | None = None) -> Tensor:
        """Class probabilities or values of the test inputs, [inputs, outputs], in double precision."""
        with torch.no_grad():
            found = torch.cat([model(part).double() for part in (self.test_x if x is None else x).split(250)])
        return found.softmax(1) if self.kind == "classification" else found


@dataclass(frozen=True, eq=False)
class Plain:
    """A model trained in the usual way on one set: what a user has without any of the methods."""

    model: nn.Module
    seconds: float  # of one core

    def copy(self) -> nn.Module:
        return copy.deepcopy(self.model)


def steps(task: Task, seed: int, epochs: int, rows: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
    """The number of each step, from 0, and the rows of its batch. BatchNorm needs two samples."""
    rows, step = torch.arange(len(task.x)) if rows is None else rows, 0
    for epoch in range(epochs):
        order = torch.Generator().manual_seed(derive(seed, "order", epoch))
        for batch in rows[torch.randperm(len(rows), generator=order)].tensor_split(number_of_batches(task)):
            if len(batch) > 1:
                yield step, batch
            step += 1


def number_of_batches(task: Task) -> int:
    return math.ceil(len(task.x) / task.batch)


def train(
    task: Task,
    seed: int,
    *,
    dropout: float = 0.0,
    rows: Tensor | None = None,
    optimizer: MakeOptimizer | None = None,
    scale: float = 1.0,
    falls: bool = True,
    after_epoch: Callable[[nn.Module], object] = lambda model: None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The plain training: Adam, whose learning rate falls to 0 along a cosine. Returns the model in evaluation mode.

    Args:
        rows: the samples to train on, repeated ones included. Default: each once.
        optimizer: another optimizer, with the same schedule.
        scale: multiplies the loss.
        falls: whether the learning rate falls.
    """
    model = task.network(dropout, seed)
    model.train()
    optimize = (optimizer or task.adam)(model)
    highest, total = optimize.param_groups[0]["lr"], task.epochs * number_of_batches(task)
    draws = getattr(optimize, "sampled_params", None)  # IVON takes its gradients at a draw of the weights
    for step, batch in steps(task, seed, task.epochs, rows):
        if falls:
            optimize.param_groups[0]["lr"] = highest * (1 + math.cos(math.pi * step / total)) / 2
        optimize.zero_grad()
        with own_randomness(CPU, seed, step), draws(train=True) if draws else nullcontext():
            loss = scale * task.loss(model(task.x[batch]), task.y[batch])
            loss.backward()
        optimize.step()
        if (step + 1) % number_of_batches(task) == 0:
            after_epoch(model)
    if not all(p.isfinite().all() for p in model.parameters()):
        raise FloatingPointError("the weights are not finite after the training: lower the learning rate.")
    return model.eval(), optimize


def update_statistics(task: Task, model: nn.Module) -> None:
    """BatchNorm statistics for the weights that the model has now."""
    with own_randomness(CPU, task.seed, "statistics"):
        update_bn((task.x[batch] for _, batch in steps(task, task.seed, 1)), model)
    model.eval()


@lru_cache(maxsize=64)  # several methods begin from the same model
def plain(config: Config, size: int, lr: float, number: int) -> Plain:
    task = task_of(config, size, lr, number)
    _warm_up(config)
    began = time.process_time()
    model, _ = train(task, task.seed)
    return Plain(model, time.process_time() - began)


@cache
def _warm_up(config: Config) -> None:
    """The first steps of a process take longer, and would count as training time."""
    task = task_of(config, config.all_sizes[0], config.all_lrs[0], 0)
    train(replace(task, epochs=1), task.seed)


def task_of(config: Config, size: int, lr: float, number: int) -> Task:
    """The task of training set `number` of some size."""
    preset, pool = PRESETS[config.preset], pool_of(config)
    if config.preset == "function":
        x, y = generated(size, derive(config.seed, "set", size, number))
    else:
        if (number + 1) * size > len(pool.x):
            raise ValueError(f"there is no set {number} of {size} samples: the pool has {len(pool.x)}.")
        own = slice(number * size, (number + 1) * size)
        x, y = pool.prepare(pool.x[own]), pool.y[own]
    return Task(
        kind=preset.kind,
        x=x,
        y=y,
        test_x=pool.test_x,
        network=NETWORKS[config.preset],
        epochs=config.epochs or preset.epochs,
        batch=preset.batch,
        rounds=preset.rounds,
        lr=lr,
        samples=config.samples,
        seed=derive(config.seed, "model", size, number),
    )


def available(config: Config, size: int) -> int | None:
    """How many disjoint sets of a size there are; None if there is no end of them."""
    return None if config.preset == "function" else len(pool_of(config).x) // size


def pool_of(config: Config) -> Pool:
    return _pool(config.preset, config.data, config.inputs, config.seed)


@cache
def _pool(preset: str, data: str | None, inputs: int, seed: int) -> Pool:
    if preset == "function":
        x, y = generated(inputs, derive(seed, "test"))
        return Pool(x[:0], y[:0], x, y)
    assert data is not None  # Config checks it
    if preset == "protein":
        return _shuffled(_protein(data), inputs, seed)
    images = datasets.load("fashion-mnist" if preset == "fashion" else "cifar10", data)
    prepare = partial(_images, datasets.moments_of(images.train_x), preset == "fashion")
    found = Pool(images.train_x, images.train_y, prepare(images.test_x[:inputs]), images.test_y, prepare)
    return _shuffled(found, inputs, seed)


def _images(moments: datasets.Moments, smaller: bool, x: Tensor) -> Tensor:
    """Standardised images; with `smaller`, 14 x 14 pixels instead of 28 x 28, in a quarter of the time."""
    x = datasets.standardised(x, moments)
    return F.avg_pool2d(x, 2) if smaller else x


def _protein(data: str) -> Pool:
    """Rows in units of the mean and standard deviation of all rows for training, the same for each set."""
    tables = read(data)
    if PROTEIN not in tables:
        raise ValueError(f"{data} has no set {PROTEIN!r}, only {', '.join(tables)}.")
    values, tests = torch.from_numpy(tables[PROTEIN].values), torch.from_numpy(tables[PROTEIN].test[0])
    training = torch.ones(len(values), dtype=torch.bool)
    training[tests] = False
    center, spread = values[training].mean(0), values[training].std(0)
    rows = ((values - center) / spread).float()
    return Pool(rows[training, :-1], rows[training, -1:], rows[tests, :-1], rows[tests, -1:])


def _shuffled(pool: Pool, inputs: int, seed: int) -> Pool:
    order = torch.randperm(len(pool.x), generator=torch.Generator().manual_seed(derive(seed, "pool")))
    return replace(pool, x=pool.x[order], y=pool.y[order], test_x=pool.test_x[:inputs], test_y=pool.test_y[:inputs])


def generated(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs uniform in [-2, 2]^4, and a sum of sines with a product term and normal noise."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, INPUTS, generator=generator) - 2
    f = torch.sin(2 * x[:, 0]) + torch.sin(x[:, 1] + x[:, 2]) + 0.5 * torch.sin(x[:, 2] * x[:, 3])
    return x, (f + NOISE * torch.randn(n, generator=generator)).unsqueeze(1)


def _mlp(inputs: int, dropout: float, seed: int) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    with seeded(derive(seed, "weights")):
        for i, (wide, units) in enumerate(((inputs, 50), (50, 50)), start=1):
            layers[f"hidden{i}"], layers[f"relu{i}"] = nn.Linear(wide, units), nn.ReLU()
            if dropout:
                layers[f"dropout{i}"] = nn.Dropout(dropout)
        layers["output"] = nn.Linear(50, 1)
    return nn.Sequential(layers)


def _convolutions(dropout: float, seed: int) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    with seeded(derive(seed, "weights")):
        for i, (channels, units) in enumerate(((1, 16), (16, 32)), start=1):
            layers[f"conv{i}"], layers[f"relu{i}"] = nn.Conv2d(channels, units, 3, padding=1), nn.ReLU()
            layers[f"pool{i}"] = nn.MaxPool2d(2)
            if dropout:
                layers[f"dropout{i}"] = nn.Dropout(dropout)
        layers |= {"flatten": nn.Flatten(), "linear": nn.Linear(288, 64), "relu3": nn.ReLU()}
        layers["output"] = nn.Linear(64, 10)
    return nn.Sequential(layers)


def _vgg(dropout: float, seed: int) -> nn.Module:
    model = networks.vgg16(10, width=0.25, normalisation="batch", dropout=dropout, seed=seed)
    # On a CPU, convolutions with the channels last take two thirds of the time.
    return model.to(memory_format=torch.channels_last)  # type: ignore[no-any-return,call-overload]


def _of_function(dropout: float, seed: int) -> nn.Module:
    return _mlp(INPUTS, dropout, seed)


def _of_protein(dropout: float, seed: int) -> nn.Module:
    return _mlp(9, dropout, seed)


NETWORKS: dict[str, Any] = {
    "function": _of_function,
    "protein": _of_protein,
    "fashion": _convolutions,
    "cifar10": _vgg,
}
