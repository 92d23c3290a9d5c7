"""Do the intervals of TwinBootRegressor hold what they promise? On the UCI sets, with their standard splits.

    .venv/bin/python benchmarks/coverage.py --data FILE.npz --page docs/coverage.md        (needs the extra sklearn)

FILE is what `twinboot uci` takes (`twinboot.experiments.uci.data`). Some ten minutes of one core. Each fit is a line of
out/coverage/fits.csv as soon as it is done, and one that is there is not done again.
"""

from __future__ import annotations

import argparse
import csv
import math
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import sklearn
import torch

from twinboot._core.atomic import replacing
from twinboot._core.seeds import derive
from twinboot.experiments.uci.data import Table, read
from twinboot.integrations.sklearn import TwinBootRegressor

LEVEL = 0.9
SPLITS = 5  # the protein set has no more
ROWS = 2000  # to train on at most: a fit of the largest set takes as long as one of the others
JUDGED = 2.0  # standard deviations
RESULTS = Path("out/coverage/fits.csv")


@dataclass(frozen=True)
class Fit:
    """What one fit came to. `covered` of `test` rows lay in their intervals, whose mean width is in the target's
    standard deviations."""

    name: str
    split: int
    most: int  # rows that it was allowed
    rows: int
    calibrating: int
    test: int
    covered: int
    width: float
    seconds: float


def measure(name: str, table: Table, split: int, most: int) -> Fit:
    """Fit with the default settings on the training rows of a split, or a random part of them, and count."""
    torch.set_num_threads(1)  # a step is too small for more
    start = time.perf_counter()
    test = np.zeros(len(table.values), bool)
    test[table.test[split]] = True
    rows = np.flatnonzero(~test)
    # Rows may lie in an order of their own: only a random part of them is exchangeable with the test rows.
    rows = np.random.default_rng(derive(split, "rows")).permutation(rows)[:most]
    x, y = table.values[:, :-1], table.values[:, -1]
    model = TwinBootRegressor(random_state=split).fit(x[rows], y[rows])
    low, high = model.predict_interval(x[test], LEVEL)
    covered = int(((low <= y[test]) & (y[test] <= high)).sum())
    width = float((high - low).mean() / y[rows].std())
    seconds = time.perf_counter() - start
    return Fit(name, split, most, len(rows), len(model.scores_), int(test.sum()), covered, width, seconds)


def expected(fit: Fit) -> tuple[float, float]:
    """The mean and the variance of the coverage of one fit that split conformal prediction has, without ties.

    Of n scores the k-th is the quantile, so a new row is covered with a probability that is Beta(k, n + 1 - k) over
    tables; the number of covered test rows is then beta-binomial.

    >>> expected(Fit("", 0, 0, 0, calibrating=19, test=100, covered=0, width=0.0, seconds=0.0))[0]
    0.9
    """
    total, test = fit.calibrating + 1, fit.test
    mean = math.ceil(LEVEL * total - 1e-9) / total  # 0.9 * 10 is to be 9 whatever rounding makes of it
    return mean, mean * (1 - mean) / test * (total + test) / (total + 1)


@dataclass(frozen=True)
class Judged:
    """The fits of one set together."""

    fits: list[Fit]

    @property
    def coverage(self) -> float:
        return float(np.mean([fit.covered / fit.test for fit in self.fits]))

    @property
    def expected(self) -> float:
        return float(np.mean([expected(fit)[0] for fit in self.fits]))

    @property
    def deviation(self) -> float:
        """The standard deviation of `coverage`. Splits share rows, but each has the mean of `expected` whatever the
        table, so those that are drawn independently are uncorrelated."""
        return math.sqrt(sum(expected(fit)[1] for fit in self.fits)) / len(self.fits)

    @property
    def apart(self) -> float:
        return (self.coverage - self.expected) / self.deviation

    @property
    def inside(self) -> bool:
        return abs(self.apart) <= JUDGED


def table(found: dict[str, Judged]) -> str:
    lines = [
        "| set | rows to train on | of which calibrate | test rows | splits | coverage | guaranteed, on average "
        "| standard deviation | apart | | width |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, judged in found.items():
        fits = judged.fits
        calibrating = sorted(fit.calibrating for fit in fits)
        low, high = f"{calibrating[0]}", f"{calibrating[-1]}"
        guaranteed = f"{LEVEL} to {LEVEL + float(np.mean([1 / (n + 1) for n in calibrating])):.3f}"
        cells = [
            name,
            f"{fits[0].rows:,}",
            low if low == high else f"{low} to {high}",
            f"{fits[0].test:,}",
            f"{len(fits)}",
            f"{judged.coverage:.3f}",
            f"{judged.expected:.3f} ({guaranteed})",
            f"{judged.deviation:.3f}",
            f"{judged.apart:+.1f}",
            "inside" if judged.inside else "outside",
            f"{np.mean([fit.width for fit in fits]):.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(found: dict[str, Judged]) -> str:
    apart = np.array([judged.apart for judged in found.values()])
    outside = [name for name, judged in found.items() if not judged.inside]
    which = f"Outside: {', '.join(outside)}." if outside else "None is outside."
    return (
        f"{which} The mean of the column *apart* is {apart.mean():+.2f}, and the sum of its squares "
        f"{(apart**2).sum():.1f}.\n"
        f"For {len(apart)} sets that keep the guarantee these are 0 with a standard deviation of "
        f"{1 / math.sqrt(len(apart)):.2f}, and {len(apart)} with one of {math.sqrt(2 * len(apart)):.1f}."
    )


def stored() -> dict[tuple[str, int, int], Fit]:
    if not RESULTS.exists():
        return {}
    kinds = {"name": str, "width": float, "seconds": float}
    with RESULTS.open(newline="") as file:
        lines = list(csv.DictReader(file))
    fits = [Fit(**{f.name: kinds.get(f.name, int)(line[f.name]) for f in fields(Fit)}) for line in lines]
    return {(fit.name, fit.split, fit.most): fit for fit in fits}


def store(fits: list[Fit]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with replacing(RESULTS) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Fit)])
        writer.writeheader()
        writer.writerows(map(asdict, fits))


def measured(tables: dict[str, Table], missing: list[tuple[str, int, int]], jobs: int) -> Iterator[Fit]:
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        running = [pool.submit(measure, name, tables[name], split, most) for name, split, most in missing]
        yield from (future.result() for future in as_completed(running))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="FILE", help="the sets with their splits, as `twinboot uci`")
    parser.add_argument("--splits", type=int, default=SPLITS, help="at most, of each set (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="to train on, at most (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="write the table to this file")
    options = parser.parse_args()
    tables = read(options.data)
    done = stored()

    def judged(splits: range, names: Iterable[str]) -> dict[str, Judged]:
        # Split by split, so that a run that is stopped early has something of every set.
        wanted = [(name, i, options.rows) for i in splits for name in names if i < len(tables[name].test)]
        missing = [key for key in wanted if key not in done]
        for number, fit in enumerate(measured(tables, missing, options.jobs), start=1):
            done[fit.name, fit.split, fit.most] = fit
            store(list(done.values()))
            print(f"{number} of {len(missing)}: {fit}", file=sys.stderr, flush=True)
        found = {name: [done[key] for key in wanted if key[0] == name] for name in names}
        return {name: Judged(fits) for name, fits in found.items() if fits}

    found = judged(range(options.splits), tables)
    result = f"{table(found)}\n\n{summary(found)}"
    # Splits that had no part in the verdict tell a set that breaks the guarantee from one that was outside by chance.
    if outside := [name for name, of_set in found.items() if not of_set.inside]:
        most = max(len(tables[name].test) for name in outside)
        if again := judged(range(options.splits, most), outside):
            chance = all(of_set.inside for of_set in again.values())
            verdict = "Inside: by these splits, what is outside above looks like chance." if chance else summary(again)
            result += f"\n\n{AGAIN.strip()}\n\n{table(again)}\n\n{verdict}"
    print(result)
    if options.page:
        minutes = sum(fit.seconds for of_set in found.values() for fit in of_set.fits) / 60
        setup = (
            f"PyTorch {torch.__version__}, scikit-learn {sklearn.__version__}, Python {platform.python_version()}; "
            f"{minutes:.0f} minutes of one core."
        )
        page = PAGE.strip().format(
            splits=options.splits, rows=options.rows, level=LEVEL, percent=100 * LEVEL, judged=JUDGED
        )
        options.page.write_text("\n\n".join([page, setup, result]) + "\n")


PAGE = """
# Coverage of the scikit-learn intervals

Written by `benchmarks/coverage.py --data FILE.npz --page docs/coverage.md`: `TwinBootRegressor` with its default
settings, on the nine sets of `twinboot uci` with the first {splits} of their standard splits. Of sets with more than
{rows:,} rows to train on, a random part of so many trains. Intervals are of {percent:g} %.

- *Of which calibrate*: n, the rows that nothing was fitted to, half of those that no twin saw. It differs from split to
  split, as the bootstrap is drawn anew.
- *Coverage*: the share of test rows that lie in their intervals, as a mean over splits.
- *Guaranteed, on average*: split conformal prediction promises a coverage between {level} and {level} + 1 / (n + 1), as
  a mean over tables and new rows. Without ties it is exactly ceil({level} (n + 1)) / (n + 1), which comes first.
- *Standard deviation*: one table may lie beside that mean. With k = ceil({level} (n + 1)) its coverage of new rows has
  the distribution Beta(k, n + 1 - k), and a limited number of test rows adds to that. This is the standard deviation of
  the column *coverage*. Splits count as independent: they share rows, but each was drawn at random by itself.
- *Apart*: how many of those the coverage is from what is guaranteed. Up to {judged:g} is *inside*; of nine sets that
  keep the guarantee, at least one is outside in about a third of runs.
- *Width*: the mean width of the intervals in standard deviations of the target. To know nothing but a normal target's
  mean and spread would be 3.29.
"""

AGAIN = """
## What is outside, again

Chance, or a guarantee that is broken? The same with the other standard splits of that set, which had no part in the
verdict above.
"""

if __name__ == "__main__":
    main()
