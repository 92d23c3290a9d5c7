"""A round: the learning rate falls to 0 along a cosine. In `fit` it changes the error bars, and not the mean model."""

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import assert_same_bits, mlp, seeded, snapshot
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, Fit, Twins, fit, resets
from twinboot.estimate import spread
from twinboot.training import rounds
from twinboot.training.epoch import Training
from twinboot.training.protocol import FIT, Protocol, complete
from twinboot.training.rounds import (
    FAR,
    GENTLE,
    LOWER,
    NATS,
    RESTART,
    SHARE,
    Round,
    Settled,
    falling,
    is_above,
    least_difference,
    perturb_,
    settle,
    settle_around,
)


def blobs(n: int = 240) -> TensorDataset:
    labels = torch.arange(n) % 3
    return TensorDataset(2 * torch.eye(3, 4)[labels] + torch.randn(n, 4, generator=seeded(0)), labels)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def run(model: nn.Module | None = None, bootstrap: Bootstrap | None = None) -> Training:
    quiet = complete(Protocol(noise=0.0), FIT, "fit")
    options: dict[str, Any] = {"protocol": quiet, "batch_size": 40, "bootstrap": bootstrap, "seed": 0}
    return Training(mlp() if model is None else model, blobs(), "classification", **options)


def test_the_learning_rate_falls_to_0_along_half_a_cosine() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule, rates = falling(optimizer, 8), list[float]()
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.2 * (1 + math.cos(math.pi * min(k, 8) / 8)) for k in range(10)])
    assert rates[8:] == [0.0, 0.0]


def test_a_round_takes_its_rate_times_the_factor_and_ends_at_0() -> None:
    current = Round(run(), lambda p: torch.optim.SGD(p, 0.1), 3, lr=0.001, factor=5.0)
    assert current.rates == [0.5]
    for number in (1, 2, 3):
        assert current.stepper.param_groups[0]["lr"] > 0
        current.epoch(number)
    assert current.stepper.param_groups[0]["lr"] == 0
    assert Round(run(), None, 3, lr=0.002).rates == [0.002]  # of the default optimizer


def test_a_round_restored_from_its_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first = Round(run(normed()), None, 3, lr=0.01)
    first.epoch(1)
    torch.save(first.state_dict(), tmp_path / "round.pt")
    second = Round(run(normed()), None, 3, lr=0.01)
    second.load_state_dict(torch.load(tmp_path / "round.pt", weights_only=True))
    for number in (2, 3):
        assert first.epoch(number) == second.epoch(number)
    assert_same_bits(first.run.twins.state_dict(), second.run.twins.state_dict())


@pytest.mark.parametrize(
    ("noise", "due", "updates"),
    [(0.0, resets.never(), 1), (0.5, resets.never(), 7), (0.0, resets.steps(resets.every(2)), 7)],
)
def test_sigma_is_computed_once_an_epoch_if_no_step_uses_it(
    noise: float, due: resets.Schedule, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, count, update = run(), [], Twins.update
    training.protocol = replace(training.protocol, noise=noise)
    monkeypatch.setattr(Twins, "update", lambda twins: (count.append(1), update(twins)))
    steps = Round(training, None, 3, lr=0.01)
    training.epoch(1, steps.stepper, steps.scaler, due)
    assert len(training.loader) == 7
    assert len(count) == updates
    found = training.twins.partition.sigma.clone()
    update(training.twins)
    assert_same_bits(found, training.twins.partition.sigma)


def test_twins_settle_around_the_mean_on_the_samples_of_the_run() -> None:
    training = run(normed())
    estimate = training.estimate()
    before = {name: t.clone() for name, t in estimate.state_dict().items()}
    found = settle(training, estimate, None, 2, lr=0.01)
    assert_same_bits(estimate.state_dict(), before)
    assert estimate.scale == 1
    assert (found["sigma"] > 0).all()
    assert 1 / spread.WIDEST < found["scale"] < spread.WIDEST


def test_sigma_of_twins_that_divide_the_samples_is_that_of_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[Training] = []
    around = Training.around
    monkeypatch.setattr(Training, "around", lambda *args: settled.append(around(*args)) or settled[-1])
    training = run(bootstrap=Bootstrap(240, kind="split"))
    found = settle(training, training.estimate(), None, 2, lr=0.01)
    torch.testing.assert_close(found["sigma"], settled[0].twins.partition.sigma / math.sqrt(2))


def failing(monkeypatch: pytest.MonkeyPatch, times: int) -> list[float]:
    """The factors of the rounds. So many of them diverge in their first epoch."""
    tried, make = list[float](), Round.__init__

    def noted(self: Round, *args: Any) -> None:
        make(self, *args)
        tried.append(args[-1])

    epoch = Round.epoch

    def diverging(self: Round, number: int) -> float:
        if len(tried) <= times:
            raise FloatingPointError("the loss is not finite")
        return epoch(self, number)

    monkeypatch.setattr(Round, "__init__", noted)
    monkeypatch.setattr(Round, "epoch", diverging)
    return tried


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_rate_that_diverges_is_followed_by_smaller_ones(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    training = run()
    expected = None if times else settle(training, training.estimate(), None, 2, lr=0.01)
    tried = failing(monkeypatch, times)
    found = settle(training, training.estimate(), None, 2, lr=0.01)
    assert tried == [RESTART / 3**k for k in range(times + 1)]
    assert (found["sigma"] > 0).all()
    if expected is not None:
        assert_same_bits(found["sigma"], expected["sigma"])


def test_adapters_have_as_many_attempts_each_at_a_third_of_the_rate() -> None:
    assert pytest.approx([5 / 3, 5 / 9, 5 / 27]) == GENTLE


def test_where_every_rate_diverges_sigma_of_the_training_stays_and_a_warning_says_so() -> None:
    """Gradient descent with four times the largest rate that converges: three steps stay finite, hundreds do not."""
    x = torch.linspace(-1, 1, 200).unsqueeze(1)
    data = TensorDataset(x, 2 * x)
    largest = 2 / (2 * x.square().mean().item())  # of the squared error

    model = nn.Linear(1, 1, bias=False)
    options: dict[str, Any] = {"epochs": 3, "batch_size": 200, "progress": False, "protocol": Protocol(noise=0.0)}
    options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, 4 * largest)
    plain = fit(model, data, "regression", spread=0.0, **options)
    with pytest.warns(UserWarning, match="the loss became infinite while the twins settled.* give spread=0 to leave"):
        found = fit(model, data, "regression", spread=400.0, **options)
    assert found.estimate.scale == 1
    assert_same_bits(found.estimate.state_dict(), plain.estimate.state_dict())


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_part_of_each_matrix_is_drawn_anew_and_its_size_stays(share: float) -> None:
    """The correlation with the weights before is sqrt(1 - share^2), to 4 standard errors of 40,000 entries, and that of
    the two twins 1 - share^2."""
    model = nn.Linear(200, 200)
    before = model.weight.detach().clone()
    twins = Twins(model)
    perturb_(twins, share, seed=0)
    size = before.square().mean().sqrt()
    one, other = ((twin.weight.detach() / size).flatten() for twin in twins)
    kept, error = math.sqrt(1 - share**2), 4 / math.sqrt(one.numel())
    for weight in (one, other):
        assert weight.square().mean().item() == pytest.approx(1, abs=2 * error)
        assert (weight * before.flatten() / size).mean().item() == pytest.approx(kept, abs=2 * error)
    assert (one * other).mean().item() == pytest.approx(kept**2, abs=2 * error)


def test_what_does_not_start_at_random_or_is_not_trained_is_not_drawn_anew() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    prune.l1_unstructured(model[3], "weight", 0.5)
    model[4].weight.requires_grad_(False)
    before, twins = snapshot(model), Twins(model)
    perturb_(twins, 0.5, seed=0)
    for twin in twins:
        changed = {name for name, value in twin.state_dict().items() if not torch.equal(value, before[name])}
        assert changed == {"1.weight", "3.weight_orig"}
        masked = twin[3].weight_mask == 0
        assert torch.equal(twin[3].weight_orig[masked], before["3.weight_orig"][masked])


def test_a_share_of_0_changes_nothing() -> None:
    twins = Twins(mlp())
    before = snapshot(twins)
    perturb_(twins, 0.0, seed=0)
    assert_same_bits(twins.state_dict(), before)


@pytest.mark.parametrize("least", [0.0, NATS])
@pytest.mark.parametrize("before", [-1.0, 0.001, 1.0])
def test_a_loss_is_above_by_a_factor_and_a_difference(before: float, least: float) -> None:
    by = max((FAR - 1) * abs(before), least)
    assert is_above(before + 1.01 * by, before, FAR, least)
    assert not is_above(before + 0.99 * by, before, FAR, least)
    assert not is_above(before - 1, before, FAR, least)
    assert is_above(math.nan, before, FAR, least)


def test_the_least_difference_is_that_of_the_likelihood_or_a_share_of_the_variance_of_the_targets() -> None:
    x = torch.randn(40, 1, generator=seeded(0))
    cover: dict[str, Any] = {"protocol": FIT, "batch_size": 8, "bootstrap": Bootstrap(40, cover=True), "seed": 0}
    values = Training(nn.Linear(1, 1), TensorDataset(x, 3 * x), "regression", **cover)
    assert least_difference(values) == pytest.approx(SHARE * (3 * x).var(correction=0).item(), rel=1e-6)
    assert least_difference(run()) == NATS


@pytest.mark.parametrize(
    ("losses", "tried"),
    [((LOWER, 9, 9), 1), ((9, LOWER, 9), 2), ((9, None, LOWER), 3), ((9, 9, FAR), 3), ((9, FAR, None), 3)],
)
def test_the_largest_rate_with_which_twins_stay_good_is_taken(losses: tuple[float | None, ...], tried: int) -> None:
    """And where the last ones are between the two limits, the last of them that stayed finite, without a warning."""
    factors = list[float]()

    def attempt(factor: float) -> Settled[float]:
        factors.append(factor)
        if (loss := losses[len(factors) - 1]) is None:
            raise FloatingPointError("the loss is not finite")
        return Settled(factor, before=1.0, after=loss)

    last_finite = max(k for k in range(tried) if losses[k] is not None)
    assert settle_around(attempt, 0.0, stacklevel=1) == factors[last_finite]
    assert factors == [RESTART / 3**k for k in range(tried)]


def test_twins_that_are_worse_at_each_rate_are_used_with_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"a training loss of 3, and the model has 1 on .*: lower the learning rate, or"
    ):
        found = settle_around(lambda factor: Settled(factor, 1.0, 3.0), 0.0, stacklevel=1)
    assert found == RESTART / 9


def test_the_losses_of_a_round_are_of_the_twins_own_samples_in_evaluation_mode() -> None:
    training = run(normed())
    current = Round(training, None, 2, lr=0.01)
    current.epoch(1)
    model, (x, y) = normed().eval(), blobs().tensors
    after, before = current.losses(model)
    for found, models in ((before, [model, model]), (after, [twin.eval() for twin in training.twins])):
        own = [counts.nonzero().squeeze(1) for counts in training.bootstrap.counts]
        values = [
            nn.functional.cross_entropy(m(x[i]), y[i], reduction="none") for m, i in zip(models, own, strict=True)
        ]
        assert found == pytest.approx(torch.cat(values).mean().item(), rel=1e-5)


def test_fit_warns_at_the_line_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Round, "losses", lambda self, model: (3.0, 1.0))
    with pytest.warns(UserWarning, match="the twins ended with a training loss of 3.*or give a larger spread") as found:
        fit(mlp(), blobs(), epochs=2, **QUIET)
    assert found[0].filename == __file__


QUIET: dict[str, Any] = {"progress": False, "optimizer": lambda p: torch.optim.Adam(p, 0.02), "batch_size": 40}


@pytest.mark.parametrize("make", [mlp, normed])
def test_the_spread_changes_the_error_bars_and_nothing_of_the_mean_model(make: Any) -> None:
    torch.manual_seed(0)
    plain, settled = (fit(make(), blobs(), epochs=6, spread=share, **QUIET) for share in (0.0, 0.5))
    assert_same_bits(plain.estimate.module.state_dict(), settled.estimate.module.state_dict())
    assert plain.best_epoch == settled.best_epoch
    assert plain.history["unseen"] == settled.history["unseen"]
    assert plain.estimate.scale == 1
    assert settled.estimate.scale != 1
    assert (plain.estimate.centered, settled.estimate.centered) == (False, True)
    assert not torch.equal(plain.estimate.partition.sigma, settled.estimate.partition.sigma)


@pytest.mark.parametrize(("share", "epochs"), [(0.5, 3), (0.3, 2), (0.01, 1)])
def test_the_twins_settle_for_this_share_of_the_epochs(
    share: float, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, epoch = list[int](), Round.epoch

    def noted(self: Round, number: int) -> float:
        numbers.append(number)
        return epoch(self, number)

    monkeypatch.setattr(Round, "epoch", noted)
    fit(mlp(), blobs(), epochs=6, spread=share, **QUIET)
    assert numbers == list(range(1, epochs + 1))


def the_same(first: Fit, second: Fit) -> None:
    assert_same_bits(first.estimate.state_dict(), second.estimate.state_dict())
    for setting in ("scale", "centered"):
        assert getattr(first.estimate, setting) == getattr(second.estimate, setting)


def test_a_finished_run_has_its_error_bars_without_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(normed(), blobs(), epochs=3, checkpoint=tmp_path, **QUIET)
    with monkeypatch.context() as patch:
        patch.setattr(Training, "epoch", None)  # a call would fail
        the_same(fit(normed(), blobs(), epochs=3, checkpoint=tmp_path, **QUIET), whole)
    the_same(whole, fit(normed(), blobs(), epochs=3, **QUIET))


def test_a_run_that_stops_while_the_twins_settle_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("twinboot.training.fit.settle", stop)
        with pytest.raises(KeyboardInterrupt):
            fit(normed(), blobs(), epochs=3, checkpoint=tmp_path, **QUIET)
    the_same(fit(normed(), blobs(), epochs=3, checkpoint=tmp_path, **QUIET), fit(normed(), blobs(), epochs=3, **QUIET))


def test_a_finished_run_that_is_made_longer_settles_again(tmp_path: Path) -> None:
    fit(normed(), blobs(), epochs=3, checkpoint=tmp_path, **QUIET)
    longer = fit(normed(), blobs(), epochs=6, checkpoint=tmp_path, **QUIET)
    the_same(longer, fit(normed(), blobs(), epochs=6, **QUIET))


def test_a_longer_run_whose_twins_diverge_falls_back_to_the_sigma_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not to that of the twins that settled after the shorter run."""
    unchanged = fit(mlp(), blobs(), epochs=4, spread=0.0, **QUIET)
    fit(mlp(), blobs(), epochs=3, checkpoint=tmp_path, **QUIET)
    failing(monkeypatch, 99)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        longer = fit(mlp(), blobs(), epochs=4, checkpoint=tmp_path, **QUIET)
    assert longer.best_epoch == unchanged.best_epoch
    the_same(longer, unchanged)


def test_a_finished_run_takes_another_spread(tmp_path: Path) -> None:
    """The training is the same, so it is not repeated, and the twins settle again: for 3 epochs, none and 1."""
    for share in (0.5, 0.0, 0.2):
        alone = fit(mlp(), blobs(), epochs=6, spread=share, **QUIET)
        again = fit(mlp(), blobs(), epochs=6, spread=share, checkpoint=tmp_path, **QUIET)
        the_same(again, alone)


@pytest.mark.parametrize(("value", "error"), [(-0.1, ValueError), (math.inf, ValueError), ("x", TypeError)])
def test_a_spread_that_is_no_share_gets_a_sentence(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^spread must be a (finite )?number[^.]*(\.1)?\.$"):
        fit(mlp(), blobs(), epochs=2, spread=value, **QUIET)


def test_draws_of_a_fitted_model_spread_as_the_twins_that_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[Training] = []
    around = Training.around
    monkeypatch.setattr(rounds.Training, "around", lambda *args: settled.append(around(*args)) or settled[-1])
    found = fit(mlp(), blobs(), epochs=6, **QUIET)
    [twins] = [training.twins.eval() for training in settled]
    x = blobs().tensors[0][found.bootstrap.unseen]
    first, second = (twin(x).softmax(1).detach() for twin in twins)
    apart = ((first - second).square() / 2).mean()
    drawn = found.estimate.predict(x, samples=400).std.square().mean()
    assert abs(drawn / apart - 1) < 4 * math.sqrt(2 / (spread.DRAWS - 1))  # the search has so many draws
