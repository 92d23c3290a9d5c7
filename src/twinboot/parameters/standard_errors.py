"""Standard errors for the parameters of a model, by twins whose samples are redrawn.

fit the model to all data
for each round:
    draw two bootstrap samples anew
    both twins go from the fit to the minima of their own samples: a few steps
    keep where they end
standard error: the standard deviation of all twins

Two twins alone know the variance of a parameter with a relative variance of 2. After R rounds it is 2 / R from the
pairs, and 2 / (2 R - 1) if all draws are taken about one mean, as here. A round is cheap because it starts at the fit,
and because many twins settle at once: their parameters are stacked, and the model is vmapped.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .._core import seeds
from .._core.checks import require_number, require_types, require_whole, shown
from ..data.bootstrap import Bootstrap
from ..training.losses import Loss
from .gradients import Batches, by_lbfgs
from .local import Locals
from .newton import DRAW, FIT, determined, settle, weakest
from .problem import Name, Problem
from .result import HEAVY, UNDETERMINED, StandardErrors, quantile_se

MANY = 300  # parameters above which second derivatives cost more than they save
ENOUGH = 30  # draws to tell heavy tails from chance
KEPT = 10_000_000  # numbers in draws that are kept without being asked for: 80 MB
MOST_ROUNDS = 1000  # until a precision is reached
FEW = 0.13  # a relative error of standard errors, from the number of data alone, that is worth a note
RANK = 1e-11  # below this share of the largest curvature there is none, up to rounding
PHASES = 10  # of a fit with mini-batches, at most: in each the learning rate falls to 0
SMALL = 0.1  # what the last phase may gain, in units of the spread of losses: a draw is about 1/2 above the minimum
FAR = 0.5  # standard errors by which the mean of the draws may differ from the fit, beyond what chance explains
DRIFT = 0.3  # standard errors by which twins that go on may still move, with mini-batches


def standard_errors(
    model: nn.Module,
    dataset: Dataset[Any],
    loss: Name | Loss = "regression",
    *,
    rounds: int | None = None,
    precision: float = 0.1,
    replicas: int = 32,
    bootstrap: Bootstrap | None = None,
    batch_size: int | None = None,
    epochs: int = 30,
    lr: float = 0.01,
    keep_draws: bool | None = None,
    seed: SupportsIndex = 0,
    device: str | int | torch.device | None = None,
    progress: bool = True,
) -> StandardErrors:
    """Estimates with standard errors for all trainable parameters of a model.

    The model is fitted to all data, from the parameters that it has; if it is fitted already, that takes one step. Then
    twins settle on bootstrap samples, and their spread is the standard error. It assumes neither equal variances nor
    that the likelihood is right. All is computed in double precision, in evaluation mode, and on a copy of the model.

    Args:
        model: a module whose parameters are wanted. Parameters with `requires_grad=False` stay fixed.
        dataset: samples (inputs, target), as in `fit`.
        loss: `"regression"` (least squares), `"logistic"` (one logit), `"classification"` (a logit per class),
            `"poisson"` (the logarithm of the expected count), `"gaussian"` (mean and log-variance), or a function of
            (output, target) with one value per sample, [n].
        rounds: how often two twins draw new samples. By default as many as `precision` needs.
        precision: the relative error that the standard errors may have for lack of draws: 0.1 needs about 25 rounds,
            more if the draws have heavy tails.
        replicas: how many twins settle at once. A model that cannot be vmapped settles them one by one.
        bootstrap: how samples are drawn: `Bootstrap(n, clusters=...)`, `strata`, `block` or another kind, with a seed
            of its own.
        batch_size: for data that are too many for full batches: Adam reads batches of so many samples, with a learning
            rate that falls from `lr` to 0 in `epochs` passes, for the fit and again in each round.
        epochs, lr: of Adam. Not used without `batch_size`.
        keep_draws: whether to keep the parameters of each twin. By default if they are at most 10 million numbers.
        seed: the same seed gives the same draws.
        device: where to compute; by default where the model is.
        progress: print a line from time to time.

    >>> x = torch.linspace(0, 1, 100).unsqueeze(1)
    >>> y = 1 + 2 * x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    >>> data = torch.utils.data.TensorDataset(x, y)
    >>> found = standard_errors(nn.Linear(1, 1), data, "regression", progress=False)
    >>> 0.02 < found.se["weight"].item() < 0.05  # 0.1 / sqrt(100 / 12) = 0.035
    True
    >>> print(found)  # doctest: +SKIP
                    estimate   std err       t   [0.025   0.975]
    ------------------------------------------------------------
    weight[0, 0]      2.0031    0.0357   56.11   1.9310   2.0752
    bias[0]           0.9997    0.0194   51.53   0.9605   1.0389
    ------------------------------------------------------------
    100 samples, 64 draws: standard errors are known to 10 %
    """
    require_types(standard_errors, locals())
    if rounds is not None:
        require_whole("rounds", rounds, 2)
    require_number("precision", precision, positive=True)
    require_whole("replicas", replicas, 2)
    require_whole("epochs", epochs, 1)
    require_number("lr", lr, positive=True)
    if batch_size is not None:
        require_whole("batch_size", batch_size, 1)
    seed = seeds.require_seed(seed)
    problem = Problem(model, dataset, loss, device, whole=batch_size is None)
    bootstrap = _require_bootstrap(bootstrap, problem.n, seed)
    way: _Exact | _Gradients | _MiniBatches
    if batch_size is not None:
        way = _MiniBatches(Batches(problem, batch_size, epochs, float(lr), seed))
    elif problem.size > MANY:
        way = _Gradients(problem)
    else:
        way = _Exact(problem)
    center = way.fit()
    collected = _Collected(center, (bootstrap.replicas * (rounds or MOST_ROUNDS)) * problem.size, keep_draws)
    began, number, together = time.perf_counter(), 0, max(1, replicas // bootstrap.replicas)
    limit = MOST_ROUNDS if rounds is None else rounds
    while number < limit:
        now = range(number, min(number + together, limit))
        counts = torch.cat([bootstrap.redrawn(time + 1).counts for time in now]).to(center)
        collected.add(*way.draw(center, counts, now.start))
        number = now.stop
        reached = collected.precision()
        enough = rounds is None and reached <= precision and collected.number * 2 * precision**2 >= 1
        if progress:
            _show(number, limit if rounds else None, reached, precision, time.perf_counter() - began, enough)
        if enough:
            break
    return _result(problem, bootstrap, way, center, collected, precision if rounds is None else None)


class _Exact:
    """Fits and draws by second derivatives."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.locals = Locals(problem)
        self.rank = max(RANK, 10 * problem.eps) if problem.eps > 1e-8 else RANK

    def fit(self) -> Tensor:
        problem, squares = self.problem, self.problem.squares
        ones = torch.ones(1, problem.n).to(problem.start)
        found = settle(self.locals, problem.start[None], ones, tolerance=FIT, damping=1e-3)
        flat = determined(found.local, squares)[0].item() < self.rank
        if flat:
            share = weakest(found.local, squares).abs()
            names = [problem.labels[k] for k in share.argsort(descending=True).tolist() if share[k] > 0.1 * share.max()]
            raise ValueError(
                f"the data do not determine {_listed(names)}: the model has collinear columns, a parameter without "
                "effect, or one that has run away; fix it with requires_grad_(False), or start from other values."
            )
        if not bool(found.done[0]):
            away = (found.members[0] - problem.start).abs() / problem.start.abs().clamp(min=1e-12)
            raise FloatingPointError(
                f"the fit has not come to a minimum after {found.steps} steps ({problem.labels[int(away.argmax())]} "
                "changed most): it may run away, as with classes that a plane separates; start from values that are "
                "closer, or simplify the model."
            )
        self.unit = found.local.unit
        return found.members[0]

    def draw(self, center: Tensor, counts: Tensor, first: int) -> tuple[Tensor, Tensor]:
        start = center.expand(len(counts), -1)
        unit = None if self.problem.squares else self.unit
        found = settle(self.locals, start, counts, tolerance=DRAW, damping=1e-10, unit=unit)
        good = found.done & (determined(found.local, self.problem.squares) >= self.rank)
        return found.members, good

    def influence(self, center: Tensor) -> Tensor | None:
        return self.locals.influence(center)


class _Gradients:
    """Fits and draws by L-BFGS."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def fit(self) -> Tensor:
        start = self.problem.start
        found, done = by_lbfgs(self.problem, start[None], torch.ones(1, self.problem.n).to(start))
        if not bool(done[0]):
            raise FloatingPointError("the fit has not come to a minimum: start from values that are closer.")
        return found[0]

    def draw(self, center: Tensor, counts: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return by_lbfgs(self.problem, center.expand(len(counts), -1), counts)

    def influence(self, center: Tensor) -> None:
        return None


class _MiniBatches:
    """Fits and draws by Adam."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.drift = batches, 0.0

    def fit(self) -> Tensor:
        problem, before = self.batches.problem, math.inf
        found, ones = problem.start, torch.ones(1, problem.n).to(problem.start)
        for phase in range(PHASES):
            found = self.batches(found[None], ones, f"fit {phase}", lambda: None)[0]
            losses = self.batches.losses(found)
            after = (losses.sum() / losses.std().clamp(min=1e-300)).item()
            if not before - after > SMALL:
                break
            before = after
        return found

    def draw(self, center: Tensor, counts: Tensor, first: int) -> tuple[Tensor, Tensor]:
        found = self.batches(center.expand(len(counts), -1), counts, f"round {first}", lambda: None)
        if first == 0:  # would they still go on?
            further = self.batches(found, counts, "further", lambda: None)
            moved = (further - found).square().mean(0).sqrt()
            self.drift = (moved / further.std(0).clamp(min=1e-300)).max().item()
            found = further
        return found, torch.ones(len(found), dtype=torch.bool)

    def influence(self, center: Tensor) -> None:
        return None


class _Collected:
    """The draws, or if they are too many the sums of powers of what they differ by from the fit."""

    def __init__(self, center: Tensor, numbers: int, keep: bool | None) -> None:
        self.keep = numbers <= KEPT if keep is None else keep
        self.center, self.number = center, 0
        self.parts: list[Tensor] = []
        self.settled: list[Tensor] = []
        self.powers = torch.zeros(4, len(center), dtype=torch.float64, device=center.device)

    def add(self, members: Tensor, settled: Tensor) -> None:
        self.number += len(members)
        self.settled.append(settled.cpu())
        away = members - self.center
        self.powers += torch.stack([away.pow(k).sum(0) for k in range(1, 5)])
        if self.keep:
            self.parts.append(members)

    def variance(self) -> Tensor:
        """Of all draws about their mean."""
        mean, second = self.powers[0] / self.number, self.powers[1] / self.number
        found: Tensor = (second - mean.square()).clamp(min=0) * self.number / (self.number - 1)
        return found

    def relative(self) -> Tensor:
        """The relative error of each standard error. For m normal draws it is 1 / sqrt(2 (m - 1)), and more if their
        fourth moment says so."""
        mean, second, third, fourth = self.powers / self.number
        variance = (second - mean.square()).clamp(min=1e-300)
        moment = fourth - 4 * mean * third + 6 * mean.square() * second - 3 * mean.pow(4)
        excess = (moment / variance.square() - 1).clamp(min=2.0)
        found: Tensor = (excess / (4 * (self.number - 1))).sqrt()
        return found

    def precision(self) -> float:
        """The worst, but not of entries whose draws run away: those do not get better."""
        away = self.runaway()
        known = self.relative()[~away]
        return known.max().item() if len(known) else 0.0

    def runaway(self) -> Tensor:
        lost = 1 - torch.cat(self.settled).double().mean().item()
        if lost > UNDETERMINED:
            return torch.ones_like(self.center, dtype=torch.bool)
        if not self.keep or self.number < ENOUGH:
            return torch.zeros_like(self.center, dtype=torch.bool)
        # The ratio of the two has a standard deviation of about sqrt(0.8 / m) for m normal draws: five of these.
        most = max(HEAVY, 1 + 5 * math.sqrt(0.8 / self.number))
        found: Tensor = self.variance().sqrt() > most * quantile_se(torch.cat(self.parts))
        return found


def _result(
    problem: Problem,
    bootstrap: Bootstrap,
    way: _Exact | _Gradients | _MiniBatches,
    center: Tensor,
    collected: _Collected,
    precision: float | None,
) -> StandardErrors:
    codes = bootstrap.units.to(center.device)
    units, influence = int(codes.max()) + 1, way.influence(center)
    if influence is not None:
        influence = influence.new_zeros(units, problem.size).index_add_(0, codes, influence)
    away = collected.runaway()
    labels = problem.labels
    runaway = [label for label, is_away in zip(labels, away.tolist(), strict=True) if is_away]
    settled = torch.cat(collected.settled)
    lost = int((~settled).sum())
    notes, warned = [], []
    of = "samples" if units == problem.n else "clusters or blocks"
    reached = collected.precision()
    known = f": standard errors are known to {100 * reached:.0f} %" if len(runaway) < len(labels) else ""
    together = "" if units == problem.n else f" in {units} {of}"
    notes.append(f"{problem.n} samples{together}, {collected.number} draws{known}")
    if lost:
        share = f"{lost} of {collected.number} bootstrap samples do not determine the parameters"
        warned.append(share + ("" if runaway else "; their draws are counted where they ended"))
    if runaway:
        warned.append(
            f"the draws of {_listed(runaway)} run away, so there is no standard error: use quantile_se or a percentile "
            'interval, more data, or Bootstrap(n, kind="bayesian")'
        )
    elif precision is not None and reached > precision:
        warned.append(f"after {MOST_ROUNDS} rounds the standard errors are known to {reached:.2g} only")
    drift = getattr(way, "drift", 0.0)
    if drift > DRIFT:
        warned.append(
            f"the twins had not settled: when they went on, they moved by {drift:.2g} of their spread; give more "
            "epochs or another lr"
        )
    away_by = (collected.powers[0] / collected.number).abs() / collected.variance().sqrt().clamp(min=1e-300)
    far = away_by[~away].max().item() if len(runaway) < len(labels) else 0.0
    if far > FAR + 4 / math.sqrt(collected.number):
        warned.append(
            f"the draws lie {far:.2g} standard errors away from the estimate on average: the fit has not settled, or "
            "the model is so curved that a percentile or BCa interval serves better"
        )
    for sentence in warned:
        warnings.warn(sentence + ".", stacklevel=3)
    df = max(units - problem.size if units == problem.n else units - 1, 1)
    rough = 1 / math.sqrt(2 * df)
    few = f"with so few {of}, any standard error is uncertain by about {100 * rough:.0f} %"
    notes += warned + ([few] if rough > FEW else [])
    module = problem.module
    for name, value in problem.tensors(center).items():
        module.get_parameter(name).data.copy_(value)
    return StandardErrors(
        estimate={name: t.clone() for name, t in problem.tensors(center).items()},
        module=module,
        labels=labels,
        draws=torch.cat(collected.parts) if collected.keep else None,
        settled=settled,
        df=float(df),
        notes=notes,
        runaway=runaway,
        _center=center,
        _variance=collected.variance(),
        _relative=collected.relative(),
        _influence=influence,
    )


def _require_bootstrap(bootstrap: Bootstrap | None, n: int, seed: int) -> Bootstrap:
    if bootstrap is None:
        return Bootstrap(n, seed=seed)
    if bootstrap.n != n:
        raise ValueError(f"the Bootstrap draws from {bootstrap.n} samples, but the dataset has {n}.")
    if bootstrap.cover:
        raise ValueError("standard errors need plain bootstrap samples: leave out cover=True.")
    if bootstrap.kind in ("split", "parametric"):
        raise ValueError(
            f"standard errors need bootstrap samples of all data, not kind={shown(bootstrap.kind)}: use "
            '"multinomial", "poisson" or "bayesian".'
        )
    return bootstrap


def _listed(names: list[str]) -> str:
    few = names[:4]
    more = f" and {len(names) - 4} others" if len(names) > 4 else ""
    return (", ".join(few) if more or len(few) < 2 else f"{', '.join(few[:-1])} and {few[-1]}") + more


def _show(number: int, limit: int | None, reached: float, precision: float, seconds: float, last: bool) -> None:
    """Print one line about the rounds so far to standard error."""
    about = max(number * (reached / precision) ** 2, number + 1)
    goal = limit or (number if last else about)
    left = seconds / number * (goal - number)
    of = f"of {limit}" if limit else f"of about {goal:.0f}"
    print(
        f"round {number} {of}: standard errors known to {100 * reached:.0f} %, {left:.0f} s left",
        file=sys.stderr,
        flush=True,
    )
