"""The runs of the image experiment: each method with each seed is a part, and what is kept of it."""

from __future__ import annotations

import math
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._core import seeds
from ..._core.devices import usable
from ..._core.extras import how_to_install
from ...estimate.prediction import entropy
from .. import datasets, networks
from ..datasets import Moments, image_files, standardised
from ..runner.experiment import Part, Tick, UnavailableError
from .config import PRESETS, Config
from .contenders import METHODS
from .cost import TURNS, kinds, turns
from .recipes import TWINS
from .rivals import AS_DEAR, longer, require_ivon
from .task import Task, Trained

STRANGE = 2000  # images of another kind
SPARE = 5000  # other images of the training files
GAP = 2000  # training images whose accuracy is compared with that of test images


def chosen(config: Config) -> tuple[tuple[str, ...], int, int]:
    """Methods, epochs and seeds: those of the config, or else of its preset, but for IVON where it is not installed."""
    preset = PRESETS[config.preset]
    usual = tuple(m for m in preset.methods if m != "ivon" or find_spec("ivon"))
    return config.methods or usual, config.epochs or preset.epochs, config.seeds or preset.seeds


def timed(config: Config) -> int:
    """How many images an epoch has whose time is measured."""
    preset = PRESETS[config.preset]
    there = datasets.DIGITS_TRAIN if preset.dataset == "digits" else preset.timed
    return min(preset.timed, preset.images or there)


def parts(config: Config) -> list[Part]:
    methods, epochs, number = chosen(config)
    _require(config)
    if config.methods is None and len(methods) < len(PRESETS[config.preset].methods):
        _tell_of_ivon()
    length = {"single": longer(epochs, AS_DEAR) + epochs, "dropout": longer(epochs)}
    length |= {method: recipe.epochs(epochs) for method, (_, recipe) in TWINS.items()}
    found = [
        Part(f"seed {seed} {method}", length.get(method, epochs), partial(_run, config, method, seed), resumes=True)
        for method in (*methods, *config.screened)
        for seed in range(number if method in methods else 1)
    ]
    ticks = (TURNS + 1) * len(kinds((*methods, *config.screened)))
    return [*found, Part("cost", ticks, partial(_cost, config), alone=True)]


@cache  # said once, however often the parts are asked for
def _tell_of_ivon() -> None:
    needed = f"the method ivon needs ivon-opt: {how_to_install('compare')}"
    print(f"twinboot: left out: {needed}", file=sys.stderr)


@cache
def _tell_of_clothes(directory: str | None) -> None:
    try:
        _images("fashion-mnist", directory)
    except datasets.MissingError:
        needed = f"strange images need {image_files.wanted('fashion-mnist')} in the directory of --data, too"
        print(f"twinboot: left out: {needed}", file=sys.stderr)


def _require(config: Config) -> None:
    """What can be known to be missing is said before anything is trained."""
    preset = PRESETS[config.preset]
    if preset.dataset != "digits" and config.data is None:
        raise UnavailableError(
            f"the preset {config.preset} needs files of {preset.dataset}: give --data DIRECTORY with "
            f"{image_files.wanted(preset.dataset)}, from {image_files.PAGES[preset.dataset]}."
        )
    try:
        data = _images(preset.dataset, config.data)
        usable(config.device or "cpu")
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    if preset.dataset == "cifar10":
        _tell_of_clothes(config.data)
    there = len(data.train_y) - (preset.images or 0) if config.spare else len(data.test_y)
    if config.test and config.test > there:
        kind = "spare" if config.spare else "test"
        raise UnavailableError(f"there are {there} {kind} images, so that test can't be {config.test}.")
    if "ivon" in (*(config.methods or ()), *config.screened):
        require_ivon()


@cache
def _images(dataset: str, directory: str | None) -> datasets.Images:
    return datasets.load(dataset, directory)


def _run(config: Config, method: str, number: int, tick: Tick, scratch: Path) -> dict[str, pd.DataFrame]:
    task, moments = _task(config, number)
    with _peak_memory(config.device) as peak:
        trained = METHODS[method](task, scratch, tick)
    cost = {"epoch_seconds": trained.curve["seconds"].median(), "memory": peak[0]}
    x, y = _judges(config, number)
    test = standardised(x, moments), y
    shown = trained.trained_on[: min(GAP, config.test or GAP)]
    rows, bins = _judged(trained, task, test, shown, _strange(config, moments), config.test)
    tables = {"rows": rows, "bins": bins, "curves": trained.curve, "costs": pd.DataFrame([cost])}
    if len(trained.sigma):
        tables["sigma"] = trained.sigma
    return {name: table.assign(method=method, seed=number) for name, table in tables.items()}


def _cost(config: Config, tick: Tick) -> dict[str, pd.DataFrame]:
    task = _task(config, 0)[0]
    shorter = replace(task, x=task.x[: timed(config)], y=task.y[: timed(config)])
    return {"turns": turns(shorter, (*chosen(config)[0], *config.screened), tick)}


def _task(config: Config, number: int) -> tuple[Task, Moments]:
    """What is to be learned with the seed of a number, and the moments of its images: of all that are there for
    training, with those that a method holds out or leaves unseen, for all methods alike."""
    seed, data = _seed(config, number), _images(PRESETS[config.preset].dataset, config.data)
    index = _order(config, number)[: PRESETS[config.preset].images]
    moments = datasets.moments_of(data.train_x[index])
    x, y = standardised(data.train_x[index], moments), data.train_y[index]
    network = partial(_network, config, data, seed=seed)
    epochs = chosen(config)[1]
    return Task(x, y, network, epochs, config.batch, config.rate, config.samples, seed), moments


def _seed(config: Config, number: int) -> int:
    return config.seed * 1_000_000 + number


def _order(config: Config, number: int) -> Tensor:
    """Of the images of the training files: the first are trained on."""
    there = len(_images(PRESETS[config.preset].dataset, config.data).train_y)
    order = torch.Generator().manual_seed(seeds.derive(_seed(config, number), "images"))
    return torch.randperm(there, generator=order)


def _judges(config: Config, number: int) -> tuple[Tensor, Tensor]:
    """The images, and their labels, that a method of this number is judged by."""
    preset, at_most = PRESETS[config.preset], config.test
    data = _images(preset.dataset, config.data)
    if not config.spare:
        return data.test_x[:at_most], data.test_y[:at_most]
    index = _order(config, number)[preset.images :][: at_most or SPARE]
    return data.train_x[index], data.train_y[index]


def _judged(
    trained: Trained,
    task: Task,
    test: tuple[Tensor, Tensor],
    shown: Tensor,
    strange: Tensor | None,
    most: int | None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The scores of each row, whose accuracy in training is that of the images `shown`, and its reliability diagram.
    At most so many unseen images, if a number is given."""
    from ... import metrics

    rows, bins = [], []
    unseen = trained.unseen[:most] if trained.unseen is not None else None
    for row, predict in trained.rows.items():
        probs = predict(test[0])
        found = metrics.scores(probs, test[1])
        in_training = (predict(task.x[shown]).argmax(1) == task.y[shown]).double().mean().item()
        found["gap"] = in_training - found["accuracy"]
        if unseen is not None:
            found["unseen"] = metrics.scores(predict(task.x[unseen]), task.y[unseen])["nll"]
        if strange is not None:
            doubt = torch.cat([entropy(probs), entropy(predict(strange))])
            found["ood_auroc"] = metrics.auroc(doubt, torch.arange(len(doubt)) >= len(probs))
        rows.append({"row": row, **found, "epochs": trained.epochs.get(row, 1.0)})
        diagram = metrics.reliability(probs, test[1])
        bins.append(pd.DataFrame(diagram._asdict()).assign(row=row, bin=range(metrics.BINS)))
    return pd.DataFrame(rows), pd.concat(bins, ignore_index=True)


def _network(config: Config, data: datasets.Images, dropout: float = 0.0, *, seed: int) -> nn.Module:
    preset = PRESETS[config.preset]
    make = networks.small if preset.network == "small" else networks.vgg16
    model = make(data.classes, data.train_x.shape[1], preset.width, preset.normalisation, dropout, seed)
    if config.augment:  # as a first layer of the same chain: the others keep their names
        layer = datasets.Augment(padding=data.train_x.shape[-1] // 8, flip=preset.dataset != "digits")
        model = nn.Sequential(OrderedDict(augment=layer, **dict(model.named_children())))
    # Convolutions on a CPU take two thirds of the time with the channels last.
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(config.device or "cpu")


def _strange(config: Config, moments: Moments) -> Tensor | None:
    """Clothes for a model of CIFAR-10, as grey images of its size; None where there are no files of them."""
    if PRESETS[config.preset].dataset != "cifar10":
        return None
    try:
        images = _images("fashion-mnist", config.data).test_x[: min(STRANGE, config.test or STRANGE)]
    except datasets.MissingError:
        return None
    return standardised(F.pad(images, (2, 2, 2, 2)).expand(-1, 3, -1, -1), moments)


@contextmanager
def _peak_memory(device: str | None) -> Iterator[list[float]]:
    """The most memory, in GiB, that the block took, in a list: that of this process, or of a GPU; NaN where neither the
    system nor the device says."""
    found = [math.nan]
    if device and torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found[0] = torch.cuda.max_memory_allocated(device) / 2**30
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        yield found
        return
    yield found
    status = Path("/proc/self/status").read_text()
    found[0] = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 2**20
