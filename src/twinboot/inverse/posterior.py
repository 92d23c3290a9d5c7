"""Draws from the posterior of a field, each the minimum of a randomized loss (randomize-then-optimize).

    loss of twin b = sum_i c_bi |y_i - F_i(v)|^2 / (2 s^2) + weight / 2 * |r(v) - xi_b / sqrt(weight)|^2

c are the counts of a bootstrap sample, s is the noise of a measurement, r the prior (`priors.py`) and xi ~ N(0, I) is
drawn once for each twin. Where nothing is measured, the twins then differ as draws from the prior do. With
`Bootstrap(kind="parametric")`, c is 1 and y has noise added, y_i + s e_bi. If the operator and the prior are linear and
the noise is Gaussian, the minima are exact draws from the posterior (Bardsley et al. 2014), and otherwise nearly so.
With resampled rows, their covariance is the sandwich H^-1 (A' diag(e^2 / s^2) A / s^2 + weight R'R) H^-1, with A and R
the derivatives of F and r, e the residuals and H = A'A / s^2 + weight R'R.

The order of things:

    1. A first weight, by cross-validation. The measurements are divided into five parts. For each part, the field with
       the lowest loss without noise (c = 1, xi = 0) is found from the others. This is done for one weight after
       another, from the largest down, and each search starts at the last one's result. The weight with which the fields
       predict the parts best that they have not seen is chosen, and so is the length of a Gaussian process.
    2. The field: the same with all measurements. Noise and, for a Gaussian process, the weight are refined together, so
       that they are the most probable ones (the evidence, MacKay 1992): with p the effective number of parameters, how
       many numbers the measurements determine,

           s^2 = |y - F(v)|^2 / (n - p)        weight = p / |r(v)|^2

       Why: cross-validation asks for the best field. Over a decade of weights it is nearly as good, but sigma is not.
       The weight of the evidence is that of error bars of the right size. If it predicts unseen measurements clearly
       worse, or if the formula does not hold (several priors, measurements that depend on each other), the weight of
       cross-validation stays.
    3. Draws: in each round a draw for each twin, with another sample and another xi.

Why not by the out-of-bag measurements of two twins: those are 13.5 % of all, and the weight that predicts them best
varies a lot from sample to sample. In one task it was 1.35, where cross-validation found 57 and a sixth of the error.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from .._core import seeds
from .._core.checks import is_number
from ..data.bootstrap import Bootstrap
from ..training import optimizers
from .measurements import Stacked
from .operators import Forward, together
from .priors import Prior, Spectrum
from .solver import evaluate, least_squares

PROBES = 4  # fields of random signs, for the mean of the squared derivatives
LARGEST = 100.0  # the first weight of a prior whose eigenvalues are not known, in units of that of the measurements
MOST = 24  # weights on the way down
WORSE, FLAT = 2, 4  # clearly worse weights in a row that end it, and weights that gain less than GAIN
GAIN, FIRST_GAIN = 1e-3, 1e-2
FOLDS = 5  # parts for cross-validation: each field is from 80 % of the measurements
# Numbers in a stack of fields and their measurements. More draws at once are quicker, until they leave the cache.
AT_ONCE = 2**18
WARM = 0.05  # of the steps of the user's optimizer, for a search that starts near its end
SETTLE = 6  # searches at most for the noise, or for noise and weight, that go with the field
SETTLED = 0.03  # relative change from one to the next that ends it: far below the error of p
TOO_MUCH = 1.25  # times the loss of unseen measurements is the price that error bars of the right size may have
AGAIN = 100.0  # times the last candidate's weight is where the search for the next one's begins
SMALLEST_NOISE = 1e-6  # in units of the measurements; below are rounding errors of single precision

Solve = Callable[["Loss", Tensor, bool], Tensor]  # of a loss, from fields [members, ...], near its minimum or not


class Term:
    """A prior with what the search needs: its function for stacks, its eigenvalues, and their scale."""

    def __init__(self, prior: Prior, initial: Tensor, seed: int) -> None:
        self.prior = prior
        function = prior.residuals(initial)
        self.run = together(function, initial, 2)
        spectrum = prior.spectrum(tuple(initial.shape))
        with torch.no_grad():
            self.size = function(initial.clone()).numel()
        if spectrum is None:
            mean = mean_square_derivative(self.run, initial, seeds.derive(seed, "probes of the prior"))
            spectrum = Spectrum(torch.full(initial.shape, mean, dtype=torch.double), [])
        self.spectrum = spectrum


class Loss:
    """The residuals of stacks of fields: of the measurements and of the priors, all with variance 1."""

    def __init__(
        self,
        data: Stacked,
        terms: Sequence[Term],
        weights: Sequence[float],
        noise: float,
        curvature: float,
        counts: Tensor,
        targets: Tensor,
        shifts: Sequence[Tensor] | None = None,
    ) -> None:
        self.data, self.terms, self.weights, self.noise = data, terms, weights, noise
        self.counts, self.targets, self.shifts = counts, targets, shifts
        # The eigenvectors of the first prior that has some. Of others with their own, the mean eigenvalue counts.
        self.spectrum = next((t.spectrum for t in terms if t.spectrum.bases), terms[0].spectrum)
        self.values = torch.full_like(self.spectrum.values, curvature / noise**2)
        for term, weight in zip(terms, weights, strict=True):
            own = term.spectrum.values
            self.values += weight * (own if term.spectrum is self.spectrum else own.mean())

    def residuals(self, fields: Tensor, rows: Tensor | None = None) -> Tensor:
        """[members, residuals]; of some rows of the measurements, with the weight of all, if `rows` are given."""
        counts, targets = (self.counts, self.targets) if rows is None else (self.counts[:, rows], self.targets[:, rows])
        share = 1.0 if rows is None else math.sqrt(self.data.n / len(rows))
        misfit = (self.data.predict(fields, self.counts, rows).to(fields.dtype) - targets) / self.noise
        parts = [(share * counts.sqrt()[..., None] * misfit).flatten(1)]
        for k, (term, weight) in enumerate(zip(self.terms, self.weights, strict=True)):
            own = math.sqrt(weight) * term.run(fields).flatten(1)
            parts.append(own if self.shifts is None else own - self.shifts[k])
        return torch.cat(parts, 1)

    def precondition(self, fields: Tensor) -> Tensor:
        return self.spectrum.inverse(fields, self.values)


class Posterior:
    """The search for the weights, the field and its draws.

    Args:
        noise: the standard deviation of a measurement's noise. None estimates it.
        solve: what finds the minimum of a loss.
        say: is told about each weight that was tried.
    """

    def __init__(
        self,
        data: Stacked,
        initial: Tensor,
        bootstrap: Bootstrap,
        priors: Sequence[Prior],
        noise: float | None,
        solve: Solve,
        seed: int,
        say: Callable[[str], object],
    ) -> None:
        self.data, self.initial, self.bootstrap, self.seed, self.say = data, initial, bootstrap, seed, say
        self.given, self.solve = noise, solve
        self.history: dict[str, list[float]] = {"weight": [], "length": [], "unseen": []}
        self.used = torch.ones(1, data.n, dtype=initial.dtype, device=initial.device)
        self.used[:, bootstrap.calibration.to(initial.device)] = 0  # these are set aside
        self.folds = bootstrap.folds(FOLDS).to(self.used)
        run: Forward = lambda fields: data.predict(fields, self.used)  # noqa: E731
        self.curvature = mean_square_derivative(run, initial, seeds.derive(seed, "probes"))
        if not self.curvature > 0:
            raise ValueError("forward has no derivative at the initial field: start elsewhere.")
        kinds = list(self._kinds(priors))
        best = self._choose(kinds[0], None, len(kinds) > 1)
        for terms in kinds[1:]:
            found = self._choose(terms, best, True)
            if clearly_lower(best.losses, found.losses):
                break
            best = min(best, found, key=lambda one: one.unseen)
        self.terms = best.terms
        self.field, self.noise, ratios = self._settle(best, self._has_evidence(best.terms))
        if ratios != best.ratios and self._predicts_worse(ratios, best):
            self.field, self.noise, ratios = self._settle(best, False)
        self.weights = _weights(self.terms, ratios, self.noise)

    @property
    def priors(self) -> tuple[Prior, ...]:
        """The priors as they were chosen, with numbers as weights."""
        return tuple(term.prior.weighted(weight) for term, weight in zip(self.terms, self.weights, strict=True))

    def _kinds(self, priors: Sequence[Prior]) -> Iterator[list[Term]]:
        for kind in product(*(prior.candidates(self.initial) for prior in priors)):
            yield [Term(prior, self.initial, self.seed) for prior in kind]

    def _choose(self, terms: list[Term], last: _Candidate | None, several: bool) -> _Candidate:
        """The weights with the lowest loss of unseen measurements, each sought in turn."""
        noise = self.given or self.data.unit
        searched = [k for k, term in enumerate(terms) if term.prior.weight == "unseen"]
        # While one weight is sought, those that come later are small.
        ratios = [1e-6 * self._largest(term) for term in terms]
        found = _Candidate(terms, ratios, self.initial.expand(len(self.folds), *self.initial.shape), noise)
        for k in searched:
            first = self._largest(terms[k]) if last is None else min(self._largest(terms[k]), AGAIN * last.ratios[k])
            found = self._descend(found, k, first)
        for attempt in range(0 if searched or not several else 2):  # the first shows the noise
            found = self._look(found, 0, found.ratios[0], attempt > 0)
        return found

    def _largest(self, term: Term) -> float:
        """A weight, in units of 1 / noise^2, at which the field is as the prior says, wherever it is measured."""
        values = term.spectrum.values
        if not term.spectrum.bases:
            return LARGEST * self.curvature / max(values.mean().item(), 1e-300)
        positive = values[values > 1e-9 * values.max()]
        return 10 * self.curvature / positive.min().item()

    def _descend(self, start: _Candidate, k: int, ratio: float) -> _Candidate:
        """From a large weight of prior k down to one that is too small, then a finer look around the best."""
        last = best = self._look(start, k, ratio, k > 0)
        step = 10 ** start.terms[k].prior.decades
        first = lowest = last.unseen
        worse = flat = 0
        for _ in range(MOST - 1):
            ratio /= step
            last = self._look(last, k, ratio, True)
            best = min(best, last, key=lambda one: one.unseen)
            worse = worse + 1 if clearly_lower(best.losses, last.losses) else 0
            # Not before the first gain: the largest weights may all leave a constant field.
            flat = 0 if last.unseen < (1 - GAIN) * lowest or lowest > (1 - FIRST_GAIN) * first else flat + 1
            lowest = min(lowest, last.unseen)
            if worse == WORSE or flat == FLAT:
                break
        half = math.sqrt(step)
        finer = [self._look(best, k, best.ratios[k] * factor, True) for factor in (half, 1 / half)]
        return min(best, *finer, key=lambda one: one.unseen)

    def _look(self, start: _Candidate, k: int, ratio: float, near: bool) -> _Candidate:
        """How well each part of the measurements is predicted by the field from the others, with this weight of prior
        k."""
        ratios = [*start.ratios[:k], ratio, *start.ratios[k + 1 :]]
        weights = _weights(start.terms, ratios, start.noise)
        fields, losses = self._predict_folds(start.terms, weights, start.noise, start.fields, near)
        unseen, prior = losses.mean().item(), start.terms[k].prior
        length = getattr(prior, "length", math.nan)
        length = float(length) if is_number(length) else math.nan
        for name, value in (("weight", weights[k]), ("length", length), ("unseen", self.data.unit**2 * unseen)):
            self.history[name].append(value)
        self.say(f"{prior!r}: weight {weights[k]:.3g}, unseen {self.data.unit**2 * unseen:.4g}")
        noise = self.given or self.data.unit * max(math.sqrt(unseen), SMALLEST_NOISE)
        return _Candidate(start.terms, ratios, fields, noise, losses)

    def _predict_folds(
        self, terms: Sequence[Term], weights: Sequence[float], noise: float, start: Tensor, near: bool
    ) -> tuple[Tensor, Tensor]:
        """For each part of the measurements the field from the others, and the losses of all that were not seen."""
        fields = self.solve(self._loss(terms, weights, noise, self.used * (1 - self.folds)), start, near)
        return fields, self._unseen(fields, self.folds)

    def _unseen(self, fields: Tensor, folds: Tensor) -> Tensor:
        """For each measurement the mean square of its residuals, in units of `unit` squared, by the field that did not
        see it."""
        with torch.no_grad():
            misfit = (self.data.predict(fields, folds) - self.data.table) / self.data.unit
        losses = (misfit.detach().square().mean(2) * folds).sum(0)[self.used[0] > 0]
        if not math.isfinite(losses.sum().item()):
            raise FloatingPointError("forward gives values that are not finite for the field that was found.")
        return losses

    def _has_evidence(self, terms: Sequence[Term]) -> bool:
        """Whether the formula for the weight holds."""
        prior = terms[0].prior
        return len(terms) == 1 and prior.evidence and prior.weight == "unseen" and self.bootstrap.independent

    def _predicts_worse(self, ratios: Sequence[float], best: _Candidate) -> bool:
        """Whether unseen measurements are predicted clearly worse than with the weights of cross-validation."""
        weights = _weights(self.terms, ratios, self.noise)
        losses = self._predict_folds(self.terms, weights, self.noise, best.fields, True)[1]
        self.say(f"weight {weights[0]:.3g} by the evidence, unseen {self.data.unit**2 * losses.mean().item():.4g}")
        return losses.mean().item() > TOO_MUCH * best.unseen and clearly_lower(best.losses, losses)

    def _settle(self, best: _Candidate, refine: bool) -> tuple[Tensor, float, list[float]]:
        """The field from all measurements, the noise s, and with `refine` another weight, times s^2.

        The effective number of parameters is how much the predicted measurements change if noise z is added to the
        measured ones, p = E z'(F(v(y + s z)) - F(v(y))) / s.
        """
        terms, ratios, noise = best.terms, list(best.ratios), best.noise
        probes = PROBES if refine or not self.given else 0
        table, total = self.data.table, self.used.sum().item() * self.data.table.shape[1]
        generator = torch.Generator(table.device).manual_seed(seeds.derive(self.seed, "degrees of freedom"))
        added = table.new_empty(1 + probes, *table.shape).normal_(generator=generator)
        added[0] = 0
        start = best.fields.mean(0)
        fields, near, seen = start.expand(1 + probes, *start.shape), bool(len(best.losses)), self.used
        for _ in range(SETTLE):
            weights = _weights(terms, ratios, noise)
            loss = self._loss(terms, weights, noise, seen.expand(1 + probes, -1), table + noise * added)
            fields, near = self.solve(loss, fields, near), True
            if not probes:
                break
            with torch.no_grad():
                predicted = self.data.predict(fields, seen).detach()
                size = terms[0].run(fields[:1]).detach().double().square().sum().item()
            moved = ((predicted[1:] - predicted[:1]) * added[1:] * seen[..., None]).sum().item() / (noise * probes)
            squares = ((predicted[0] - table).double().square() * seen[0, :, None]).sum().item()
            before = (noise, ratios[0])
            if not self.given:  # at least a twentieth of the measurements counts: p is itself an estimate
                noise = math.sqrt(squares / max(total - moved, 0.05 * total))
                noise = max(noise, SMALLEST_NOISE * self.data.unit)
            if refine and moved > 1 and size > 0:
                ratios[0] = noise**2 * moved / size
            changes = [abs(math.log(new / old)) for new, old in zip((noise, ratios[0]), before, strict=True)]
            if max(changes) < SETTLED or not (refine or any(term.prior.weight != "unseen" for term in terms)):
                break
        return fields[0], noise, ratios

    def _loss(
        self,
        terms: Sequence[Term],
        weights: Sequence[float],
        noise: float,
        counts: Tensor,
        targets: Tensor | None = None,
        shifts: Sequence[Tensor] | None = None,
    ) -> Loss:
        targets = self.data.table[None] if targets is None else targets
        return Loss(self.data, terms, weights, noise, self.curvature, counts, targets, shifts)

    def draws(self, rounds: int) -> Iterator[Tensor]:
        """Fields [draws, ...], some rounds at a time. With `rounds=0`, those of the twins of the bootstrap itself."""
        size = self.bootstrap.replicas * (self.data.table.numel() + self.initial.numel())
        many = max(1, AT_ONCE // size) if self.data.mappable and not self.data.apart else 1
        times = list(range(1, rounds + 1)) or [0]
        for start in range(0, len(times), many):
            parts = [self._randomized(time) for time in times[start : start + many]]
            counts, targets = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
            shifts = [torch.cat(same) for same in zip(*(part[2] for part in parts), strict=True)]
            loss = self._loss(self.terms, self.weights, self.noise, counts, targets, shifts)
            yield self.solve(loss, self.field.expand(len(counts), *self.field.shape), True)

    def _randomized(self, time: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What differs from twin to twin in a round: counts, measurements, and the noise of each prior."""
        number, like = self.bootstrap.replicas, self.initial

        def normal(purpose: str, *shape: int) -> Tensor:
            generator = torch.Generator(like.device).manual_seed(seeds.derive(self.seed, purpose, time))
            return torch.empty(number, *shape, dtype=like.dtype, device=like.device).normal_(generator=generator)

        shifts = [normal(f"prior {k}", term.size) for k, term in enumerate(self.terms)]
        table = self.data.table[None]
        if self.bootstrap.kind == "parametric":
            added = table + self.noise * normal("measurements", *table.shape[1:])
            return self.used.expand(number, -1), added, shifts
        own = self.bootstrap.redrawn(time) if time else self.bootstrap
        return own.counts.to(self.used) * self.used, table.expand(number, -1, -1), shifts


class _Candidate(NamedTuple):
    """Priors with the weights that cross-validation found."""

    terms: list[Term]
    ratios: list[float]  # weights times noise^2
    fields: Tensor  # one for each part, from the others
    noise: float
    losses: Tensor = torch.empty(0)  # of each measurement, by the field that did not see it; none before a search

    @property
    def unseen(self) -> float:
        return self.losses.mean().item()


def _weights(terms: Sequence[Term], ratios: Sequence[float], noise: float) -> list[float]:
    """The weights of the priors: numbers that were given, or ratios to 1 / noise^2."""
    return [
        ratio / noise**2 if term.prior.weight == "unseen" else float(term.prior.weight)
        for term, ratio in zip(terms, ratios, strict=True)
    ]


def by_least_squares(steps: int, tick: Callable[[], object]) -> Solve:
    """Each member to its own minimum, by the residuals."""
    return lambda loss, start, near: least_squares(loss.residuals, start, loss.precondition, steps, tick)


def by_optimizer(
    make: optimizers.Make | None,
    steps: int,
    decay: float,
    batch_size: int | None,
    seed: int,
    tick: Callable[[], object],
) -> Solve:
    """All members by one optimizer, on all measurements or in batches. Near the minimum it takes a few of the steps."""
    epochs = 0

    def solve(loss: Loss, start: Tensor, near: bool) -> Tensor:
        nonlocal epochs
        number = max(1, math.ceil(WARM * steps)) if near else steps
        fields = torch.nn.Parameter(start.detach().clone())
        optimizer = optimizers.make_optimizer(make, [[fields]], lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay ** (steps / number))
        total = loss.data.table.numel()  # losses are of the order of 1, as without a prior
        order = torch.empty(0, dtype=torch.long)
        good = start.detach().clone()
        for _ in range(number):
            rows = None
            if batch_size is not None:
                if len(order) < batch_size:
                    epochs += 1
                    generator = torch.Generator().manual_seed(seeds.derive(seed, "batches", epochs))
                    order = torch.randperm(loss.data.n, generator=generator)
                rows, order = order[:batch_size].to(start.device), order[batch_size:]

            def closure(rows: Tensor | None = rows) -> float:
                residuals, gradient = evaluate(lambda f: loss.residuals(f, rows), fields)
                fields.grad = gradient / total
                return residuals.square().sum().item() / total

            value = optimizer.step(closure)
            if not math.isfinite(value) or not math.isfinite(fields.sum().item()):
                warnings.warn("the loss became NaN or infinite, so the last good fields are used.", RuntimeWarning, 4)
                return good
            good.copy_(fields.detach())
            schedule.step()
            tick()
        return good

    return solve


def clearly_lower(new: Tensor, old: Tensor) -> bool:
    """Whether the mean is lower by more than the standard error of the difference. There are few out-of-bag
    measurements, and once the twins fit noise, their loss changes little: without this rule, chance would often pick a
    late state."""
    gain = old - new
    error = gain.std() / math.sqrt(len(gain)) if len(gain) > 1 else 0.0
    return bool(gain.mean() > error)


def mean_square_derivative(run: Forward, initial: Tensor, seed: int) -> float:
    """The mean over cells of diag(J'J), by random signs z: E (J'z)^2 = diag(J'J)."""
    with torch.enable_grad():
        fields = torch.stack([initial.detach()] * PROBES).requires_grad_()
        found = run(fields)
        generator = torch.Generator(found.device).manual_seed(seed)
        signs = found.new_empty(found.shape).bernoulli_(generator=generator).mul_(2).sub_(1)  # vmap permutes memory
        [pulled] = torch.autograd.grad(found, fields, signs, allow_unused=True)
    return 0.0 if pulled is None else pulled.double().square().mean().item()
