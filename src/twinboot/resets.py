"""When to reset the twins, and how.

A schedule is a function of the count (of epochs or steps, from 1) that says yes or no:

    due = resets.every(1)
    for epoch in range(1, epochs + 1):
        ...
        if due(epoch):
            twins.reset()

A schedule keeps no state, so a run that is resumed asks it the same questions and gets the same answers.

A mode says how far from their mean the copies are put, in units of sigma.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from ._core.checks import is_number, is_whole, require_one_of, shown
from ._core.fingerprints import of_function

__all__ = ["at", "every", "growing", "never", "steps"]

Mode = Literal["sample", "mean", "centered"]
SHORT = 100  # steps of an epoch: with 79, resets within epochs made no clear difference (docs/ablations.md)


Fill = Callable[[Tensor], None]  # fills a tensor with standard normals


def _sample(away: Tensor, fill_: Fill) -> None:
    """All copies independently, as in the paper."""
    fill_(away)


def _mean(away: Tensor, fill_: Fill) -> None:
    """All copies at the mean."""


def _centered(away: Tensor, fill_: Fill) -> None:
    """As `"sample"`, given that the mean of the copies stays where it is."""
    fill_(away)
    away -= away.mean(0)


# How far from their mean the copies [copies, ...] are put, in units of sigma. It is 0 at first.
MODES: dict[str, Callable[[Tensor, Fill], None]] = {"sample": _sample, "mean": _mean, "centered": _centered}


def require_mode(mode: str) -> None:
    require_one_of(list(MODES), "reset mode", mode)


class Schedule(Protocol):
    """Anything that answers whether a reset is due at a count; a function of your own will do."""

    def __call__(self, count: int, /) -> bool: ...


@dataclass(frozen=True)
class every:
    """A reset at each multiple of `interval`: the `K` of Algorithm 1.

    >>> due = every(3)
    >>> [t for t in range(1, 10) if due(t)]
    [3, 6, 9]
    """

    interval: int

    def __post_init__(self) -> None:
        _positive("every", "interval", self.interval)

    def __call__(self, count: int) -> bool:
        return _counted(count) % self.interval == 0


@dataclass(frozen=True, init=False)
class at:
    """A reset at the counts named, such as the epochs {1, 2, 6, 12} of Appendix A.3.

    >>> due = at(1, 2, 6, 12)
    >>> [t for t in range(1, 41) if due(t)]
    [1, 2, 6, 12]
    """

    counts: tuple[int, ...]

    def __init__(self, *counts: int) -> None:
        if not counts:
            raise ValueError("at() needs at least one count; use never() for no reset at all.")
        for count in counts:
            _positive("at", "each count", count)
        object.__setattr__(self, "counts", tuple(sorted(set(counts))))

    def __call__(self, count: int) -> bool:
        return _counted(count) in self.counts


@dataclass(frozen=True)
class growing:
    """Resets that grow rarer: the first at `first`, each interval `factor` times the one before, up to `most`.

    Frequent while the twins could still drift into different basins, rare once they share one (section 3.5).

    >>> due = growing(first=50, factor=1.5)
    >>> [t for t in range(1, 1000) if due(t)]
    [50, 125, 238, 406, 659]
    >>> due = growing(first=50, factor=1.5, most=100)
    >>> [t for t in range(1, 500) if due(t)]
    [50, 125, 225, 325, 425]
    """

    first: int = 50
    factor: float = 1.5
    most: int | None = None

    def __post_init__(self) -> None:
        _positive("growing", "first", self.first)
        if not is_number(self.factor) or not 1 <= self.factor < math.inf:
            raise ValueError(f"growing() needs a finite factor of at least 1, not {shown(self.factor)}.")
        if self.most is not None:
            _positive("growing", "most", self.most)
            if self.most < self.first:
                raise ValueError(f"growing() needs most to be at least first, {self.first}, not {self.most}.")

    def __call__(self, count: int) -> bool:
        # The n-th reset comes after the sum of n intervals, rounded: increasing in n.
        due = bisect_left(range(1, _counted(count) + 1), count, key=self._nth)
        return due < count and self._nth(due + 1) == count

    def _nth(self, n: int) -> int:
        growing = n
        if self.most is not None and self.factor > 1:  # after so many intervals, all are the longest
            growing = min(n, math.ceil(math.log(self.most / self.first) / math.log(self.factor)))
        try:  # first * (1 + factor + ... + factor^(growing - 1))
            total = growing if self.factor == 1 else (self.factor**growing - 1) / (self.factor - 1)
        except OverflowError:  # so far ahead that no run gets there
            return 2**62
        return int(min(self.first * total + (n - growing) * (self.most or 0) + 0.5, 2.0**62))


@dataclass(frozen=True)
class steps:
    """A schedule that counts steps where `fit` and the integrations would count epochs: for resets within an epoch.

    Section 3.5 has them frequent at first, before the twins drift apart, and rare later:
    `steps(growing(first=10, factor=1.1, most=80))`.

    >>> due = steps(every(10))
    >>> [t for t in range(1, 40) if due(t)]
    [10, 20, 30]
    """

    schedule: Schedule

    def __post_init__(self) -> None:
        require_schedule(self.schedule, "schedule")

    def __call__(self, count: int) -> bool:
        return self.schedule(count)


@dataclass(frozen=True)
class never:
    """No reset: what the paper's second figure shows to fail where there is more than one basin."""

    def __call__(self, count: int) -> bool:
        return _counted(count) < 1


def is_due(schedule: Schedule, count: int) -> bool:
    """What a schedule says of a count; a sentence if a function of the user's gives no answer."""
    answer = schedule(count)
    if not isinstance(answer, (bool, int, np.bool_)):
        raise TypeError(f"the reset schedule must answer True or False, not {shown(answer)}.")
    return bool(answer)


def require_schedule(given: Schedule, argument: str = "reset") -> None:
    if not callable(given) or isinstance(given, type):
        raise TypeError(f"{argument} must be a schedule such as twinboot.resets.every(1), not {shown(given)}.")


def steps_and_epochs(due: Schedule) -> tuple[Schedule, Schedule]:
    """A schedule as two: of what it says of steps, and of epochs; one of them is never due."""
    return (due, never()) if isinstance(due, steps) else (never(), due)


def usual(epoch: int) -> Schedule:
    """The default of `fit` and `TwinModule`, by the number of steps in an epoch: a reset after each epoch, as in the
    paper. In long epochs there are more at first: from random weights, twins diverge within a few hundred steps, and
    their mean no longer works as a network (docs/first-epoch.md)."""
    return every(1) if epoch <= SHORT else steps(growing(first=10, factor=1.1, most=epoch))


def described(schedule: Schedule) -> str:
    """A schedule in words, by which two runs can be compared."""
    if isinstance(schedule, steps):
        return f"steps({described(schedule.schedule)})"
    return repr(schedule) if isinstance(schedule, (every, at, growing, never)) else of_function(schedule)


def _positive(schedule: str, argument: str, value: int) -> None:
    if not is_whole(value) or not 1 <= value < 2**62:
        raise ValueError(f"{schedule}() needs {argument} to be a whole number of at least 1, not {shown(value)}.")


def _counted(count: int) -> int:
    if not is_whole(count) or not 1 <= count < 2**62:
        raise ValueError(
            f"counts of epochs or steps start at 1, not {shown(count)}: ask due(epoch + 1) in a loop from 0."
        )
    return count
