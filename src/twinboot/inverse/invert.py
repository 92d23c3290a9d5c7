"""Inverse problems: find a field from measurements, and how uncertain each part of it is.

    observed = forward(field) + noise

`invert` trains twins of the field on two bootstrap samples of the measurements, as Algorithm 1 does for the weights of
a network. About 13.5 % of the measurements are in neither sample. Their loss rises when the twins begin to fit noise,
so the result is the state of the last step at which the twins' mean clearly predicted them better than before.

With a prior, no early stop is needed: the prior is sampled by each twin, its weight is found from the measurements, and
each twin goes to its minimum (`posterior.py`).
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import resets
from .._core.checks import require_known, require_number, require_tensor, require_types, require_whole
from ..data.bootstrap import Bootstrap
from ..groups import Grouping, Partition
from ..training import optimizers
from ..training.protocol import INVERT, Protocol, blocks_of_three, complete, refuse_settings
from ..twins import Twins
from .inversion import Inversion
from .measurements import Measurements, Stacked, examine, see
from .operators import Forward
from .posterior import Posterior, by_least_squares, by_optimizer, clearly_lower
from .priors import Prior, as_priors

NOT_USED = ("local", "pooled", "resample", "average")  # of a protocol: there are no networks, loaders or epochs
# With a prior, twins go to their minima, and noise on the weights and resets would only keep them from it. In a linear
# problem of 12 cells with 2,000 steps of Adam, sigma^2 was 1.06 of the exact one without both (three pairs of twins),
# 1.05 with noise, 0.70 with resets and 0.46 with both.
NOT_WITH_PRIOR = ("reset", "mode", "noise")
PATIENCE = 300  # steps without a better state after which a run may end; the first reset intervals are 50 to 170
KEPT = 10_000_000  # numbers in draws that are kept without being asked for: 40 MB in single precision


def invert(
    forward: Forward,
    observed: Tensor,
    initial: Tensor,
    *,
    prior: Prior | Forward | Sequence[Prior | Forward] | None = None,
    rounds: int = 0,
    noise_std: float | None = None,
    keep_draws: bool | None = None,
    protocol: Protocol | None = None,
    replicas: int = 2,
    steps: int = 3000,
    optimizer: optimizers.Make | None = None,
    decay: float = 0.999,
    batch_size: int | None = None,
    stop: Literal["unseen"] | None = "unseen",
    check: int = 10,
    patience: int | None = None,
    bootstrap: Bootstrap | None = None,
    seed: int = 0,
    progress: bool | Callable[[int], object] = False,
    **unknown: Any,
) -> Inversion:
    """Find the field behind measurements, and how uncertain each part of it is.

    Args:
        forward: the operator: a differentiable function that maps a field to measurements. The twins go through it
            together by `torch.vmap`, so that an expensive operator is read once for both. If vmap cannot handle it, it
            is called for each twin. If it has a method `rows(index)`, as `Dense` has, each twin computes only the
            measurements in its bootstrap sample.
        observed: the measurements, in the shape that `forward` returns. The bootstrap resamples its first axis.
        initial: where the search starts; a tensor with any number of dimensions.
        prior: what is known of the field: `GaussianProcess()`, `Smooth()`, `Near(std=...)`, `Edges(...)`, a function
            from the field to residuals, or several of these. Each twin samples it, so that sigma is right where little
            is measured. The field is then the mode of the posterior from all measurements.
        rounds: with a prior, how often the sample and the noise of each twin are drawn anew. Each round gives a draw
            from the posterior for each twin. Sigma is then known for each cell: with 20 rounds of two twins to 11 %.
            With 0, the two twins alone give a sigma for each block of cells.
        noise_std: with a prior, the standard deviation of the noise of a measurement. By default it is estimated
            from the residuals.
        keep_draws: whether `Inversion.draws` keeps the draws. By default it does up to ten million numbers.
        protocol: the settings of the method. By default `groups` are blocks of three along each axis (`Blocks((3, 3))`
            in 2D), `reset` is `resets.growing(50, 1.5)`, which counts steps, and `mode` is `"centered"`. With a prior
            only `groups` is used; with rounds, by default each cell has its own sigma.
        replicas: the number of twins.
        steps: the maximum number of steps; with a prior, for each weight and each round.
        optimizer: a function that makes an optimizer from parameters (one tensor, [twins, ...]); by default Adam with a
            learning rate of 0.01, for a field whose values are of the order of 1. With a prior the default is a solver
            for least squares, which needs no learning rate (`inverse/solver.py`).
        decay: factor on the learning rate in each step. Adam moves an entry by at most about lr / (1 - decay).
        batch_size: the batch size of the plain training that the twins replace, as in `PairedLoader`: draws per twin
            and step. By default all. Needs an operator with `rows`.
        stop: `"unseen"` keeps the state that predicts the out-of-bag measurements best, where better means by more than
            the standard error of the difference. None keeps the last state. `stop`, `check` and `patience` are for runs
            without a prior.
        check: steps between two evaluations on those measurements.
        patience: stop after this many steps without a better state. By default after as many as the best state took,
            and at least 300.
        bootstrap: which twin sees which measurement; `Bootstrap(n, clusters=...)` keeps dependent measurements
            together. Its n is the length of the first axis of `observed`, or of the first axes together.
            `kind="parametric"`, with a prior, adds noise to the measurements instead of resampling them: for few
            measurements.
        seed: seeds the bootstrap and all noise.
        progress: True prints lines to standard error. A function is called after each step with its number.

    >>> blur = torch.randn(60, 12, generator=torch.Generator().manual_seed(0))
    >>> result = invert(lambda v: blur @ v, blur @ torch.ones(12), torch.zeros(12), steps=400)
    >>> bool((result.field - 1).abs().max() < 0.1)
    True
    >>> from twinboot import Near
    >>> noisy = blur @ torch.ones(12) + torch.randn(60, generator=torch.Generator().manual_seed(1))
    >>> result = invert(lambda v: blur @ v, noisy, torch.zeros(12), prior=Near(std=1.0), rounds=20)
    >>> result.draws.shape, bool((result.probability(lambda v: v > 0) > 0.9).all())
    (torch.Size([40, 12]), True)
    """
    priors = as_priors(prior)
    without = (*NOT_USED, *NOT_WITH_PRIOR) if priors else NOT_USED
    refuse_settings(unknown, "invert", NOT_USED)
    require_known(unknown, invert)
    optimizers.require_function(optimizer)
    protocol = complete(protocol, INVERT, "invert with a prior" if priors else "invert", without=without)
    require_types(invert, {**locals(), "prior": None})
    require_whole("rounds", rounds, 0)
    if stop not in ("unseen", None):
        raise ValueError(f'stop must be "unseen" or None, not {stop!r}.')
    if steps < 1 or check < 1:
        raise ValueError(f"steps and check must be at least 1, not {steps} and {check}.")
    if patience is not None and (patience < 1 or stop is None):
        raise ValueError(f'patience must be at least 1, and goes with stop="unseen", not {patience} and {stop!r}.')
    if not 0 < decay <= 1:
        raise ValueError(f"decay must lie in (0, 1], not {decay}.")
    _require_data(initial, observed)
    observed = observed.detach()
    bootstrap = bootstrap or Bootstrap(len(observed), replicas, seed)
    if bootstrap.replicas != replicas:
        raise ValueError(f"the bootstrap has {bootstrap.replicas} replicas, but there are {replicas} twins.")
    follow = _Progress(progress, steps)
    if priors:
        if stop is None or patience is not None:
            raise ValueError("with a prior there is no early stop: leave stop and patience out.")
        _require_posterior(bootstrap, noise_std)
        examine(forward, observed, initial, bootstrap, batch_size)
        data = Stacked(forward, observed, initial, bootstrap)
        if optimizer is None and batch_size is None:
            solve = by_least_squares(int(steps), follow.tick)
        else:
            solve = by_optimizer(optimizer, int(steps), float(decay), batch_size, seed, follow.tick)
        noise = None if noise_std is None else float(noise_std)
        posterior = Posterior(data, initial.detach(), bootstrap, priors, noise, solve, seed, follow.say)
        return _summarize(posterior, int(rounds), keep_draws, protocol.groups, follow)
    if rounds or noise_std is not None or keep_draws is not None:
        raise ValueError("rounds, noise_std and keep_draws need a prior, such as prior=GaussianProcess().")
    if bootstrap.kind == "parametric":
        raise ValueError('kind="parametric" needs a prior: without one, the noise of the measurements is not known.')
    return _train(
        forward,
        observed,
        initial,
        protocol,
        bootstrap,
        optimizer,
        steps,
        decay,
        batch_size,
        stop,
        check,
        patience,
        seed,
        follow,
    )


def _train(
    forward: Forward,
    observed: Tensor,
    initial: Tensor,
    protocol: Protocol,
    bootstrap: Bootstrap,
    optimizer: optimizers.Make | None,
    steps: int,
    decay: float,
    batch_size: int | None,
    stop: str | None,
    check: int,
    patience: int | None,
    seed: int,
    follow: _Progress,
) -> Inversion:
    """Algorithm 1, without a prior."""
    data = see(forward, observed, initial, bootstrap, batch_size, seed)
    if stop and not len(bootstrap.unseen):
        raise ValueError('every measurement is seen by some twin, so there is none for stop="unseen": use stop=None.')
    replicas = bootstrap.replicas
    groups = blocks_of_three(initial.ndim) if protocol.groups is None else protocol.groups
    twins = Twins(nn.ParameterDict({"field": initial.detach().clone()}), replicas, groups, seed, stacked=True)
    [fields] = twins.parameters()
    stepper = optimizers.make_optimizer(optimizer, [[fields]], lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(stepper, decay)
    stopping = _EarlyStopping(twins, data, stop)

    train = math.nan

    def loss(step: int) -> float:
        nonlocal train
        train, fields.grad = data.loss(twins.weights()["field"], step)
        _require_finite(train, fields.grad, step)
        return train

    for step in range(1, steps + 1):
        try:
            with twins.sampled(protocol.noise):  # one draw, however often LBFGS asks within a step
                stepper.step(partial(loss, step))
            twins.update()
            if step % check == 0 or step == steps:
                stopping.look(step, fields.detach().mean(0), train / replicas)
                follow.checked(step, stopping)
        except FloatingPointError as error:
            if not stopping.step:
                raise
            warnings.warn(f"{error} The result is the best state before, of step {stopping.step}.", RuntimeWarning, 3)
            break
        follow.tick()
        if stop and step % check == 0 and step - stopping.step >= (patience or max(PATIENCE, stopping.step)):
            break
        if step < steps and resets.is_due(protocol.reset, step):
            twins.reset(protocol.mode)
        schedule.step()
    sigma, field = stopping.sigma * bootstrap.scale, stopping.field
    [df] = twins.partition.expand([field], of=(replicas - 1) * twins.partition.sizes.to(field.dtype))
    return Inversion(field, sigma, stopping.step, stopping.history, bootstrap, seed, df.expand_as(field).clone())


def _summarize(
    posterior: Posterior, rounds: int, keep: bool | None, groups: str | Grouping | None, follow: _Progress
) -> Inversion:
    """Draws from the posterior, and what `Inversion` keeps of them."""
    field, bootstrap = posterior.field, posterior.bootstrap
    total = max(rounds, 1) * bootstrap.replicas
    keep = total * field.numel() <= KEPT if keep is None else keep
    kept, number, mean, squares = [], 0, torch.zeros_like(field), torch.zeros_like(field)
    for drawn in posterior.draws(rounds):
        number += len(drawn)
        if keep:
            kept.append(drawn)
        for one in drawn - field:  # which is near the mean, so that no digits are lost
            mean += one
            squares += one.square()
        follow.say(f"{number} of {total} draws")
    variance = (squares - mean.square() / number).clamp(min=0) / (number - 1)
    df = torch.full_like(field, number - 1)
    if groups is None and not rounds:
        groups = blocks_of_three(field.ndim)
    if groups is not None:
        partition = Partition.of(nn.ParameterDict({"field": field}), groups)
        pooled = partition.sum_of_squares([variance.sqrt()]) / partition.sizes
        variance, size = (
            found.to(field).expand_as(field).clone()
            for of in (pooled, partition.sizes)
            for found in partition.expand([field], of=of)
        )
        df = df * size
    draws = torch.cat(kept) if keep else None
    sigma, steps = variance.sqrt(), follow.step
    return Inversion(
        field, sigma, steps, posterior.history, bootstrap, posterior.seed, df, draws, posterior.priors, posterior.noise
    )


class _Progress:
    """Tells a function of the user about each step, or prints some lines to standard error."""

    def __init__(self, progress: bool | Callable[[int], object], steps: int) -> None:
        self.call = progress if callable(progress) else None
        self.prints, self.step, self.steps, self.began = progress is True, 0, steps, time.monotonic()

    def tick(self) -> None:
        self.step += 1
        if self.call is not None:
            self.call(self.step)

    def say(self, line: str) -> None:
        if self.prints:
            print(f"{line}, {time.monotonic() - self.began:.0f} s", file=sys.stderr, flush=True)

    def checked(self, step: int, stopping: _EarlyStopping) -> None:
        """Ten lines for a run of all steps."""
        now = {name: values[-1] for name, values in stopping.history.items()}
        before = stopping.history["step"][-2] if len(stopping.history["step"]) > 1 else 0
        if 10 * step // self.steps > 10 * before // self.steps:
            self.say(
                f"step {step} of {self.steps}: loss {now['train']:.4g}, unseen {now['unseen']:.4g}, sigma "
                f"{now['sigma']:.2g}, best step {stopping.step}"
            )


class _EarlyStopping:
    """Keeps the state of the last step that clearly predicted the out-of-bag measurements better, and the history."""

    def __init__(self, twins: Twins, data: Measurements, stop: str | None) -> None:
        self.twins, self.data, self.stop = twins, data, stop
        self.history: dict[str, list[float]] = {"step": [], "train": [], "unseen": [], "sigma": []}
        self.losses: Tensor | None = None
        self.step = 0

    @torch.no_grad()
    def look(self, step: int, field: Tensor, train: float) -> None:
        losses = self.data.unseen_losses(field)
        unseen = losses.mean().item() if len(losses) else math.nan
        if len(losses) and not math.isfinite(unseen):
            raise FloatingPointError(f"forward gives values that are not finite for the twins' mean at step {step}.")
        [sigma] = self.twins.partition.expand([field])
        sigma = sigma.to(field).expand_as(field).clone()
        unit = self.data.unit**2  # of the losses
        values = (step, unit * train, unit * unseen, sigma.square().mean().sqrt().item())
        for name, value in zip(self.history, values, strict=True):
            self.history[name].append(value)
        if self.stop is None or self.losses is None or clearly_lower(losses, self.losses):
            self.losses, self.step, self.field, self.sigma = losses, step, field, sigma
            self.noise = self.data.unit * math.sqrt(unseen if len(losses) else train)


def _require_data(initial: Tensor, observed: Tensor) -> None:
    require_tensor("initial", initial)
    if not initial.is_floating_point() or not initial.numel():
        raise TypeError("initial must be a tensor of real floating-point numbers, with at least one.")
    require_tensor("observed", observed)
    if observed.ndim == 0 or not observed.is_floating_point():
        raise TypeError("observed must be a tensor of floating-point numbers with at least one axis.")
    if not bool(observed.isfinite().all()):
        raise ValueError("observed has values that are not finite: remove those measurements first.")
    if not bool(observed.any()):
        what = "zero everywhere" if observed.numel() else "empty"
        raise ValueError(f"observed is {what}: there is nothing to invert; were the measurements loaded?")


def _require_finite(loss: float, gradient: Tensor, step: int) -> None:
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss is not finite at step {step}: forward gave NaN or infinity, or the learning rate is too high."
        )
    if not math.isfinite(gradient.sum().item()):  # one bad entry spoils the sum, which is quicker than a look at each
        raise FloatingPointError(f"forward has no finite derivative at the field of step {step}.")


def _require_posterior(bootstrap: Bootstrap, noise_std: float | None) -> None:
    if noise_std is not None:
        require_number("noise_std", noise_std, positive=True)
    if bootstrap.kind == "split":
        raise ValueError('kind="split" gives each twin half of the measurements: with a prior, use another kind.')
