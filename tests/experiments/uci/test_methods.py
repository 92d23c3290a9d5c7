import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from twinboot import Prediction
from twinboot._core.seeds import derive
from twinboot.experiments.uci import methods as uci_methods
from twinboot.experiments.uci.data import Split, Table, split
from twinboot.experiments.uci.methods import (
    Config,
    Predicted,
    certain,
    held_out,
    noise_of,
    score,
    single,
    train,
    twins,
)

TINY = Config(hidden=8, batch=16, updates=20, epochs=3, samples=4)
NOISE = 0.5


def linear(rows: int, tests: int, seed: int = 0) -> Table:
    """A target that is linear in three inputs, with normal noise of a known level."""
    generator = np.random.default_rng(seed)
    x = generator.normal(2, 3, (rows, 3))
    y = x @ [1.0, -2.0, 0.5] + 7 + generator.normal(0, NOISE, rows)
    return Table(np.column_stack([x, y]), np.arange(tests)[None])


@pytest.fixture
def data() -> Split:
    return split(linear(120, 20), 0)


def test_scores_of_the_true_function_and_noise_are_those_of_the_normal_distribution() -> None:
    """RMSE is the noise, NLL the entropy of N(0, noise^2), coverage the level: each to 4 standard errors."""
    n = 20_000
    table = linear(n + 100, n)
    train = table.values[n:]
    made = split(table, 0)
    truth = torch.from_numpy((table.values[:n, :-1] @ [1.0, -2.0, 0.5] + 7 - train[:, -1].mean()) / made.unit)
    prediction = Prediction("regression", truth[:, None], torch.zeros(n, 1).double())
    found = score(Predicted(prediction, NOISE / made.unit, 1, 0.0, 100), made.test_y.double(), made.unit)
    assert found["rmse"] == pytest.approx(NOISE, abs=4 * NOISE / math.sqrt(2 * n))
    assert found["nll"] == pytest.approx(0.5 * math.log(2 * math.pi * math.e * NOISE**2), abs=4 * math.sqrt(0.5 / n))
    assert found["covered"] == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / n))
    assert found["noise"] == pytest.approx(NOISE)


def test_spread_of_the_draws_and_noise_add_up_in_interval_and_nll() -> None:
    prediction = Prediction("regression", torch.zeros(1, 1), torch.full((1, 1), 3.0))
    half = NormalDist().inv_cdf(0.95) * 5
    for value, inside in ((half - 0.01, 1.0), (half + 0.01, 0.0)):
        found = score(Predicted(prediction, 4.0, 1, 0.0, 1), torch.tensor([[value]]), 2.0)
        assert found["covered"] == inside
        assert found["nll"] == pytest.approx(0.5 * value**2 / 25 + math.log(5 * 2 * math.sqrt(2 * math.pi)), rel=1e-5)
        assert found["spread"] == pytest.approx(6)


def test_noise_is_what_the_draws_leave_of_the_residuals() -> None:
    target = torch.tensor([[2.0], [-2.0]])
    for spread, noise2 in ((0.0, 4.0), (1.0, 3.0), (2.0, 0.2), (9.0, 0.2)):
        prediction = Prediction("regression", torch.zeros(2, 1), torch.full((2, 1), spread))
        assert noise_of(prediction, target, least=0.05) ** 2 == pytest.approx(noise2)
    assert noise_of(certain(lambda x: x, target), target, least=0.05) > 0


def test_a_linear_target_is_learned_to_its_noise() -> None:
    config = Config(updates=600, epochs=1, samples=16)
    made = split(linear(600, 200), 0)
    found = {"single": single(config, made, 1), **twins(config, made, 1)}
    found["all"] = single(config, made, 1, found["single"].epoch)
    assert set(found) == set(uci_methods.METHODS)
    for predicted in found.values():
        scores = score(predicted, made.test_y, made.unit)
        assert NOISE * 0.85 < scores["rmse"] < NOISE * 1.5
        # Wide, because so few steps leave some error, and the noise is known from some 50 rows alone.
        assert abs(scores["covered"] - 0.9) < 0.25
        assert scores["nll"] < 0.5 * math.log(2 * math.pi * math.e * NOISE**2) + 0.8
    assert found["draws"].noise < found["mean"].noise


def test_the_hold_out_is_as_large_as_said_and_apart() -> None:
    used, held = held_out(Config(), 1000, 3)
    assert len(held) == 135
    assert sorted([*used.tolist(), *held.tolist()]) == list(range(1000))


def test_methods_start_from_the_same_weights_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = (uci_methods.network(3, 8, seed) for seed in (1, 1, 2))
    assert torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)
    assert torch.equal(before, torch.get_rng_state())


def test_the_start_of_a_network_leaves_generators_of_other_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seed: int) -> None:
        raise AssertionError("torch.manual_seed is for all devices")

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(1, "weights"))
        expected = torch.nn.Linear(3, 8)
    monkeypatch.setattr(torch, "manual_seed", refuse)
    assert torch.equal(uci_methods.network(3, 8, 1)[0].weight, expected.weight)


@pytest.mark.parametrize(
    "run",
    [
        lambda made: single(TINY, made, 0).prediction.mean,
        lambda made: single(TINY, made, 0, 3).prediction.mean,
        lambda made: twins(TINY, made, 0)["mean"].prediction.mean,
        lambda made: twins(TINY, made, 0)["draws"].prediction.mean,
    ],
)
def test_no_method_sees_a_test_target_and_each_repeats_bit_for_bit(run: Callable[[Split], Tensor], data: Split) -> None:
    hidden = replace(data, test_y=torch.full_like(data.test_y, torch.nan))
    assert torch.equal(run(data), run(hidden))


def test_rows_that_are_held_out_do_not_train(data: Split) -> None:
    used, held = held_out(TINY, len(data.train_x), 0)
    hidden = data.train_y.clone()
    hidden[held] = 1e6
    first, second = (train(TINY, made, 0, used, None, 3)[0] for made in (data, replace(data, train_y=hidden)))
    assert torch.equal(first[0].weight, second[0].weight)


def test_the_epoch_kept_is_the_one_with_the_least_loss_on_the_hold_out(data: Split) -> None:
    used, held = held_out(TINY, len(data.train_x), 0)
    losses = []
    for epochs in range(1, 7):
        model, epoch = train(TINY, data, 0, used, None, epochs)
        assert epoch == epochs
        losses.append((data.train_y[held] - certain(model, data.train_x[held]).mean).square().mean().item())
    kept, best = train(TINY, data, 0, used, held, 6)
    assert best == 1 + losses.index(min(losses))
    loss = (data.train_y[held] - certain(kept, data.train_x[held]).mean).square().mean().item()
    assert loss == pytest.approx(min(losses))
    assert TINY.epochs_of(len(data.train_x)) == 3
    assert single(TINY, data, 0).noise == pytest.approx(math.sqrt(min(losses[:3])), rel=1e-5)


def test_a_single_network_makes_about_as_many_steps_on_each_set_but_passes_over_large_ones_often_enough() -> None:
    config = Config()
    assert [config.batch_of(rows) for rows in (277, 1999, 2000, 41_157)] == [32, 32, 256, 256]
    for rows in (277, 455, 1439, 8611):
        assert config.epochs_of(rows) * -(-rows // config.batch_of(rows)) == pytest.approx(config.updates, rel=0.02)
    assert config.epochs_of(41_157) == config.epochs == 40


def test_the_hold_out_is_what_two_bootstrap_samples_leave() -> None:
    assert Config().hold_out == pytest.approx(0.1353, abs=0.0005)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(({name: 0}, f"{name} must be at least 1, not 0") for name in ("splits", "hidden", "batch", "large")),
        *(({name: 0}, f"{name} must be at least 1, not 0") for name in ("large_batch", "updates", "epochs")),
        ({"samples": 1}, "samples must be at least 2"),
        ({"lr": float("nan")}, "lr must be greater than 0"),
        ({"hold_out": 0.0}, "hold_out must lie between 0.02 and 0.5"),
        ({"min_noise": 0.0}, "min_noise must be above 0 and at most 1"),
        ({"sets": ("yacht", "yacht")}, "no name twice"),
        ({"data": "missing.npz"}, "can't read missing.npz"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config(**change)
