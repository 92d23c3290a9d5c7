"""What does a matched spread do to the predictions of the scikit-learn estimators? With `spread=0.3`, and without.

    .venv/bin/python benchmarks/spread.py --data FILE.npz --page docs/spread.md        (needs the extra sklearn)

FILE is what `twinboot uci` takes (`twinboot.experiments.uci.data`). Some twenty minutes of one core. Each fit is a line
of out/spread/fits.csv as soon as it is done, and one that is there is not done again.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import sklearn
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn import datasets
from sklearn.model_selection import StratifiedShuffleSplit

from twinboot import metrics
from twinboot._core.atomic import replacing
from twinboot.experiments.uci.data import read
from twinboot.integrations.sklearn import TwinBootClassifier, TwinBootRegressor

LEVEL = 0.9
SPREADS = (0.0, 0.3)  # without, and the default of `fit`
TABLES = ("bostonHousing", "concrete", "energy", "wine-quality-red", "yacht")  # the small ones of `twinboot uci`
CLASSES = ("iris", "wine", "breast_cancer", "digits")  # they come with scikit-learn
TEST = 0.25  # share of the rows of a set of classes
ORDER = ("RMSE", "error", "NLL", "ECE", "coverage", "width", "spread")  # of the columns
RESULTS = Path("out/spread/fits.csv")
Arrays = tuple[NDArray[np.float64], NDArray[np.float64]]
Split = tuple[Arrays, Arrays]  # to train on, and to test by
Scores = dict[str, float]
Score = Callable[[Arrays, Arrays, int, float], Scores]
Done = dict[tuple[str, int, float], Scores]  # set, split and spread -> scores


def regression(train: Arrays, test: Arrays, seed: int, spread: float) -> Scores:
    """Scores in standard deviations of the target."""
    unit = train[1].std()
    model = TwinBootRegressor(spread=spread, random_state=seed).fit(*train)
    mean, std = model.predict(test[0], return_std=True)
    low, high = model.predict_interval(test[0], LEVEL)
    return {
        "RMSE": np.sqrt(np.mean((test[1] - mean) ** 2)) / unit,
        "NLL": -stats.norm.logpdf(test[1], mean, std).mean() - np.log(unit),
        "coverage": float(((low <= test[1]) & (test[1] <= high)).mean()),
        "width": (high - low).mean() / unit,
        "spread": np.sqrt(np.mean(std**2 - model.noise_**2)) / unit,
    }


def classification(train: Arrays, test: Arrays, seed: int, spread: float) -> Scores:
    model = TwinBootClassifier(spread=spread, random_state=seed).fit(*train)
    probs, labels = torch.from_numpy(model.predict_proba(test[0])), torch.from_numpy(test[1].astype(np.int64))
    drawn = model._predict(test[0]).std
    return {
        "error": 1 - float((probs.argmax(1) == labels).double().mean()),
        "NLL": metrics.nll(probs, labels),
        "ECE": metrics.ece(probs, labels),
        "spread": float(drawn.square().mean().sqrt()),
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


def compared(score: Score, sets: Iterator[tuple[str, list[Split]]], done: Done, only_stored: bool) -> str:
    """A table: for each set and score the mean without, and the change with a 95 % interval over the splits."""
    lines = list[str]()
    for name, splits in sets:
        numbers = [n for n in range(len(splits)) if not only_stored or all((name, n, s) in done for s in SPREADS)]
        for number in numbers:
            for spread in SPREADS:
                if (name, number, spread) not in done:
                    done[name, number, spread] = score(*splits[number], number, spread)
                    store(done)
                    print(name, number, spread, done[name, number, spread], file=sys.stderr, flush=True)
        before, after = ([done[name, number, spread] for number in numbers] for spread in SPREADS)
        if not numbers:
            continue
        names = [key for key in ORDER if key in before[0]]
        if not lines:
            lines = [f"| set | splits | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
        cells = [change([row[key] for row in before], [row[key] for row in after]) for key in names]
        lines.append(f"| {name} | {len(numbers)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def stored() -> Done:
    if not RESULTS.exists():
        return {}
    with RESULTS.open(newline="") as file:
        rows = [(row.pop("set"), int(row.pop("split")), float(row.pop("with")), row) for row in csv.DictReader(file)]
    return {
        key: {name: float(value) for name, value in row.items() if value} for *key_, row in rows for key in [(*key_,)]
    }


def store(done: Done) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for row in done.values() for name in row)
    with replacing(RESULTS) as partial, partial.open("w", newline="") as file:
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
    parser.add_argument("--data", required=True, metavar="FILE", help="the sets with their splits, as `twinboot uci`")
    parser.add_argument("--splits", type=int, default=10, help="of each set (default: %(default)s)")
    parser.add_argument("--stored", action="store_true", help="fit nothing: show the splits that are done")
    parser.add_argument("--page", type=Path, help="write the tables to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a step is too small for more
    done = stored()
    numbers = compared(regression, tables(options.data, options.splits), done, options.stored)
    labels = compared(classification, classes(options.splits), done, options.stored)
    versions = f"PyTorch {torch.__version__}, scikit-learn {sklearn.__version__}, Python {platform.python_version()}."
    page = PAGE.format(splits=options.splits, versions=versions, numbers=numbers, labels=labels, percent=100 * LEVEL)
    print(page)
    if options.page:
        options.page.write_text(page)


PAGE = """# The scikit-learn estimators with a matched spread

Written by `benchmarks/spread.py --data FILE.npz --splits {splits} --page docs/spread.md`: the estimators with their
default settings, but with `spread=0` and `spread=0.3`. A cell has the mean over the splits with `spread=0`, and the
change with `spread=0.3` and its 95 % interval. *Spread* is the root mean square standard deviation over draws of the
weights. {versions}

## Regression

RMSE, NLL and the width of {percent:g} % intervals are for a target in units of its standard deviation.

{numbers}

## Classification

{labels}
"""

if __name__ == "__main__":
    main()
