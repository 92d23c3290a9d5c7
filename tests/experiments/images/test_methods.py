"""The methods that are compared: each learns, none reads what it may not, each goes on after a stop, and each row is
what its name says."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from contest import PROBLEM, network, patterns, trained

from twinboot import Bootstrap
from twinboot.estimate import calibration
from twinboot.experiments.images import methods as images_methods
from twinboot.experiments.images.methods import AS_DEAR, DROPOUT, HELD_OUT, METHODS, MORE, find, longer, method
from twinboot.experiments.images.single import Problem, Single, Trained, by_one_model
from twinboot.experiments.images.twins import recipe_of
from twinboot.experiments.images.verdicts import USUAL
from twinboot.experiments.runner.experiment import Tick
from twinboot.training.protocol import FIT
from twinboot.training.selection import Average

VARIANTS = ["twins:kind=split", "twins:cover=true", "twins:dropout=0.1", "twins-pooled:cover=false,longer=1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Trained, list[int]]]:
    """The training of a method that nothing disturbs, and its ticks: once for all tests that look at it."""

    @cache
    def training(method: str) -> tuple[Trained, list[int]]:
        ticks: list[int] = []
        return trained(method, tmp_path_factory.mktemp("whole"), ticks=ticks), ticks

    return training


@pytest.mark.parametrize("method", [*METHODS, *VARIANTS])
def test_each_method_learns_and_all_its_rows_are_probabilities(method: str, whole: Any) -> None:
    found, ticks = whole(method)
    x, y = patterns(300, 1)
    for row, predict in found.rows.items():
        probs = predict(x)
        torch.testing.assert_close(probs.sum(1), torch.ones(300))
        assert (probs.argmax(1) == y).double().mean() > (0.4 if "IVON" in row else 0.6), row
        assert torch.equal(probs, predict(x)), row  # draws are seeded
    assert len(ticks) == find(method).epochs(6)
    epochs = len(ticks) - 6 if method == "single" else len(ticks)  # without the second of an ensemble
    assert list(found.curve["epoch"]) == list(range(1, epochs + 1))
    assert set(found.epochs) <= set(found.rows)


@pytest.mark.parametrize("method", [*METHODS, *VARIANTS])
def test_what_may_not_be_trained_on_changes_nothing(method: str, whole: Any, tmp_path: Path) -> None:
    usual, _ = whole(method)
    apart = torch.ones(150, dtype=torch.bool)
    apart[usual.trained_on] = False
    if method == "hold-out":
        assert apart.sum() == round(HELD_OUT * 150)
    elif method == "dropout-seen" or (method.startswith("twins") and not recipe_of(method)[1].cover):
        bootstrap = Bootstrap(150, seed=0) if method == "dropout-seen" else recipe_of(method)[1].bootstrap(150, 0)
        assert apart.nonzero().squeeze(1).equal(bootstrap.unseen)
    else:
        assert not apart.any()
        assert usual.unseen is None
        return
    assert usual.unseen is not None
    assert apart.nonzero().squeeze(1).equal(usual.unseen.sort().values)
    changed = PROBLEM.x.clone()
    changed[apart] += 3.0
    other = trained(method, tmp_path / "b", replace(PROBLEM, x=changed))
    # The training accuracy of each epoch is a function of the weights then: none depends on what is apart.
    assert list(usual.curve["train"]) == list(other.curve["train"])
    assert list(usual.curve["loss"]) != list(other.curve["loss"])
    assert usual.sigma.equals(other.sigma)


@pytest.mark.parametrize("method", ["hold-out", "single", "dropout", "twins", "twins-pooled", "twins:dropout=0.1"])
def test_a_method_goes_on_after_a_stop_as_if_there_had_been_none(method: str, whole: Any, tmp_path: Path) -> None:
    left = [4]

    def tick() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    usual, _ = whole(method)
    place = tmp_path / "stopped"
    place.mkdir()
    with pytest.raises(KeyboardInterrupt):
        find(method).train(PROBLEM, place, tick)
    torch.manual_seed(99)  # as another process would have it
    ticks: list[int] = []
    again = find(method).train(PROBLEM, place, lambda: ticks.append(1))
    assert len(ticks) == find(method).epochs(6)  # those of before the stop too
    x, _ = patterns(20, 2)
    for row in usual.rows:
        assert torch.equal(usual.rows[row](x), again.rows[row](x)), row
    columns = [c for c in usual.curve if c != "seconds"]
    assert usual.curve[columns].equals(again.curve[columns])
    assert usual.sigma.equals(again.sigma)


def test_the_usual_ways_are_rows_of_the_methods(whole: Any) -> None:
    found = {row for method in ("single", "dropout") for row in whole(method)[0].rows}
    assert set(USUAL) - found == {"IVON"}  # whose package is an extra


def test_a_new_method_is_one_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its rows, its length and the time of its epochs follow."""
    monkeypatch.setattr(images_methods, "METHODS", dict(METHODS))

    @method("short", epochs=lambda epochs: epochs // 2)
    def short(problem: Problem, scratch: Path, tick: Tick) -> Trained:
        run = Single(problem)
        run.train(problem.epochs // 2, scratch, tick)
        return run.result({"half as long": by_one_model(run.of("last"))}, {"half as long": 0.5})

    ticks: list[int] = []
    assert list(trained("short", tmp_path / "a", ticks=ticks).rows) == ["half as long"]
    assert len(ticks) == find("short").epochs(6) == 3
    assert find("short").kind == "short"
    assert find("short").clock(PROBLEM, tmp_path)(1) > 0


@pytest.mark.parametrize("kind", sorted({found.kind for found in METHODS.values()} - {"ivon"}))
def test_a_clock_trains_one_epoch_after_another(kind: str, tmp_path: Path) -> None:
    clock = find(kind).clock(replace(PROBLEM, x=PROBLEM.x[:48], y=PROBLEM.y[:48]), tmp_path / "a")
    assert all(clock(epoch) > 0 for epoch in (1, 2))


def test_averages_of_a_short_run_are_of_what_was_trained(tmp_path: Path) -> None:
    x, y = patterns(300, 1)
    for epochs in (1, 2):
        found = trained("single", tmp_path / str(epochs), replace(PROBLEM, epochs=epochs, lr=0.02))
        assert (found.rows["SWA"](x).argmax(1) == y).double().mean() > 0.5
        assert all(took > 1 for took in found.epochs.values())


def test_the_temperature_of_a_hold_out_is_the_best_for_it(tmp_path: Path) -> None:
    found = trained("hold-out", tmp_path / "a")
    held = torch.ones(150, dtype=torch.bool)
    held[found.trained_on] = False
    x, y = PROBLEM.x[held], PROBLEM.y[held]
    logs = found.rows["single, best loss on a hold-out"](x).double().log()
    expected = calibration.temperature(logs[None], calibration.Labels(y))  # of logits but for a constant in each row
    warmed = (logs / expected).softmax(1)
    torch.testing.assert_close(
        found.rows["single, best loss, temperature by the hold-out"](x).double(), warmed, rtol=1e-3, atol=1e-4
    )
    assert expected != pytest.approx(1, abs=0.01)


def test_averaged_dropout_is_the_average_over_its_epochs_as_that_of_the_twins_is(tmp_path: Path) -> None:
    found = trained("dropout", tmp_path / "a")
    average, weights, known = Average(FIT.average), [], {}
    for epochs in range(1, longer(PROBLEM.epochs) + 1):  # each the beginning of the same run
        run = Single(PROBLEM, dropout=DROPOUT)
        run.train(epochs)
        weights = [p.detach().clone() for p in run.of("last").parameters()]
        average.take(weights)
        known[epochs] = weights
    kept = torch.load(tmp_path / "a" / "single.pt")["states"]
    states = {f"average after {PROBLEM.epochs}": PROBLEM.epochs, "average": longer(PROBLEM.epochs)}
    for state, epochs in states.items():
        for name, weight in zip(dict(network(DROPOUT).named_parameters()), known[epochs], strict=True):
            torch.testing.assert_close(kept[state][name], weight)
    x, _ = patterns(20, 3)
    usual, averaged, *_, most = (predict(x) for predict in found.rows.values())
    assert list(found.rows)[-1] == f"MC dropout, averaged, {MORE} times as long"
    assert found.epochs[list(found.rows)[-1]] == longer(PROBLEM.epochs) / PROBLEM.epochs
    for one, other in combinations((usual, averaged, most), 2):
        assert not torch.allclose(one, other, atol=1e-3)


def test_a_single_model_is_shown_after_as_long_as_twins_take(tmp_path: Path) -> None:
    found, x = trained("single", tmp_path / "a"), patterns(20, 3)[0]
    for more in (MORE, AS_DEAR):
        run = Single(PROBLEM)
        run.train(longer(PROBLEM.epochs, more))
        row = f"single, {more} times as long"
        torch.testing.assert_close(found.rows[row](x), by_one_model(run.of("last"))(x))
        assert found.epochs[row] == longer(PROBLEM.epochs, more) / PROBLEM.epochs


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
    run = images_methods._variational(replace(PROBLEM, epochs=epochs))
    optimizer, schedule = run.optimizer, run.scheduler
    assert schedule is not None
    found = []
    for _ in range(epochs):
        found.append(optimizer.param_groups[0]["lr"] / 0.2)
        with warnings.catch_warnings(action="ignore"):  # that no step was taken
            schedule.step()
    assert found[: len(rates)] == pytest.approx(rates)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0)
