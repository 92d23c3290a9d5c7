"""Full-waveform inversion by Twin-Boot and by Adam alone: one run of each, and how it is judged.

The records of a survey are made by the same solver that inverts them, and noise is added. A shot is what the bootstrap
resamples: the traces of one shot share its waves, so they are seen together or not at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from ... import resets
from ..._core import seeds
from ...data.bootstrap import UNSEEN, Bootstrap
from ...groups import Blocks
from ...inverse.invert import invert
from ...training.protocol import Protocol
from ..runner.experiment import Part, Tick, one_thread
from ..seismic.scores import correlation, covered
from . import velocity
from .acoustic import Survey, require_deepwave
from .config import Config, truth

SCALE = 1000.0  # m/s for a step of 1 in the field, which is what Adam's rate is made for
LEVEL = 0.9
METHODS = {
    "standard": "Adam, all shots, to the end",
    "held out": "Adam, stopped by held-out shots",
    "mean": "Twin-Boot, mean reset",
    "centered": "Twin-Boot, centered reset",
    "prior": "the same, sigma by a prior at least",
}


def parts(config: Config) -> list[Part]:
    require_deepwave()
    ground, ticks = truth(config), len(METHODS) * config.steps
    return [Part(f"run-{number}", ticks, partial(_run, config, ground, number)) for number in range(config.seeds)]


class Problem:
    """What is known to an inversion: a start, an operator and noisy records; and the truth to judge it by."""

    def __init__(self, config: Config, ground: Tensor, number: int) -> None:
        self.config, self.truth = config, ground
        self.start = velocity.smoothed(ground, config.smoothing / config.cell)
        self.survey = Survey(
            ground.shape[1],
            config.cell,
            config.shots,
            config.receivers,
            config.frequency,
            config.duration,
            config.interval,
            config.bounds[1],
        )
        clean = self.survey.record(ground)
        self.seed = seeds.derive(config.seed, "fwi", number)
        draw = torch.Generator().manual_seed(seeds.derive(self.seed, "records"))
        level = config.noise * clean.square().mean().sqrt()
        self.observed = clean + level * torch.randn(clean.shape, generator=draw)

    def velocity(self, field: Tensor) -> Tensor:
        return (self.start + SCALE * field).clamp(*self.config.bounds)

    def forward(self) -> Records:
        return Records(self, torch.arange(self.config.shots))

    def bootstrap(self) -> Bootstrap:
        """Of the shots: the first one drawn that leaves out at least two, which the rule for the stop needs."""
        for attempt in range(1000):
            found = Bootstrap(self.config.shots, seed=seeds.derive(self.seed, "shots", attempt))
            if len(found.unseen) >= 2:
                return found
        raise AssertionError("a thousand bootstrap samples leave out no two shots.")


@dataclass(frozen=True)
class Records:
    """The operator: of a field, the records of some shots. A twin computes those of the shots that it drew."""

    problem: Problem
    shots: Tensor

    def __call__(self, field: Tensor) -> Tensor:
        return self.problem.survey.record(self.problem.velocity(field), self.shots)

    def rows(self, index: Tensor | slice) -> Records:
        return Records(self.problem, self.shots[index])


@dataclass(frozen=True)
class Found:
    velocity: Tensor
    step: int  # that was kept
    unused: int  # shots that were not trained on
    sigma: Tensor | None = None


def by_adam(problem: Problem, tick: Tick, hold_out: bool) -> Found:
    """Adam on all shots to the end; or on most, and what predicts the others best is kept."""
    config = problem.config
    held = max(1, round(UNSEEN * config.shots)) if hold_out else 0
    order = torch.randperm(
        config.shots, generator=torch.Generator().manual_seed(seeds.derive(problem.seed, "held out"))
    )
    apart, used = order[:held], order[held:]
    records = problem.forward()
    field = torch.zeros_like(problem.truth, requires_grad=True)
    adam = torch.optim.Adam([field], lr=config.rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adam, config.decay)
    size = problem.observed.square().mean()  # as in `invert`, so that Adam's epsilon means the same
    best, lowest = Found(problem.start, 0, held), math.inf
    for step in range(1, config.steps + 1):
        adam.zero_grad()
        loss = (records.rows(used)(field) - problem.observed[used]).square().mean() / size
        loss.backward()
        adam.step()
        schedule.step()
        tick()
        if held and (step % config.check == 0 or step == config.steps):
            with torch.no_grad():
                left = (records.rows(apart)(field) - problem.observed[apart]).square().mean().item()
            if left < lowest:
                best, lowest = Found(problem.velocity(field.detach().clone()), step, held), left
    return best if held else Found(problem.velocity(field.detach()), config.steps, 0)


def by_twins(
    problem: Problem, tick: Tick, mode: Literal["mean", "centered"], prior: Literal["found"] | None = None
) -> Found:
    config = problem.config
    found = invert(
        problem.forward(),
        problem.observed,
        torch.zeros_like(problem.truth),
        protocol=Protocol(
            groups=Blocks((config.block, config.block)), reset=resets.growing(config.first_reset, 1.5), mode=mode
        ),
        steps=config.steps,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=config.rate),
        decay=config.decay,
        check=config.check,
        prior=prior,
        bootstrap=problem.bootstrap(),
        seed=problem.seed,
        progress=lambda step: tick(),
    )
    sigma = SCALE * found.sigma
    return Found(problem.velocity(found.field), found.best_step, len(found.bootstrap.unseen), sigma)


def _run(config: Config, ground: Tensor, number: int, tick: Tick) -> dict[str, pd.DataFrame]:
    methods: dict[str, Callable[[Problem], Found]] = {
        "standard": lambda problem: by_adam(problem, tick, hold_out=False),
        "held out": lambda problem: by_adam(problem, tick, hold_out=True),
        "mean": lambda problem: by_twins(problem, tick, "mean"),
        "centered": lambda problem: by_twins(problem, tick, "centered"),
        "prior": lambda problem: by_twins(problem, tick, "centered", prior="found"),
    }
    with one_thread():  # beside other work two gained nothing on grids so small, and sometimes stalled
        problem, rows, maps = Problem(config, ground, number), [], {"truth": ground}
        maps["start"] = problem.start
        for method, carry_out in methods.items():
            began = time.process_time()  # of this core: what else runs there does not count
            found = carry_out(problem)
            seconds = time.process_time() - began
            rows.append({"run": number, "method": method, **judged(problem, found), "seconds": round(seconds, 2)})
            maps[method] = found.velocity
            if found.sigma is not None:
                maps[f"{method} sigma"] = found.sigma
    tables = {"runs": pd.DataFrame(rows)}
    if number == 0:
        tables["maps"] = _cells(maps)
    return tables


def judged(problem: Problem, found: Found) -> dict[str, float]:
    """How far what was found is off, and whether its sigma says where."""
    error = (found.velocity - problem.truth).abs()
    depth = torch.arange(len(error), dtype=error.dtype)[:, None].expand_as(error)
    row = {
        "start": _rms(problem.start - problem.truth),
        "error": _rms(error),
        "step": found.step,
        "unused": found.unused,
        "sigma": math.nan,
        "correlation": math.nan,
        "depth": correlation(depth, error),
        "covered": math.nan,
    }
    if found.sigma is not None:
        row["sigma"] = _rms(found.sigma)
        row["correlation"] = correlation(found.sigma, error)
        row["covered"] = covered(error, found.sigma, LEVEL)
    return row


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def _cells(maps: dict[str, Tensor]) -> pd.DataFrame:
    """One row for each cell: where it lies, and its value in each map in m/s."""
    row, column = torch.meshgrid(*map(torch.arange, maps["truth"].shape), indexing="ij")
    cells = {"row": row.flatten().tolist(), "column": column.flatten().tolist()}
    return pd.DataFrame(
        cells | {name: values.flatten().double().round(decimals=2).tolist() for name, values in maps.items()}
    )
