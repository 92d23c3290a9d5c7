from itertools import chain
from types import SimpleNamespace
from typing import Self

import pytest
import torch
from torch import Tensor

from twinboot import Dense
from twinboot.experiments.seismic import cost as seismic_cost
from twinboot.experiments.seismic.descent import Schedule
from twinboot.experiments.seismic.kernels import Problem, Task, problem, respond
from twinboot.inverse.operators import Forward


@pytest.fixture(scope="module")
def small() -> Problem:
    return problem(Task(64, 0.3, 2.0, 1.0, 1.0), 0)


def test_the_operator_is_that_of_the_problem(small: Problem) -> None:
    expected = small.kernels @ respond("tanh", 2.0 * small.truth).flatten()
    torch.testing.assert_close(seismic_cost.operator(small)(small.truth), expected)


@pytest.mark.parametrize("batch", [None, 8])
def test_each_turn_but_the_first_has_the_time_of_a_step_of_both(small: Problem, batch: int | None) -> None:
    ticks: list[int] = []
    schedule = Schedule(steps=1, rate=0.01, decay=0.99, batch=batch)
    found = seismic_cost.cost(small, schedule, 3, lambda: ticks.append(1))
    assert found["turn"].tolist() == [2, 3]
    assert (found[["standard", "twins"]] > 0).all(axis=None)
    assert len(ticks) == 3


class Recording(Dense):
    """Keeps how many measurements each call computes, and which batches were asked for."""

    sizes: list[int]
    batches: list[list[int]]

    def __call__(self, field: Tensor) -> Tensor:
        found = super().__call__(field)
        self.sizes.append(len(found))
        return found

    def rows(self, index: Tensor | slice) -> Self:
        if isinstance(index, Tensor):
            self.batches.append(index.tolist())
        return super().rows(index)

    def ends(self, length: int) -> Forward:
        pair = super().ends(length)

        def counted(fields: Tensor) -> Tensor:
            self.sizes.extend([length, length])
            return pair(fields)

        return counted


@pytest.fixture
def recording(small: Problem, monkeypatch: pytest.MonkeyPatch) -> Recording:
    made = Recording(small.kernels, torch.tanh)
    made.sizes, made.batches = [], []
    monkeypatch.setattr(seismic_cost, "operator", lambda problem: made)
    return made


def test_each_is_charged_for_its_own_steps(
    small: Problem, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that counts calls of the operator: one in a plain step; two in a step of twins, and one more in each
    look at the unseen, after steps 30, 40, 50 and 60, 70, 75."""
    monkeypatch.setattr(seismic_cost, "time", SimpleNamespace(perf_counter=lambda: len(recording.sizes)))
    found = seismic_cost.cost(small, Schedule(steps=1, rate=0.01, decay=0.99), 3)
    assert found["standard"].tolist() == [1, 1]
    assert found["twins"].tolist() == [2 + 3 / 25] * 2


@pytest.mark.parametrize(("batch", "rows"), [(None, 64), (10, 10)])
def test_the_plain_loop_computes_a_batch_in_each_step(
    small: Problem, recording: Recording, batch: int | None, rows: int
) -> None:
    """And takes no measurement again in an epoch, here of six batches; what is no full one is left out."""
    steps = seismic_cost._standard(recording, small.observed, Schedule(1, 0.01, 0.99, batch=batch))
    next(steps)
    next(steps)
    assert recording.sizes == [rows] * (2 * seismic_cost.TURN)
    taken = recording.batches
    epochs = [list(chain.from_iterable(taken[start : start + 6])) for start in range(0, len(taken) - 5, 6)]
    assert [len(set(epoch)) for epoch in epochs] == ([60] * 8 if batch else [])
    assert len(set(map(tuple, epochs))) == len(epochs)
