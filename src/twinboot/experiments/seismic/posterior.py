"""Beyond the paper: fields with a prior, on the tasks of `regimes.py` and against exact posteriors.

`invert(prior=GaussianProcess(), rounds=...)` itself solves the 48 tasks. Its rivals are `invert` without a prior, Adam
with a hold-out, and Tikhonov regularization in closed form: with the weight that the truth would choose (the oracle's),
and with generalized cross-validation and a linearised (Laplace) posterior, as a scientist would take. Two small
problems have a posterior that is known: in closed form if the operator is linear, and by a long run of MALA if it is
not.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor, nn

from ... import Bootstrap, Dense, GaussianProcess, Inversion, Smooth, invert
from ..._core import seeds
from .. import plots
from ..intervals import correlation, covered
from ..runner.experiment import (
    Part,
    Status,
    Tables,
    Tick,
    Verdict,
    one_thread,
    require_at_least,
    status,
)
from . import operator, regimes
from .descent import LEVELS, METHODS, Schedule, train
from .kernels import SIDE, Problem, Setting, kernels, problem, problems, slopes, undo
from .regimes import AXES

TITLE = "Fields with a prior, and the exact posterior"
QUESTION = "Do error bars hold the truth if the field is known to be smooth, and what does it cost in error?"
CAPTION = (
    "Left: the share of the cells whose 90 % interval holds the truth, in per cent, for each task (mean over the "
    "seeds); blue is 85 to 95 %. Middle: the error of the field in each task against that of Tikhonov with the "
    "weight that the truth would choose; the line is equality. Right: sigma of each cell against that of the exact "
    "posterior, for a linear operator and for a nonlinear one (by MALA), with twins that see perturbed or resampled "
    "measurements."
)
LOW, HIGH = 0.85, 0.95  # of the cells, for 90 % intervals that are right
TIKHONOV = 1.1  # times its error is as good
PRIOR, TWINS, HELD, ORACLE, LAPLACE = (
    "invert with a prior",
    "invert without a prior",
    "Adam, stopped by a hold-out",
    "Tikhonov, the oracle's weight",
    "Tikhonov, GCV, Laplace",
)
ROWS = (PRIOR, TWINS, HELD, ORACLE, LAPLACE)
PERTURBED, RESAMPLED = "perturbed measurements", "resampled measurements"
SHADES = ["#eeb27c", "#7fb2e0", "#c9b3e6"]  # too few, right, too many
SMALL = 10  # cells of a side of the small problems: with 100 unknowns MALA is sure to have converged
SMALL_ROWS = 400  # measurements of them: enough for resampled rows to be like perturbed ones


@dataclass(frozen=True, kw_only=True)
class Config(regimes.Config):
    """Beyond the paper: fields with a prior on the tasks of `twinboot regimes`, and against exact posteriors."""

    rounds: int = 20
    """Of redrawn twins: 40 draws give a standard deviation to 11 %."""
    exact_rounds: int = 200
    """Rounds for the small problems: 400 draws give a standard deviation to 3.5 %."""
    mala: int = 4000
    """Steps of each of 64 chains of MALA; the first quarter is left out."""
    seeds: int = 2
    """Problems of each task: the first of those of `twinboot regimes`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 2, "rounds", "exact_rounds")
        require_at_least(self, 100, "mala")


QUICK = Config(
    rows=(300,), noise=(0.3,), beta=(1.0,), spread=(0.7,), steps=600, lr=0.006, decay=0.9987, exact_rounds=50, mala=1000
)


def settings(config: Config) -> list[Setting]:
    return [Setting(*values) for values in product(*(getattr(config, name) for name in AXES))]


def parts(config: Config) -> list[Part]:
    found = [Part("exact", 2, partial(_exact, config))]
    for setting in settings(config):
        name = " ".join(f"{getattr(setting, axis):g}" for axis in AXES)
        found.append(Part(f"prior {name}", config.seeds, partial(_with_prior, config, setting)))
    return found + [
        Part(f"{run} {rows}", config.steps, partial(_without, config, rows, run))
        for rows in config.rows
        for run in ("centered", "hold-out")
    ]


def _with_prior(config: Config, setting: Setting, tick: Tick) -> dict[str, pd.DataFrame]:
    found = []
    with one_thread():
        for number, p in enumerate(problems(setting, config.seed, config.seeds)):
            began = time.process_time()
            result = by_prior(p, config.rounds, config.seed)
            took = {PRIOR: time.process_time() - began}
            half = {level: (result.interval(level)[1] - result.field) for level in LEVELS}
            scored = {PRIOR: score(p, result.field, result.sigma, half)}
            began = time.process_time()
            best, sigma = tikhonov_by_gcv(p)
            took[LAPLACE] = time.process_time() - began
            scored |= {LAPLACE: score(p, best, sigma), ORACLE: score(p, tikhonov_by_truth(p))}
            [prior] = result.prior
            assert isinstance(prior, GaussianProcess)
            length = float(prior.length)  # type: ignore[arg-type]  # a number, once it is found
            for method, row in scored.items():
                more = {"seconds": took.get(method, math.nan), "length": length if method == PRIOR else math.nan}
                found.append(_labels(setting) | {"seed": number, "method": method} | row | more)
            tick()
    return {"runs": pd.DataFrame(found)}


def by_prior(p: Problem, rounds: int, seed: int) -> Inversion:
    prior = GaussianProcess()
    return invert(operator(p), p.observed, p.initial, prior=prior, rounds=rounds, bootstrap=p.bootstrap, seed=seed)


def _labels(setting: Setting) -> dict[str, float]:
    return {name: getattr(setting, name) for name in AXES}


def _without(config: Config, rows: int, run: str, tick: Tick) -> dict[str, pd.DataFrame]:
    given = [
        (setting, number, p)
        for setting in settings(config)
        if setting.rows == rows
        for number, p in enumerate(problems(setting, config.seed, config.seeds))
    ]
    schedule, method = Schedule(config.steps, config.lr, config.decay), METHODS[run]
    with one_thread():
        state = train([p for *_, p in given], method, schedule, config.seed, tick)["clear"]
    name, found = (TWINS if method.replicas > 1 else HELD), []
    for k, (setting, number, p) in enumerate(given):
        row = score(p, state.field[k], state.sigma[k] if method.replicas > 1 else None)
        found.append(_labels(setting) | {"seed": number, "method": name} | row)
    return {"runs": pd.DataFrame(found)}


def score(
    p: Problem, field: Tensor, sigma: Tensor | None = None, half: dict[float, Tensor] | None = None
) -> dict[str, float]:
    """The mean squared error; and how often intervals hold the truth, normal ones if no half widths are given."""
    error = field - p.truth
    row = {"error": error.square().mean().item()}
    if sigma is not None:
        row |= {"sigma": sigma.square().mean().sqrt().item(), "correlation": correlation(sigma, error)}
        row |= {
            f"covered_{level}": covered(error, sigma, level)
            if half is None
            else (error.abs() < half[level]).float().mean().item()
            for level in LEVELS
        }
    return row


class Tikhonov:
    """Minima of |K u - y|^2 + weight * u' R u in the response u, for all weights by one decomposition. R has the
    squared differences of neighbours."""

    def __init__(self, p: Problem) -> None:
        self.p, rows = p, p.kernels.double()
        lower = torch.linalg.cholesky(slopes())
        half = torch.linalg.solve_triangular(lower, rows.T, upper=False)  # L^-1 K'
        # Not the eigenvalues of half @ half.T: their rounding errors are the square of these.
        vectors, roots, _ = torch.linalg.svd(half, full_matrices=half.shape[1] < len(half))
        self.values = nn.functional.pad(roots.square(), (0, len(half) - len(roots)))
        self.basis = torch.linalg.solve_triangular(lower.T, vectors, upper=True)  # L^-T V
        self.right = self.basis.T @ (rows.T @ p.observed.double())
        self.weights = torch.logspace(-5, 4, 37, dtype=torch.double)

    def response(self, weight: Tensor) -> Tensor:
        return torch.mv(self.basis, self.right / (self.values + weight))

    def field(self, weight: Tensor) -> Tensor:
        x = undo(self.p.setting.response, self.response(weight))
        return torch.div(x, self.p.setting.beta).float().view(SIDE, SIDE)

    def residual(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of squared residuals, and the degrees of freedom that are left."""
        off = self.p.kernels.double() @ self.response(weight) - self.p.observed.double()
        return off.square().sum(), len(off) - (self.values / (self.values + weight)).sum()

    def sigma(self, weight: Tensor) -> Tensor:
        """Of the field: that of u by the posterior covariance, divided by the slope of the response."""
        squares, free = self.residual(weight)
        variance = squares / free * (self.basis.square() / (self.values + weight)).sum(1)
        slope = (1 - self.response(weight).clamp(-0.999, 0.999).square()) * self.p.setting.beta
        return torch.div(variance.sqrt(), slope).float().view(SIDE, SIDE)


def tikhonov_by_truth(p: Problem) -> Tensor:
    """With the weight that has the lowest error: what no method can know."""
    solved = Tikhonov(p)
    fields = [solved.field(weight) for weight in solved.weights]
    return min(fields, key=lambda field: (field - p.truth).square().mean().item())


def tikhonov_by_gcv(p: Problem) -> tuple[Tensor, Tensor]:
    """With the weight of generalized cross-validation, and sigma by the Laplace approximation."""
    solved = Tikhonov(p)

    def criterion(weight: Tensor) -> float:
        squares, free = solved.residual(weight)
        return (squares / free.square()).item()

    weight = min(solved.weights, key=criterion)
    return solved.field(weight), solved.sigma(weight)


@dataclass(frozen=True)
class Small:
    """A problem of few cells whose posterior is known: the noise and the weight of the prior are given."""

    rows: Tensor  # [M, cells]
    observed: Tensor
    beta: float  # 0 for a linear operator
    noise: float
    weight: float

    def respond(self, field: Tensor) -> Tensor:
        return (self.beta * field).tanh() if self.beta else field

    def loss(self, fields: Tensor) -> Tensor:
        """Minus the log posterior of fields [chains, cells], up to a constant."""
        misfit = (self.respond(fields) @ self.rows.T - self.observed) / self.noise
        grids = fields.view(-1, SMALL, SMALL)
        rough = grids.diff(dim=1).square().sum((1, 2)) + grids.diff(dim=2).square().sum((1, 2))
        return misfit.square().sum(1) / 2 + self.weight * rough / 2

    def curvature(self, field: Tensor) -> tuple[Tensor, Tensor]:
        """A'A / s^2 and weight R'R at a field: the second derivatives, where residuals are small."""
        slope = self.beta * (1 - self.respond(field).square()) if self.beta else torch.ones_like(field)
        rows = self.rows * slope / self.noise
        step, eye = torch.eye(SMALL, dtype=torch.double).diff(dim=0), torch.eye(SMALL, dtype=torch.double)
        line = step.T @ step
        return rows.T @ rows, self.weight * (torch.kron(line, eye) + torch.kron(eye, line))

    def mode(self) -> Tensor:
        field = torch.zeros(SMALL**2, dtype=torch.double)
        for _ in range(50):  # of Gauss and Newton; ten are enough
            leaf = field[None].clone().requires_grad_()
            [slope] = torch.autograd.grad(self.loss(leaf).sum(), leaf)
            data, prior = self.curvature(field)
            field = field - torch.linalg.solve(data + prior, slope[0])
        return field


def small(seed: int, beta: float, noise: float = 0.2, weight: float = 25.0) -> Small:
    """A truth drawn from a smooth field, and kernels that leave one side of it hardly measured."""
    generator = torch.Generator().manual_seed(seeds.derive(seed, "small"))
    truth = problem(Setting(50, 1.0, 1.0, 1.0, 1.0), seed).truth[:SMALL, :SMALL].double().flatten()
    places = torch.rand(SMALL_ROWS, 2, generator=generator) * torch.tensor([SMALL - 1.0, 0.6 * (SMALL - 1)])
    rows = kernels(places, 1.0).view(-1, SIDE, SIDE)[:, :SMALL, :SMALL].flatten(1).double()
    made = Small(rows, torch.zeros(SMALL_ROWS, dtype=torch.double), beta, noise, weight)
    drawn = noise * torch.randn(SMALL_ROWS, generator=generator).double()
    return Small(rows, rows @ made.respond(truth) + drawn, beta, noise, weight)


def exact_sigma(given: Small) -> Tensor:
    """Of the posterior of a linear problem."""
    data, prior = given.curvature(given.mode())
    return torch.sqrt(torch.linalg.inv(data + prior).diagonal())


def sandwich_sigma(given: Small) -> Tensor:
    """What twins of resampled measurements have, up to the number of rounds: H^-1 (A' diag(e^2 / s^2) A / s^2 +
    weight R'R) H^-1, with the residuals e."""
    mode = given.mode()
    data, prior = given.curvature(mode)
    slope = given.beta * (1 - given.respond(mode).square()) if given.beta else torch.ones_like(mode)
    off = (given.rows @ given.respond(mode) - given.observed) / given.noise
    scores = given.rows * slope / given.noise * off[:, None]
    inverse = torch.linalg.inv(data + prior)
    return torch.sqrt((inverse @ (scores.T @ scores + prior) @ inverse).diagonal())


def by_mala(given: Small, steps: int, chains: int = 64, seed: int = 0) -> tuple[Tensor, float]:
    """Sigma of the posterior by the Metropolis-adjusted Langevin algorithm, and the share of accepted steps.

    Proposals are preconditioned by the inverse of the curvature at the mode, in whose units all directions are alike.
    """
    generator = torch.Generator().manual_seed(seeds.derive(seed, "mala"))
    mode = given.mode()
    data, prior = given.curvature(mode)
    root = torch.linalg.cholesky(torch.linalg.inv(data + prior))  # proposals are root @ N(0, 1)
    h = 1.65**2 / SMALL ** (2 / 3)  # the best step for many dimensions d is 1.65^2 / d^(1/3); d is SMALL^2

    def evaluate(z: Tensor) -> tuple[Tensor, Tensor]:
        leaf = z.clone().requires_grad_()
        loss = given.loss(mode + leaf @ root.T)
        [slope] = torch.autograd.grad(loss.sum(), leaf)
        return loss.detach(), slope

    z = torch.randn(chains, SMALL**2, generator=generator, dtype=torch.double)
    loss, slope = evaluate(z)
    taken, number, total, squares = 0.0, 0, torch.zeros(()), torch.zeros(())
    for step in range(steps):
        noise = torch.randn(z.shape, generator=generator, dtype=z.dtype)
        there = z - h / 2 * slope + math.sqrt(h) * noise
        new_loss, new_slope = evaluate(there)
        back = (z - there + h / 2 * new_slope).square().sum(1) / (2 * h)
        ratio = loss - new_loss - back + noise.square().sum(1) / 2
        accepted = torch.rand(chains, generator=generator, dtype=z.dtype).log() < ratio
        z = torch.where(accepted[:, None], there, z)
        loss, slope = torch.where(accepted, new_loss, loss), torch.where(accepted[:, None], new_slope, slope)
        if step >= steps // 4:
            away = z @ root.T
            taken, number = taken + accepted.double().mean().item(), number + 1
            total, squares = total + away.mean(0), squares + away.square().mean(0)
    return (squares / number - (total / number).square()).sqrt(), taken / number


def by_invert(given: Small, rounds: int, kind: str, seed: int) -> Tensor:
    """Sigma of `invert`, told the noise and the weight."""
    found = invert(
        Dense(given.rows, lambda field: given.respond(field)),
        given.observed,
        torch.zeros(SMALL, SMALL, dtype=torch.double),
        prior=Smooth(order=1, weight=given.weight),
        rounds=rounds,
        noise_std=given.noise,
        bootstrap=Bootstrap(len(given.observed), 2, seed, kind="parametric" if kind == PERTURBED else "multinomial"),
        seed=seed,
    )
    return found.sigma.flatten()


def _exact(config: Config, tick: Tick) -> dict[str, pd.DataFrame]:
    found = []
    with one_thread():
        for case, beta in (("linear", 0.0), ("tanh", 2.0)):
            given = small(config.seed, beta)
            accepted = math.nan
            if beta:
                truth, accepted = by_mala(given, config.mala, seed=config.seed)
            else:
                truth = exact_sigma(given)
            for kind, expected in ((PERTURBED, truth), (RESAMPLED, sandwich_sigma(given))):
                sigma = by_invert(given, config.exact_rounds, kind, config.seed)
                columns = {"sigma": sigma.tolist(), "truth": truth.tolist(), "expected": expected.tolist()}
                labels = {"case": case, "kind": kind, "accepted": accepted}
                found.append(pd.DataFrame({"cell": range(SMALL**2), **columns}).assign(**labels))
            tick()
    return {"exact": pd.concat(found, ignore_index=True)}


def off(cells: pd.DataFrame, column: str = "truth") -> float:
    """The root mean square over the cells of sigma / truth - 1."""
    return float(np.sqrt(((cells["sigma"] / cells[column] - 1) ** 2).mean()))


def by_task(tables: Tables, column: str) -> pd.DataFrame:
    """The mean over the seeds, a row for each task and a column for each method."""
    return tables["runs"].pivot_table(index=list(AXES), columns="method", values=column)


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    runs, errors, hold = tables["runs"], by_task(tables, "error"), by_task(tables, "covered_0.9")
    shown = []
    for method in ROWS:
        own = runs[runs["method"] == method]
        row = {"method": method, "median error (MSE)": f"{errors[method].median():.4f}"}
        row |= {"median error / Tikhonov's, oracle": f"{(errors[method] / errors[ORACLE]).median():.2f}"}
        known = method in hold
        right = hold[method].between(LOW, HIGH).sum() if known else ""
        row |= {f"tasks with {LOW:.0%} to {HIGH:.0%} in 90 % intervals": right}
        row |= {"50, 90, 95 % intervals hold": _levels(own) if known else ""}
        row |= {"correlation of sigma, |error|": f"{own['correlation'].mean():.2f}" if known else ""}
        seconds = own["seconds"].dropna()
        shown.append(row | {"core seconds": f"{seconds.median():.1f}" if len(seconds) else ""})
    exact = [
        {
            "operator": case,
            "twins see": kind,
            "sigma / that of the posterior": f"{(own['sigma'] / own['truth']).mean():.3f}",
            "rms difference": f"{off(own):.1%}",
            "rms difference from what theory expects": f"{off(own, 'expected'):.1%}",
        }
        for (case, kind), own in tables["exact"].groupby(["case", "kind"], sort=False)
    ]
    tasks = errors.index.to_frame(index=False)
    for method in ROWS:
        tasks[f"error, {method}"] = errors[method].map("{:.4f}".format).to_list()
    tasks["90 % intervals hold"] = hold[PRIOR].map("{:.0%}".format).to_list()
    tasks["of Tikhonov, Laplace"] = hold[LAPLACE].map("{:.0%}".format).to_list()
    tasks["length, cells"] = by_task(tables, "length")[PRIOR].map("{:.3g}".format).to_list()
    return {
        f"All tasks, {config.seeds} seeds each": pd.DataFrame(shown),
        f"Sigma against the exact posterior, {config.exact_rounds} rounds": pd.DataFrame(exact),
        "Each task, mean over the seeds": tasks,
    }


def _levels(own: pd.DataFrame) -> str:
    return ", ".join(f"{own[f'covered_{level}'].mean():.0%}" for level in LEVELS)


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    errors, hold = by_task(tables, "error"), by_task(tables, "covered_0.9")
    tasks, few = len(errors), len(errors) < 10
    right = hold[PRIOR].between(LOW, HIGH)
    low, high = (hold[PRIOR] < LOW).sum(), (hold[PRIOR] > HIGH).sum()
    lower = errors[PRIOR] < errors[[TWINS, HELD]].min(axis=1)
    ratio = errors[PRIOR] / errors[ORACLE]
    exact = dict(iter(tables["exact"].groupby(["case", "kind"])))
    linear, rows = off(exact["linear", PERTURBED]), off(exact["linear", RESAMPLED])
    bent, bent_rows = off(exact["tanh", PERTURBED]), off(exact["tanh", RESAMPLED])
    sampling = 1 / math.sqrt(2 * (2 * config.exact_rounds - 1))
    gcv = hold[LAPLACE].between(LOW, HIGH).sum()
    return [
        Verdict(
            "With a sampled prior, 90 % intervals hold the truth in 85 to 95 % of the cells in five of six tasks.",
            "maps that hold the truth",
            _share(right.mean(), 5 / 6, few),
            f"In {right.sum()} of {tasks} tasks; fewer in {low}, more in {high}. Over all tasks "
            f"{hold[PRIOR].mean():.0%} of the cells. {_where(hold[PRIOR] < LOW, 'fewer')}Tikhonov with GCV and a "
            f"Laplace posterior: {gcv} of {tasks} tasks, {hold[LAPLACE].mean():.0%} of the cells. Without a prior: "
            f"{hold[TWINS].mean():.0%}.",
            ours=True,
        ),
        Verdict(
            "With a prior the error is lower than without, in eleven of twelve tasks.",
            "against `invert` without a prior and Adam with a hold-out, whichever is better",
            _share(lower.mean(), 11 / 12, few),
            f"Lower in {lower.sum()} of {tasks} tasks; the median task has "
            f"{(errors[PRIOR] / errors[[TWINS, HELD]].min(axis=1)).median():.2f} of their error.",
            ours=True,
        ),
        Verdict(
            "The error is at most 1.1 times that of Tikhonov with the oracle's weight.",
            "smooth fields",
            _share((ratio <= TIKHONOV).mean(), 1.0, few),
            f"In {(ratio <= TIKHONOV).sum()} of {tasks} tasks; the median ratio is {ratio.median():.2f}, the largest "
            f"{ratio.max():.2f}. {_where(ratio > TIKHONOV, 'more')}",
            ours=True,
        ),
        Verdict(
            "Sigma is that of the exact posterior: within 5 % for a linear operator, within 15 % for a nonlinear one.",
            "perturbed measurements, root mean square over the cells",
            status(linear <= 0.05 and bent <= 0.15, linear <= 0.05 or bent <= 0.15),
            f"{linear:.1%} and {bent:.1%} with perturbed measurements; {rows:.1%} and {bent_rows:.1%} with resampled "
            f"ones. {2 * config.exact_rounds} draws alone make {sampling:.1%}. What is left of resampled ones is what "
            f"the sandwich expects of these residuals: from it they differ by "
            f"{off(exact['linear', RESAMPLED], 'expected'):.1%} and {off(exact['tanh', RESAMPLED], 'expected'):.1%}.",
            ours=True,
        ),
    ]


def _share(found: float, wanted: float, few: bool) -> Status:
    return status(found >= wanted, found >= 1 / 2, few)


def _where(chosen: pd.Series, what: str) -> str:
    """Which value of each setting is the most common among the chosen tasks, if it is clearly so."""
    index = chosen[chosen].index.to_frame()
    if len(index) < 3:
        return ""
    told = []
    for name in AXES:
        top = index[name].value_counts(normalize=True)
        if chosen.index.get_level_values(name).nunique() > 1 and top.iloc[0] >= 0.75:
            told.append(f"{name} {top.index[0]:g} in {top.iloc[0]:.0%}")
    return f"Of the tasks with {what}: {', '.join(told)}. " if told else ""


def figure(config: Config, tables: Tables) -> Figure:
    height = 2.6 + 0.42 * len(config.noise) * len(config.beta) * len(config.rows)
    drawn = Figure(figsize=(16, max(height, 5.6)), layout="constrained")
    left, middle, right = drawn.subplots(1, 3, width_ratios=[1.15, 1, 1])
    _draw_map(left, config, by_task(tables, "covered_0.9")[PRIOR])
    _draw_errors(middle, by_task(tables, "error"))
    _draw_exact(right, tables["exact"])
    return drawn


def _draw_map(axes: Axes, config: Config, hold: pd.Series) -> None:
    down, across = list(product(config.noise, config.beta, config.rows)), list(product(config.width, config.spread))
    shade = np.zeros((len(down), len(across)))
    for (i, (noise, beta, rows)), (j, (width, spread)) in product(enumerate(down), enumerate(across)):
        share = hold.loc[(rows, noise, beta, width, spread)]
        shade[i, j] = 0 if share < LOW else 1 if share <= HIGH else 2
        axes.text(j, i, f"{100 * share:.0f}", ha="center", va="center", color="#222222")
    axes.imshow(shade, cmap=ListedColormap(SHADES), vmin=-0.5, vmax=2.5, aspect="auto")
    axes.set_xticks(range(len(across)), [f"width {w:g}\nspread {s:g}" for w, s in across])
    axes.set_yticks(range(len(down)), [f"noise {n:g}, beta {b:g}, M = {m}" for n, b, m in down])
    axes.tick_params(length=0)
    axes.set_title("90 % intervals that hold the truth,\nper cent of the cells")


def _draw_errors(axes: Axes, errors: pd.DataFrame) -> None:
    for method, colour in zip((PRIOR, TWINS, LAPLACE), plots.SERIES, strict=False):
        axes.plot(errors[ORACLE], errors[method], "o", color=colour, ms=6, alpha=0.75, mew=0, label=method)
    ends = [errors[ORACLE].min() / 1.5, errors[ORACLE].max() * 1.5]
    axes.plot(ends, ends, color=plots.ink(), lw=1)
    axes.set(xscale="log", yscale="log", xlabel="that of Tikhonov, oracle's weight", ylabel="mean square error of v")
    axes.set_title("Error of the field, each task")
    axes.grid(alpha=0.6)
    axes.legend(loc="lower right", fontsize="medium")


def _draw_exact(axes: Axes, cells: pd.DataFrame) -> None:
    marks = {PERTURBED: "o", RESAMPLED: "^"}
    colours = dict(zip(("linear", "tanh"), plots.SERIES, strict=False))
    for (case, kind), own in cells.groupby(["case", "kind"], sort=False):
        style: Any = {"color": colours[case], "ms": 5, "alpha": 0.7, "mew": 0}
        axes.plot(own["truth"], own["sigma"], marks[kind], label=f"{case}, {kind}", **style)
    ends = [cells["truth"].min() / 1.1, cells["truth"].max() * 1.1]
    axes.plot(ends, ends, color=plots.ink(), lw=1)
    axes.set(xscale="log", yscale="log", xlabel="sigma of the exact posterior", ylabel="sigma of invert")
    for set_ticks, limits in ((axes.set_xticks, axes.get_xlim()), (axes.set_yticks, axes.get_ylim())):
        set_ticks(*plots.log_ticks(*limits))
    axes.minorticks_off()
    axes.set_title("Sigma against the exact posterior, each cell")
    axes.grid(alpha=0.6)
    axes.legend(loc="lower right", fontsize="medium")
