from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from loops import assert_same_bits, seeded
from torch import Tensor

from twinboot import Bootstrap, Dense, invert
from twinboot.inverse.measurements import Batches, Divided, Weighted, see

N, CELLS = 60, 12
MakeData = Any


class Traces:
    """Measurements [n, ...], each a few nonlinear functions of the field; records which are computed."""

    def __init__(self, kernels: Tensor, record: list[list[int]] | None = None, own: Tensor | None = None) -> None:
        self.kernels, self.record = kernels, [] if record is None else record
        self.own = torch.arange(len(kernels)) if own is None else own

    def __call__(self, field: Tensor) -> Tensor:
        self.record.append(self.own.tolist())
        return torch.tanh(self.kernels @ field.flatten())

    def rows(self, index: Tensor | slice) -> Traces:
        return type(self)(self.kernels[index], self.record, self.own[index])


def traces(*axes: int) -> tuple[Traces, Tensor]:
    """An operator whose measurements have these further axes, and noisy measurements."""
    generator = seeded(0)
    kernels = torch.randn(N, *axes, CELLS, generator=generator, dtype=torch.double) / 3
    noise = torch.randn(N, *axes, generator=generator, dtype=torch.double)
    return Traces(kernels), torch.tanh(kernels @ torch.ones(CELLS, dtype=torch.double)) + 0.1 * noise


def some_fields(replicas: int) -> Tensor:
    return torch.randn(replicas, 3, 4, generator=seeded(1), dtype=torch.double)


START = torch.zeros(3, 4, dtype=torch.double)
BOOTSTRAPS = [
    Bootstrap(N, 2, seed=1),
    Bootstrap(N, 3, seed=2),
    Bootstrap(N, 2, seed=3, kind="bayesian"),
    Bootstrap(N, 3, seed=4, kind="poisson"),
]
AXES: list[tuple[int, ...]] = [(), (2,), (2, 3)]
three_ways = pytest.mark.parametrize("make", [Weighted, Divided, partial(Batches, batch_size=10, seed=0)])
all_bootstraps = pytest.mark.parametrize("bootstrap", BOOTSTRAPS, ids=repr)


def written_out(forward: Any, observed: Tensor, bootstrap: Bootstrap, fields: Tensor) -> Tensor:
    """The sum over twins of the mean over all measurements of weight * residual^2."""
    total = torch.zeros((), dtype=torch.double)
    for counts, field in zip(bootstrap.counts.double(), fields, strict=True):
        squared = (forward(field) - observed).square().reshape(N, -1).mean(1)
        total = total + (counts * squared).sum() / counts.sum()
    return total


@all_bootstraps
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("make", [Weighted, Divided])
def test_loss_and_gradient_equal_the_formula(make: MakeData, bootstrap: Bootstrap, axes: tuple[int, ...]) -> None:
    """Both in units of the mean square of the measurements that some twin sees."""
    forward, observed = traces(*axes)
    fields = some_fields(bootstrap.replicas)
    value, gradient = make(forward, observed, START, bootstrap).loss(fields, 1)
    apart = fields.clone().requires_grad_()
    expected = written_out(forward, observed, bootstrap, apart)
    expected = expected / observed[bootstrap.seen].square().mean()
    assert value == pytest.approx(expected.item(), rel=1e-12)
    [slope] = torch.autograd.grad(expected, apart)
    torch.testing.assert_close(gradient, slope)
    assert not fields.requires_grad


@three_ways
@pytest.mark.parametrize("replicas", [2, 3])
def test_out_of_bag_measurements_change_no_bit_of_the_loss(make: MakeData, replicas: int) -> None:
    forward, observed = traces(2)
    bootstrap = Bootstrap(N, replicas, seed=6)
    other = observed.clone()
    other[bootstrap.unseen] = 1e6
    assert len(bootstrap.unseen) > 1
    first, second = (make(forward, y, START, bootstrap) for y in (observed, other))
    for step in range(1, 8):
        assert_same_bits(*(data.loss(some_fields(replicas), step) for data in (first, second)))
    field = some_fields(1)[0]
    assert (first.unseen_losses(field) < second.unseen_losses(field)).all()


@three_ways
def test_a_measurement_that_a_twin_sees_changes_the_loss(make: MakeData) -> None:
    """In the batch of some step. Without this, the test above could not fail."""
    forward, observed = traces()
    bootstrap = Bootstrap(N, seed=5)
    for index in bootstrap.seen[:5]:
        other = observed.clone()
        other[index] += 1
        first, second = (make(forward, y, START, bootstrap) for y in (observed, other))
        fields = some_fields(2)
        assert any(first.loss(fields, step)[0] != second.loss(fields, step)[0] for step in range(1, 7))


@three_ways
@pytest.mark.parametrize("axes", AXES)
def test_unseen_losses_are_squared_residuals_of_out_of_bag_measurements(make: MakeData, axes: tuple[int, ...]) -> None:
    forward, observed = traces(*axes)
    bootstrap, field = Bootstrap(N, seed=5), some_fields(1)[0]
    squared = (forward(field) - observed).square().reshape(N, -1).mean(1) / observed[bootstrap.seen].square().mean()
    unseen = [i for i in range(N) if not bootstrap.counts[:, i].any()]
    torch.testing.assert_close(make(forward, observed, START, bootstrap).unseen_losses(field), squared[unseen])


@pytest.mark.parametrize("make", [Weighted, Divided])
@pytest.mark.parametrize("axes", AXES)
def test_where_every_measurement_is_seen_there_are_no_unseen_losses(make: MakeData, axes: tuple[int, ...]) -> None:
    forward, observed = traces(*axes)
    data = make(forward, observed, START, Bootstrap(N, kind="bayesian"))
    assert data.unseen_losses(some_fields(1)[0]).shape == (0,)


@pytest.mark.parametrize("replicas", [2, 3])
def test_each_twin_computes_what_it_drew_once_and_nothing_else(replicas: int) -> None:
    forward, observed = traces()
    bootstrap = Bootstrap(N, replicas, seed=5)
    data = Divided(forward, observed, START, bootstrap)
    forward.record.clear()
    data.loss(some_fields(replicas), 1)
    assert [sorted(asked) for asked in forward.record] == [own.nonzero().flatten().tolist() for own in bootstrap.counts]
    forward.record.clear()
    data.unseen_losses(some_fields(1)[0])
    assert [sorted(asked) for asked in forward.record] == [bootstrap.unseen.tolist()]


def test_rows_that_both_twins_drew_are_stored_once() -> None:
    """The parts of two twins are views of one matrix, which has the rows that some twin sees."""
    data = Divided(Dense(torch.randn(N, CELLS)), torch.ones(N), torch.zeros(CELLS), bootstrap := Bootstrap(N))
    first, second = (part.columns.untyped_storage() for part in data.parts)  # type: ignore[attr-defined]
    assert first.data_ptr() == second.data_ptr()
    assert first.nbytes() == 4 * CELLS * len(bootstrap.seen)


@pytest.mark.parametrize("bootstrap", [Bootstrap(N, 2, seed=5), Bootstrap(N, 3, seed=5)], ids=repr)
@pytest.mark.parametrize("axes", AXES)
def test_an_epoch_of_batches_has_on_average_the_loss_and_gradient_of_all(
    bootstrap: Bootstrap, axes: tuple[int, ...]
) -> None:
    forward, observed = traces(*axes)
    fields = some_fields(bootstrap.replicas)
    data = Batches(forward, observed, START, bootstrap, batch_size=12, seed=0)
    values, gradients = zip(*(data.loss(fields, step) for step in range(1, 6)), strict=True)
    value, gradient = Weighted(forward, observed, START, bootstrap).loss(fields, 1)
    assert sum(values) / 5 == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(torch.stack(gradients).mean(0), gradient)
    assert len(set(values)) == 5


def epochs(bootstrap: Bootstrap, batch_size: int, steps: int, seed: int = 0) -> list[list[int]]:
    """What each call of the operator computes, twin by twin in each step."""
    forward, observed = traces()
    data = Batches(forward, observed, START, bootstrap, batch_size, seed)
    forward.record.clear()
    for step in range(1, steps + 1):
        data.loss(some_fields(bootstrap.replicas), step)
    return list(forward.record)


def joined(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def test_twins_that_divide_the_measurements_divide_a_batch() -> None:
    assert {len(batch) for batch in epochs(Bootstrap(N, kind="split"), 12, 4)} == {6}


@pytest.mark.parametrize("replicas", [2, 3])
def test_an_epoch_goes_through_all_draws_of_each_twin_once_and_the_next_in_another_order(replicas: int) -> None:
    bootstrap = Bootstrap(N, replicas, seed=5)
    asked = epochs(bootstrap, 12, 10)
    assert {len(batch) for batch in asked} == {12}
    for twin in range(replicas):
        first, second = (joined(asked[twin + start : start + 5 * replicas : replicas]) for start in (0, 5 * replicas))
        assert sorted(first) == sorted(second) == bootstrap.indices(twin).tolist()
        assert first != second
        assert first != sorted(first)
    assert epochs(bootstrap, 12, 10) == asked
    assert epochs(bootstrap, 12, 10, seed=1) != asked


@pytest.mark.parametrize("bootstrap", [Bootstrap(N, seed=5), Bootstrap(N, 3, seed=4, kind="poisson")], ids=repr)
def test_every_batch_is_full_and_no_draw_comes_twice_in_an_epoch(bootstrap: Bootstrap) -> None:
    """Also for twins with different numbers of draws. The rest of an epoch waits for the next one."""
    steps = int(bootstrap.counts.sum(1).min()) // 13
    asked = epochs(bootstrap, 13, 2 * steps)
    assert {len(batch) for batch in asked} == {13}
    for twin in range(bootstrap.replicas):
        own = Counter(joined(asked[twin : steps * bootstrap.replicas : bootstrap.replicas]))
        assert not own - Counter(bootstrap.indices(twin).tolist())


def test_a_step_always_has_the_same_batch() -> None:
    """LBFGS asks several times in a step, and a resumed run starts at a later one."""
    forward, observed = traces()
    data = Batches(forward, observed, START, Bootstrap(N), 10, 0)
    fields = some_fields(2)
    fourth, ninth = data.loss(fields, 4), data.loss(fields, 9)
    assert_same_bits(data.loss(fields, 4), fourth)
    assert_same_bits(data.loss(fields, 9), ninth)
    assert fourth[0] != ninth[0]


def test_see_takes_the_cheapest_way_that_the_operator_allows() -> None:
    forward, observed = traces(2)
    whole = partial(see, observed=observed, initial=START, seed=0)
    plain = whole(lambda v: forward(v), bootstrap=Bootstrap(N), batch_size=None)
    assert type(plain) is Weighted
    assert type(whole(forward, bootstrap=Bootstrap(N), batch_size=None)) is Divided
    assert type(whole(forward, bootstrap=Bootstrap(N), batch_size=5)) is Batches
    both_axes = whole(forward, bootstrap=Bootstrap(2 * N), batch_size=None)  # rows selects along the first axis only
    assert type(both_axes) is Weighted


class Shifted(Traces):
    """Returns the measurement after the requested one."""

    def rows(self, index: Any) -> Traces:
        return super().rows((index + 1) % len(self.kernels))


class Longer(Traces):
    def rows(self, index: Any) -> Traces:
        return self


@pytest.mark.parametrize(
    ("change", "batch_size", "message"),
    [
        (lambda f: lambda v: f(v), 5, r"batch_size needs an operator with a method rows\(index\)"),
        (lambda f: f, 0, "batch_size must be between 1 and the 60 measurements, not 0"),
        (lambda f: f, 61, "batch_size must be between 1 and the 60 measurements, not 61"),
        (lambda f: Shifted(f.kernels), None, r"forward.rows\(index\)\(field\) gives something else than"),
        (lambda f: Longer(f.kernels), None, r"forward.rows\(index\)\(field\) gives something else than"),
    ],
)
def test_bad_batches_and_rows_get_one_sentence(change: Any, batch_size: int | None, message: str) -> None:
    forward, observed = traces()
    with pytest.raises(ValueError, match=message) as caught:
        see(change(forward), observed, START + 0.1, Bootstrap(N), batch_size, 0)
    assert "\n" not in str(caught.value)


def test_batches_find_the_solution_of_a_linear_problem() -> None:
    """Batches of a sixth of the draws, with little noise."""
    generator = seeded(0)
    matrix = torch.randn(N, CELLS, generator=generator)
    truth = torch.randn(3, 4, generator=generator)
    observed = matrix @ truth.flatten() + 0.01 * torch.randn(N, generator=generator)
    run = partial(invert, Dense(matrix), observed, torch.zeros(3, 4), steps=600, decay=0.99)
    fast = partial(torch.optim.Adam, lr=0.05)
    found = run(batch_size=10, optimizer=fast)
    torch.testing.assert_close(found.field, truth, atol=0.05, rtol=0)
    assert not torch.equal(found.field, run(optimizer=fast).field)
    assert_same_bits(found.field, run(batch_size=10, optimizer=fast).field)


def test_weights_of_a_bayesian_bootstrap_go_with_a_divisible_operator() -> None:
    """Every twin sees every measurement, so there is no early stopping."""
    matrix = torch.randn(N, CELLS, generator=seeded(0))
    run = partial(
        invert,
        observed=matrix @ torch.ones(CELLS),
        initial=torch.zeros(CELLS),
        steps=20,
        stop=None,
        bootstrap=Bootstrap(N, kind="bayesian"),
    )
    torch.testing.assert_close(run(Dense(matrix)).field, run(lambda v: matrix @ v).field)


def test_a_batch_may_be_as_large_as_all_measurements() -> None:
    """One step is then an epoch, and has the whole loss."""
    forward, observed = traces()
    bootstrap, fields = Bootstrap(N, seed=5), some_fields(2)
    found = see(forward, observed, START, bootstrap, N, 0).loss(fields, 3)[0]
    expected = written_out(forward, observed, bootstrap, fields) / observed[bootstrap.seen].square().mean()
    assert found == pytest.approx(expected.item(), rel=1e-12)


def test_a_part_of_the_operator_that_ignores_the_field_is_refused() -> None:
    class Constant(Traces):
        def __call__(self, field: Tensor) -> Tensor:
            return super().__call__(field.detach())

    forward, observed = traces()
    data = see(Constant(forward.kernels), observed, START, Bootstrap(N), None, 0)
    with pytest.raises(ValueError, match="does not depend on the field"):
        data.loss(some_fields(2), 1)


def test_an_operator_whose_rows_are_a_number_is_an_ordinary_function() -> None:
    class Operator:
        rows = 20

        def __call__(self, field: Tensor) -> Tensor:
            return field.repeat(5)

    found = invert(Operator(), torch.ones(20), torch.zeros(4), steps=300)
    assert (found.field - 1).abs().max() < 0.1


def test_batches_of_a_bayesian_bootstrap_are_refused() -> None:
    bootstrap = Bootstrap(20, kind="bayesian")
    with pytest.raises(ValueError, match="weights, not draws to take a few of: leave batch_size out"):
        invert(Dense(torch.eye(20)), torch.ones(20), torch.zeros(20), batch_size=4, bootstrap=bootstrap, stop=None)


@pytest.mark.parametrize(
    ("function", "together"), [(None, True), (torch.tanh, True), (lambda v: v - v.mean(), False), (torch.triu, True)]
)
def test_a_function_that_mixes_cells_keeps_the_twins_of_a_dense_operator_apart(function: Any, together: bool) -> None:
    matrix = torch.randn(40, 9, generator=seeded(3))
    data = see(Dense(matrix, function), torch.ones(40), torch.zeros(3, 3), Bootstrap(40), None, 0)
    assert (data.pair is not None) == together
    fields = torch.randn(2, 3, 3, generator=seeded(4))
    plain = see(Dense(matrix, function).__call__, torch.ones(40), torch.zeros(3, 3), Bootstrap(40), None, 0)
    for a, b in zip(data.loss(fields, 1), plain.loss(fields, 1), strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b))


class Masked:
    """Rows by a mask, which loses their order."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def __call__(self, field: Tensor) -> Tensor:
        return self.matrix @ field

    def rows(self, index: Any) -> Masked:
        mask = torch.zeros(len(self.matrix), dtype=torch.bool)
        mask[index] = True
        return Masked(self.matrix[mask])


class Reversed(Masked):
    def rows(self, index: Any) -> Masked:
        return Reversed(self.matrix.flip(0)[index])


@pytest.mark.parametrize("kind", [Masked, Reversed])
def test_rows_in_a_wrong_order_are_refused_even_if_the_initial_measurements_are_equal(kind: type[Masked]) -> None:
    with pytest.raises(ValueError, match="gives something else than"):
        invert(kind(torch.randn(60, 4, generator=seeded(0))), torch.ones(60), torch.zeros(4))


def test_rows_may_be_a_plain_function_and_may_write_into_the_field() -> None:
    matrix = torch.randn(60, 4, generator=seeded(0))

    class Writing:
        def __call__(self, field: Tensor) -> Tensor:
            return matrix @ field.mul_(2)

        def rows(self, index: Any) -> Any:
            return lambda field: matrix[index] @ field.mul_(2)

    found = invert(Writing(), matrix @ torch.ones(4), torch.zeros(4), steps=300)
    assert (found.field - 0.5).abs().max() < 0.05
