"""Which share of sigma^2 is due to the data, layer by layer and epoch by epoch, in four ways to train twins.

    .venv/bin/python benchmarks/control.py --page docs/control.md

The page has a figure, which is written to figures/control.png beside it. About four minutes of one core.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import textwrap
from pathlib import Path
from statistics import fmean, stdev

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import TensorDataset

from twinboot import Fit, Protocol, fit, resets
from twinboot.experiments import datasets, networks, plots

SEEDS, EPOCHS, RATE = 4, 20, 0.001  # the learning rate of the paper
SHOWN = (1, 2, 5, 10, 20)  # epochs in the tables
NAMES = (
    "from random weights, a reset each epoch",
    "from random weights, no reset, falling rate",
    f"from a trained model, no reset, rate falling from {RATE}",
    f"from a trained model, no reset, rate falling from {RATE / 10}",
)
Shares = dict[str, list[float]]  # layer -> share of the data after each epoch


def shares_of(found: Fit) -> Shares:
    column = "data_share/"
    return {name.removeprefix(column): own for name, own in found.history.items() if name.startswith(column)}


def measure(data: TensorDataset, seed: int) -> list[Shares]:
    """The shares of each way to train. The trained model is the result of the first one."""

    def run(model: nn.Module, reset: resets.Schedule, rate: float, falls: bool) -> Fit:
        return fit(
            model,
            data,
            protocol=Protocol(reset=reset),
            optimizer=lambda p: torch.optim.Adam(p, rate),
            scheduler=(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, EPOCHS)) if falls else None,
            epochs=EPOCHS,
            seed=seed,
            control=True,
            progress=False,
        )

    first = run(networks.small(10, seed=seed), resets.every(1), RATE, falls=False)
    trained = copy.deepcopy(first.estimate.module).requires_grad_(True)
    others = [
        run(networks.small(10, seed=seed), resets.never(), RATE, falls=True),
        run(trained, resets.never(), RATE, falls=True),
        run(trained, resets.never(), RATE / 10, falls=True),
    ]
    return [shares_of(found) for found in (first, *others)]


def mean(seeds: list[Shares], layer: str) -> list[float]:
    return [fmean(values) for values in zip(*(own[layer] for own in seeds), strict=True)]


def table(seeds: list[Shares]) -> list[str]:
    rows = ["| layer | " + " | ".join(f"epoch {epoch}" for epoch in SHOWN) + " |", "|---" * (len(SHOWN) + 1) + "|"]
    for layer in seeds[0]:
        values = [[own[layer][epoch - 1] for own in seeds] for epoch in SHOWN]
        cells = [f"{fmean(v):.2f} ± {stdev(v) / math.sqrt(len(v)):.2f}" for v in values]
        rows.append(f"| {layer} | {' | '.join(cells)} |")
    return rows


def figure(ways: list[list[Shares]]) -> Figure:
    drawn = Figure((13, 3.6), layout="constrained")
    panels = drawn.subplots(1, len(NAMES), sharey=True)
    for axes, name, seeds in zip(panels, NAMES, ways, strict=True):
        for layer, colour in zip(seeds[0], (*plots.SERIES, plots.TRUTH), strict=True):
            axes.plot(range(1, EPOCHS + 1), mean(seeds, layer), color=colour, label=layer)
        axes.axhline(0, color=plots.ink(), lw=0.8)
        axes.set(title=textwrap.fill(name, 26), xlabel="epoch", ylim=(-0.5, 1))
        axes.grid(True)
    panels[0].set_ylabel("share of sigma^2 by data")
    panels[0].legend()
    return drawn


def page(ways: list[list[Shares]], samples: int) -> str:
    about = (
        "Written by `benchmarks/control.py --page docs/control.md`. [sigma.md](sigma.md) explains what it means. "
        "`fit(..., control=True)` trains twins of a small convolutional network, with three convolutions, on "
        f"{samples:,} digits of 8 x 8 pixels, for {EPOCHS} epochs with Adam at a learning rate of {RATE} unless "
        "another is named. A falling rate falls to 0 along a cosine. The trained model is the result of the first way. "
        f"Mean and standard error of {SEEDS} seeds. A share of 1 means that sigma^2 is all due to the data; a share of "
        "0, that it is as large with the same data in another order. Estimates scatter around 0, so some are negative."
    )
    lines = ["# Which share of sigma^2 is due to the data", "", textwrap.fill(about, 120, break_on_hyphens=False), ""]
    lines += [
        "![Four panels, one for each way to train, with the share of sigma squared that is due to the data over the",
        "epochs, a line for each layer.](figures/control.png)",
    ]
    for name, seeds in zip(NAMES, ways, strict=True):
        lines += ["", f"## {name[0].upper()}{name[1:]}", "", *table(seeds)]
    lines += ["", f"torch {torch.__version__}, {platform.system()} {platform.machine()}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="a page in Markdown to write, such as docs/control.md")
    place = parser.parse_args().page
    images = datasets.load("digits")
    data = TensorDataset(datasets.standardised(images.train_x, datasets.moments_of(images.train_x)), images.train_y)
    ways = [list(seeds) for seeds in zip(*(measure(data, seed) for seed in range(SEEDS)), strict=True)]
    text = page(ways, len(data))
    print(text)
    if place is not None:
        place.write_text(text, encoding="utf-8")
        with plots.theme():
            (place.parent / "figures").mkdir(exist_ok=True)
            figure(ways).savefig(place.parent / "figures" / "control.png", dpi=90, metadata={"Software": None})


if __name__ == "__main__":
    main()
