"""Many problems of the seismic task solved at once, by twins or by Adam alone, and how good the results are.

The loss of a field is quadratic in the response u = f(v). A step over all M measurements therefore needs one product
with K' W K, [cells, cells], instead of two with K, [M, cells]: the steps of `invert` in less time. Where measurements
are few, two products with the factors of the kernels, each a bump down times a bump across, take less time still. All
problems are one tensor of fields [problems, 30, 30], and `Blocks((1, 3, 3))` gives each problem its own sigmas.

A test compares the results with those of `invert`: they agree to rounding, except for Adam's eps. `invert` divides the
loss by the mean square of the measurements, so its eps of 1e-8 is that many times larger in the units used here. It
matters where few kernels reach, and gradients are as small as eps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from ... import Blocks, Twins, resets
from ..._core import seeds
from ..intervals import correlation, covered
from ..runner.experiment import Tick, require_at_least, require_positive
from .kernels import SIDE, Problem, respond

LEVELS = (0.5, 0.9, 0.95)  # of central intervals
FEW = 1500  # measurements, up to which the factors of the kernels take less time than K' W K; at 2,000 they are equal


@dataclass(frozen=True)
class Method:
    """How a field is trained: alone, with or without a hold-out; or as twins, with weight noise and resets."""

    replicas: int = 1
    hold_out: bool = False
    mode: resets.Mode = "sample"
    noise: float = 1.0  # a factor on sigma
    eps: float = 1e-8  # of Adam
    fixed: float = 0.0  # standard deviation of noise on a field alone, the same in all steps


METHODS = {
    "standard": Method(),
    "hold-out": Method(hold_out=True),
    "sample": Method(2, mode="sample"),
    "mean": Method(2, mode="mean"),
    "centered": Method(2, mode="centered"),
    "no noise": Method(2, mode="sample", noise=0.0),
    "four": Method(4, mode="centered"),
}


@dataclass(frozen=True)
class Schedule:
    """How long and how fast; `batch` None for all measurements in each step."""

    steps: int
    lr: float
    decay: float
    first_reset: int = 50
    batch: int | None = None
    check: int = 20
    growth: float = 1.5  # each interval between resets is so many times the one before


def require_training(config: Any) -> None:
    """Check the settings that the three experiments of this package share."""
    require_positive(config, "lr", "decay")
    require_at_least(config, 1, "steps")
    require_at_least(config, 2, "seeds")
    if config.decay > 1:
        raise ValueError(f"decay must be at most 1, not {config.decay}.")


@dataclass
class State:
    """The field of each problem, its sigma, and the step they are from."""

    field: Tensor
    sigma: Tensor
    step: Tensor


class Fields(nn.Module):
    """One field for each problem. The output is their responses u, [problems, cells]."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__()
        self.response = problems[0].setting.response
        self.beta = torch.tensor([p.setting.beta for p in problems])[:, None, None]
        self.field = nn.Parameter(torch.stack([p.initial for p in problems]).to(problems[0].observed.dtype))

    def forward(self) -> Tensor:
        return self.respond(self.field)

    def noisy(self, std: float, generator: torch.Generator) -> Tensor:
        noise = torch.randn(self.field.shape, generator=generator, dtype=self.field.dtype)
        return self.respond(self.field + std * noise)

    def respond(self, field: Tensor) -> Tensor:
        return respond(self.response, self.beta * field).flatten(1)


def train(
    problems: Sequence[Problem], method: Method, schedule: Schedule, seed: int = 0, tick: Tick = lambda: None
) -> dict[str, State]:
    """Train on problems with the same response and number of measurements. A loop of its own, for twins and for Adam
    alone: `invert` solves one problem at a time, and takes many times as long for all seeds.

    Returns four states. Validation data are the out-of-bag measurements of the twins, or the hold-out.

        last      after the last step
        lowest    where the validation loss was lowest
        clear     the last that lowered the validation loss by more than a standard error, as `invert` keeps it
        average   the mean field since the last reset
    """
    divided = [divide(p, method) for p in problems]
    weights = torch.stack([own for own, _ in divided])
    slope: _BatchSlope | _FullSlope | _FactorSlope
    if schedule.batch:
        slope = _BatchSlope(problems, weights, schedule.batch, seed)
    else:
        slope = (_FactorSlope if weights.shape[2] <= FEW else _FullSlope)(problems, weights)
    model = Fields(problems)
    twins = Twins(model, method.replicas, Blocks((1, 3, 3)), seed) if method.replicas > 1 else None
    optimizer = torch.optim.Adam((twins or model).parameters(), schedule.lr, eps=method.eps, fused=True)
    annealing = torch.optim.lr_scheduler.ExponentialLR(optimizer, schedule.decay)
    due = resets.growing(schedule.first_reset, schedule.growth)
    validation = [(p.kernels[index], p.observed[index]) for p, (_, index) in zip(problems, divided, strict=True)]
    snapshots = _Snapshots(validation, model.respond)

    draws = torch.Generator().manual_seed(seeds.derive(seed, "fixed noise"))

    for step in range(1, schedule.steps + 1):
        optimizer.zero_grad()
        with twins.sampled(method.noise) if twins else nullcontext():
            for number, own in enumerate(twins or [model]):
                u = model.noisy(method.fixed, draws) if method.fixed else own()
                u.backward(slope(number, u.detach(), step))
        optimizer.step()
        annealing.step()
        if twins:
            twins.update()
        if step % schedule.check == 0 or step == schedule.steps:
            field = torch.stack([own.get_parameter("field").detach() for own in twins or [model]]).mean(0)
            snapshots.look(field, _sigma(twins, field), step)
        if twins and due(step) and step < schedule.steps:
            twins.reset(method.mode)
            snapshots.restart()
        tick()
    return snapshots.states()


def divide(problem: Problem, method: Method) -> tuple[Tensor, Tensor]:
    """The weights [twins, M] of the measurements, each row of sum 1; and the measurements that validate."""
    if method.replicas > 1:
        counts, index = problem.bootstrap.counts.to(problem.observed), problem.bootstrap.unseen
    else:
        counts, index = torch.ones_like(problem.observed)[None], problem.held_out
        if method.hold_out:
            counts[:, index] = 0
    return counts / counts.sum(1, keepdim=True), index


def _sigma(twins: Twins | None, field: Tensor) -> Tensor:
    """For each cell that of its patch of 3 x 3 cells."""
    if twins is None:
        return torch.zeros_like(field)
    [sigma] = twins.sigma.values()
    return sigma.repeat_interleave(3, 1).repeat_interleave(3, 2)


class _FullSlope:
    """The slope of a twin's loss in u. With all measurements the loss is u' G u - 2 h' u, and its slope 2 (G u - h)."""

    def __init__(self, problems: Sequence[Problem], weights: Tensor) -> None:
        pairs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(weights.shape[1])]
        for p, own in zip(problems, weights, strict=True):
            for pair, weight in zip(pairs, own, strict=True):
                used = weight > 0
                rows, w = p.kernels[used], weight[used]
                pair.append(((rows * w[:, None]).T @ rows, rows.T @ (w * p.observed[used])))
        self.gram, self.right = ([torch.stack([of[k] for of in pair]) for pair in pairs] for k in (0, 1))

    def __call__(self, twin: int, u: Tensor, step: int) -> Tensor:
        return 2 * (_dot(self.gram[twin], u) - self.right[twin])


class _FactorSlope:
    """The same from the factors of the kernels: the row of a measurement is D A', with D down and A across."""

    def __init__(self, problems: Sequence[Problem], weights: Tensor) -> None:
        rows = torch.stack([p.kernels for p in problems]).unflatten(2, (SIDE, SIDE))
        self.down, self.across = rows.sum(3) / rows.sum((2, 3))[..., None], rows.sum(2)
        self.observed, self.weights = torch.stack([p.observed for p in problems]), 2 * weights

    def __call__(self, twin: int, u: Tensor, step: int) -> Tensor:
        measured = (torch.bmm(self.down, u.unflatten(1, (SIDE, SIDE))) * self.across).sum(2)
        residual = self.weights[:, twin] * (measured - self.observed)
        return torch.bmm(self.down.mT, residual[..., None] * self.across).flatten(1)


class _BatchSlope:
    """The same with a few measurements in each step: each twin's draws, in an order that is new in each epoch."""

    def __init__(self, problems: Sequence[Problem], weights: Tensor, size: int, seed: int) -> None:
        self.size, self.seed, self.epoch, self.order = size, seed, -1, torch.empty(0)
        self.kernels = torch.cat([p.kernels for p in problems])
        self.observed = torch.cat([p.observed for p in problems])
        self.starts = torch.arange(len(problems))[:, None] * weights.shape[2]
        self.draws = [
            [torch.repeat_interleave((w / w[w > 0].min()).round().long()) for w in of_twin]
            for of_twin in weights.unbind(1)
        ]
        self.per_epoch = min(len(d) for of_twin in self.draws for d in of_twin) // size

    def __call__(self, twin: int, u: Tensor, step: int) -> Tensor:
        epoch, place = divmod(step - 1, self.per_epoch)
        if epoch != self.epoch:
            self.epoch, used = epoch, self.per_epoch * self.size
            generator = torch.Generator().manual_seed(seeds.derive(self.seed, "order", epoch))
            shuffled = [
                torch.stack([d[torch.randperm(len(d), generator=generator)[:used]] for d in of_twin])
                for of_twin in self.draws
            ]
            self.order = torch.stack(shuffled)
        index = (self.starts + self.order[twin, :, place * self.size : (place + 1) * self.size]).flatten()
        rows = self.kernels.index_select(0, index).view(len(u), self.size, -1)
        residual = _dot(rows, u) - self.observed[index].view(len(u), -1)
        return torch.bmm(residual[:, None], rows).squeeze(1) * (2 / self.size)


def _dot(rows: Tensor, u: Tensor) -> Tensor:
    """For each problem, rows [problems, n, cells] times a vector [problems, cells]. Written as u' rows': the other way
    round, batched products take several times as long."""
    return torch.bmm(u[:, None], rows.mT).squeeze(1)


class _Snapshots:
    """The states of each problem that `train` returns."""

    def __init__(self, validation: list[tuple[Tensor, Tensor]], response: Callable[[Tensor], Tensor]) -> None:
        self.response = response
        self.kernels, self.observed = (nn.utils.rnn.pad_sequence(list(v), True) for v in zip(*validation, strict=True))
        self.number = torch.tensor([len(y) for _, y in validation])
        self.inside = torch.arange(self.observed.shape[1]) < self.number[:, None]
        self.chosen: dict[str, State] = {}
        self.losses: dict[str, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """After a reset a new average begins."""
        self.sum, self.looks = torch.zeros(()), 0

    def look(self, field: Tensor, sigma: Tensor, step: int) -> None:
        self.last = last = State(field, sigma, torch.full((len(field),), step))
        self.sum, self.looks = self.sum + field, self.looks + 1
        losses = (_dot(self.kernels, self.response(field)) - self.observed).square()
        for name, errors in (("lowest", 0.0), ("clear", 1.0)):
            if name not in self.chosen:
                self.chosen[name] = State(field.clone(), sigma.clone(), last.step.clone())
                self.losses[name] = losses
            gain = self.losses[name] - losses
            mean = gain.sum(1) / self.number
            variance = ((gain - mean[:, None]).square() * self.inside).sum(1) / (self.number - 1).clamp(min=1)
            better = mean > errors * (variance / self.number).sqrt()
            for part in fields(State):
                getattr(self.chosen[name], part.name)[better] = getattr(last, part.name)[better]
            self.losses[name] = torch.where(better[:, None], losses, self.losses[name])

    def states(self) -> dict[str, State]:
        average = self.sum / self.looks if self.looks else self.last.field
        return {"last": self.last, "average": State(average, self.last.sigma, self.last.step), **self.chosen}


def scores(problems: Sequence[Problem], state: State, method: Method) -> pd.DataFrame:
    """For each problem: losses, mean squared error of the field, and for twins how well sigma predicts the error."""
    found = []
    for p, field, sigma, step in zip(problems, state.field, state.sigma, state.step.tolist(), strict=True):
        u = respond(p.setting.response, p.setting.beta * field).flatten()
        used = divide(p, method)[0].any(0)
        error = field - p.truth
        row = {
            "train": (p.kernels @ u - p.observed).square()[used].mean().item(),
            "test": (p.test_kernels @ u - p.test_observed).square().mean().item(),
            "error": error.square().mean().item(),
            "step": step,
        }
        if method.replicas > 1:
            row |= {"sigma": sigma.square().mean().sqrt().item(), "correlation": correlation(sigma, error)}
            row |= {f"covered_{level}": covered(error, sigma, level) for level in LEVELS}
        found.append(row)
    return pd.DataFrame(found)


def deciles(problems: Sequence[Problem], state: State) -> pd.DataFrame:
    """The cells of each problem in ten parts by sigma: mean squares of sigma and of the error, and coverage. Means over
    the problems."""
    found = []
    for p, field, sigma in zip(problems, state.field, state.sigma, strict=True):
        order = sigma.flatten().argsort(stable=True)
        parts = zip((field - p.truth).flatten()[order].chunk(10), sigma.flatten()[order].chunk(10), strict=True)
        for part, (e, s) in enumerate(parts, start=1):
            row = {"decile": part, "sigma2": s.square().mean().item(), "error2": e.square().mean().item()}
            found.append(row | {f"covered_{level}": covered(e, s, level) for level in LEVELS})
    return pd.DataFrame(found).groupby("decile", as_index=False).mean()


def covered_text(runs: pd.DataFrame) -> str:
    """The mean coverage at each level, as the tables show it."""
    return ", ".join(f"{runs[f'covered_{level}'].mean():.0%}" for level in LEVELS)
