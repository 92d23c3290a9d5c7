"""What a prior costs in `invert`: the search for its weight, and a round of draws.

    .venv/bin/python benchmarks/prior.py --page docs/prior-cost.md        (needs the extra cli)

The tasks are some of `twinboot regimes`. Times are of one core, and the runs of a task are interleaved, so that what
else the machine does falls on all of them alike. Some ten minutes.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from twinboot import GaussianProcess, Smooth, invert
from twinboot._core.atomic import replacing
from twinboot.experiments.runner.experiment import one_thread
from twinboot.experiments.seismic import operator
from twinboot.experiments.seismic.kernels import Problem, Setting, problem

SETTINGS = [Setting(rows, 0.3, beta, 1.0, 1.0) for rows in (300, 1000, 4096) for beta in (1.0, 3.0)]
ROUNDS = 20
KNOWN = GaussianProcess(length=7.5, std=0.5)
RUNS: dict[str, Callable[[Problem], object]] = {
    "without": lambda p: invert(operator(p), p.observed, p.initial),
    "one": lambda p: invert(operator(p), p.observed, p.initial, prior=KNOWN, noise_std=p.setting.noise),
    "rounds": lambda p: invert(
        operator(p), p.observed, p.initial, prior=KNOWN, noise_std=p.setting.noise, rounds=ROUNDS
    ),
    "smooth": lambda p: invert(operator(p), p.observed, p.initial, prior=Smooth()),
    "process": lambda p: invert(operator(p), p.observed, p.initial, prior=GaussianProcess()),
}
TEXT = """# What a prior costs

Written by `benchmarks/prior.py --page docs/prior-cost.md`: `invert` on six tasks of `twinboot regimes` (30 x 30 cells,
noise 0.3, kernels of width 1). Seconds of one core, medians of {repeats} runs, interleaved.

- *Without a prior*: at most 3,000 steps of Adam, with its early stop.
- *Known prior*: length, standard deviation and noise are given. One search, and the two twins' draws.
- *A round*: the mean of {rounds} rounds, two draws each, relative to that search.
- *`Smooth()`* and *`GaussianProcess()`*: weight, noise and length are found. In brackets: relative to a run without a
  prior.

PyTorch {torch}, Python {python}, {minutes:.0f} minutes.

| measurements | beta | without a prior | known prior | a round / known prior | `Smooth()` | `GaussianProcess()` |
|---|---|---|---|---|---|---|
"""


def measure(repeats: int) -> list[str]:
    lines = []
    for setting in SETTINGS:
        taken: dict[str, list[float]] = {name: [] for name in RUNS}
        for repeat in range(repeats):
            p = problem(setting, repeat)
            for name, run in RUNS.items():
                began = time.process_time()
                run(p)
                taken[name].append(time.process_time() - began)
        took = {name: statistics.median(times) for name, times in taken.items()}
        a_round = (took["rounds"] - took["one"]) / ROUNDS / took["one"]
        cells = [
            f"{setting.rows:,}",
            f"{setting.beta:g}",
            f"{took['without']:.2f}",
            f"{took['one']:.2f}",
            f"{a_round:.1%}",
        ]
        cells += [f"{took[name]:.2f} ({took[name] / took['without']:.2f})" for name in ("smooth", "process")]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind and task")
    parser.add_argument("--page", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    began = time.monotonic()
    with one_thread():
        lines = measure(options.repeats)
    head = TEXT.format(
        repeats=options.repeats,
        rounds=ROUNDS,
        torch=torch.__version__,
        python=platform.python_version(),
        minutes=max(1, (time.monotonic() - began) / 60),
    )
    if options.page:
        with replacing(options.page) as file:
            Path(file).write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
