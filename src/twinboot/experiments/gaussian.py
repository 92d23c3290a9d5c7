"""Figure 1: two twins find the mean of a Gaussian cloud. Is their distance the uncertainty of that mean?

The loss of a datum x is l(w; x) = ||x - w||^2 (the paper does not say whether with a factor of 1/2, which would halve
the learning rate). A full-batch step at the learning rate r therefore closes the share a = 2 r of the way to the mean
of the twin's bootstrap sample, and sigma^2 has a closed form. Write tau^2 = variance / M * (M - 1) / M for the variance
of the mean as a bootstrap of M data sees it, u for E[sigma^2] and c for the covariance of a twin with the mean of its
own sample. The noise on the weights, N(0, sigma^2), enters each step, so

    c' = (1 - a) c + a tau^2
    u' = (1 - a)^2 u + 2 a (1 - a) c + a^2 tau^2 + a^2 u        (the last term is the noise)

At a constant rate u settles at tau^2 (2 - a) / (2 - 2 a): noise that is driven by sigma makes sigma larger. As the
rate falls to 0 it settles at tau^2. Given the data, an estimate from B bootstrap samples then has the relative variance
r = 2 / ((B - 1) D) of the paper, D = 2 weights here. Over data sets, whose own covariance is a Wishart matrix, it has
r (1 + (D + 1) / (M - 1)) + 2 / ((M - 1) D), so that beyond B = M more trainings buy little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from .. import Blocks, Bootstrap, PairedLoader, Twins
from .._core.seeds import derive
from . import plots
from .intervals import formatted
from .runner.experiment import (
    Part,
    Tables,
    Tick,
    Verdict,
    agrees,
    one_thread,
    overall,
    refuse_repeated,
    require_at_least,
    require_positive,
    status,
)

TITLE = "The mean of a Gaussian"
QUESTION = "Is the distance between two twins the uncertainty of what they estimate, and what does it cost?"
CAPTION = (
    "Top left: one run with the settings of Appendix A.2. Top right: the estimate of each run, once the rate has "
    "fallen to 0. Bottom left: root mean square of the estimates as a share of the bootstrap's own sigma, with two "
    'standard errors; lines are closed forms. "Few steps": as many as in the picture; "constant rate": before the '
    'rate falls; "twins": after. Bottom right: how much one estimate of sigma^2 varies between data sets, against '
    "its cost."
)
WEIGHTS = 2  # D: the twins look for a point in the plane


@dataclass(frozen=True, kw_only=True)
class Config:
    """Figure 1: two twins estimate the mean of a cloud of points. Is sigma the standard error of that mean?"""

    points: int = 400
    """Data in the cloud (Appendix A.2)."""
    variance: float = 120.0
    """Of the data, per dimension (Appendix A.2)."""
    epochs: int = 5
    """Passes over the data in the picture (Appendix A.2)."""
    batch: int = 200
    """Batch size in the picture (Appendix A.2)."""
    lr: float = 0.07
    """Learning rate of SGD (Appendix A.2)."""
    stride: int = 4
    """Steps between two circles in the picture (Appendix A.2)."""
    start: tuple[float, float] = (-4.0, 3.0)
    """Where the twins start in the picture. Not stated; a few true sigmas away."""
    sizes: tuple[int, ...] = (50, 100, 200, 500, 1000, 2000, 5000)
    """Numbers of data M for the comparison with theory."""
    seeds: int = 400
    """Data sets for each M."""
    replicas: tuple[int, ...] = (10, 50, 200)
    """Numbers B of the classical bootstrap's trainings, for comparison."""
    constant: int = 60
    """Full-batch steps at the constant learning rate, in the comparison: 0.86^60 = 0.0001 of the way is then left."""
    falling: int = 1000
    """Further steps while it falls to 0: by the closed form less than 1 % of sigma^2 is then due to the noise."""
    seed: int = 7
    """Of the data, their resampling and the noise on the weights (Appendix A.2)."""

    def __post_init__(self) -> None:
        require_positive(self, "variance", "epochs", "batch", "lr", "stride", "constant", "falling")
        require_at_least(self, 2, "points", "seeds")
        refuse_repeated(self, "sizes", *(["replicas"] if self.replicas else []))
        if min(*self.sizes, *self.replicas, 2) < 2:
            raise ValueError(f"sizes and replicas must all be at least 2, not {self.sizes} and {self.replicas}.")
        if self.lr >= 0.5:
            raise ValueError(f"lr must be below 0.5, not {self.lr}: a step would go past the mean.")
        if self.constant <= self.stages["twins, few steps"]:
            raise ValueError(f"constant must be more than the {self.stages['twins, few steps']} steps of the picture.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1, not {self.seed}.")

    @property
    def stages(self) -> dict[str, int]:
        """The steps after which the comparison reads sigma."""
        short = self.epochs * math.ceil(self.points / self.batch)
        return {"twins, few steps": short, "twins, constant rate": self.constant, "twins": self.constant + self.falling}


QUICK = Config(seeds=200, sizes=(50, 200, 1000, 5000), replicas=(10, 50))


class Mean(nn.Module):
    """The whole model: a point, or one for each of many runs. Its loss is the squared distance from the data."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.w).square().sum(-1)


def parts(config: Config) -> list[Part]:
    short = config.stages["twins, few steps"]
    picture = Part("picture", short, partial(_picture, config))
    return [picture, *(Part(f"size-{size}", config.seeds, partial(_estimates, config, size)) for size in config.sizes)]


def _picture(config: Config, tick: Tick) -> dict[str, pd.DataFrame]:
    """One run, by the loop that a user would write."""
    generator = torch.Generator().manual_seed(config.seed)
    data = torch.randn(config.points, WEIGHTS, generator=generator) * math.sqrt(config.variance)
    bootstrap = Bootstrap(config.points, seed=config.seed)
    loader = PairedLoader(TensorDataset(data), bootstrap, config.batch)
    twins = Twins(Mean(torch.tensor(config.start)), seed=config.seed)
    optimizer = torch.optim.SGD(twins.parameters(), lr=config.lr)

    def positions(step: int) -> list[tuple[float, ...]]:
        sigma = twins.sigma["(model)"].item()
        return [(step, i, *twin.get_parameter("w").tolist(), sigma) for i, twin in enumerate(twins, start=1)]

    path = positions(0)
    for _ in range(config.epochs):
        for pair in loader:
            with twins.sampled():
                for twin, (x,) in zip(twins, pair, strict=True):
                    twin(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            twins.update()
            path += positions(len(path) // 2)
            tick()
    optima = [(r + 1, *data[bootstrap.indices(r)].mean(0).tolist()) for r in range(2)]
    return {
        "path": pd.DataFrame(path, columns=["step", "twin", "w1", "w2", "sigma"]),
        "optima": pd.DataFrame(optima, columns=["twin", "w1", "w2"]),
    }


def _estimates(config: Config, size: int, tick: Tick) -> dict[str, pd.DataFrame]:
    """sigma^2 by twins at each stage and by classical bootstraps, for many data sets of one size."""
    generator = torch.Generator().manual_seed(derive(config.seed, "data", size))
    most = max(config.replicas, default=2)
    means = []  # of the bootstrap samples; the first two of a data set are the twins'
    with one_thread():
        for seed in range(config.seeds):
            data = torch.randn(size, WEIGHTS, generator=generator) * math.sqrt(config.variance)
            bootstrap = Bootstrap(size, max(most, 2), seed=derive(config.seed, "bootstrap", size, seed))
            means.append(bootstrap.counts.to(data) @ data / size)
            tick()
        found = _twins(config, torch.stack(means)[:, :2], derive(config.seed, "noise", size))
    for replicas in config.replicas:
        found[f"bootstrap {replicas}"] = torch.stack([m[:replicas].var(0).mean() for m in means])
    frames = [
        pd.DataFrame({"size": size, "seed": range(config.seeds), "estimator": name, "sigma2": values.numpy()})
        for name, values in found.items()
    ]
    return {"estimates": pd.concat(frames, ignore_index=True)}


def _twins(config: Config, means: Tensor, seed: int) -> dict[str, Tensor]:
    """sigma^2 [seeds] at each stage. A squared loss knows its data only by their mean, so the mean stands for them."""
    twins = Twins(Mean(torch.zeros(len(means), WEIGHTS)), groups=Blocks((1, WEIGHTS)), seed=seed)
    optimizer = torch.optim.SGD(twins.parameters(), lr=config.lr)
    found, names = {}, {step: name for name, step in config.stages.items()}
    for step, lr in enumerate(_rates(config), start=1):
        optimizer.param_groups[0]["lr"] = lr
        with twins.sampled():
            for twin, mean in zip(twins, means.unbind(1), strict=True):
                twin(mean).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()
        if step in names:
            found[names[step]] = twins.sigma["w"].flatten().square()
    return found


def _rates(config: Config) -> list[float]:
    falling = [config.lr * (1 - step / config.falling) for step in range(config.falling)]
    return [config.lr] * config.constant + falling


def tau_squared(config: Config, size: Any) -> Any:
    """The variance of the mean of `size` data, as a bootstrap sees it."""
    return config.variance / size * (size - 1) / size


def expected(config: Config) -> dict[str, float]:
    """E[sigma^2] / tau^2 of each estimator by the closed forms at the top of this file."""
    names = {step: name for name, step in config.stages.items()}
    u, c, found = 0.0, 0.0, {}
    for step, lr in enumerate(_rates(config), start=1):
        a = 2 * lr
        u = (1 - a) ** 2 * u + 2 * a * (1 - a) * c + a**2 + a**2 * u
        c = (1 - a) * c + a
        if step in names:
            found[names[step]] = u
    return found | {f"bootstrap {replicas}": 1.0 for replicas in config.replicas}


def relative_variance(trainings: Any, size: Any) -> Any:
    """Of sigma^2 from as many bootstrap samples as trainings, over data sets of one size."""
    given_data = 2 / (WEIGHTS * (trainings - 1))
    return given_data * (1 + (WEIGHTS + 1) / (size - 1)) + 2 / (WEIGHTS * (size - 1))


def summary(config: Config, estimates: pd.DataFrame) -> pd.DataFrame:
    """For each size and estimator: the mean of sigma^2 as a share of tau^2, its standard error and its relative
    variance, and what theory says of each."""
    ratio = estimates["sigma2"] / tau_squared(config, estimates["size"])
    grouped = ratio.groupby([estimates["size"], estimates["estimator"]], sort=False)
    found = grouped.agg(mean="mean", error="sem", variance="var").reset_index()
    found["variance"] /= found["mean"] ** 2
    found["expected"] = found["estimator"].map(expected(config))
    found["trainings"] = found["estimator"].str.extract(r"bootstrap (\d+)", expand=False).fillna("2").astype(int)
    settled = ~found["estimator"].isin(["twins, few steps", "twins, constant rate"])
    found["theory"] = relative_variance(found["trainings"], found["size"]).where(settled)
    return found


def pooled(config: Config, estimates: pd.DataFrame) -> pd.DataFrame:
    """The summary over all sizes together, a row for each estimator."""
    grouped = summary(config, estimates).drop(columns="size").groupby("estimator", sort=False)
    found = grouped.mean().astype({"trainings": int})
    found["error"] = grouped["error"].apply(lambda errors: math.sqrt(errors.pow(2).sum()) / len(errors))
    return found.reset_index()


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    found = pooled(config, tables["estimates"])
    shown = formatted(
        found.assign(work=found["variance"] * found["trainings"]),
        {
            "estimator": ("estimator",),
            "trainings": ("trainings",),
            "sigma² / bootstrap's": ("mean", "{:.3f}", "error"),
            "expected": ("expected", "{:.3f}"),
            "relative variance of sigma²": ("variance", "{:.4f}"),
            "theory": ("theory", "{:.4f}"),
            "variance x trainings": ("work", "{:.2f}"),
        },
    )
    twins = summary(config, tables["estimates"]).query("estimator == 'twins'")
    tau2 = tau_squared(config, twins["size"])
    sizes = formatted(
        twins.assign(true=(config.variance / twins["size"]).pow(0.5), rms=(tau2 * twins["mean"]).pow(0.5)),
        {
            "M": ("size",),
            "true sigma": ("true", "{:.3f}"),
            "rms of twins' sigma": ("rms", "{:.3f}"),
            "sigma² / bootstrap's": ("mean", "{:.3f}", "error"),
            "expected": ("expected", "{:.3f}"),
            "relative variance of sigma²": ("variance", "{:.3f}"),
        },
    )
    return {
        f"All M together, {config.seeds} data sets for each, ± standard error": shown,
        "Two twins, the rate fallen to 0, by the number of data M, ± standard error": sizes,
    }


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    found = pooled(config, tables["estimates"]).set_index("estimator")
    twins, constant, few = (found.loc[name] for name in reversed(config.stages))
    classical = found[found.index.str.startswith("bootstrap")]
    told = (f", {row.variance:.4f} for B = {row.trainings} (theory {row.theory:.4f})" for row in classical.itertuples())
    others = "".join(told)
    gain = (twins["variance"] * 2 / (classical["variance"] * classical["trainings"])).max()  # NaN if there is none
    precise = f" Per training spent, a classical bootstrap is up to {gain:.1f} times as precise here."
    last, total = int(tables["path"]["step"].max()), config.seeds * len(config.sizes)
    # A sample variance of n values with the kurtosis 3 + 12 / D of a chi-squared varies by (2 + 12 / D) / n.
    spread_error = twins["theory"] * math.sqrt((2 + 12 / WEIGHTS) / total)
    single = tables["estimates"].query("estimator == 'twins'")
    low, high = (single["sigma2"] / (config.variance / single["size"])).pow(0.5).quantile([0.25, 0.75])
    return [
        Verdict(
            "The two-sample estimator of sigma^2 is unbiased.",
            "Section 3.4",
            overall([agrees(twins["mean"], twins["error"])]),
            f"Once the rate has fallen to 0, sigma^2 is {twins['mean']:.3f} ± {twins['error']:.3f} of the bootstrap's "
            f"variance, which is (M - 1) / M of the true one; closed form {twins['expected']:.3f}.",
        ),
        Verdict(
            "The circles track the true uncertainty at every step of the run.",
            "Section 4.1, Figure 1",
            overall(agrees(math.sqrt(row["mean"]), row["error"] / 2) for row in (few, constant, twins)),  # of sigma
            f"They grow with the run: after its {last} steps {(1 - 2 * config.lr) ** last:.0%} of the way is still "
            "to go (with a loss that is the squared distance; the paper does not state its factor), and sigma^2 is "
            f"{few['mean']:.2f} ± {few['error']:.2f} of what it should be (closed form {few['expected']:.2f}). At a "
            f"constant rate it settles at {constant['mean']:.3f} ± {constant['error']:.3f} "
            f"({constant['expected']:.3f}), because the noise that sigma drives feeds back on it.",
        ),
        Verdict(
            f"Its relative variance is 2 / D, here {2 / WEIGHTS:.0f}; a classical bootstrap's is 2 / ((B - 1) D).",
            "Section 3.4",
            overall([agrees(twins["variance"], spread_error, twins["theory"])]),
            f"{twins['variance']:.2f} ± {spread_error:.2f} for two twins (theory {twins['theory']:.2f}){others}. "
            "Theory includes what the data sets themselves differ by, which no number of trainings removes.",
        ),
        Verdict(
            "Two samples do online what a classical bootstrap does at a prohibitive cost.",
            "Section 4.1",
            status(high < 1.5 * low, bool(agrees(twins["mean"], twins["error"])), total < 50),
            "The cost is 2 trainings. But with two weights a single estimate is rough: half of them lie outside "
            f"{low:.2f} to {high:.2f} of the true sigma. What makes two twins enough is a group of many weights."
            + (precise if gain > 0 else ""),
        ),
    ]


def figure(config: Config, tables: Tables) -> Figure:
    drawn = Figure(figsize=(12.5, 10.5), layout="constrained")
    for axes, draw in zip(drawn.subplots(2, 2).flat, (_draw_path, _draw_spread, _draw_bias, _draw_cost), strict=True):
        draw(axes, config, tables)
    return drawn


def _draw_path(axes: Axes, config: Config, tables: Tables) -> None:
    path, optima = tables["path"], tables["optima"]
    for twin, color in enumerate(plots.TWINS, start=1):
        own = path[path["twin"] == twin]
        axes.plot(own["w1"], own["w2"], "o-", ms=3, color=color, lw=1.4, label=f"twin {twin}")
        best = optima[optima["twin"] == twin]
        axes.plot(best["w1"], best["w2"], "*", color=color, ms=15, mec="white", label=f"best for sample {twin}")
    mean = path.groupby("step")[["w1", "w2", "sigma"]].mean()
    for _, row in pd.concat([mean[:: config.stride], mean[-1:]]).iterrows():
        plots.circle(axes, (row["w1"], row["w2"]), row["sigma"], color=plots.ink(), alpha=0.6, lw=1)
    truth = math.sqrt(config.variance / config.points)
    plots.circle(axes, (0, 0), truth, color=plots.TRUTH, lw=1.8, ls="--")
    axes.plot(0, 0, "+", color=plots.TRUTH, ms=13, mew=2, label="true mean; dashed: true $\\sigma$")
    label = f"estimated $\\sigma$, every {config.stride} steps and last"
    axes.plot([], [], "o", mfc="none", color=plots.ink(), alpha=0.6, ms=10, label=label)
    title = f"One run of {mean.index.max()} steps, M = {config.points}"
    axes.set(title=title, xlabel="$w_1$", ylabel="$w_2$", aspect="equal", adjustable="datalim")
    axes.legend(loc="upper right")


def _draw_spread(axes: Axes, config: Config, tables: Tables) -> None:
    """Each run's sigma, and the quantiles of theory: sigma^2 / tau^2 is exponential for two twins and two weights."""
    own, color = tables["estimates"].query("estimator == 'twins'"), plots.SERIES[0]
    true_sigma = "true $\\sigma = \\sigma_{data} / \\sqrt{M}$"
    truth, sigma = (config.variance / own["size"]).pow(0.5), own["sigma2"].pow(0.5)
    axes.plot(truth, sigma, "o", ms=3, mew=0, alpha=0.15, color=color)
    axes.plot([], [], "o", ms=5, color=color, alpha=0.5, label=f"two twins, each of {config.seeds} data sets")
    by_size = sigma.groupby(truth.to_numpy())
    rms = by_size.apply(lambda s: math.sqrt((s**2).mean()))
    axes.plot(rms.index, rms, "o", ms=8, color=color, mec="white", label="their root mean square")
    quantiles = by_size.quantile([0.1, 0.9]).unstack()
    labels = ["their 10 % and 90 % quantiles", None]
    axes.plot(quantiles.index, quantiles, "_", ms=13, mew=2, color=plots.SERIES[1], label=labels)
    line = torch.tensor([truth.min() * 0.8, truth.max() * 1.25])
    axes.plot(line, line, "--", color=plots.TRUTH, lw=1.5, label=true_sigma)
    for level, label in ((0.1, "10 % and 90 % in theory"), (0.9, None)):
        axes.plot(line, line * math.sqrt(-math.log(1 - level)), ":", color=plots.TRUTH, lw=1.2, label=label)
    title = f"Estimate against truth, M from {max(config.sizes)} to {min(config.sizes)}"
    axes.set(xscale="log", yscale="log", title=title, xlabel=true_sigma, ylabel="estimated $\\sigma$")
    axes.set_ylim(min(float(line[0]) / 12, sigma.min() / 1.5), float(line[1]) * 4)
    axes.set_xticks(rms.index, [f"{x:.2g}" for x in rms.index])
    axes.minorticks_off()
    axes.legend(loc="lower right")


def _draw_bias(axes: Axes, config: Config, tables: Tables) -> None:
    found = summary(config, tables["estimates"])
    shown = ["twins", "twins, constant rate", "twins, few steps", *(f"bootstrap {b}" for b in config.replicas[-1:])]
    axes.axhline(1, color=plots.TRUTH, ls="--", lw=1.5, label="$\\sigma$ of the bootstrap")
    for i, (name, color) in enumerate(zip(shown, plots.SERIES, strict=False)):
        own = found[found["estimator"] == name]
        root = own["mean"].pow(0.5)
        sizes = own["size"] * 1.06 ** (i - 1.5)  # side by side
        axes.errorbar(sizes, root, own["error"] / root, fmt="o", ms=5, color=color, capsize=3, label=name)
        axes.plot(own["size"], own["expected"].pow(0.5), color=color, lw=1, alpha=0.8)
    axes.plot([], [], color=plots.ink(), lw=1, label="lines: closed form")
    axes.set(xscale="log", xlabel="number of data M", title="Bias of the estimate")
    axes.set_ylabel("rms $\\sigma$ / $\\sigma$ of the bootstrap")
    axes.set_ylim(min(0.7, axes.get_ylim()[0]), max(1.35, axes.get_ylim()[1] * 1.1))
    axes.set_xticks(config.sizes, map(str, config.sizes))
    axes.minorticks_off()
    axes.grid(alpha=0.5)
    axes.legend(loc="upper right", ncols=2)


def _draw_cost(axes: Axes, config: Config, tables: Tables) -> None:
    found = pooled(config, tables["estimates"]).dropna()
    trainings = torch.logspace(math.log10(2), math.log10(max((250, *config.replicas))), 100).tolist()
    theory = [sum(relative_variance(b, size) for size in config.sizes) / len(config.sizes) for b in trainings]
    axes.plot(trainings, theory, color=plots.ink(), lw=1, label="theory, two weights")
    for weights in (100, 10_000):
        axes.plot(2, 2 / weights, "o", color=plots.SERIES[0], ms=9, mfc="none")
        text = f"two twins, a group of {weights:,} weights (theory)"
        axes.annotate(text, (2, 2 / weights), (8, -3), textcoords="offset points", fontsize=9)
    for name, color in (("twins", plots.SERIES[0]), ("bootstrap", plots.SERIES[3])):
        own = found[found["estimator"].str.startswith(name)]
        axes.plot(own["trainings"], own["variance"], "o", ms=9, color=color, label=f"{name}, measured")
    axes.set(xscale="log", yscale="log", title="Spread of one estimate, and its cost")
    axes.set(xlabel="cost: trainings of the model", ylabel="relative variance of $\\sigma^2$")
    axes.set_xticks([2, 10, 50, 200], ["2", "10", "50", "200"])
    axes.minorticks_off()
    axes.grid(alpha=0.5)
    axes.legend(loc="upper right")
