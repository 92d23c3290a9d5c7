"""Draws from the posterior of a field, each the minimum of a randomized loss (randomize-then-optimize).

    loss of twin b = sum_i c_bi |y_i - F_i(v)|^2 / (2 s^2) + weight / 2 * |r(v) - xi_b / sqrt(weight)|^2

c are the counts of a bootstrap sample, s is the noise of a measurement, r the prior (`priors.py`) and xi ~ N(0, I) is
drawn once for each twin. Where nothing is measured, the twins then differ as draws from the prior do. With
`Bootstrap(kind="parametric")`, c is 1 and y has noise added, y_i + s e_bi. If the operator and the prior are linear and
the noise is Gaussian, the minima are exact draws from the posterior (Bardsley et al. 2014), and otherwise nearly so.
With resampled rows, their covariance is the sandwich H^-1 (A' diag(e^2 / s^2) A / s^2 + weight R'R) H^-1, with A and R
the derivatives of F and r, e the residuals and H = A'A / s^2 + weight R'R.

The order of things:

    1. The weight, by cross-validation. The measurements are divided into five parts. For each part, the field with the
       lowest loss without noise (c = 1, xi = 0) is found from the others. This is done for one weight after another,
       from the largest down, and each search starts at the last one's result. The weight with which the fields predict
       the parts best that they have not seen is chosen. For a linear problem these fields are means of all draws.
    2. The field: the same with all measurements. The noise s follows from its residuals.
    3. Draws: in each round a draw for each twin, with another sample and another xi.

Why not by the out-of-bag measurements of two twins: those are 13.5 % of all, and the weight that predicts them best
varies from sample to sample by a factor of 100.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from .._core import seeds
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
SETTLE = 3  # searches to find the noise that goes with a given weight
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
        self.history: dict[str, list[float]] = {"weight": [], "order": [], "unseen": []}
        self.used = torch.ones(1, data.n, dtype=initial.dtype, device=initial.device)
        self.used[:, bootstrap.calibration.to(initial.device)] = 0  # these are set aside
        run: Forward = lambda fields: data.predict(fields, self.used)  # noqa: E731
        self.curvature = mean_square_derivative(run, initial, seeds.derive(seed, "probes"))
        if not self.curvature > 0:
            raise ValueError("forward has no derivative at the initial field: start elsewhere.")
        chosen = [self._choose(terms) for terms in self._kinds(priors)]
        self.terms, ratios, start, noise, _ = min(chosen, key=lambda one: one[-1])
        self.field, self.noise = self._settle(ratios, start, noise)
        self.weights = _weights(self.terms, ratios, self.noise)

    @property
    def priors(self) -> tuple[Prior, ...]:
        """The priors as they were chosen, with numbers as weights."""
        return tuple(term.prior.weighted(weight) for term, weight in zip(self.terms, self.weights, strict=True))

    def _kinds(self, priors: Sequence[Prior]) -> Iterator[list[Term]]:
        for kind in product(*(prior.candidates(self.initial) for prior in priors)):
            yield [Term(prior, self.initial, self.seed) for prior in kind]

    def _choose(self, terms: list[Term]) -> tuple[list[Term], list[float], Tensor, float, float]:
        """Weights times noise^2 with the lowest loss of unseen measurements, a field, the noise, and that loss."""
        noise = self.given or self.data.unit
        searched = [k for k, term in enumerate(terms) if term.prior.weight == "unseen"]
        # While one weight is sought, those that come later are small.
        ratios = [1e-6 * self._largest(term) for term in terms]
        field, loss = self.initial, math.inf
        for k in searched:
            field, noise, loss = self._descend(terms, ratios, k, field, noise)
        return terms, ratios, field, noise, loss

    def _largest(self, term: Term) -> float:
        """A weight, in units of 1 / noise^2, at which the field is as the prior says, wherever it is measured."""
        values = term.spectrum.values
        if not term.spectrum.bases:
            return LARGEST * self.curvature / max(values.mean().item(), 1e-300)
        positive = values[values > 1e-9 * values.max()]
        return 10 * self.curvature / positive.min().item()

    def _descend(
        self, terms: Sequence[Term], ratios: list[float], k: int, start: Tensor, noise: float
    ) -> tuple[Tensor, float, float]:
        """From the largest weight of prior k down to one that is too small, then a finer look around the best.
        `ratios` are weights times noise^2; that of prior k is set to the best."""
        folds = self.bootstrap.folds(FOLDS).to(self.used)
        best: tuple[float, Tensor, Tensor, float] | None = None

        def look(ratio: float, fields: Tensor, near: bool) -> tuple[Tensor, Tensor]:
            nonlocal best, noise
            ratios[k] = ratio
            weights = _weights(terms, ratios, noise)
            fields = self.solve(self._loss(terms, weights, noise, self.used * (1 - folds)), fields, near)
            losses = self._unseen(fields, folds)
            unseen = losses.mean().item()
            noise = self.given or self.data.unit * max(math.sqrt(unseen), SMALLEST_NOISE)
            order = getattr(terms[k].prior, "order", math.nan)
            for name, value in (("weight", weights[k]), ("order", order), ("unseen", self.data.unit**2 * unseen)):
                self.history[name].append(value)
            self.say(f"{terms[k].prior!r}: weight {weights[k]:.3g}, unseen {self.data.unit**2 * unseen:.4g}")
            if best is None or unseen < best[2].mean().item():
                best = (ratio, fields, losses, noise)
            return fields, losses

        ratio, step = self._largest(terms[k]), 10 ** terms[k].prior.decades
        fields, lowest, worse, flat = start.expand(len(folds), *start.shape), math.inf, 0, 0
        first: float | None = None
        for number in range(MOST):
            fields, losses = look(ratio, fields, number > 0 or start is not self.initial)
            assert best is not None
            worse = worse + 1 if clearly_lower(best[2], losses) else 0
            unseen = losses.mean().item()
            first = unseen if first is None else first
            # Not before the first gain: the largest weights may all leave a constant field.
            flat = 0 if unseen < (1 - GAIN) * lowest or lowest > (1 - FIRST_GAIN) * first else flat + 1
            lowest = min(lowest, unseen)
            if worse == WORSE or flat == FLAT:
                break
            ratio /= step
        assert best is not None
        ratio, fields = best[:2]
        for finer in (math.sqrt(step), 1 / math.sqrt(step)):
            look(ratio * finer, fields, True)
        ratios[k], fields, losses, noise = best
        return fields.mean(0), noise, losses.mean().item()

    def _unseen(self, fields: Tensor, folds: Tensor) -> Tensor:
        """For each measurement the mean square of its residuals, in units of `unit` squared, by the field that did not
        see it."""
        with torch.no_grad():
            misfit = (self.data.predict(fields, folds) - self.data.table) / self.data.unit
        losses = (misfit.detach().square().mean(2) * folds).sum(0)[self.used[0] > 0]
        if not math.isfinite(losses.sum().item()):
            raise FloatingPointError("forward gives values that are not finite for the field that was found.")
        return losses

    def _settle(self, ratios: list[float], start: Tensor, noise: float) -> tuple[Tensor, float]:
        """The field from all measurements, and the noise s.

        s^2 = (sum of squared residuals) / (n - p), with p the effective number of parameters: how much the predicted
        measurements change if noise z is added to the measured ones, p = E z'(F(v(y + s z)) - F(v(y))) / s. The mean
        square of residuals of unseen measurements is larger, by what the field is uncertain.
        """
        number = 1 if self.given else 1 + PROBES
        table, total = self.data.table, self.used.sum().item() * self.data.table.shape[1]
        generator = torch.Generator(table.device).manual_seed(seeds.derive(self.seed, "degrees of freedom"))
        added = torch.empty(number, *table.shape, dtype=table.dtype, device=table.device).normal_(generator=generator)
        added[0] = 0
        fields = start.expand(number, *start.shape)
        known = self.given or all(term.prior.weight == "unseen" for term in self.terms)
        for _ in range(1 if known else SETTLE):
            weights = _weights(self.terms, ratios, noise)
            loss = self._loss(self.terms, weights, noise, self.used.expand(number, -1), table + noise * added)
            fields = self.solve(loss, fields, start is not self.initial)
            if self.given:
                break
            with torch.no_grad():
                predicted = self.data.predict(fields, self.used).detach()
            seen = self.used[..., None]
            moved = ((predicted[1:] - predicted[:1]) * added[1:] * seen).sum().item() / (noise * PROBES)
            squares = ((predicted[0] - table).double().square() * seen[0]).sum().item()
            # At least a twentieth of the measurements counts: p is itself an estimate.
            noise = math.sqrt(squares / max(total - moved, 0.05 * total))
            noise = max(noise, SMALLEST_NOISE * self.data.unit)
        return fields[0], noise

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
