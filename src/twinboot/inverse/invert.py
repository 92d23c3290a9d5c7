"""Inverse problems: find a field from measurements, and how uncertain each part of it is.

    observed = forward(field) + noise

`invert` trains twins of the field on two bootstrap samples of the measurements, as Algorithm 1 does for the weights of
a network. About 13.5 % of the measurements are in neither sample. Their loss rises when the twins begin to fit noise,
so the result is the state of the last step at which the twins' mean clearly predicted them better than before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import resets
from .._core import seeds
from .._core.checks import require_known, require_samples, require_tensor, require_types, require_whole
from ..data.bootstrap import Bootstrap
from ..estimate.prediction import Moments, Prediction, combine
from ..estimate.student import half_width
from ..training import optimizers
from ..training.protocol import INVERT, Protocol, blocks_of_three, complete, refuse_settings
from ..twins import Twins
from . import priors
from .measurements import Measurements, see
from .operators import Forward

NOT_USED = ("pooled", "resample", "average")  # settings of a protocol: there are no networks, loaders or epochs


def invert(
    forward: Forward,
    observed: Tensor,
    initial: Tensor,
    *,
    protocol: Protocol | None = None,
    replicas: int = 2,
    steps: int = 3000,
    optimizer: optimizers.Make | None = None,
    decay: float = 0.999,
    batch_size: int | None = None,
    stop: Literal["unseen"] | None = "unseen",
    check: int = 10,
    patience: int | None = None,
    prior: float | str | None = None,
    bootstrap: Bootstrap | None = None,
    seed: int = 0,
    progress: Callable[[int], object] = lambda step: None,
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
        protocol: the settings of the method. By default `groups` are blocks of three along each axis (`Blocks((3, 3))`
            in 2D), `reset` is `resets.growing(50, 1.5)`, which counts steps, and `mode` is `"centered"`.
        replicas: the number of twins.
        steps: the maximum number of steps.
        optimizer: a function that makes an optimizer from parameters (one tensor, [twins, ...]); by default Adam with a
            learning rate of 0.01, for a field whose values are of the order of 1.
        decay: factor on the learning rate in each step. Adam moves an entry by at most about lr / (1 - decay).
        batch_size: the batch size of the plain training that the twins replace, as in `PairedLoader`: draws per twin
            and step. By default all. Needs an operator with `rows`.
        stop: `"unseen"` keeps the state that predicts the out-of-bag measurements best, where better means by more than
            the standard error of the difference. None keeps the last state.
        check: steps between two evaluations on those measurements.
        patience: stop after this many steps without a better state.
        prior: the standard deviation of a cell around `initial` where nothing is measured. Sigma is that value there,
            and elsewhere at least what such a prior leaves (`inverse/priors.py`). `"found"` uses the root mean square
            of the difference between the field that was found and `initial`. By default sigma is the twins' distance
            alone, which is too small where there are few data or a run was stopped early.
        bootstrap: which twin sees which measurement; `Bootstrap(n, clusters=...)` keeps dependent measurements
            together. Its n is the length of the first axis of `observed`, or of the first axes together.
        seed: seeds the bootstrap and all noise.
        progress: called after each step with its number.

    >>> blur = torch.randn(60, 12, generator=torch.Generator().manual_seed(0))
    >>> result = invert(lambda v: blur @ v, blur @ torch.ones(12), torch.zeros(12), steps=400)
    >>> bool((result.field - 1).abs().max() < 0.1)
    True
    """
    refuse_settings(unknown, "invert", NOT_USED)
    require_known(unknown, invert)
    prior = priors.as_prior(prior)
    optimizers.require_function(optimizer)
    protocol = complete(protocol, INVERT, "invert", without=NOT_USED)
    require_types(invert, locals())
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
    data = see(forward, observed, initial, bootstrap, batch_size, seed)
    if stop and not len(bootstrap.unseen):
        raise ValueError('every measurement is seen by some twin, so there is none for stop="unseen": use stop=None.')
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
        with twins.sampled(protocol.noise):  # one draw, however often LBFGS asks within a step
            stepper.step(partial(loss, step))
        twins.update()
        if step % check == 0 or step == steps:
            stopping.look(step, fields.detach().mean(0), train / replicas)
            if patience is not None and step - stopping.step >= patience:
                progress(step)
                break
        if step < steps and resets.is_due(protocol.reset, step):
            twins.reset(protocol.mode)
        schedule.step()
        progress(step)
    sigma, field = stopping.sigma * bootstrap.scale, stopping.field
    [df] = twins.partition.expand([field], of=(replicas - 1) * twins.partition.sizes.to(field.dtype))
    raised = priors.raised(sigma, prior, field, initial, data, twins.partition, stopping.noise, seed)
    df = torch.where(raised > sigma, math.inf, df.expand_as(field))  # where sigma is the prior's, it is known
    return Inversion(field, raised, stopping.step, stopping.history, bootstrap, seed, df)


@dataclass(frozen=True, eq=False)
class Inversion:
    """The result of `invert`: the field, and a standard deviation for each of its entries.

    `history` has one value per check for each of these: "step", "train" (the mean loss of the noisy twins before the
    step), "unseen" (the loss of the twins' mean on the out-of-bag measurements, after the step) and "sigma" (of the
    twins, as root mean square over the field).

    `df` are the degrees of freedom of each sigma, for `interval`: the number of cells in the block times the number of
    twins minus 1, or infinity where sigma is the prior's. None counts as infinity.
    """

    field: Tensor
    sigma: Tensor
    best_step: int
    history: dict[str, list[float]]
    bootstrap: Bootstrap
    seed: int = 0
    df: Tensor | None = None

    def __repr__(self) -> str:
        sigma, step = self.sigma.square().mean().sqrt(), self.best_step
        return f"Inversion(field of shape {tuple(self.field.shape)}, sigma {sigma:.3g} in the rms, from step {step})"

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval of each entry, by Student's t with `df` degrees of freedom.

        These are an upper bound: neighbouring cells are correlated, and a block then says less about its sigma. So
        these intervals are still too narrow by a little, where those of a normal distribution were by more.
        """
        half = half_width(level, self.df) * self.sigma
        return self.field - half, self.field + half

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Fields [samples, ...] from N(field, sigma^2)."""
        require_whole("samples", samples, 0)
        require_types(Inversion.sample, locals())
        generator = generator or torch.Generator(self.field.device).manual_seed(seeds.derive(self.seed, "fields"))
        drawn = torch.empty(samples, *self.field.shape, dtype=self.field.dtype, device=self.field.device)
        return self.field + self.sigma * drawn.normal_(generator=generator)

    @torch.no_grad()
    def predict(self, operator: Forward, samples: int = 32) -> Prediction:
        """What an operator would measure: mean and spread over fields from N(field, sigma^2), or with `samples=0` of
        the field alone."""
        require_types(Inversion.predict, locals())
        require_samples(samples)
        moments = Moments("regression")
        for field in self.sample(samples) if samples else [self.field.clone()]:
            with torch.enable_grad():  # an operator may differentiate by itself
                measured = operator(field)
            moments.add(measured.detach()[None])
        return combine([moments])


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
        if self.stop is None or self.losses is None or _clearly_lower(losses, self.losses):
            self.losses, self.step, self.field, self.sigma = losses, step, field, sigma
            self.noise = self.data.unit * math.sqrt(unseen if len(losses) else train)


def _clearly_lower(new: Tensor, old: Tensor) -> bool:
    """Whether the mean is lower by more than the standard error of the difference. There are few out-of-bag
    measurements, and once the twins fit noise, their loss changes little: without this rule, chance would often pick a
    late state."""
    gain = old - new
    error = gain.std() / math.sqrt(len(gain)) if len(gain) > 1 else 0.0
    return bool(gain.mean() > error)


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
