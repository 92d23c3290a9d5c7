"""The runs of the image experiment: each method with each seed is a part, and what is kept of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import metrics, seeds
from ..prediction import entropy
from . import datasets, networks
from .contenders import METHODS, MORE, Task, Trained
from .datasets import Moments, standardised
from .experiment import Part, Tick, UnavailableError
from .images_config import PRESETS, Config

STRANGE = 2000  # images of another kind
GAP = 2000  # training images whose accuracy is compared with that of test images


def chosen(config: Config) -> tuple[tuple[str, ...], int, int]:
    """Methods, epochs and seeds: those of the config, or else of its preset."""
    preset = PRESETS[config.preset]
    return config.methods or preset.methods, config.epochs or preset.epochs, config.seeds or preset.seeds


def parts(config: Config) -> list[Part]:
    preset = PRESETS[config.preset]
    methods, epochs, number = chosen(config)
    if preset.dataset != "digits":
        try:
            datasets.load(preset.dataset, config.data)
        except ValueError as error:
            raise UnavailableError(f"the preset {config.preset} needs --data: {error}") from None
    if "ivon" in methods:
        _require_ivon()
    length = {"single": 2 * epochs, "longer": round(MORE * epochs)}
    return [
        Part(f"seed {seed} {method}", length.get(method, epochs), partial(_run, config, method, seed), resumes=True)
        for seed in range(number)
        for method in methods
    ]


def _require_ivon() -> None:
    try:
        import ivon  # noqa: F401
    except ImportError:
        raise UnavailableError("the method ivon needs ivon-opt: pip install 'twinboot[compare]'.") from None


def _run(config: Config, method: str, number: int, tick: Tick, scratch: Path) -> dict[str, pd.DataFrame]:
    seed = config.seed * 1_000_000 + number
    data = datasets.load(PRESETS[config.preset].dataset, config.data)
    drawn = torch.randperm(len(data.train_y), generator=torch.Generator().manual_seed(seeds.derive(seed, "images")))
    index = drawn[: PRESETS[config.preset].images]
    moments = datasets.moments_of(data.train_x[index])
    network = partial(_network, config, data, seed=seed)
    task = Task(
        standardised(data.train_x[index], moments),
        data.train_y[index],
        network,
        chosen(config)[1],
        config.batch,
        config.rate,
        config.samples,
        seed,
    )
    with _peak_memory() as peak:
        trained = METHODS[method](task, scratch, tick)
    seconds = trained.curve["seconds"]
    cost = {"seconds": seconds.sum(), "epoch_seconds": seconds.median(), "memory": peak[0]}
    test = standardised(data.test_x, moments), data.test_y
    rows, bins = _judged(trained, task, test, _strange(config, moments))
    tables = {"rows": rows, "bins": bins, "curves": trained.curve, "costs": pd.DataFrame([cost])}
    if len(trained.sigma):
        tables["sigma"] = trained.sigma
    return {name: table.assign(method=method, seed=number) for name, table in tables.items()}


def _judged(
    trained: Trained, task: Task, test: tuple[Tensor, Tensor], strange: Tensor | None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The scores of each row, and its reliability diagram."""
    rows, bins = [], []
    shown = trained.trained_on[:GAP]
    for row, predict in trained.rows.items():
        probs = predict(test[0])
        found = metrics.scores(probs, test[1])
        in_training = (predict(task.x[shown]).argmax(1) == task.y[shown]).double().mean().item()
        found["gap"] = in_training - found["accuracy"]
        if strange is not None:
            doubt = torch.cat([entropy(probs), entropy(predict(strange))])
            found["ood_auroc"] = metrics.auroc(doubt, torch.arange(len(doubt)) >= len(probs))
        rows.append({"row": row, **found})
        diagram = metrics.reliability(probs, test[1])
        bins.append(pd.DataFrame(diagram._asdict()).assign(row=row, bin=range(metrics.BINS)))
    return pd.DataFrame(rows), pd.concat(bins, ignore_index=True)


def _network(config: Config, data: datasets.Images, dropout: float = 0.0, *, seed: int) -> nn.Module:
    preset = PRESETS[config.preset]
    make = networks.small if preset.network == "small" else networks.vgg16
    model = make(data.classes, data.train_x.shape[1], preset.width, preset.normalisation, dropout, seed)
    if config.augment:
        model = nn.Sequential(datasets.Augment(), model)
    # Convolutions on a CPU take two thirds of the time with the channels last.
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(config.device or "cpu")


def _strange(config: Config, moments: Moments) -> Tensor | None:
    """Clothes for a model of CIFAR-10, as grey images of its size; None where there are no files of them."""
    if PRESETS[config.preset].dataset != "cifar10":
        return None
    try:
        images = datasets.load("fashion-mnist", config.data).test_x[:STRANGE]
    except ValueError:
        return None
    return standardised(F.pad(images, (2, 2, 2, 2)).expand(-1, 3, -1, -1), moments)


@contextmanager
def _peak_memory() -> Iterator[list[float]]:
    """The most memory, in GiB, that this process held in the block, in a list; NaN where the system does not say."""
    found = [math.nan]
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        yield found
        return
    yield found
    status = Path("/proc/self/status").read_text()
    found[0] = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 2**20
