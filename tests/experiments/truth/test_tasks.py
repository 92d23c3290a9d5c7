from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from twinboot.experiments.truth.config import PRESETS, Config
from twinboot.experiments.truth.tasks import (
    INPUTS,
    NETWORKS,
    NOISE,
    PROTEIN,
    Task,
    available,
    generated,
    number_of_batches,
    plain,
    steps,
    task_of,
    train,
)

CONFIG = Config(sizes=(60,), lrs=(0.01,), epochs=3, inputs=12)


@pytest.fixture
def protein(tmp_path: Path) -> Config:
    values = np.random.default_rng(0).normal(3, 2, size=(530, 10))
    np.savez(tmp_path / "sets.npz", **{PROTEIN: values, f"{PROTEIN}__test_idx": np.arange(30)[None]})
    return Config(preset="protein", data=str(tmp_path / "sets.npz"), sizes=(60,), lrs=(0.01,), epochs=3, inputs=20)


def test_sets_are_disjoint_and_share_the_test_inputs(protein: Config) -> None:
    tasks = [task_of(protein, 60, 0.01, number) for number in range(8)]
    rows = torch.cat([task.x for task in tasks])
    assert len(rows.unique(dim=0)) == len(rows) == 480
    assert len({task.seed for task in tasks}) == 8
    assert all(torch.equal(task.test_x, tasks[0].test_x) for task in tasks)
    assert not (rows[:, None] == tasks[0].test_x).all(2).any()


def test_a_set_beyond_the_pool_is_refused(protein: Config) -> None:
    assert available(protein, 60) == 8  # of 500 rows
    assert available(CONFIG, 60) is None
    with pytest.raises(ValueError, match=r"there is no set 8 of 60 samples: the pool has 500\."):
        task_of(protein, 60, 0.01, 8)


def test_rows_are_standardised_by_those_for_training(protein: Config) -> None:
    rows = torch.cat([task_of(protein, 250, 0.01, number).x for number in range(2)])
    torch.testing.assert_close(rows.mean(0), torch.zeros(9), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.std(0), torch.ones(9), atol=1e-5, rtol=0)


def test_the_generated_function_has_the_noise_that_it_says() -> None:
    x, y = generated(20_000, 0)
    f = torch.sin(2 * x[:, 0]) + torch.sin(x[:, 1] + x[:, 2]) + 0.5 * torch.sin(x[:, 2] * x[:, 3])
    noise = y[:, 0] - f
    assert abs(noise.std().item() - NOISE) < 4 * NOISE / (2 * 20_000) ** 0.5
    assert x.shape == (20_000, INPUTS)
    assert x.abs().max() <= 2
    assert not torch.equal(generated(5, 1)[0], generated(5, 2)[0])


def test_the_plain_training_is_the_same_each_time_and_others_differ() -> None:
    task = task_of(CONFIG, 60, 0.01, 0)
    one, again, other = (task.predict(train(task, seed)[0]) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(task.predict(plain(CONFIG, 60, 0.01, 0).model), task.predict(train(task, task.seed)[0]))


def rates(task: Task, falls: bool) -> list[float]:
    found = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        class Noted(torch.optim.SGD):
            def step(self, closure: object = None) -> None:  # type: ignore[override]
                found.append(self.param_groups[0]["lr"])

        return Noted(model.parameters(), 0.1)

    train(task, 0, optimizer=make, falls=falls)
    return found


def test_the_learning_rate_falls_along_a_cosine_or_stays() -> None:
    task = replace(task_of(CONFIG, 60, 0.01, 0), epochs=5)
    assert number_of_batches(task) == 2
    expected = 0.05 * (1 + np.cos(np.pi * np.arange(10) / 10))
    assert rates(task, True) == pytest.approx(expected)
    assert rates(task, False) == [0.1] * 10


def test_an_epoch_reads_each_row_once_or_as_often_as_it_was_drawn() -> None:
    task = task_of(CONFIG, 60, 0.01, 0)

    def counts(rows: Tensor | None) -> Tensor:
        return torch.bincount(torch.cat([batch for _, batch in steps(task, 0, 1, rows)]), minlength=60)

    assert (counts(None) == 1).all()
    rows = torch.randint(60, (60,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(counts(rows), torch.bincount(rows, minlength=60))


def test_a_training_that_fails_is_an_error() -> None:
    task = task_of(CONFIG, 60, 0.01, 0)
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        train(task, 0, optimizer=lambda model: torch.optim.SGD(model.parameters(), 1e30))


@pytest.mark.parametrize(
    ("preset", "shape", "outputs"),
    [("function", (4,), 1), ("protein", (9,), 1), ("fashion", (1, 14, 14), 10), ("cifar10", (3, 32, 32), 10)],
)
def test_networks_end_in_a_linear_layer_and_have_dropout_on_demand(
    preset: str, shape: tuple[int, ...], outputs: int
) -> None:
    assert list(NETWORKS) == list(PRESETS)
    for dropout in (0.0, 0.2):
        model = NETWORKS[preset](dropout, 0)
        assert model(torch.zeros(2, *shape)).shape == (2, outputs)
        assert isinstance(model[-1], nn.Linear)  # for Laplace
        assert any(isinstance(layer, nn.Dropout) for layer in model) == bool(dropout)
