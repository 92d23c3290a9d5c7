"""What does a setting do to the predictions of the scikit-learn estimators? With a matched spread, or with noise per
output, and without.

    .venv/bin/python benchmarks/estimators.py spread --data FILE.npz --page docs/spread.md     (needs the extra sklearn)
    .venv/bin/python benchmarks/estimators.py local --data FILE.npz --page docs/local.md

FILE is what `twinboot uci` takes (`twinboot.experiments.uci.data`). Some twenty minutes of one core. With
`--images DIR`, the official files of CIFAR-10, 5,000 of its images are rows of a table, too. Each fit is a line of
out/spread/fits.csv or out/local/fits.csv as soon as it is done, and one that is there is not done again.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn import datasets
from sklearn.model_selection import StratifiedShuffleSplit

from twinboot import Protocol, metrics
from twinboot._core.atomic import replacing
from twinboot.experiments.datasets import load
from twinboot.experiments.uci.data import read
from twinboot.integrations.sklearn import TwinBootClassifier, TwinBootRegressor

LEVEL = 0.9
TABLES = ("bostonHousing", "concrete", "energy", "wine-quality-red", "yacht")  # the small ones of `twinboot uci`
CLASSES = ("iris", "wine", "breast_cancer", "digits")  # they come with scikit-learn
TEST = 0.25  # share of the rows of a set of classes
IMAGES = 5000  # of CIFAR-10 to train on, others for each split, and as many to test by
ORDER = ("RMSE", "error", "NLL", "ECE", "coverage", "width", "spread", "core seconds")  # of the columns
Arrays = tuple[NDArray[np.float64], NDArray[np.float64]]
Split = tuple[Arrays, Arrays]  # to train on, and to test by
Scores = dict[str, float]
Settings = dict[str, Any]  # of an estimator
Score = Callable[[Arrays, Arrays, int, Settings], Scores]
Done = dict[tuple[str, int, str], Scores]  # set, split and setting -> scores


@dataclass(frozen=True)
class Comparison:
    """Two settings, the same but for what is asked about."""

    name: str
    title: str
    settings: dict[str, Settings]  # as the page has it -> arguments of the estimators: without, and with

    @property
    def results(self) -> Path:
        return Path("out") / self.name / "fits.csv"


COMPARISONS = {
    "spread": Comparison(
        "spread",
        "The scikit-learn estimators with a matched spread",
        {"spread=0": {"spread": 0.0}, "spread=0.3": {"spread": 0.3}},  # the default of `fit`
    ),
    "local": Comparison(
        "local",
        "The scikit-learn estimators with noise per output",
        {
            "local=False": {"protocol": Protocol(local=False)},
            "local=True": {"protocol": Protocol(local=True)},
        },
    ),
}


def regression(train: Arrays, test: Arrays, seed: int, settings: Settings) -> Scores:
    """Scores in standard deviations of the target."""
    unit, began = train[1].std(), time.process_time()
    model = TwinBootRegressor(random_state=seed, **settings).fit(*train)
    seconds = time.process_time() - began
    mean, std = model.predict(test[0], return_std=True)
    low, high = model.predict_interval(test[0], LEVEL)
    return {
        "RMSE": np.sqrt(np.mean((test[1] - mean) ** 2)) / unit,
        "NLL": -stats.norm.logpdf(test[1], mean, std).mean() - np.log(unit),
        "coverage": float(((low <= test[1]) & (test[1] <= high)).mean()),
        "width": (high - low).mean() / unit,
        "spread": np.sqrt(np.mean(std**2 - model.noise_**2)) / unit,
        "core seconds": seconds,
    }


def classification(train: Arrays, test: Arrays, seed: int, settings: Settings) -> Scores:
    began = time.process_time()
    model = TwinBootClassifier(random_state=seed, **settings).fit(*train)
    seconds = time.process_time() - began
    probs, labels = torch.from_numpy(model.predict_proba(test[0])), torch.from_numpy(test[1].astype(np.int64))
    drawn = model._predict(test[0]).std
    return {
        "error": 1 - float((probs.argmax(1) == labels).double().mean()),
        "NLL": metrics.nll(probs, labels),
        "ECE": metrics.ece(probs, labels),
        "spread": float(drawn.square().mean().sqrt()),
        "core seconds": seconds,
    }


def tables(path: str, splits: int) -> Iterator[tuple[str, list[Split]]]:
    for name, table in read(path).items():
        if name in TABLES:
            x, y = table.values[:, :-1], table.values[:, -1]
            parts = [(np.setdiff1d(np.arange(len(y)), test), test) for test in table.test[:splits]]
            yield name, [((x[train], y[train]), (x[test], y[test])) for train, test in parts]


def classes(splits: int) -> Iterator[tuple[str, list[Split]]]:
    for name in CLASSES:
        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        parts = StratifiedShuffleSplit(splits, test_size=TEST, random_state=0).split(x, y)
        yield name, [((x[train], y[train]), (x[test], y[test])) for train, test in parts]


def pictures(directory: str, splits: int) -> Iterator[tuple[str, list[Split]]]:
    """The pixels of an image are a row: for a network of linear layers alone."""
    images = load("cifar10", directory)

    def part(x: torch.Tensor, y: torch.Tensor, start: int) -> Arrays:
        return x[start : start + IMAGES].flatten(1).double().numpy() / 255, y[start : start + IMAGES].numpy()

    test = part(images.test_x, images.test_y, 0)
    starts = range(0, splits * IMAGES, IMAGES)
    yield "CIFAR-10, pixels", [(part(images.train_x, images.train_y, start), test) for start in starts]


def compared(
    score: Score, sets: Iterator[tuple[str, list[Split]]], comparison: Comparison, done: Done, only_stored: bool
) -> str:
    """A table: for each set and score the mean without, and the change with a 95 % interval over the splits."""
    lines = list[str]()
    for name, splits in sets:
        stored = [n for n in range(len(splits)) if all((name, n, s) in done for s in comparison.settings)]
        numbers = stored if only_stored else range(len(splits))
        for number in numbers:
            for setting, own in comparison.settings.items():
                if (name, number, setting) not in done:
                    done[name, number, setting] = score(*splits[number], number, own)
                    store(done, comparison.results)
                    print(name, number, setting, done[name, number, setting], file=sys.stderr, flush=True)
        before, after = ([done[name, number, setting] for number in numbers] for setting in comparison.settings)
        if not numbers:
            continue
        names = [key for key in ORDER if key in before[0]]
        if not lines:
            lines = [f"| set | splits | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
        cells = [change([row[key] for row in before], [row[key] for row in after]) for key in names]
        lines.append(f"| {name} | {len(numbers)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read_fits(results: Path) -> Done:
    if not results.exists():
        return {}
    with results.open(newline="") as file:
        rows = [(row.pop("set"), int(row.pop("split")), row.pop("with"), row) for row in csv.DictReader(file)]
    return {
        key: {name: float(value) for name, value in row.items() if value} for *key_, row in rows for key in [(*key_,)]
    }


def store(done: Done, results: Path) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for row in done.values() for name in row)
    with replacing(results) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["set", "split", "with", *names])
        writer.writeheader()
        writer.writerows({"set": k[0], "split": k[1], "with": k[2], **row} for k, row in done.items())


def change(before: list[float], after: list[float]) -> str:
    found = np.subtract(after, before)
    if len(found) < 2:
        return f"{np.mean(before):.3f} {found.mean():+.3f}"
    half = stats.t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found))
    return f"{np.mean(before):.3f} {found.mean():+.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=COMPARISONS, help="what to compare with and without")
    parser.add_argument("--data", required=True, metavar="FILE", help="the sets with their splits, as `twinboot uci`")
    parser.add_argument("--images", metavar="DIR", help="the official files of CIFAR-10")
    parser.add_argument("--splits", type=int, default=10, help="of each set (default: %(default)s)")
    parser.add_argument("--stored", action="store_true", help="fit nothing: show the splits that are done")
    parser.add_argument("--page", type=Path, help="write the tables to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a step is too small for more
    comparison = COMPARISONS[options.setting]
    done, (without, with_it) = read_fits(comparison.results), comparison.settings
    numbers = compared(regression, tables(options.data, options.splits), comparison, done, options.stored)
    sets = [classes(options.splits)] + ([pictures(options.images, min(options.splits, 5))] if options.images else [])
    labels = compared(classification, chain(*sets), comparison, done, options.stored)
    versions = f"PyTorch {torch.__version__}, scikit-learn {sklearn.__version__}, Python {platform.python_version()}."
    page = PAGE.format(
        title=comparison.title,
        name=comparison.name,
        without=without,
        with_it=with_it,
        flags=f"--splits {options.splits}" + " --images DIR" * bool(options.images),
        versions=versions,
        numbers=numbers,
        labels=labels,
        percent=100 * LEVEL,
    )
    print(page)
    if options.page:
        options.page.write_text(page)


PAGE = """# {title}

Written by `benchmarks/estimators.py {name} --data FILE.npz {flags} --page docs/{name}.md`: the estimators
with their default settings, but with `{without}` and `{with_it}`. A cell has the mean over the splits with the first,
and the change with the second and its 95 % interval. *Spread* is the root mean square standard deviation over draws of
the weights. {versions}

## Regression

RMSE, NLL and the width of {percent:g} % intervals are for a target in units of its standard deviation.

{numbers}

## Classification

{labels}
"""

if __name__ == "__main__":
    main()
