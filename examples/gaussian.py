"""See the method at work on the simplest problem there is: the mean of a cloud of points.

    make demo        (or: .venv/bin/python examples/gaussian.py [--out FILE.png])

Left: two twins look for the mean of 400 points, each on its own bootstrap sample; circles show sigma, which is nothing
but how far the twins stand apart. Right: is that estimate right? 2,000 repetitions against the closed form.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from twinboot import Blocks, Bootstrap, PairedLoader, Twins

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
except ImportError:
    raise SystemExit("this example draws: install matplotlib with `pip install twinboot[plots]`.") from None

# Appendix A.2 of the paper, except for more epochs: its 5 are 10 steps, after which a fifth of the way is still to go.
POINTS, VARIANCE, BATCH, RATE, SEED = 400, 120.0, 200, 0.07, 7
EPOCHS, STRIDE = 30, 4
REPETITIONS = 2_000
BLUE, ORANGE, DARK = "#2a6fbb", "#d9772b", "#333333"


class Mean(nn.Module):
    """The whole model: a point. Its loss is the squared distance from the data."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.w).square().sum(-1)


def train() -> tuple[Tensor, Tensor, Tensor]:
    """The twins' paths [steps, 2, 2], sigma after each step, and the means of the two bootstrap samples."""
    data = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(SEED)) * math.sqrt(VARIANCE)
    bootstrap = Bootstrap(POINTS, seed=SEED)
    twins = Twins(Mean(torch.tensor([-4.0, 3.0])), seed=SEED)
    optimizer = torch.optim.SGD(twins.parameters(), lr=RATE)
    path, sigma = [[twin.w.detach().clone() for twin in twins]], [0.0]
    loader = PairedLoader(TensorDataset(data), bootstrap, BATCH)
    for _ in range(EPOCHS):
        for pair in loader:
            with twins.sampled():
                sum(twin(x).mean() for twin, (x,) in zip(twins, pair, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
            twins.update()
            path.append([twin.w.detach().clone() for twin in twins])
            sigma.append(twins.sigma["(model)"].item())
    optima = torch.stack([data[bootstrap.indices(r)].mean(0) for r in range(2)])
    return torch.stack([torch.stack(p) for p in path]), torch.tensor(sigma), optima


def repeat(replicas: int) -> Tensor:
    """sigma^2 of many repetitions at once: each row of one parameter is the mean of a cloud of its own."""
    generator = torch.Generator().manual_seed(SEED)
    data = torch.randn(REPETITIONS, POINTS, 2, generator=generator) * math.sqrt(VARIANCE)
    twins = Twins(Mean(torch.zeros(REPETITIONS, 2)), replicas, groups=Blocks((1, 2)))
    optimizer = torch.optim.SGD(
        twins.parameters(), lr=0.5
    )  # one full-batch step of a quadratic: exactly at the optimum
    counts = torch.stack([Bootstrap(POINTS, replicas, seed).counts for seed in range(REPETITIONS)], 1).float()
    for twin, weights in zip(twins, counts, strict=True):
        (weights / POINTS * twin(data.transpose(0, 1)).T).sum().backward()
    optimizer.step()
    twins.update()
    return twins.sigma["w"].flatten().square()


def draw_paths(axes: Axes, path: Tensor, sigma: Tensor, optima: Tensor, truth: float) -> None:
    for twin, color in enumerate((BLUE, ORANGE)):
        axes.plot(*path[:, twin].T, color=color, lw=1.4, label=f"twin {twin + 1}")
        axes.plot(*optima[twin], "*", color=color, ms=14, mec="white", label=f"mean of sample {twin + 1}")
    mean = path.mean(1)
    for step in range(STRIDE, len(path), STRIDE):
        axes.add_patch(plt.Circle(mean[step].tolist(), sigma[step].item(), fill=False, color=DARK, alpha=0.4, lw=0.8))
    axes.add_patch(plt.Circle((0, 0), truth, fill=False, color="crimson", lw=1.8, ls="--"))
    axes.plot(0, 0, "+", color="crimson", ms=13, mew=2, label="true mean, and true $\\sigma$ (dashed)")
    axes.plot([], [], "o", mfc="none", color=DARK, alpha=0.5, ms=11, label=f"estimated $\\sigma$, every {STRIDE} steps")
    axes.set(title="Two twins, each on its own bootstrap sample", xlabel="$w_1$", ylabel="$w_2$", aspect="equal")
    axes.legend(loc="upper right", fontsize=9, framealpha=0.95)


def draw_distribution(axes: Axes, squared: dict[int, Tensor], tau2: float) -> None:
    grid = torch.linspace(0.01, 4, 400)
    for (replicas, values), color in zip(squared.items(), (BLUE, ORANGE), strict=True):
        axes.hist((values / tau2).numpy(), bins=60, range=(0, 4), density=True, color=color, alpha=0.35)
        degrees = (replicas - 1) * 2  # sigma^2 / tau^2 is chi-squared over its degrees of freedom
        density = torch.distributions.Chi2(degrees).log_prob(grid * degrees).exp() * degrees
        mean = values.mean().item() / tau2
        axes.plot(grid, density, color=color, lw=2, label=f"{replicas} twins: mean {mean:.3f}; line: theory")
    axes.axvline(1, color="crimson", ls="--", lw=1.5)
    title = f"The estimate over {REPETITIONS:,} repetitions"
    axes.set(title=title, xlabel="estimated $\\sigma^2$ / true $\\sigma^2$", ylabel="density", xlim=(0, 4))
    axes.legend(fontsize=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/gaussian.png"), help="where to write the picture")
    out: Path = parser.parse_args().out
    path, sigma, optima = train()
    truth = math.sqrt(VARIANCE / POINTS)
    # The bootstrap sees the sample's variance, which is (n - 1) / n of the population's.
    tau2 = VARIANCE / POINTS * (POINTS - 1) / POINTS
    squared = {replicas: repeat(replicas) for replicas in (2, 8)}
    late = sigma[len(sigma) // 2 :].mean()
    print(f"sigma of the mean: true {truth:.3f}, of the two twins in the picture (second half of the run) {late:.3f}")
    for replicas, values in squared.items():
        ratio = values / tau2
        print(
            f"{replicas} twins, {REPETITIONS} repetitions: sigma^2 is {ratio.mean():.3f} +- "
            f"{ratio.std() / math.sqrt(REPETITIONS):.3f} of the truth on average; its variance is {ratio.var():.3f}, "
            f"in theory {1 / (replicas - 1):.3f}"
        )
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
    draw_paths(left, path, sigma, optima, truth)
    draw_distribution(right, squared, tau2)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    print(f"picture: {out}")


if __name__ == "__main__":
    main()
