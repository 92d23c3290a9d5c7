import math
from typing import Any

import pytest
import torch
from loops import assert_same_bits, mlp, seeded
from torch import Tensor, nn

from twinboot import Blocks, Twins
from twinboot.distributed.sketch import Sketch, _signs
from twinboot.groups import Partition


def partition_of(*shapes: tuple[int, ...], groups: Any = "tensor") -> Partition:
    model = nn.Module()
    for i, shape in enumerate(shapes):
        model.register_parameter(f"w{i}", nn.Parameter(torch.zeros(shape)))
    return Partition.of(model, groups)


def squares(sketch: Sketch, partition: Partition, difference: list[Tensor], seed: int) -> Tensor:
    """For each sigma, the squared distance that the sketch estimates."""
    total = torch.zeros_like(partition.sigma)
    for i, part in enumerate(sketch.split(sketch.of(difference, seed, beside=total))):
        partition.add_squares_(total, [i], [part], [part])
    return total


@pytest.mark.parametrize("uneven", [False, True])
def test_a_sketched_square_has_the_expectation_and_variance_of_the_closed_form(uneven: bool) -> None:
    entries, k, draws = 700, 31, 3000  # the last bucket row is not full
    d = torch.randn(entries, generator=seeded(0), dtype=torch.float64)
    if uneven:
        d *= torch.logspace(0, -2, entries, dtype=torch.float64)
    partition = partition_of((entries,)).double()
    partition.sigma = partition.sigma.double()
    sketch = Sketch(partition, k)
    found = torch.stack([squares(sketch, partition, [d], seed)[0] for seed in range(draws)])
    buckets = torch.arange(entries) % k
    shares = torch.zeros(k, dtype=d.dtype).index_add_(0, buckets, d.square())
    variance = 2 * (shares.square().sum() - d.pow(4).sum())
    assert abs(found.mean() - d.square().sum()) < 4 * (variance / draws).sqrt()
    # The standard error of a sample variance, from the kurtosis that the draws themselves show.
    fourth = (found - found.mean()).pow(4).mean()
    assert abs(found.var() - variance) < 4 * ((fourth - variance**2) / draws).sqrt()
    if not uneven:  # spread over many entries: 2 / k of the square, to a tenth
        assert float(variance) == pytest.approx(2 / k * float(d.square().sum()) ** 2, rel=0.1)


def test_sketches_of_units_are_unbiased_for_each_unit() -> None:
    shape, k, draws = (3, 4, 5, 5), 17, 2000
    partition = partition_of(shape, groups="unit")
    sketch = Sketch(partition, k)
    assert sketch.shapes == [(3, k, 1, 1)]
    d = torch.randn(shape, generator=seeded(0)) * torch.tensor([0.1, 1.0, 3.0]).view(3, 1, 1, 1)
    found = torch.stack([squares(sketch, partition, [d], seed) for seed in range(draws)])
    exact = partition.sum_of_squares([d])
    assert ((found.mean(0) - exact).abs() < 4 * found.std(0) / math.sqrt(draws)).all()


def test_labels_along_two_dimensions_as_of_transposed_convolutions_are_sketched_row_by_row() -> None:
    def by_pair(name: str, parameter: Tensor) -> tuple[str, Tensor]:
        return name, torch.arange(4).view(2, 2, 1)

    partition = partition_of((2, 2, 50), groups=by_pair)
    sketch = Sketch(partition, 7)
    assert sketch.shapes == [(2, 2, 7)]
    d = torch.zeros(2, 2, 50)
    d[0, 1, 3] = 2.0  # a single entry is alone in its bucket: no error
    assert squares(sketch, partition, [d], seed=0).tolist() == [0, 4, 0, 0]


def test_a_parameter_that_a_sketch_would_not_halve_is_sent_itself() -> None:
    assert Sketch(partition_of((200,), (201,), (3, 67)), 100).shapes == [(200,), (100,), (100,)]
    assert Sketch(partition_of((40, 30), groups="unit"), 15).shapes == [(40, 30)]
    assert Sketch(partition_of((40, 31), groups="unit"), 15).shapes == [(40, 15)]
    assert Sketch(partition_of((30, 30), groups=Blocks((3, 3))), 5).shapes == [(30, 30)]
    assert len(Sketch(partition_of((101,), (5, 5), (200, 3)), 50)) == 50 + 25 + 50


def test_small_parameters_are_exact() -> None:
    partition = Twins(mlp()).partition
    sketch = Sketch(partition, 251)
    d = [torch.randn(shape, generator=seeded(i)) for i, shape in enumerate(partition.parameter_shapes.values())]
    torch.testing.assert_close(squares(sketch, partition, d, seed=0), partition.sum_of_squares(d))


def test_a_sketch_is_linear_and_its_signs_depend_on_the_seed_alone() -> None:
    partition = partition_of((1000,), (30, 40))
    sketch = Sketch(partition, 61)
    first, second = ([torch.randn(s, generator=seeded(i)) for s in ((1000,), (30, 40))] for i in range(2))
    of = [sketch.of(w, 5, beside=partition.sigma) for w in (first, second)]
    difference = [a - b for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(of[0] - of[1], sketch.of(difference, 5, beside=partition.sigma), atol=1e-5, rtol=1e-5)
    assert_same_bits(of[0], sketch.of(first, 5, beside=partition.sigma))
    assert not torch.equal(of[0], sketch.of(first, 6, beside=partition.sigma))


def test_signs_have_mean_0_and_neighbours_are_independent() -> None:
    ones = torch.ones(2**18 + 7)  # the last word of random bits is used in part
    signs = _signs(0)
    drawn = torch.cat([signs(ones), signs(ones)])
    assert drawn.abs().eq(1).all()
    for lag in (0, 1, 31, 32, 64, len(ones)):
        products = drawn if lag == 0 else drawn[lag:] * drawn[:-lag]
        assert abs(float(products.mean())) < 4 / math.sqrt(len(products))


def test_large_tensors_are_summed_part_by_part() -> None:
    n, k = 2 * 2**18 + 100, 61
    w = torch.randn(n, generator=seeded(0))
    partition = partition_of((n,))
    sums = Sketch(partition, k).of([w], 3, beside=partition.sigma)
    signs, parts = _signs(3), w.split(2**18 // k * k)
    assert len(parts) == 3
    signed = torch.cat([signs(part[None])[0] for part in parts])
    expected = torch.zeros(k).index_add_(0, torch.arange(n) % k, signed)
    torch.testing.assert_close(sums, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_summed_in_float32_or_better(dtype: torch.dtype) -> None:
    partition = partition_of((1000,))
    w = torch.randn(1000, generator=seeded(0)).to(dtype)
    sketch = Sketch(partition, 61)
    sent = sketch.of([w], 0, beside=torch.zeros(1, dtype=torch.float64))
    assert sent.dtype == torch.float64
    if dtype != torch.float64:
        assert_same_bits(sent, sketch.of([w.float()], 0, beside=partition.sigma).double())


def test_a_sketch_does_not_depend_on_memory_order() -> None:
    d = torch.randn(8, 5, 3, 3, generator=seeded(0))
    for groups in ("tensor", "unit"):
        partition = partition_of((8, 5, 3, 3), groups=groups)
        sketch = Sketch(partition, 11)
        found = [
            torch.stack([squares(sketch, partition, [t], seed) for seed in range(300)]).mean(0)
            for t in (d, d.contiguous(memory_format=torch.channels_last))
        ]
        exact = partition.sum_of_squares([d])
        assert all(((f / exact - 1).abs() < 4 * math.sqrt(2 / 11 / 300) * 1.3).all() for f in found)
