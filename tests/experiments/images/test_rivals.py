"""Single models in several ways: each row is what its name says."""

import warnings
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from contest import TASK, network, patterns, trained

from twinboot.estimate import calibration
from twinboot.experiments.images.recipes import DROPOUT
from twinboot.experiments.images.rivals import AS_DEAR, MORE, longer, variational
from twinboot.experiments.images.single import Single, Split, plain
from twinboot.experiments.images.task import of_mean
from twinboot.training.selection import Average


def test_averages_of_a_short_run_are_of_what_was_trained(tmp_path: Path) -> None:
    x, y = patterns(300, 1)
    for epochs in (1, 2):
        found = trained("single", tmp_path / str(epochs), replace(TASK, epochs=epochs, rate=0.02))
        assert (found.rows["SWA"](x).argmax(1) == y).double().mean() > 0.5
        assert all(took > 1 for took in found.epochs.values())


def test_the_temperature_of_a_hold_out_is_the_best_for_it(tmp_path: Path) -> None:
    found = trained("hold-out", tmp_path / "a")
    held = torch.ones(150, dtype=torch.bool)
    held[found.trained_on] = False
    x, y = TASK.x[held], TASK.y[held]
    logs = found.rows["single, best loss on a hold-out"](x).double().log()
    expected = calibration.temperature(logs[None], calibration.Labels(y))  # of logits but for a constant in each row
    warmed = (logs / expected).softmax(1)
    torch.testing.assert_close(
        found.rows["single, best loss, temperature by the hold-out"](x).double(), warmed, rtol=1e-3, atol=1e-4
    )
    assert expected != pytest.approx(1, abs=0.01)


def test_averaged_dropout_is_the_average_over_its_epochs_as_that_of_the_twins_is(tmp_path: Path) -> None:
    found = trained("dropout", tmp_path / "a")
    average, weights, known = Average(8.0), [], {}
    for epochs in range(1, longer(TASK.epochs) + 1):  # each the beginning of the same run
        run = Single(network(DROPOUT), Split(TASK.x, TASK.y), plain(TASK.rate), TASK.batch, TASK.seed)
        run.train(epochs)
        weights = [p.detach().clone() for p in run.of("last").parameters()]
        average.take(weights)
        known[epochs] = weights
    kept = torch.load(tmp_path / "a" / f"epoch-{longer(TASK.epochs)}.pt")["states"]
    states = {f"average after {TASK.epochs}": TASK.epochs, "average": longer(TASK.epochs)}
    for state, epochs in states.items():
        for name, weight in zip(dict(network(DROPOUT).named_parameters()), known[epochs], strict=True):
            torch.testing.assert_close(kept[state][name], weight)
    x, _ = patterns(20, 3)
    usual, averaged, *_, most = (predict(x) for predict in found.rows.values())
    assert list(found.rows)[-1] == f"MC dropout, averaged, {MORE} times as long"
    assert found.epochs[list(found.rows)[-1]] == longer(TASK.epochs) / TASK.epochs
    for one, other in combinations((usual, averaged, most), 2):
        assert not torch.allclose(one, other, atol=1e-3)


def test_a_single_model_is_shown_after_as_long_as_twins_take(tmp_path: Path) -> None:
    found, x = trained("single", tmp_path / "a"), patterns(20, 3)[0]
    for more in (MORE, AS_DEAR):
        run = Single(network(), Split(TASK.x, TASK.y), plain(TASK.rate), TASK.batch, TASK.seed)
        run.train(longer(TASK.epochs, more))
        row = f"single, {more} times as long"
        torch.testing.assert_close(found.rows[row](x), of_mean(run.of("last"))(x))
        assert found.epochs[row] == longer(TASK.epochs, more) / TASK.epochs


def test_an_ensemble_is_the_mean_of_two_different_models(tmp_path: Path) -> None:
    found = trained("single", tmp_path / "a")
    x, _ = patterns(20, 3)
    one, both = found.rows["single, all images"](x), found.rows["ensemble of 2"](x)
    assert not torch.allclose(one, both)
    assert (2 * both - one).min() > -1e-6  # the second's own probabilities
    assert found.epochs["ensemble of 2"] == 2


@pytest.mark.parametrize(
    ("epochs", "rates"), [(1, [1.0]), (4, [0.5, 0.75, 1.0, 0.5]), (12, [0.2, 0.36, 0.52, 0.68, 0.84, 1.0])]
)
def test_the_rate_of_ivon_rises_for_five_epochs_and_falls_along_a_cosine(epochs: int, rates: list[float]) -> None:
    pytest.importorskip("ivon", reason="the extra compare is not installed")
    optimizer, schedule = variational(replace(TASK, epochs=epochs))(network())
    assert schedule is not None
    found = []
    for _ in range(epochs):
        found.append(optimizer.param_groups[0]["lr"] / 0.2)
        with warnings.catch_warnings(action="ignore"):  # that no step was taken
            schedule.step()
    assert found[: len(rates)] == pytest.approx(rates)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0)
