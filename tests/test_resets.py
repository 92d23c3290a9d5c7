import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinboot import resets


def due(schedule: resets.Schedule, until: int) -> list[int]:
    return [t for t in range(1, until + 1) if schedule(t)]


def test_every_is_due_at_multiples() -> None:
    assert due(resets.every(1), 4) == [1, 2, 3, 4]
    assert due(resets.every(4), 13) == [4, 8, 12]


def test_at_is_due_at_the_counts_of_the_papers_sweeps() -> None:
    assert due(resets.at(12, 1, 6, 2, 2), 40) == [1, 2, 6, 12]


def test_never_is_never_due() -> None:
    assert due(resets.never(), 100) == []


@given(st.integers(1, 60), st.floats(1, 4, allow_nan=False))
def test_growing_intervals_start_with_the_first_and_grow_by_the_factor(first: int, factor: float) -> None:
    counts = due(resets.growing(first, factor), 2000)
    assert counts[0] == first
    intervals = [b - a for a, b in zip([0, *counts], counts, strict=False)]
    for k, interval in enumerate(intervals):  # rounding moves each end of an interval by half a count at most
        assert interval == pytest.approx(first * factor**k, abs=1)


def test_the_usual_schedule_is_the_papers_but_for_long_epochs_which_begin_with_more_resets() -> None:
    assert resets.usual(100) == resets.every(1)
    assert resets.usual(101) == resets.steps(resets.growing(10, 1.1, most=101))


def test_a_schedule_is_described_by_what_it_does() -> None:
    assert resets.described(resets.steps(resets.at(3, 1))) == "steps(at(counts=(1, 3)))"
    assert resets.described(lambda count: count > 3) != resets.described(lambda count: count > 4)


def test_growing_with_factor_one_is_every() -> None:
    assert due(resets.growing(7, 1.0), 50) == due(resets.every(7), 50)
    assert due(resets.growing(7, 1.0, most=9), 50) == due(resets.every(7), 50)


@given(st.integers(1, 60), st.floats(1.001, 4, allow_nan=False), st.integers(0, 100))
def test_growing_intervals_end_at_the_longest(first: int, factor: float, more: int) -> None:
    counts = due(resets.growing(first, factor, most=first + more), 400)
    intervals = [b - a for a, b in zip([0, *counts], counts, strict=False)]
    for k, interval in enumerate(intervals):
        assert interval == pytest.approx(min(first * factor ** min(k, 500), first + more), abs=1)


def test_steps_are_due_as_their_schedule_is_and_epochs_then_never() -> None:
    own = resets.steps(resets.every(3))
    by_step, by_epoch = resets.steps_and_epochs(own)
    assert due(by_step, 9) == [3, 6, 9]
    assert due(by_epoch, 9) == []
    by_step, by_epoch = resets.steps_and_epochs(resets.every(3))
    assert due(by_step, 9) == []
    assert due(by_epoch, 9) == [3, 6, 9]


@pytest.mark.parametrize(
    "schedule", [resets.every(5), resets.at(1), resets.growing(), resets.never(), resets.steps(resets.every(5))]
)
def test_counts_from_zero_are_refused(schedule: resets.Schedule) -> None:
    with pytest.raises(ValueError, match=r"start at 1, not 0: ask due\(epoch \+ 1\)"):
        schedule(0)


def test_growing_answers_far_ahead() -> None:
    assert not resets.growing(50, 4.0)(10**9)


@pytest.mark.parametrize("reset", [1, 0, "every", resets.every])
def test_what_is_no_schedule_is_refused_in_a_sentence(reset: Any) -> None:
    with pytest.raises(TypeError, match=rf"such as twinboot.resets.every\(1\), not {reset!r}"):
        resets.require_schedule(reset)


@pytest.mark.parametrize("schedule", [10, None, resets.every])
def test_steps_of_no_schedule_are_refused(schedule: Any) -> None:
    with pytest.raises(TypeError, match=r"^schedule must be a schedule"):
        resets.steps(schedule)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: resets.every(0), r"every\(\) needs interval to be a whole number of at least 1, not 0"),
        (lambda: resets.every(2.5), r"whole number of at least 1, not 2.5"),  # type: ignore[arg-type]
        (lambda: resets.at(), r"at\(\) needs at least one count; use never\(\)"),
        (lambda: resets.at(3, -1), r"at\(\) needs each count to be a whole number of at least 1, not -1"),
        (lambda: resets.growing(0), r"growing\(\) needs first to be a whole number"),
        (lambda: resets.growing(5, 0.5), r"growing\(\) needs a finite factor of at least 1, not 0.5"),
        (lambda: resets.growing(5, most=4), r"growing\(\) needs most to be at least first, 5, not 4"),
        (lambda: resets.growing(5, most=7.5), r"growing\(\) needs most to be a whole number"),  # type: ignore[arg-type]
        (lambda: resets.growing(5, float("nan")), r"finite factor of at least 1, not nan"),
    ],
)
def test_bad_schedules_are_refused_in_a_sentence(make: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()  # type: ignore[operator]


def test_a_schedule_answers_yes_or_no() -> None:
    assert resets.is_due(lambda count: count % 2, 3) is True
    assert resets.is_due(resets.every(2), 3) is False
    for answer in (None, torch.zeros(3), "yes", math.nan):
        with pytest.raises(TypeError, match=r"^the reset schedule must answer True or False, not .*\.$"):
            resets.is_due(lambda count: answer, 1)  # type: ignore[arg-type, return-value]  # noqa: B023
