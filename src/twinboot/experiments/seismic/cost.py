"""What a step of the seismic task costs, with Twin-Boot and without, through the dense operator itself.

Both take turns, a few steps each, in one process, so that whatever else the machine does slows both alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from ...inverse.invert import invert
from ...inverse.operators import Dense
from .descent import Schedule
from .kernels import SIDE, Problem, respond

TURN = 25  # steps


def operator(problem: Problem) -> Dense:
    task = problem.task
    return Dense(problem.kernels, lambda field: respond(task.response, task.beta * field))


def cost(problem: Problem, schedule: Schedule, turns: int, tick: Callable[[], object] = lambda: None) -> pd.DataFrame:
    """Seconds of a step in each turn: of one field with Adam, and of `invert` with twins, noise, sigma and resets."""
    forward, rows = operator(problem), []
    single = _standard(forward, problem.observed, schedule)
    next(single)
    started = time.perf_counter()

    def take_turns(step: int) -> None:
        nonlocal started
        if step % TURN:
            return
        twin = time.perf_counter() - started
        started = time.perf_counter()
        next(single)
        alone = time.perf_counter() - started
        rows.append({"turn": step // TURN, "standard": alone / TURN, "twins": twin / TURN})
        tick()
        started = time.perf_counter()

    invert(
        forward,
        problem.observed,
        torch.zeros(SIDE, SIDE),
        steps=turns * TURN,
        optimizer=lambda fields: torch.optim.Adam(fields, schedule.rate, fused=True),
        decay=schedule.decay,
        batch_size=schedule.batch,
        progress=take_turns,
    )
    return pd.DataFrame(rows[1:])  # the first has the preparations in it


def _standard(forward: Dense, observed: Tensor, schedule: Schedule) -> Iterator[None]:
    """The plain loop, as fast as it goes: the same layout of the matrix, a fused loss and a fused Adam."""
    field = torch.zeros(SIDE, SIDE, requires_grad=True)
    optimizer = torch.optim.Adam([field], schedule.rate, fused=True)
    annealing = torch.optim.lr_scheduler.ExponentialLR(optimizer, schedule.decay)
    order, epoch = torch.arange(len(observed)), torch.Generator().manual_seed(0)
    place = len(observed)
    while True:
        for _ in range(TURN):
            optimizer.zero_grad()
            if schedule.batch is None:
                loss = F.mse_loss(forward(field), observed)
            else:
                if place + schedule.batch > len(observed):
                    order, place = torch.randperm(len(observed), generator=epoch), 0
                batch = order[place : place + schedule.batch]
                place += schedule.batch
                loss = F.mse_loss(forward.rows(batch)(field), observed[batch])
            loss.backward()
            optimizer.step()
            annealing.step()
        yield
