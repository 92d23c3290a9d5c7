"""Whether the mean of twins is a network in a first epoch that is long: with no reset in it, and with early ones.

    .venv/bin/python benchmarks/first_epoch.py DIR --page docs/first-epoch.md

DIR holds the official files of CIFAR-10. VGG-16 with weight norm, at a quarter of its width, goes once through all
50,000 images, as `fit` would do it. About 20 minutes of one core.
"""

from __future__ import annotations

import argparse
import platform
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, PairedLoader, Twins, resets
from twinboot.experiments import datasets, networks
from twinboot.training.optimizers import adam

BATCH, RATE, WIDTH = 64, 0.001, 0.25  # as in `twinboot images`
LOOK, LOOKS, JUDGES = 98, 8, 1000  # steps between looks, their number, and unseen images that judge
SEEDS = (0, 1)
KINDS = {"none": resets.never(), "early": resets.growing(10, 1.1, most=LOOK * LOOKS)}


def descend(images: datasets.Images, seed: int, due: resets.Schedule) -> Iterator[tuple[float, float]]:
    """The loss of the mean of the twins, and their own mean loss, after each so many steps."""
    x, y = datasets.standardised(images.train_x, datasets.moments_of(images.train_x)), images.train_y
    bootstrap = Bootstrap(len(y), seed=seed)
    loader = PairedLoader(TensorDataset(x, y), bootstrap, BATCH, "counts", seed=seed)
    network = networks.vgg16(10, width=WIDTH, seed=seed)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    twins = Twins(network, seed=seed)
    optimizer = adam(twins.parameters(), RATE)
    judges = bootstrap.unseen[:JUDGES]

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            logits = torch.cat([model(part) for part in x[judges].split(250)])
        return F.cross_entropy(logits, y[judges]).item()

    for step, pair in enumerate(loader, start=1):
        optimizer.zero_grad()
        with twins.sampled():
            for twin, (inputs, labels, weight) in zip(twins, pair, strict=True):
                (weight * F.cross_entropy(twin(inputs), labels, reduction="none")).mean().backward()
        optimizer.step()
        twins.update()
        if step % LOOK == 0:
            yield loss(twins.estimate().module), sum(loss(twin) for twin in twins) / 2
        if due(step):
            twins.reset()


def page(directory: str) -> str:
    images = datasets.load("cifar10", directory)
    told = []
    for seed in SEEDS:
        found = [list(descend(images, seed, due)) for due in KINDS.values()]
        for look, (never, early) in enumerate(zip(*found, strict=True), start=1):
            values = " | ".join(f"{mean:.3f} | {own:.3f}" for mean, own in (never, early))
            told.append(f"| {seed} | {look * LOOK} | {values} |")
            print(told[-1], flush=True)
    about = (
        "Written by `benchmarks/first_epoch.py DIR --page docs/first-epoch.md`: two twins of VGG-16 with weight norm, "
        f"at {WIDTH} of its width, in their first epoch of all 50,000 images of CIFAR-10; Adam at {RATE}, batches of "
        f"{BATCH} draws. Cross entropy of {JUDGES:,} images that no twin saw: of the mean of the twins, and of each "
        "twin by itself, on average; by chance it is 2.303. Early resets: `resets.growing(10, 1.1)`."
    )
    lines = [
        "# Resets in a long first epoch",
        "",
        textwrap.fill(about, 120, break_on_hyphens=False),
        "",
        "| seed | step | no reset: mean of the twins | each twin | early resets: mean of the twins | each twin |",
        "|---|---|---|---|---|---|",
        *told,
        "",
        f"torch {torch.__version__}, {platform.system()} {platform.machine()}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="with the official files of CIFAR-10")
    parser.add_argument("--page", type=Path, help="a page in Markdown to write, such as docs/first-epoch.md")
    arguments = parser.parse_args()
    text = page(arguments.directory)
    if arguments.page is not None:
        arguments.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
