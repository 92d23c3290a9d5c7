"""Many problems of the seismic task solved at once, with twins or with a single field each.

The loss of a field is a quadratic in u = f(v), so that a step over all M measurements needs one product with K' W K, of
[cells, cells], and not two with K, of [M, cells]: the same steps in less time. All problems are one tensor of fields
[problems, 30, 30]; twins of it have sigmas of their own for each problem, as `Blocks((1, 3, 3))` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from ... import resets
from ..._core import seeds
from ...groups import Blocks
from ...twins import Twins
from .kernels import SIDE, Problem, respond

Mode = Literal["sample", "mean", "centered"]


@dataclass(frozen=True)
class Method:
    """How a field is trained: alone, with or without a hold-out; or as twins, with noise and a kind of reset."""

    replicas: int = 1
    hold_out: bool = False
    mode: Mode = "sample"
    noise: float = 1.0


@dataclass(frozen=True)
class Schedule:
    """How long and how fast; `batch` None for all measurements in each step."""

    steps: int
    rate: float
    decay: float
    first_reset: int = 50
    batch: int | None = None
    check: int = 20


@dataclass
class State:
    """Of each problem the field, its sigma and the step they are from."""

    field: Tensor
    sigma: Tensor
    step: Tensor

    def take(self, which: Tensor, other: State) -> None:
        """For the problems in question, what the other has."""
        for mine, theirs in ((self.field, other.field), (self.sigma, other.sigma), (self.step, other.step)):
            mine[which] = theirs[which]

    def clone(self) -> State:
        return State(self.field.clone(), self.sigma.clone(), self.step.clone())


@dataclass(frozen=True)
class Trained:
    """What a run leaves, chosen in four ways. Validation data are those that no twin saw, or the hold-out."""

    last: State
    lowest: State  # of the lowest loss on validation data
    clear: State  # the last that was better on validation data by more than a standard error, as `invert` keeps it
    average: State  # the mean field over the time after the last reset


def train(
    problems: Sequence[Problem],
    method: Method,
    schedule: Schedule,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> Trained:
    """Train on problems of the same number of measurements."""
    task = problems[0].task
    beta = torch.tensor([p.task.beta for p in problems])[:, None, None]
    weights, validation = _division(problems, method)
    loss = (_Batches if schedule.batch else _Whole)(problems, weights, schedule, seed)
    holder = _Fields(len(problems))
    twins = Twins(holder, method.replicas, Blocks((1, 3, 3)), seed, stacked=True) if method.replicas > 1 else None
    parameter = next(iter((twins or holder).parameters()))
    optimizer = torch.optim.Adam([parameter], schedule.rate, fused=True)
    annealing = torch.optim.lr_scheduler.ExponentialLR(optimizer, schedule.decay)
    due = resets.growing(schedule.first_reset, 1.5)
    best = _Best(validation, lambda field: respond(task.response, beta * field).flatten(1))

    for step in range(1, schedule.steps + 1):
        optimizer.zero_grad()
        if twins:
            with twins.sampled(method.noise):
                fields = twins.weights()["field"]
        else:
            fields = parameter[None]
        u = respond(task.response, beta * fields).flatten(2)
        u.backward(torch.stack([loss.slope(b, u[b].detach(), step) for b in range(len(u))]))
        optimizer.step()
        annealing.step()
        if twins:
            twins.update()
        if step % schedule.check == 0 or step == schedule.steps:
            field = parameter.detach().mean(0) if twins else parameter.detach().clone()
            best.look(field, _sigma(twins, len(problems)), step)
        if twins and due(step) and step < schedule.steps:
            twins.reset(method.mode)
            best.restart()
        tick()
    return best.trained()


class _Fields(nn.Module):
    def __init__(self, problems: int) -> None:
        super().__init__()
        self.field = nn.Parameter(torch.zeros(problems, SIDE, SIDE))


def _sigma(twins: Twins | None, problems: int) -> Tensor:
    if twins is None:
        return torch.zeros(problems, SIDE, SIDE)
    [sigma] = twins.sigma.values()
    return sigma.repeat_interleave(3, 1).repeat_interleave(3, 2)


def _division(problems: Sequence[Problem], method: Method) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """For each twin and problem the weights [M], of sum 1; and of each problem the measurements that validate."""
    weights: list[list[Tensor]] = [[] for _ in range(method.replicas)]
    validation = []
    for p in problems:
        if method.replicas > 1:
            counts, index = p.bootstrap.counts.float(), p.bootstrap.unseen
        else:
            counts, index = torch.ones(1, p.task.rows), p.held_out
            if method.hold_out:
                counts[:, index] = 0
        for own, count in zip(weights, counts, strict=True):
            own.append(count / count.sum())
        validation.append((p.kernels[index], p.observed[index]))
    return weights, validation


class _Loss(Protocol):
    def slope(self, twin: int, u: Tensor, step: int) -> Tensor: ...


class _Whole:
    """All measurements in each step: the slope of u' G u - 2 h' u is 2 (G u - h)."""

    def __init__(self, problems: Sequence[Problem], weights: list[list[Tensor]], schedule: Schedule, seed: int) -> None:
        cells = SIDE**2
        self.gram = [torch.empty(len(problems), cells, cells) for _ in weights]
        self.right = [torch.empty(len(problems), cells) for _ in weights]
        for b, weight in enumerate(weights):
            for i, p in enumerate(problems):
                used = weight[i] > 0
                rows, w = p.kernels[used], weight[i][used]
                torch.mm((rows * w[:, None]).T, rows, out=self.gram[b][i])
                self.right[b][i] = rows.T @ (w * p.observed[used])

    def slope(self, twin: int, u: Tensor, step: int) -> Tensor:
        return 2 * (_dot(self.gram[twin], u) - self.right[twin])


class _Batches:
    """A few measurements in each step, each twin's draws in an order that is new in each epoch."""

    def __init__(self, problems: Sequence[Problem], weights: list[list[Tensor]], schedule: Schedule, seed: int) -> None:
        assert schedule.batch is not None
        self.size = schedule.batch
        self.kernels = torch.cat([p.kernels for p in problems])
        self.observed = torch.cat([p.observed for p in problems])
        self.starts = torch.tensor([0] + [len(p.observed) for p in problems[:-1]]).cumsum(0)[:, None]
        self.draws = [
            [torch.repeat_interleave((w / w[w > 0].min()).round().long()) for w in weight] for weight in weights
        ]
        self.seed, self.epoch, self.order = seed, -1, torch.empty(0)
        self.per_epoch = min(len(d) for twin in self.draws for d in twin) // self.size

    def slope(self, twin: int, u: Tensor, step: int) -> Tensor:
        epoch, place = divmod(step - 1, self.per_epoch)
        if epoch != self.epoch:
            self.epoch, used = epoch, self.per_epoch * self.size
            generator = torch.Generator().manual_seed(seeds.derive(self.seed, "order", epoch))
            self.order = torch.stack(
                [
                    torch.stack([d[torch.randperm(len(d), generator=generator)[:used]] for d in draws])
                    for draws in self.draws
                ]
            )
        index = (self.starts + self.order[twin, :, place * self.size : (place + 1) * self.size]).flatten()
        rows = self.kernels.index_select(0, index).view(len(u), self.size, -1)
        residual = _dot(rows, u) - self.observed[index].view(len(u), -1)
        return torch.bmm(residual[:, None], rows).squeeze(1) * (2 / self.size)


def _dot(rows: Tensor, u: Tensor) -> Tensor:
    """Of each problem its rows [problems, n, cells] times its vector [problems, cells]. Written as u' rows', because
    the other way round batched products take several times as long."""
    return torch.bmm(u[:, None], rows.mT).squeeze(1)


class _Best:
    """The states to keep of each problem."""

    def __init__(self, validation: list[tuple[Tensor, Tensor]], response: Callable[[Tensor], Tensor]) -> None:
        self.response = response
        self.kernels, self.observed = (nn.utils.rnn.pad_sequence(list(v), True) for v in zip(*validation, strict=True))
        self.number = torch.tensor([len(y) for _, y in validation])
        self.inside = torch.arange(self.observed.shape[1]) < self.number[:, None]
        self.kept: dict[str, State] = {}
        self.losses: dict[str, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """After a reset a new average begins."""
        self.sum, self.looks = torch.zeros(()), 0

    def look(self, field: Tensor, sigma: Tensor, step: int) -> None:
        self.now = now = State(field, sigma, torch.full((len(field),), step))
        self.sum, self.looks = self.sum + field, self.looks + 1
        losses = (_dot(self.kernels, self.response(field)) - self.observed).square()
        for name, errors in (("lowest", 0.0), ("clear", 1.0)):
            if name not in self.kept:
                self.kept[name], self.losses[name] = now.clone(), losses
            gain = self.losses[name] - losses
            mean = gain.sum(1) / self.number
            variance = ((gain - mean[:, None]).square() * self.inside).sum(1) / (self.number - 1)
            better = mean > errors * (variance / self.number).sqrt()
            self.kept[name].take(better, now)
            self.losses[name] = torch.where(better[:, None], losses, self.losses[name])

    def trained(self) -> Trained:
        average = State(self.sum / self.looks if self.looks else self.now.field, self.now.sigma, self.now.step)
        return Trained(self.now, self.kept["lowest"], self.kept["clear"], average)
