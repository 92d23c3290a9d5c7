"""The methods that are compared: each learns, none reads what it may not, and each goes on after a stop."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, Estimate, calibration, fit
from twinboot.averaging import POWER, Average
from twinboot.experiments import networks
from twinboot.experiments.contenders import HELD_OUT, METHODS, Task, Trained, longer
from twinboot.experiments.recipes import DROPOUT, LONGER, TWINS
from twinboot.experiments.single import Single, Split, plain
from twinboot.optimizers import adam


def patterns(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of three bright corners with noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=generator)
    x = 0.7 * torch.randn(n, 1, 8, 8, generator=generator)
    for label, corner in enumerate([(0, 0), (0, 4), (4, 0)]):
        x[y == label, :, corner[0] : corner[0] + 4, corner[1] : corner[1] + 4] += 1
    return x, y


def network(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    return networks.small(3, 1, 0.125, "batch", dropout, seed)


TASK = Task(*patterns(150, 0), network, epochs=6, batch=16, rate=0.005, samples=4, seed=0)


def trained(method: str, scratch: Path, task: Task = TASK, ticks: list[int] | None = None) -> Trained:
    if method == "ivon":
        pytest.importorskip("ivon", reason="the extra compare is not installed")
    scratch.mkdir(exist_ok=True)
    return METHODS[method](task, scratch, lambda: ticks.append(1) if ticks is not None else None)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_learns_and_all_its_rows_are_probabilities(method: str, tmp_path: Path) -> None:
    ticks: list[int] = []
    found = trained(method, tmp_path / "a", ticks=ticks)
    x, y = patterns(300, 1)
    for row, predict in found.rows.items():
        probs = predict(x)
        torch.testing.assert_close(probs.sum(1), torch.ones(300))
        assert (probs.argmax(1) == y).double().mean() > (0.4 if "IVON" in row else 0.6), row
        assert torch.equal(probs, predict(x)), row  # draws are seeded
    epochs = longer(6) if method == "single" else TWINS[method][1].epochs(6) if method in TWINS else 6
    assert len(ticks) == (epochs + 6 if method == "single" else epochs)  # the second of an ensemble
    assert list(found.curve["epoch"]) == list(range(1, epochs + 1))
    assert set(found.epochs) <= set(found.rows)


@pytest.mark.parametrize("method", METHODS)
def test_what_may_not_be_trained_on_changes_nothing(method: str, tmp_path: Path) -> None:
    whole = trained(method, tmp_path / "a")
    apart = torch.ones(150, dtype=torch.bool)
    apart[whole.trained_on] = False
    if method == "hold-out":
        assert apart.sum() == round(HELD_OUT * 150)
    elif method == "dropout-seen" or (method in TWINS and not TWINS[method][1].cover):
        assert apart.nonzero().squeeze(1).equal(Bootstrap(150, seed=0).unseen)
    else:
        assert not apart.any()
        assert whole.unseen is None
        return
    assert whole.unseen is not None
    assert apart.nonzero().squeeze(1).equal(whole.unseen.sort().values)
    changed = TASK.x.clone()
    changed[apart] += 3.0
    other = trained(method, tmp_path / "b", replace(TASK, x=changed))
    # The training accuracy of each epoch is a function of the weights then: none depends on what is apart.
    assert list(whole.curve["train"]) == list(other.curve["train"])
    assert list(whole.curve["loss"]) != list(other.curve["loss"])
    assert whole.sigma.equals(other.sigma)


def test_averages_of_a_short_run_are_of_what_was_trained(tmp_path: Path) -> None:
    x, y = patterns(300, 1)
    for epochs in (1, 2):
        found = trained("single", tmp_path / str(epochs), replace(TASK, epochs=epochs, rate=0.02))
        assert (found.rows["SWA"](x).argmax(1) == y).double().mean() > 0.5


@pytest.mark.parametrize("method", ["hold-out", "single", "twins", "twins-split", "twins-dropout"])
def test_a_method_goes_on_after_a_stop_as_if_there_had_been_none(method: str, tmp_path: Path) -> None:
    left = [4]

    def tick() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    whole = trained(method, tmp_path / "whole")
    place = tmp_path / "stopped"
    place.mkdir()
    with pytest.raises(KeyboardInterrupt):
        METHODS[method](TASK, place, tick)
    torch.manual_seed(99)  # as another process would have it
    ticks: list[int] = []
    again = METHODS[method](TASK, place, lambda: ticks.append(1))
    # Those of before the stop too.
    assert len(ticks) == {"single": longer(6) + 6, "twins-split": 7}.get(method, 6)
    x, _ = patterns(20, 2)
    for row in whole.rows:
        assert torch.equal(whole.rows[row](x), again.rows[row](x)), row
    columns = [c for c in whole.curve if c != "seconds"]
    assert whole.curve[columns].equals(again.curve[columns])
    assert whole.sigma.equals(again.sigma)


def test_twins_are_calibrated_by_what_no_twin_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[list[int]] = []
    calibrate = Estimate.calibrate

    def spy(self: Estimate, dataset: Any, **options: Any) -> float:
        used.append(list(dataset.indices))
        return calibrate(self, dataset, **options)

    monkeypatch.setattr(Estimate, "calibrate", spy)
    trained("twins", tmp_path / "a", replace(TASK, epochs=1))
    assert used == [Bootstrap(150, seed=0).unseen.tolist()]


def test_the_temperature_of_a_hold_out_is_the_best_for_it(tmp_path: Path) -> None:
    found = trained("hold-out", tmp_path / "a")
    held = torch.ones(150, dtype=torch.bool)
    held[found.trained_on] = False
    x, y = TASK.x[held], TASK.y[held]
    logs = found.rows["single, best loss on a hold-out"](x).double().log()
    expected = calibration.temperature(logs[None], y)  # of logits but for a constant in each row
    warmed = (logs / expected).softmax(1)
    torch.testing.assert_close(
        found.rows["single, best loss, temperature by the hold-out"](x).double(), warmed, rtol=1e-3, atol=1e-4
    )
    assert expected != pytest.approx(1, abs=0.01)


def test_averaged_dropout_is_the_average_over_its_epochs_as_that_of_the_twins_is(tmp_path: Path) -> None:
    found = trained("dropout", tmp_path / "a")
    average, weights = Average(POWER), []
    for epochs in range(1, TASK.epochs + 1):  # each the beginning of the same run
        run = Single(network(DROPOUT), Split(TASK.x, TASK.y), plain(TASK.rate), TASK.batch, TASK.seed)
        run.train(epochs)
        weights = [p.detach().clone() for p in run.of("last").parameters()]
        average.take(weights)
    kept = torch.load(tmp_path / "a" / f"epoch-{TASK.epochs}.pt")["states"]["average"]
    for name, weight in zip(dict(network(DROPOUT).named_parameters()), weights, strict=True):
        torch.testing.assert_close(kept[name], weight)
    x, _ = patterns(20, 3)
    assert not torch.allclose(found.rows["MC dropout"](x), found.rows["MC dropout, averaged"](x), atol=1e-3)


def test_an_ensemble_is_the_mean_of_two_different_models(tmp_path: Path) -> None:
    found = trained("single", tmp_path / "a")
    x, _ = patterns(20, 3)
    one, both = found.rows["single, all images"](x), found.rows["ensemble of 2"](x)
    assert not torch.allclose(one, both)
    assert (2 * both - one).min() > -1e-6  # the second's own probabilities
    assert found.epochs["ensemble of 2"] == 2


def test_the_last_epoch_alone_is_neither_averaged_nor_chosen(tmp_path: Path) -> None:
    trained("twins", tmp_path / "a")
    data = TensorDataset(TASK.x, TASK.y)
    plain: list[Estimate] = []
    fit(
        network(),
        data,
        epochs=TASK.epochs,
        batch_size=TASK.batch,
        optimizer=lambda p: adam(p, TASK.rate),
        progress=False,
        callback=lambda epoch, estimate, twins: plain.append(twins.estimate()),
    )
    kept = Estimate.load(tmp_path / "a" / "last.safetensors", network())
    for here, there in zip(kept.module.parameters(), plain[-1].module.parameters(), strict=True):
        assert torch.equal(here, there)


def test_twins_that_train_longer_show_what_they_were_after_as_many_epochs_as_the_others(tmp_path: Path) -> None:
    found = trained("twins-split", tmp_path / "a", replace(TASK, epochs=8))
    [row] = found.epochs
    assert row == f"Twin-Boot on divided images, {LONGER} times as long"
    assert found.epochs[row] == 9 / 8
    x, _ = patterns(20, 2)
    halves: list[Estimate] = []
    fit(
        network(),
        TensorDataset(TASK.x, TASK.y),
        epochs=9,
        batch_size=TASK.batch,
        optimizer=lambda p: adam(p, TASK.rate),
        bootstrap=Bootstrap(150, kind="split", cover=True),
        progress=False,
        callback=lambda epoch, estimate, twins: halves.append(estimate),
    )
    for epochs, name in ((8, "Twin-Boot on divided images"), (9, row)):
        estimate = halves[epochs - 1]
        estimate.update_batchnorm(TASK.x.split(TASK.batch))
        expected = estimate.predict(x, TASK.samples, seed=TASK.seed).probs
        torch.testing.assert_close(found.rows[name](x), expected, atol=0.02, rtol=0.1)  # statistics of other batches
    assert not torch.allclose(found.rows[row](x), found.rows["Twin-Boot on divided images"](x), atol=1e-3)


def test_a_recipe_reaches_the_twins(tmp_path: Path) -> None:
    last = {method: trained(method, tmp_path / method).sigma["sigma"].iloc[-1] for method in TWINS}
    assert len(set(last.values())) == len(TWINS)  # no two of them trained the same way
