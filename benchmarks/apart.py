"""What twins in different processes send for sigma, and how well a sketch tells it.

    .venv/bin/python benchmarks/apart.py --page docs/apart.md          a minute on one core

Two twins train in one process, where the exact sigma is known. After each step the sketch of both is compared with it,
so that steps, sizes of sketches and the exact value all belong to the same run.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinboot import Twins
from twinboot._core.noise import filler
from twinboot._core.seeds import derive
from twinboot.distributed.sketch import Sketch
from twinboot.experiments import networks

BATCH = 64  # the paper's batch size (Appendix A.4)
NUMBERS = (61, 251, 1021)  # primes: columns of weights then spread over the buckets
STEPS, RESET_EVERY = 50, 20


def mlp() -> nn.Module:
    """Two hidden layers of 256 units on 28 x 28 images."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    groups: str


CASES = [
    Case("MLP", mlp, (1, 28, 28), "layer"),
    Case("MLP, a sigma per unit", mlp, (1, 28, 28), "unit"),
    Case("quarter-width VGG-16", lambda: networks.vgg16(10, width=0.25), (3, 32, 32), "layer"),
]


def measure(case: Case) -> list[str]:
    """The rows of a case's table."""
    torch.manual_seed(0)
    twins = Twins(case.model(), groups=case.groups)
    optimizer = torch.optim.Adam(twins.parameters(), 1e-3)
    x, y = torch.randn(16 * BATCH, *case.shape), torch.randint(10, (16 * BATCH,))
    sketches = {k: Sketch(twins.partition, k) for k in NUMBERS}
    errors: dict[int, list[Tensor]] = {k: [] for k in NUMBERS}
    seconds: dict[int | str, list[float]] = {k: [] for k in (*NUMBERS, "noise")}
    for step in range(STEPS):
        with twins.sampled():
            for twin in twins:
                drawn = torch.randint(len(x), (BATCH,))
                F.cross_entropy(twin(x[drawn]), y[drawn]).backward()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()
        weights = twins._store.weights()
        exact = twins.partition.sigma.clone()
        for k, sketch in sketches.items():
            started = time.thread_time()
            sent = [sketch.of(w, derive(0, step), exact) for w in weights]
            seconds[k].append((time.thread_time() - started) / len(weights))
            total = torch.zeros_like(exact)
            for i, (first, second) in enumerate(zip(*map(sketch.split, sent), strict=True)):
                twins.partition.add_squares_(total, [i], [first - second], [first])
            known = exact > 0  # a unit that has had no gradient yet is at the same place in both, in a sketch as well
            errors[k].append(((total / twins.partition.sizes / 2).sqrt() / exact - 1).abs()[known])
        noise = [[torch.empty_like(w, requires_grad=False) for w in weights[0]]]
        started = time.thread_time()
        filler(noise)(step, None)
        seconds["noise"].append(time.thread_time() - started)
        if step % RESET_EVERY == RESET_EVERY - 1:
            twins.reset()
    whole = sum(w.numel() * w.element_size() for w in weights[0])
    noise_ms = 1e3 * statistics.median(seconds["noise"])
    rows = [f"| {case.name} | all weights | {whole:,} | 1 | 0 | 0 | |"]
    for k, sketch in sketches.items():
        found = torch.cat(errors[k])
        size = len(sketch) * exact.element_size()
        ms = 1e3 * statistics.median(seconds[k])
        rows.append(
            f"| {case.name} | {k} | {size:,} | {size / whole:.2g} | {100 * found.median():.2g} % | "
            f"{100 * found.max():.2g} % | {ms:.2g} ms, {ms / noise_ms:.2g} of the noise |"
        )
    return rows


PAGE = """
# What twins in different processes send

Written by `.venv/bin/python benchmarks/apart.py --page docs/apart.md`. `Apart(model, mesh, exchange=k, sketch=n)` sends
all weights at each k-th update and a sketch of n numbers per tensor (per unit, with `groups="unit"`) at the others;
what is smaller than its sketch is sent itself, and so is exact. These are the sizes of both, and how far sigma from a
sketch is from the exact one.

- *Bytes* are what each process hands to the other twin's in one update, in float32. `Apart.bytes_sent()` gives them for
  your model.
- *Error* is the absolute value of (sigma from the sketch / exact sigma - 1), over all groups and {steps} steps of a run
  with Adam, noise and resets. For one large tensor theory gives a standard deviation of 1 / sqrt(2 n), so a median of
  0.67 of that: {theory}. The worst is over as many values as there are groups times steps.
  Groups of several large tensors are better, those in which few buckets have most of the distance worse.
- *Time* is what one twin's process needs on one core to draw the signs and to sum up, and its ratio to drawing the
  noise of that twin.
- The square of sigma from a sketch is right on average, whatever the weights. Sigma itself is on average too small by
  about 1 / (4 n): 0.1 % for 251.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heading = "| model | numbers per tensor | bytes | share | error of sigma: median | worst | time |"
    lines = [heading, "|---|---|---|---|---|---|---|", *(row for case in CASES for row in measure(case))]
    print("\n".join(lines))
    if options.page:
        theory = ", ".join(f"{67.45 / math.sqrt(2 * k):.2g} % for {k}" for k in NUMBERS)
        page = PAGE.strip().format(steps=STEPS, theory=theory)
        setup = f"PyTorch {torch.__version__}, 1 thread, Python {platform.python_version()}, random images and labels."
        options.page.write_text("\n\n".join([page, setup, "\n".join(lines)]) + "\n")


if __name__ == "__main__":
    main()
