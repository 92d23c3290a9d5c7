import math

import numpy as np
import pytest

from twinboot.experiments.regressions.tasks import BETWEEN, RHO, SIZE, TASKS, _expected


def test_expectations_are_those_of_normal_predictors() -> None:
    np.testing.assert_allclose(_expected(lambda x: np.ones(len(x))), np.eye(3), atol=1e-12)
    np.testing.assert_allclose(_expected(lambda x: x[:, 0] ** 2), np.diag([1.0, 3.0, 1.0]), atol=1e-10)


def test_the_closed_form_of_growing_noise() -> None:
    """E[(0.5 + |x|)^2] = 1.25 + sqrt(2 / pi), and times x^2: 3.25 + 2 sqrt(2 / pi). Quadrature has trouble with |x|."""
    found = TASKS["linear"].closed(100)
    mean = math.sqrt(2 / math.pi)
    np.testing.assert_allclose(found, np.sqrt(np.array([1.25 + mean, 3.25 + 2 * mean, 1.25 + mean]) / 100), rtol=0.01)


@pytest.mark.parametrize("name", ["linear", "logistic", "poisson", "clusters", "series"])
def test_statsmodels_and_the_closed_form_agree_for_many_samples(name: str) -> None:
    pytest.importorskip("statsmodels", reason="the extra compare is not installed")
    task = TASKS[name]
    estimate, robust = task.robust(task.draw(np.random.default_rng(0), 40_000))
    closed = task.closed(40_000)
    np.testing.assert_allclose(robust, closed, rtol=0.15)
    assert (np.abs(estimate - [1.0, 0.5, -0.5]) < 4 * closed).all()


def test_clusters_and_neighbours_are_correlated() -> None:
    sample = TASKS["clusters"].draw(np.random.default_rng(0), 8000)
    noise = (sample.y - 1 - sample.x @ [0.5, -0.5]).reshape(-1, SIZE)
    assert noise.mean(1).var() == pytest.approx(BETWEEN**2 + 1 / SIZE, rel=0.2)
    series = TASKS["series"].draw(np.random.default_rng(0), 8000)
    noise = series.y - 1 - series.x @ [0.5, -0.5]
    assert np.corrcoef(noise[1:], noise[:-1])[0, 1] == pytest.approx(RHO, abs=0.05)
    assert series.block == 89
