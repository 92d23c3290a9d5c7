"""The runs of the image experiment: one part for each method and seed, and one that measures the time of an epoch."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._core import seeds
from ..._core.batches import usable
from ..._core.extras import how_to_install
from ...estimate.prediction import entropy
from .. import datasets, networks
from ..datasets import Moments, image_files, standardised
from ..runner.experiment import Part, Tick, UnavailableError
from .config import PRESETS, Config
from .methods import NEEDS_IVON, find, require_ivon
from .single import Problem, Trained

STRANGE = 2000  # out-of-distribution images
SPARE = 5000  # other images of the training files
GAP = 2000  # training images whose accuracy is compared with that of test images
TURNS = 3  # measurements of the time of an epoch
_images = cache(datasets.load)


def chosen(config: Config) -> tuple[tuple[str, ...], int, int]:
    """Methods, epochs and seeds. IVON is left out of a preset if it is not installed."""
    preset, methods = PRESETS[config.preset], config.all_methods
    if config.methods is None and not find_spec("ivon"):
        methods = tuple(name for name in methods if name != "ivon")
    return methods, config.epochs or preset.epochs, config.seeds or preset.seeds


def timed(config: Config) -> int:
    """Images of an epoch whose time is measured."""
    preset = PRESETS[config.preset]
    available = datasets.DIGITS_TRAIN if preset.dataset == "digits" else preset.timed
    return min(preset.timed, preset.images or available)


def parts(config: Config) -> list[Part]:
    methods, epochs, number = chosen(config)
    _require(config)
    if len(methods) < len(config.all_methods):
        _say_left_out(NEEDS_IVON)
    found = []
    for name, seed in product(methods, range(number)):
        part = f"seed {seed} {name}".replace(":", " ")  # directories on Windows have no colon in their names
        found.append(Part(part, find(name).epochs(epochs), partial(_run, config, name, seed), resumes=True))
    ticks = (TURNS + 1) * len(_kinds(config))
    return [*found, Part("cost", ticks, partial(_cost, config), alone=True)]


@cache  # once, though the command line asks for the parts twice
def _say_left_out(why: str) -> None:
    print(f"twinboot: left out: {why}", file=sys.stderr)


def _require(config: Config) -> None:
    """Refuse, before anything is trained, what cannot run."""
    preset = PRESETS[config.preset]
    if not find_spec("torchmetrics"):
        raise UnavailableError(f"images need torchmetrics: {how_to_install('metrics')}")
    if preset.dataset != "digits" and config.data is None:
        raise UnavailableError(
            f"the preset {config.preset} needs files of {preset.dataset}: give --data DIRECTORY with "
            f"{image_files.wanted(preset.dataset)}, from {image_files.LAYOUTS[preset.dataset].page}."
        )
    try:
        data = _images(preset.dataset, config.data)
        usable(config.device or "cpu")
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    if preset.dataset == "cifar10" and _strange(config) is None:
        _say_left_out(f"strange images need {image_files.wanted('fashion-mnist')} in the directory of --data, too")
    available = len(data.train_y) - (preset.images or 0) if config.spare else len(data.test_y)
    if config.test and config.test > available:
        kind = "spare" if config.spare else "test"
        raise UnavailableError(f"there are {available} {kind} images: test can't be {config.test}.")
    if "ivon" in (config.methods or ()):
        require_ivon()


def _run(config: Config, name: str, number: int, tick: Tick, scratch: Path) -> dict[str, pd.DataFrame]:
    problem, moments = _problem(config, number)
    trained = find(name).train(problem, scratch, tick)
    (x, y), strange = _test_images(config, number), _strange(config)
    strange = None if strange is None else standardised(strange, moments)
    rows, bins = _scored(config, trained, problem, standardised(x, moments), y, strange)
    tables = {"rows": rows, "bins": bins, "curves": trained.curve}
    if len(trained.sigma):
        tables["sigma"] = trained.sigma
    return {table: values.assign(method=name, seed=number) for table, values in tables.items()}


def _kinds(config: Config) -> list[str]:
    """The methods whose epochs are timed. A single model is the unit."""
    return list(dict.fromkeys(["single", *(find(name).kind for name in chosen(config)[0])]))


def _cost(config: Config, tick: Tick) -> dict[str, pd.DataFrame]:
    """Seconds of an epoch of each kind, in turns, so that all meet the same load of the machine. The first turn, in
    which memory is allocated, does not count."""
    problem, found = _problem(config, 0)[0], []
    problem = replace(problem, x=problem.x[: timed(config)], y=problem.y[: timed(config)])
    with TemporaryDirectory() as scratch:
        clocks = {kind: find(kind).clock(problem, Path(scratch) / str(i)) for i, kind in enumerate(_kinds(config))}
        for turn in range(TURNS + 1):
            for kind, clock in clocks.items():
                found.append({"kind": kind, "turn": turn, "seconds": clock(turn + 1)})
                tick()
    return {"turns": pd.DataFrame([row for row in found if row["turn"]])}


def ratios(turns: pd.DataFrame) -> pd.DataFrame:
    """Kind -> time of its epochs relative to a single model's in the same turn: median, least, most."""
    wide = turns.pivot(index="turn", columns="kind", values="seconds")
    relative = wide.div(wide["single"], axis=0)
    return pd.DataFrame({"median": relative.median(), "least": relative.min(), "most": relative.max()})


def _problem(config: Config, number: int) -> tuple[Problem, Moments]:
    """The problem for seed `number`, and the moments of its images. All training images count for the moments, whatever
    a method holds out."""
    seed, data = _seed(config, number), _images(PRESETS[config.preset].dataset, config.data)
    index = _order(config, number)[: PRESETS[config.preset].images]
    moments = datasets.moments_of(data.train_x[index])
    x, y = standardised(data.train_x[index], moments), data.train_y[index]
    network = partial(_network, config, data, seed=seed)
    return Problem(x, y, network, chosen(config)[1], config.batch, config.lr, config.samples, seed), moments


def _seed(config: Config, number: int) -> int:
    return config.seed * 1_000_000 + number


def _order(config: Config, number: int) -> Tensor:
    """Order of the images of the training files; the first ones are trained on."""
    n = len(_images(PRESETS[config.preset].dataset, config.data).train_y)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seeds.derive(_seed(config, number), "images")))


def _test_images(config: Config, number: int) -> tuple[Tensor, Tensor]:
    preset = PRESETS[config.preset]
    data = _images(preset.dataset, config.data)
    if not config.spare:
        return data.test_x[: config.test], data.test_y[: config.test]
    index = _order(config, number)[preset.images :][: config.test or SPARE]
    return data.train_x[index], data.train_y[index]


def _scored(
    config: Config, trained: Trained, problem: Problem, test_x: Tensor, test_y: Tensor, strange: Tensor | None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The scores and the reliability diagram of each row."""
    from ... import metrics  # torchmetrics takes two seconds to import, which `twinboot --help` can do without

    rows, bins = [], []
    shown = trained.trained_on[: min(GAP, config.test or GAP)]
    unseen = trained.unseen[: config.test] if trained.unseen is not None else None
    for row, predict in trained.rows.items():
        probs = predict(test_x)
        found = metrics.scores(probs, test_y)
        in_training = (predict(problem.x[shown]).argmax(1) == problem.y[shown]).double().mean().item()
        found["gap"] = in_training - found["accuracy"]
        if unseen is not None:
            found["unseen"] = metrics.scores(predict(problem.x[unseen]), problem.y[unseen])["nll"]
        if strange is not None:
            uncertainty = torch.cat([entropy(probs), entropy(predict(strange))])
            found["ood_auroc"] = metrics.auroc(uncertainty, torch.arange(len(uncertainty)) >= len(probs))
        rows.append({"row": row, **found, "epochs": trained.epochs.get(row, 1.0)})
        diagram = metrics.reliability(probs, test_y)
        bins.append(pd.DataFrame(diagram._asdict()).assign(row=row, bin=range(metrics.BINS)))
    return pd.DataFrame(rows), pd.concat(bins, ignore_index=True)


def _network(config: Config, data: datasets.Images, dropout: float = 0.0, *, seed: int) -> nn.Module:
    preset = PRESETS[config.preset]
    make = networks.small if preset.network == "small" else networks.vgg16
    model = make(data.classes, data.train_x.shape[1], preset.width, preset.normalisation, dropout, seed)
    # On a CPU, convolutions with the channels last take two thirds of the time.
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(config.device or "cpu")


def _strange(config: Config) -> Tensor | None:
    """Fashion-MNIST for models of CIFAR-10, at their size; None without its files."""
    if PRESETS[config.preset].dataset != "cifar10":
        return None
    try:
        images = _images("fashion-mnist", config.data).test_x[: min(STRANGE, config.test or STRANGE)]
    except datasets.MissingError:
        return None
    return F.pad(images, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
