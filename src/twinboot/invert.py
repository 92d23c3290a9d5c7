"""Inverse problems: a field that was seen through a forward operator, and where not to trust what is found.

    observed = forward(field) + noise

`invert` trains twins of the field on two bootstrap samples of the measurements, as Algorithm 1 does for the weights of
a network. About 13.5 % of the measurements are drawn for neither twin. They tell when the twins begin to fit the noise:
the field and its sigma are kept from the last step at which the twins' mean clearly predicted those measurements
better than before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import vmap

from . import resets, seeds
from .bootstrap import Bootstrap
from .groups import Blocks, Grouping
from .inversion import Forward, Inversion
from .twins import RESET_MODES, Twins

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def invert(
    forward: Forward,
    observed: Tensor,
    initial: Tensor,
    *,
    groups: str | Grouping | None = None,
    replicas: int = 2,
    steps: int = 3000,
    optimizer: MakeOptimizer | None = None,
    decay: float = 0.999,
    reset: Callable[[int], bool] | None = None,
    mode: Literal["sample", "mean", "centered"] = "centered",
    noise: float = 1.0,
    stop: Literal["unseen"] | None = "unseen",
    check: int = 10,
    bootstrap: Bootstrap | None = None,
    seed: int = 0,
    progress: Callable[[int], object] = lambda step: None,
) -> Inversion:
    """Find the field behind measurements, and how uncertain each part of it is.

    Args:
        forward: what would be measured of a field: a differentiable function of one tensor. The twins go through it
            together by `torch.vmap`, so that an expensive operator is read once for both; one that vmap cannot
            handle is called for each twin.
        observed: the measurements, in the shape that `forward` gives. Its first axis is what the bootstrap resamples.
        initial: where the search starts; an array of any number of dimensions.
        groups: which entries share one sigma. By default blocks of three along each axis: `Blocks((3, 3))` in 2D.
        replicas: how many twins.
        steps: how many steps at most.
        optimizer: a function that makes an optimizer for parameters; by default Adam at 0.01, for a field whose values
            are of the order of 1.
        decay: the learning rate is multiplied by this each step. Adam moves an entry by about rate / (1 - decay) at
            most.
        reset: after which steps the twins are reset; by default `resets.growing(50, 1.5)`.
        mode: how: `"centered"`, `"mean"`, or `"sample"` as in the paper.
        noise: scale of the noise on the field in training, in units of sigma; 0 for none.
        stop: `"unseen"` keeps the state that predicts best what no twin saw, where better means by more than the
            standard error of the difference; None keeps the last state.
        check: steps between two looks at those.
        bootstrap: who sees which measurement, if not the default: `Bootstrap(n, clusters=...)` keeps together what
            belongs together. Its n is the length of the first axis of `observed`, or of the first axes together.
        seed: of the resampling and all noise.
        progress: called after each step with its number.

    >>> blur = torch.randn(60, 12, generator=torch.Generator().manual_seed(0))
    >>> result = invert(lambda v: blur @ v, blur @ torch.ones(12), torch.zeros(12), steps=400)
    >>> bool((result.field - 1).abs().max() < 0.1)
    True
    """
    if mode not in RESET_MODES:
        raise ValueError(f'unknown reset mode {mode!r}: use "sample", "mean" or "centered".')
    if stop not in ("unseen", None):
        raise ValueError(f'stop must be "unseen" or None, not {stop!r}.')
    if steps < 1 or check < 1:
        raise ValueError(f"steps and check must be at least 1, not {steps} and {check}.")
    if not (0 < decay <= 1 and noise >= 0):
        raise ValueError(f"decay must lie in (0, 1] and noise be 0 or more, not {decay} and {noise}.")
    observed = _checked_data(observed)
    run = _stacked(forward, initial, observed, replicas)
    bootstrap = bootstrap or Bootstrap(len(observed), replicas, seed)
    rows = _Rows(observed, bootstrap, replicas)
    if stop and not len(bootstrap.unseen):
        raise ValueError('every measurement is seen by some twin, so there is none for stop="unseen": use stop=None.')
    due = reset or resets.growing(50, 1.5)
    twins = Twins(
        _Field(initial), replicas, groups or (Blocks((3,) * initial.ndim) if initial.ndim else "tensor"), seed
    )
    stepper = (optimizer or _adam)(twins.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(stepper, decay)
    best = _Best(twins)

    def loss(step: int) -> float:
        """Of all twins, with their gradients. The same noise however often LBFGS asks within a step."""
        stepper.zero_grad()
        draw = torch.Generator(initial.device).manual_seed(seeds.derive(seed, "noise", step))
        with twins.sampled(noise, draw):
            found = rows.losses(run(_fields(twins))).sum()
            _backward(found, list(twins.parameters()), step, rows.scale)
        return found.item()

    for step in range(1, steps + 1):
        train = stepper.step(partial(loss, step))
        twins.update()
        if step % check == 0 or step == steps:
            best.look(step, train / replicas, rows, forward, stop)
        if due(step) and step < steps:
            twins.reset(mode)
        schedule.step()
        progress(step)
    return Inversion(best.field, best.sigma, best.step, best.history, bootstrap, seed)


class _Field(nn.Module):
    def __init__(self, initial: Tensor) -> None:
        super().__init__()
        self.field = nn.Parameter(initial.detach().clone())


class _Rows:
    """The measurements as the twins see them: each with a weight for each twin, and none for both where unseen."""

    def __init__(self, observed: Tensor, bootstrap: Bootstrap, replicas: int) -> None:
        if bootstrap.replicas != replicas:
            raise ValueError(f"the bootstrap has {bootstrap.replicas} replicas, but there are {replicas} twins.")
        shape, axes = observed.shape, 0
        while math.prod(shape[:axes]) < bootstrap.n and axes < len(shape):
            axes += 1
        if math.prod(shape[:axes]) != bootstrap.n:
            raise ValueError(
                f"the bootstrap resamples {bootstrap.n} measurements, but the first axes of observed, of shape "
                f"{tuple(shape)}, do not multiply to that."
            )
        self.observed = observed
        weights = bootstrap.counts.to(observed)
        weights = weights / weights.mean(1, keepdim=True)
        self.weights = weights.view(replicas, *shape[:axes], *[1] * (len(shape) - axes))
        self.unseen = (bootstrap.counts == 0).all(0).to(observed.device)
        # The optimizer sees a loss without units: Adam would take the gradients of tiny measurements for zero.
        seen = observed.square().reshape(len(self.unseen), -1)[~self.unseen]
        self.scale = seen.mean().item() or 1.0

    def losses(self, predicted: Tensor) -> Tensor:
        """For each twin the mean of its weighted squared residuals."""
        return (self.weights * (predicted - self.observed).square()).flatten(1).mean(1)

    def unseen_losses(self, predicted: Tensor) -> Tensor:
        """For each measurement that no twin sees its squared residual, a mean where it has axes of its own."""
        squared = (predicted - self.observed).square()
        return squared.reshape(len(self.unseen), -1).mean(1)[self.unseen]


class _Best:
    """The state to keep, and how the run went."""

    def __init__(self, twins: Twins) -> None:
        self.twins = twins
        self.history: dict[str, list[float]] = {"step": [], "train": [], "unseen": [], "sigma": []}
        self.losses: Tensor | None = None
        self.step = 0

    @torch.no_grad()
    def look(self, step: int, train: float, rows: _Rows, forward: Forward, stop: str | None) -> None:
        field = _fields(self.twins).mean(0)
        losses = rows.unseen_losses(forward(field.clone()))
        unseen = losses.mean().item() if len(losses) else math.nan
        if len(losses) and not math.isfinite(unseen):
            raise FloatingPointError(f"forward gives values that are not finite for the twins' mean at step {step}.")
        sigma = _sigma(self.twins, field)
        for name, value in zip(self.history, (step, train, unseen, sigma.square().mean().sqrt().item()), strict=True):
            self.history[name].append(value)
        if stop is None or self.losses is None or _clearly_lower(losses, self.losses):
            self.losses, self.step, self.field, self.sigma = losses, step, field, sigma


def _clearly_lower(new: Tensor, old: Tensor) -> bool:
    """By more than the standard error of the difference. There are few unseen measurements, and once the twins fit
    noise the loss on them changes little: without this rule chance would often pick a late state."""
    gain = old - new
    error = gain.std() / math.sqrt(len(gain)) if len(gain) > 1 else 0.0
    return bool(gain.mean() > error)


def _fields(twins: Twins) -> Tensor:
    return torch.stack([twin.get_parameter("field") for twin in twins])


def _sigma(twins: Twins, field: Tensor) -> Tensor:
    """One sigma for each entry of the field."""
    [sigma] = twins.partition.expand([field])
    return sigma.to(field).expand_as(field).clone()


def _stacked(forward: Forward, initial: Tensor, observed: Tensor, replicas: int) -> Forward:
    """`forward` for a stack of fields: all at once where vmap can do it, else one after another."""
    if not isinstance(initial, Tensor) or not initial.is_floating_point() or not initial.numel():
        raise TypeError("initial must be a tensor of real floating-point numbers, with at least one.")
    start = initial.detach().clone()  # an operator may write into what it is given
    with torch.no_grad():
        once = forward(start.clone())
    if not isinstance(once, Tensor) or once.shape != observed.shape or once.is_complex():
        given = f"shape {tuple(once.shape)}, {once.dtype}" if isinstance(once, Tensor) else f"a {type(once).__name__}"
        wanted = f"shape {tuple(observed.shape)}, {observed.dtype}"
        raise ValueError(f"forward(initial) gives {given}, but observed has {wanted}.")
    if not bool(once.isfinite().all()):
        raise FloatingPointError("forward gives values that are not finite for the initial field.")

    def one_by_one(fields: Tensor) -> Tensor:
        return torch.stack([forward(field.clone()) for field in fields])

    together = vmap(forward)
    try:  # with gradients, because some operators are only refused there, such as those that checkpoint activations
        first, second = (_with_gradient(run, start, replicas) for run in (together, one_by_one))
        same = all(torch.allclose(a, b, 1e-3, 1e-5 * float(b.abs().max())) for a, b in zip(first, second, strict=True))
    except Exception:  # vmap refuses some operators, each in its own way
        same = False
    return together if same else one_by_one


def _with_gradient(run: Forward, start: Tensor, replicas: int) -> tuple[Tensor, Tensor]:
    """What an operator gives for a stack of fields, and the gradient of its sum."""
    with torch.enable_grad():
        fields = torch.stack([start] * replicas).requires_grad_()
        found = run(fields)
        [gradient] = torch.autograd.grad(found.sum(), fields)
    return found.detach(), gradient


def _checked_data(observed: Tensor) -> Tensor:
    if not isinstance(observed, Tensor) or observed.ndim == 0 or not observed.is_floating_point():
        raise TypeError("observed must be a tensor of floating-point numbers with at least one axis.")
    if not bool(observed.isfinite().all()):
        raise ValueError("observed has values that are not finite: remove those measurements first.")
    if not bool(observed.any()):
        raise ValueError("observed is zero everywhere: there is nothing to invert; were the measurements loaded?")
    return observed.detach()


def _backward(loss: Tensor, fields: list[nn.Parameter], step: int, scale: float) -> None:
    """Gradients for the fields alone: the operator may have parameters of its own."""
    if not math.isfinite(loss.item()):
        raise FloatingPointError(
            f"the loss is not finite at step {step}: forward gave NaN or infinity, or the learning rate is too high."
        )
    found = torch.autograd.grad(loss / scale, fields, allow_unused=True) if loss.requires_grad else [None] * len(fields)
    for field, gradient in zip(fields, found, strict=True):
        if gradient is None:
            raise ValueError(
                "what forward gives does not depend on the field by operations that PyTorch can differentiate."
            )
        if not bool(gradient.isfinite().all()):
            raise FloatingPointError(f"forward has no finite derivative at the field of step {step}.")
        field.grad = gradient


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)
