"""How many samples `Estimate.calibrate` needs to be worth it: the likelihood of test samples, before and after.

    .venv/bin/python benchmarks/calibrate.py --page docs/calibrate.md

One task is to tell clouds of points that overlap, the other to predict a value and its variance. Twins train on some
points; `calibrate` then gets a few others, more and more of them, and is judged by a third part.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import textwrap
import warnings
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from twinboot import Estimate, fit
from twinboot.estimate.prediction import Task

SIZES = (20, 50, 100, 200, 400)
SEEDS, SUBSETS = 4, 2  # with each seed so many subsets of each size
CLASSES, WIDE, ALL, TRAIN, POOL = 5, 20, 2000, 700, 500  # the points that are left over judge
EPOCHS = 30


def clouds(generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Points, their classes, and how many outputs a model needs."""
    y = torch.randint(CLASSES, (ALL,), generator=generator)
    x = 0.6 * torch.randn(CLASSES, WIDE, generator=generator)[y] + torch.randn(ALL, WIDE, generator=generator)
    return x, y, CLASSES


def values(generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Points, a function of each with noise that differs from point to point, and as above."""
    x = torch.randn(ALL, WIDE, generator=generator)
    noise = (0.3 + 0.3 * x[:, 3].abs()) * torch.randn(ALL, generator=generator)
    return x, ((2 * x[:, 0]).sin() + x[:, 1] * x[:, 2] + noise)[:, None], 2


def measure(task: Task, seed: int) -> dict[int, list[tuple[float, float, float]]]:
    """For each size: the NLL of test samples before, that after, and the scale of the noise that was found."""
    generator = torch.Generator().manual_seed(seed)
    x, y, outputs = clouds(generator) if task == "classification" else values(generator)
    torch.manual_seed(seed)  # of the weights
    model = nn.Sequential(nn.Linear(WIDE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))
    estimate = fit(model, TensorDataset(x[:TRAIN], y[:TRAIN]), task, epochs=EPOCHS, seed=seed, progress=False).estimate

    def nll(of: Estimate) -> float:
        return of.predict(x[TRAIN + POOL :]).nll(y[TRAIN + POOL :]).mean().item()

    before = nll(estimate)
    found: dict[int, list[tuple[float, float, float]]] = {size: [] for size in SIZES}
    for size in SIZES:
        for _ in range(SUBSETS):
            drawn = TRAIN + torch.randperm(POOL, generator=generator)[:size]
            own = copy.deepcopy(estimate)
            with warnings.catch_warnings():  # that no noise may be best: it is counted here
                warnings.simplefilter("ignore")
                own.calibrate(TensorDataset(x[drawn], y[drawn]))
            found[size].append((before, nll(own), own.scale))
    return found


def table(task: Task) -> list[str]:
    seeds = [measure(task, seed) for seed in range(SEEDS)]
    told = [
        "| samples | NLL before | change of the NLL | at worst | better in | takes all noise away in |",
        "|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        changes = [[after - before for before, after, _ in found[size]] for found in seeds]
        means, each = [fmean(own) for own in changes], [change for own in changes for change in own]
        before = fmean(found[size][0][0] for found in seeds)
        none = [scale == 0 for found in seeds for _, _, scale in found[size]]
        change = f"{fmean(means):+.3f} ± {stdev(means) / math.sqrt(SEEDS):.3f}"
        better = f"{sum(change < 0 for change in each)} of {len(each)}"
        told.append(f"| {size} | {before:.3f} | {change} | {max(each):+.3f} | {better} | {sum(none)} of {len(none)} |")
    return told


def page() -> str:
    about = (
        f"Written by `benchmarks/calibrate.py --page docs/calibrate.md`: twins are trained by `fit` on {TRAIN} points "
        f"of {CLASSES} clouds in {WIDE} dimensions, which overlap, for {EPOCHS} epochs. Then `calibrate` gets points "
        "that they did not train on, and is judged by others, which are like them. Means and standard errors of "
        f"{SEEDS} seeds, with {SUBSETS} subsets of each size for each."
    )
    others = (
        f'The same for a model that predicts a value and its variance, by the loss `"gaussian"`, from {TRAIN} points '
        f"in {WIDE} dimensions, of which four matter; the noise of the values differs from point to point."
    )
    lines = [
        "# How many samples `calibrate` needs",
        "",
        textwrap.fill(about, 120, break_on_hyphens=False),
        "",
        *table("classification"),
        "",
        textwrap.fill(others, 120, break_on_hyphens=False),
        "",
        *table("gaussian"),
        "",
        f"torch {torch.__version__}, {platform.system()} {platform.machine()}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="a page in Markdown to write, such as docs/calibrate.md")
    place = parser.parse_args().page
    text = page()
    print(text)
    if place is not None:
        place.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
