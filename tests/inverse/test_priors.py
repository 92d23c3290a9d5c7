"""What a prior adds to sigma, against the posterior of problems in which each measurement sees one cell."""

import math

import pytest
import torch
from torch import Tensor

from twinboot import Blocks, Bootstrap, Dense, invert
from twinboot.groups import Partition
from twinboot.inverse.measurements import see
from twinboot.inverse.priors import PROBES, raised

CELLS = 12


def sigma_by_prior(forward: object, rows: int, prior: float, noise: float, block: int = 1) -> tuple[Tensor, Bootstrap]:
    """What the prior leaves where the twins' own sigma is 0."""
    bootstrap, zeros = Bootstrap(rows, seed=3), torch.zeros(CELLS)
    data = see(forward, torch.ones(rows), zeros, bootstrap, None, 0)  # type: ignore[arg-type]
    partition = Partition.of(torch.nn.ParameterDict({"field": zeros}), Blocks((block,)))
    return raised(zeros, prior, zeros, zeros, data, partition, noise, 0), bootstrap


@pytest.mark.parametrize("divisible", [True, False])
def test_cells_that_are_measured_alone_keep_the_variance_of_their_posterior(divisible: bool) -> None:
    """Each measurement sees one cell, so random signs give the diagonal of J'J exactly when each cell is seen once."""
    strength = torch.linspace(0.5, 3, CELLS)
    operator = Dense(torch.diag(strength))
    found, bootstrap = sigma_by_prior(operator if divisible else operator.__call__, CELLS, prior=2.0, noise=0.3)
    seen = torch.zeros(CELLS)
    seen[bootstrap.seen] = 1  # out-of-bag measurements do not count
    assert 0 < seen.sum() < CELLS
    torch.testing.assert_close(found, (1 / 4 + seen * strength**2 / 0.09).rsqrt())


def test_random_probes_give_the_information_of_a_dense_operator_on_average() -> None:
    """Within a group of D cells the estimate of the mean diagonal has a relative error of sqrt(2 / (D * probes)), if
    the columns of J are nearly orthogonal, as here."""
    rows = 400
    matrix = torch.randn(rows, CELLS, generator=torch.Generator().manual_seed(0))
    found, bootstrap = sigma_by_prior(Dense(matrix), rows, prior=1.0, noise=0.5, block=6)
    diagonal = matrix[bootstrap.seen].square().sum(0).view(2, 6).mean(1).repeat_interleave(6)
    expected = (1 + diagonal / 0.25).rsqrt()
    width = 4 * math.sqrt(2 / (6 * PROBES)) / 2  # a root halves relative errors
    assert ((found / expected - 1).abs() < width).all()
    assert found[0] == found[5] != found[6]


def test_invert_raises_sigma_to_the_prior_where_nothing_is_measured_and_only_there() -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(200, CELLS, generator=generator)
    matrix[:, 9:] = 0
    truth = torch.randn(CELLS, generator=generator)
    observed = matrix @ truth + 0.1 * torch.randn(200, generator=generator)
    plain, with_prior, found = (
        invert(Dense(matrix), observed, torch.zeros(CELLS), steps=600, prior=prior) for prior in (None, 3.0, "found")
    )
    assert torch.equal(plain.field, with_prior.field)
    assert not plain.sigma[9:].any()
    torch.testing.assert_close(with_prior.sigma[9:], torch.full((3,), 3.0))
    assert (with_prior.sigma[:9] >= plain.sigma[:9]).all()
    assert (with_prior.sigma[:9] < 0.1).all()
    # The root mean square of the field's distance from the start.
    torch.testing.assert_close(found.sigma[9:], found.field.square().mean().sqrt().expand(3))


@pytest.mark.parametrize("prior", [0, -1.0, "none", True, math.nan, [1.0]])
def test_other_values_of_prior_are_refused(prior: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r'^prior must be a number above 0, "found" or None, not .*\.$'):
        invert(Dense(torch.eye(3)), torch.ones(3), torch.zeros(3), prior=prior)  # type: ignore[arg-type]
