"""The ready-made loop: what it learns, what it never reads, and how it goes on after a kill."""

import csv
import errno
import math
import random
import signal
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loops import assert_same_bits, mlp, seeded
from processes import Deadly, ended, together
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from twinboot import Bootstrap, Estimate, Fit, Protocol, Twins, fit, resets
from twinboot._core.states import pack, unpack
from twinboot.experiments import datasets, networks
from twinboot.training.checkpoints import Checkpoints

QUIET: dict[str, Any] = {"progress": False, "spread": 0.0, "optimizer": lambda p: torch.optim.Adam(p, 0.02)}


def blobs(n: int = 240, seed: int = 0) -> TensorDataset:
    """Three classes of points around three corners."""
    labels = torch.arange(n) % 3
    corners = 2 * torch.eye(3, 4)
    return TensorDataset(corners[labels] + torch.randn(n, 4, generator=seeded(seed)), labels)


def dropout_net() -> nn.Sequential:
    first, *rest = mlp()
    return nn.Sequential(first, nn.Dropout(0.2), *rest)


def digits() -> TensorDataset:
    images = datasets.load("digits")
    return TensorDataset(images.train_x[:400].float().flatten(1) / 16, images.train_y[:400])


def digits_net() -> nn.Sequential:
    """With the same weights each time, and something that draws."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 24), nn.Dropout(0.2), nn.ReLU(), nn.Linear(24, 10))


def test_digits_are_learned_in_a_second() -> None:
    found = fit(digits_net(), digits(), epochs=12, optimizer=lambda p: torch.optim.Adam(p, 0.01), progress=False)
    images = datasets.load("digits")
    probs = found.estimate.predict(images.test_x.float().flatten(1) / 16).probs
    assert (probs.argmax(1) == images.test_y).double().mean() > 0.8


def test_it_learns_and_keeps_the_epoch_that_predicts_unseen_samples_best() -> None:
    found = fit(mlp(), blobs(), epochs=12, **QUIET)
    assert found.history["epoch"] == list(range(1, 13))
    assert found.history["unseen"][found.best_epoch - 1] == min(found.history["unseen"])
    assert found.history["accuracy"][found.best_epoch - 1] > 0.85
    assert all(
        0 < least <= most for least, most in zip(found.history["sigma_least"], found.history["sigma_most"], strict=True)
    )
    x, y = blobs()[found.bootstrap.unseen]
    expected = nn.functional.cross_entropy(found.estimate(x), y).item()
    assert min(found.history["unseen"]) == pytest.approx(expected, rel=1e-5)
    assert repr(found).startswith(f"Fit(epoch {found.best_epoch} of 12, unseen 0.")


@pytest.mark.parametrize("options", [{"cover": True}, {"kind": "bayesian"}])
def test_where_the_twins_see_everything_the_last_epoch_is_kept(options: dict[str, Any], capsys: Any) -> None:
    seen: list[dict[str, Tensor]] = []
    found = fit(
        mlp(),
        blobs(),
        epochs=12,
        bootstrap=Bootstrap(240, **options),
        optimizer=QUIET["optimizer"],
        callback=lambda epoch, estimate, twins: seen.append(estimate.state_dict()),
    )
    assert found.best_epoch == 12
    assert not {"unseen", "accuracy"} & set(found.history)
    assert repr(found) == "Fit(epoch 12 of 12)"
    assert_same_bits(found.estimate.state_dict(), seen[-1])
    x, y = blobs(seed=1).tensors
    assert (found.estimate.predict(x).probs.argmax(1) == y).double().mean() > 0.75
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert not any("unseen" in line or "*" in line for line in lines)


def test_a_run_that_sees_everything_goes_on_bit_for_bit_with_statistics_of_its_own(tmp_path: Path) -> None:
    def run(epochs: int, **options: Any) -> Fit:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        model.load_state_dict({k: seeded_like(v) for k, v in model.state_dict().items()})
        return fit(model, blobs(), epochs=epochs, bootstrap=Bootstrap(240, cover=True), **QUIET, **options)

    run(2, checkpoint=tmp_path)
    resumed, whole = run(4, checkpoint=tmp_path), run(4)
    assert_same_bits(resumed.estimate.state_dict(), whole.estimate.state_dict())
    assert without_time(resumed) == without_time(whole)
    x, _ = blobs().tensors
    layer, norm = whole.estimate.module[0], whole.estimate.module[1]  # type: ignore[index]
    torch.testing.assert_close(norm.running_mean, layer(x).mean(0), atol=0.1, rtol=0.1)


@pytest.mark.parametrize(("kind", "replicas", "size"), [("multinomial", 2, 20), ("split", 2, 16), ("split", 4, 8)])
def test_a_batch_has_the_distinct_samples_of_its_draws_and_twins_that_divide_them_divide_it_too(
    kind: Any, replicas: int, size: int
) -> None:
    sizes: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return super().forward(x)

    bootstrap = Bootstrap(240, replicas, kind=kind, cover=True)
    for resample in ("counts", "draws") if kind == "split" else ("counts",):
        sizes.clear()
        fit(
            Counting(4, 3),
            blobs(),
            epochs=1,
            batch_size=32,
            bootstrap=bootstrap,
            protocol=Protocol(resample=resample),
            **QUIET,
        )  # type: ignore[arg-type]
        assert abs(statistics.mode(sizes) - size) <= 1  # 32 (1 - 1 / e) = 20.2
        assert abs(len(sizes) / replicas - 240 / 32) <= 1 + 0.07 * 240 / 32  # and what is covered


@pytest.mark.parametrize("cover", [False, True])
def test_twins_that_divide_the_samples_keep_sigma_of_their_mean(cover: bool) -> None:
    last: list[Tensor] = []
    found = fit(
        mlp(),
        blobs(),
        epochs=3,
        protocol=Protocol(average=math.inf),
        bootstrap=Bootstrap(240, kind="split", cover=cover),
        callback=lambda epoch, estimate, twins: last.append(twins.partition.sigma.clone()),
        **QUIET,
    )
    torch.testing.assert_close(found.estimate.partition.sigma, last[found.best_epoch - 1] / math.sqrt(2))
    assert ("unseen" in found.history) != cover


def seeded_like(value: Tensor) -> Tensor:
    return torch.rand(value.shape, generator=seeded(1)) if value.is_floating_point() else value


def test_unseen_samples_change_nothing_that_is_trained() -> None:
    data, other = blobs(), blobs()
    bootstrap = Bootstrap(len(data), seed=5)
    other.tensors[0][bootstrap.unseen] += 7
    first, second = (fit(mlp(), d, epochs=1, bootstrap=bootstrap, **QUIET) for d in (data, other))
    assert_same_bits(first.estimate.state_dict(), second.estimate.state_dict())
    assert first.history["unseen"] != second.history["unseen"]


@pytest.mark.parametrize("loss", ["regression", "gaussian", lambda out, y: (out[:, 0] - y).abs()])
def test_values_are_fitted_by_each_loss(loss: Any, tmp_path: Path) -> None:
    x = torch.randn(300, 4, generator=seeded(1))
    data = TensorDataset(x, x[:, 0] - x[:, 1])
    model = mlp(outputs=2 if loss == "gaussian" else 1)
    found = fit(model, data, loss, epochs=15, **QUIET)
    assert "accuracy" not in found.history
    out = found.estimate(x)[:, 0]
    assert (out - data.tensors[1]).square().mean() < 0.1 * data.tensors[1].var()
    found.estimate.save(tmp_path / "estimate")
    for estimate in (found.estimate, Estimate.load(tmp_path / "estimate", model)):
        if isinstance(loss, str):  # and predicted, without being asked for by name
            prediction = estimate.predict(x, 4)
            assert prediction.task == loss
        else:
            with pytest.raises(ValueError, match='give task="classification", "regression" or "gaussian"'):
                estimate.predict(x, 4)
            prediction = estimate.predict(x, 4, "regression")
        assert prediction.mean.shape == (300, 1)


def test_an_epoch_has_as_many_steps_with_counts_as_with_draws() -> None:
    steps = {}
    for kind in ("draws", "counts"):
        taken: list[int] = []

        class Counting(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                taken.append(1)  # noqa: B023 (it is of this turn)
                return super().step(closure)

        fit(
            mlp(),
            blobs(600),
            epochs=1,
            protocol=Protocol(resample=kind),
            batch_size=32,
            spread=0.0,
            progress=False,
            optimizer=Counting,
        )  # type: ignore[arg-type]
        steps[kind] = len(taken)
    assert steps["draws"] == 19  # 600 / 32
    assert abs(steps["counts"] - steps["draws"]) <= 1


def test_averaged_epochs_walk_less_and_each_by_itself_is_the_papers() -> None:
    kept: dict[float, list[Tensor]] = {}
    for power in (3.0, math.inf):
        kept[power] = []

        def look(epoch: int, estimate: Estimate, twins: Twins) -> None:
            kept[power].append(estimate.module[0].weight.detach().clone())  # noqa: B023 (it is of this turn)
            own = twins.estimate().module[0].weight
            assert torch.equal(own, kept[power][-1]) == (power == math.inf or epoch == 1)  # noqa: B023

        fit(mlp(), blobs(), epochs=12, callback=look, protocol=Protocol(average=power), **QUIET)
    moves = {power: torch.stack(found).diff(dim=0)[-5:].norm() for power, found in kept.items()}
    assert moves[3.0] < moves[math.inf]


def test_noise_in_training_is_so_many_times_sigma(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, sampled = [], Twins.sampled

    def spy(self: Twins, scale: float = 1.0, *, local: bool = False) -> Any:
        calls.append((scale, local))
        return sampled(self, scale, local=local)

    monkeypatch.setattr(Twins, "sampled", spy)
    for noise in (0.0, 1.0, 2.5):
        for local in (False, True):
            calls.clear()
            fit(mlp(), blobs(), epochs=2, protocol=Protocol(noise=noise, local=local), **QUIET)
            assert set(calls) == ({(noise, local)} if noise else set())


def test_a_step_with_pooled_gradients_moves_the_mean_as_ever_and_the_twins_less_apart() -> None:
    found: dict[float, tuple[Tensor, Tensor]] = {}
    for pooled in (0.0, 0.75):

        def look(epoch: int, estimate: Estimate, twins: Twins, pooled: float = pooled) -> None:
            found[pooled] = nn.utils.parameters_to_vector(estimate.module.parameters()), twins.partition.sigma.clone()

        one_step = {"optimizer": lambda p: torch.optim.SGD(p, 0.1), "batch_size": 240}
        fit(
            mlp(),
            blobs(),
            epochs=1,
            protocol=Protocol(noise=0.0, pooled=pooled, resample="draws"),
            callback=look,
            progress=False,
            **one_step,
        )
    (mean, apart), (pooled_mean, pooled_apart) = found.values()
    torch.testing.assert_close(pooled_mean, mean)
    torch.testing.assert_close(pooled_apart, apart / 4)


def test_a_reset_after_each_epoch_and_after_as_many_steps_are_the_same_bits() -> None:
    options: dict[str, Any] = {"epochs": 4, "batch_size": 16, **QUIET}
    by_epoch = fit(mlp(), blobs(), protocol=Protocol(resample="draws"), **options)
    in_steps = Protocol(resample="draws", reset=resets.steps(resets.every(240 // 16)))
    by_step = fit(mlp(), blobs(), protocol=in_steps, **options)
    assert_same_bits(by_step.estimate.state_dict(), by_epoch.estimate.state_dict())
    assert without_time(by_step) == without_time(by_epoch)


def test_resets_within_epochs_come_after_the_steps_that_the_schedule_names(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, due, modes = [0], [], []
    update, reset = Twins.update, Twins.reset

    def counting(self: Twins) -> None:
        steps[0] += 1
        update(self)

    def noted(self: Twins, mode: resets.Mode = "sample") -> None:
        due.append(steps[0])
        modes.append(mode)
        reset(self, mode)

    monkeypatch.setattr(Twins, "update", counting)
    monkeypatch.setattr(Twins, "reset", noted)
    schedule = resets.steps(resets.growing(4, 1.5, most=10))
    fit(
        mlp(),
        blobs(),
        epochs=3,
        batch_size=16,
        protocol=Protocol(resample="draws", reset=schedule, mode="centered"),
        **QUIET,
    )
    assert steps[0] == 45
    assert due == [4, 10, 19, 29, 39]
    assert set(modes) == {"centered"}
    fit(mlp(), blobs(), epochs=2, batch_size=16, protocol=Protocol(resample="draws", mode="mean"), **QUIET)
    assert due[5:] == [60, 75]
    assert modes[5:] == ["mean", "mean"]


def test_a_long_first_epoch_begins_with_more_resets_so_that_the_mean_of_the_twins_is_a_network() -> None:
    """Twins of random weights that part for 168 steps have a mean that has hardly learned."""
    images = datasets.load("digits")
    x = datasets.standardised(images.train_x, datasets.moments_of(images.train_x))
    data = TensorDataset(x, images.train_y)
    for seed in (0, 1):
        usual, parted = (
            fit(
                networks.small(10, 1, 0.5, seed=seed),
                data,
                epochs=1,
                batch_size=8,
                protocol=Protocol(reset=reset),
                spread=0.0,
                seed=seed,
                progress=False,
            )
            for reset in (None, resets.every(1))
        )
        assert usual.history["unseen"][0] < 0.75 * parted.history["unseen"][0]


@pytest.mark.parametrize("schedule", [resets.growing(5, 1.2), resets.every(1)])  # the latter is due after the stop, too
def test_a_run_with_resets_within_epochs_goes_on_bit_for_bit(tmp_path: Path, schedule: resets.Schedule) -> None:
    def run(epochs: int, **options: Any) -> Fit:
        reset = resets.steps(schedule)
        return fit(mlp(), blobs(), epochs=epochs, batch_size=16, protocol=Protocol(reset=reset), **QUIET, **options)

    run(2, checkpoint=tmp_path)
    assert_same_bits(run(4, checkpoint=tmp_path).estimate.state_dict(), run(4).estimate.state_dict())


def test_counts_and_draws_both_find_a_line_without_noise() -> None:
    x = torch.randn(300, 3, generator=seeded(2))
    data = TensorDataset(x, x @ torch.tensor([1.0, -2.0, 0.5]))
    options: dict[str, Any] = {"epochs": 60, "progress": False, "optimizer": lambda p: torch.optim.Adam(p, 0.1)}
    for kind in ("draws", "counts"):
        found = fit(nn.Linear(3, 1), data, "regression", protocol=Protocol(resample=kind), **options).estimate.module
        torch.testing.assert_close(found.weight, torch.tensor([[1.0, -2.0, 0.5]]), atol=0.02, rtol=0)


def test_batchnorm_of_the_mean_model_has_statistics_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    data = blobs()
    found = fit(model, data, epochs=3, batch_size=len(data), **QUIET)  # one batch, whose statistics these are
    inner = found.estimate.module
    values = inner[0](data.tensors[0][found.bootstrap.seen])
    torch.testing.assert_close(inner[1].running_mean, values.mean(0))
    torch.testing.assert_close(inner[1].running_var, values.var(0))


def test_batchnorm_knows_the_spread_of_a_dataset_that_is_sorted_by_class() -> None:
    x = torch.cat([torch.randn(200, 1, generator=seeded(1)), 50 + torch.randn(200, 1, generator=seeded(2))])
    data = TensorDataset(x, (x[:, 0] > 25).long())
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
    found = fit(model, data, epochs=1, batch_size=40, **QUIET)
    spread = found.estimate.module[0].running_var.item()
    # 25^2 between the classes; of a batch of 40 in random order the estimate is within a few percent of it, and the
    # mean over nine batches closer still. Batches of one class would say 1.
    assert spread == pytest.approx(625, rel=0.1)


def test_the_callback_sees_each_epoch_as_it_was_loss_and_hit() -> None:
    seen: list[tuple[int, float]] = []
    data = blobs()

    def look(epoch: int, estimate: Estimate, twins: Twins) -> None:
        unseen = Bootstrap(len(data)).unseen
        x, y = (t[unseen] for t in data.tensors)
        seen.append((epoch, F.cross_entropy(estimate(x), y).item()))

    found = fit(mlp(), data, epochs=3, callback=look, **QUIET)
    assert [epoch for epoch, _ in seen] == found.history["epoch"] == [1, 2, 3]
    assert [loss for _, loss in seen] == pytest.approx(found.history["unseen"], rel=1e-5)


def test_statistics_of_batchnorm_do_not_depend_on_the_global_generators() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(fit(model, blobs(), epochs=1, **QUIET).estimate.module[2].running_mean)
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(*found)


@pytest.mark.parametrize(("batch_size", "n"), [(8, 33), (8, 34), (8, 35), (64, 65)])
def test_no_batch_is_too_small_for_batchnorm(batch_size: int, n: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    for resample in ("draws", "counts"):
        options: Any = {"batch_size": batch_size, "protocol": Protocol(resample=resample), **QUIET}
        assert fit(model, blobs(n), epochs=1, **options).best_epoch == 1


def test_patience_ends_a_run_that_gets_no_better() -> None:
    noise = TensorDataset(torch.randn(60, 4, generator=seeded(3)), torch.randint(3, (60,), generator=seeded(4)))
    found = fit(mlp(), noise, epochs=200, patience=3, progress=False, optimizer=lambda p: torch.optim.Adam(p, 0.1))
    assert len(found.history["epoch"]) == found.best_epoch + 3 < 200


def test_global_generators_and_the_model_stay_as_they_are() -> None:
    model = dropout_net()
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    fit(model, blobs(), epochs=2, **QUIET)
    assert torch.equal(state, torch.get_rng_state())
    assert_same_bits(before, list(model.parameters()))


def scheduled(data: TensorDataset | None = None, **options: Any) -> Fit:
    settings: dict[str, Any] = {"epochs": 6, "batch_size": 32, "seed": 3}
    settings["protocol"] = Protocol(reset=resets.every(2))
    halve = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # noqa: E731
    return fit(digits_net(), data or digits(), scheduler=halve, **QUIET, **settings | options)


def without_time(found: Fit) -> dict[str, list[float]]:
    return {name: values for name, values in found.history.items() if name != "seconds"}


def killed(folder: Path, reads: int) -> None:
    torch.set_num_threads(1)
    scheduled(Deadly(digits(), reads), checkpoint=folder)


def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """kill -9 in the middle of an epoch, three times over."""
    for reads in (1170, 830, 1500):  # of some 560 in an epoch
        assert ended(killed, tmp_path, reads) == -signal.SIGKILL
    done = len(list(tmp_path.glob("epoch-*.pt")))
    assert done == 2  # of the last epochs, as `keep` says
    resumed, whole = scheduled(checkpoint=tmp_path), scheduled()
    assert_same_bits(resumed.estimate.state_dict(), whole.estimate.state_dict())
    assert without_time(resumed) == without_time(whole)
    assert resumed.best_epoch == whole.best_epoch


def test_a_control_adds_columns_and_changes_nothing_else() -> None:
    plain, controlled = scheduled(), scheduled(control=True)
    assert_same_bits(plain.estimate.state_dict(), controlled.estimate.state_dict())
    history = without_time(controlled)
    columns = {name: history.pop(name) for name in list(history) if name not in plain.history}
    assert history == without_time(plain)
    assert list(columns) == ["data_share/0", "data_share/3"]
    assert all(len(shares) == 6 and max(shares) < 1 for shares in columns.values())


def fit_with_and_without_control() -> dict[str, list[float]]:
    plain, controlled = (fit(mlp(), blobs(), epochs=2, batch_size=16, control=c, **QUIET) for c in (False, True))
    assert_same_bits(plain.estimate.state_dict(), controlled.estimate.state_dict())
    return {name: values for name, values in controlled.history.items() if name.startswith("data_share/")}


def test_ranks_have_one_control_and_the_twins_that_they_had() -> None:
    first, second = together(fit_with_and_without_control)
    assert first == second
    assert list(first) == ["data_share/0", "data_share/2"]


def fit_stacked() -> None:
    with pytest.raises(ValueError, match="in one process, and not under torchrun: leave out stacked"):
        fit(mlp(), blobs(), epochs=1, batch_size=16, stacked=True, **QUIET)


def test_ranks_have_separate_twins() -> None:
    together(fit_stacked)


def test_a_run_with_a_control_goes_on_bit_for_bit(tmp_path: Path) -> None:
    scheduled(checkpoint=tmp_path, epochs=3, control=True)
    resumed, whole = scheduled(checkpoint=tmp_path, control=True), scheduled(control=True)
    assert_same_bits(resumed.estimate.state_dict(), whole.estimate.state_dict())
    assert without_time(resumed) == without_time(whole)


@pytest.mark.parametrize("control", [False, True])
def test_a_run_with_a_control_goes_on_with_it_and_one_without_without(tmp_path: Path, control: bool) -> None:
    scheduled(checkpoint=tmp_path, epochs=2, control=control)
    with pytest.raises(ValueError, match=f"control was {control} and is {not control} here"):
        scheduled(checkpoint=tmp_path, control=not control)


def bends() -> nn.Sequential:
    """A chain of layers, in float64, and the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def in_double() -> TensorDataset:
    x, y = blobs().tensors
    return TensorDataset(x.double(), y)


def normed() -> nn.Sequential:
    """No chain: stacked twins run it one by one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3)).double()


@pytest.mark.parametrize("make", [bends, normed])
@pytest.mark.parametrize(
    "protocol",
    [Protocol(), Protocol(groups="unit", mode="centered"), Protocol(groups="weight", noise=0.5, pooled=0.3)],
)
def test_stacked_twins_train_as_separate_ones_do(make: Any, protocol: Protocol) -> None:
    separate, stacked = (
        fit(make(), in_double(), epochs=4, protocol=protocol, stacked=choice, **{**QUIET, "spread": 0.5})
        for choice in (False, True)
    )
    for column, values in without_time(separate).items():
        assert stacked.history[column] == pytest.approx(values, rel=1e-6), column
    assert stacked.estimate.scale == pytest.approx(separate.estimate.scale, rel=1e-6)
    torch.testing.assert_close(stacked.estimate.state_dict(), separate.estimate.state_dict(), rtol=1e-6, atol=1e-8)


def test_a_run_of_stacked_twins_goes_on_bit_for_bit(tmp_path: Path) -> None:
    options = QUIET | {"spread": 0.5, "stacked": True}
    fit(bends(), in_double(), epochs=2, checkpoint=tmp_path, **options)
    resumed = fit(bends(), in_double(), epochs=5, checkpoint=tmp_path, **options)
    whole = fit(bends(), in_double(), epochs=5, **options)
    assert without_time(resumed) == without_time(whole)
    assert_same_bits(resumed.estimate.state_dict(), whole.estimate.state_dict())
    with pytest.raises(ValueError, match="stacked was True and is False here"):
        fit(bends(), in_double(), epochs=6, checkpoint=tmp_path, **{**options, "stacked": False})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"control": True}, "stacked twins have no control: leave out control or stacked"),
        ({"optimizer": lambda p: torch.optim.Adafactor(p)}, "treat each weight alone .*, not Adafactor: leave it out"),
        ({"optimizer": lambda p: Whole(p, 0.1)}, "treat each weight alone .*, not Whole: leave it out"),
    ],
)
def test_what_stacked_twins_cannot_do_is_said_before_training(options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        fit(bends(), in_double(), epochs=1, stacked=True, **{**QUIET, **options})


class Whole(torch.optim.SGD):
    """One that may do anything, such as divide each gradient by its norm."""


def test_a_checkpoint_from_before_there_was_a_control_goes_on(tmp_path: Path) -> None:
    scheduled(checkpoint=tmp_path, epochs=2)
    state = Checkpoints(tmp_path).latest(torch.device("cpu"))
    assert state is not None
    description = unpack(state["description"])
    assert description.pop("control") is False
    del state["format"]
    Checkpoints(tmp_path).save(state.pop("epoch"), {**state, "description": pack(description)})
    assert without_time(scheduled(checkpoint=tmp_path)) == without_time(scheduled())


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    scheduled(checkpoint=tmp_path, epochs=3)
    assert without_time(scheduled(checkpoint=tmp_path)) == without_time(scheduled())


def test_a_checkpoint_of_other_options_is_refused(tmp_path: Path) -> None:
    scheduled(checkpoint=tmp_path, epochs=1)
    with pytest.raises(ValueError, match="does not fit: batch_size was 32 and is 16 here"):
        scheduled(checkpoint=tmp_path, batch_size=16)


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (
            {"scheduler": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 2)},
            {"scheduler": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4)},
            "'T_max' of the scheduler's settings was 2 and is 4 here",
        ),
        ({}, {"protocol": Protocol(reset=resets.never())}, r"reset was every\(interval=1\) and is never\(\) here"),
        (
            {"protocol": Protocol(reset=resets.steps(resets.every(2)))},
            {"protocol": Protocol(reset=resets.steps(lambda step: step % 2 == 0))},
            r"reset was steps\(every\(interval=2\)\) and is steps\(<lambda> \(\w+\)\) here",
        ),
    ],
)
def test_another_schedule_of_the_rate_or_the_resets_is_refused(
    tmp_path: Path, then: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    fit(mlp(), blobs(), epochs=1, checkpoint=tmp_path, **QUIET, **then)
    with pytest.raises(ValueError, match=f"does not fit: {said}"):
        fit(mlp(), blobs(), epochs=2, checkpoint=tmp_path, **QUIET, **now)
    assert fit(mlp(), blobs(), epochs=2, checkpoint=tmp_path, **QUIET, **then).history["epoch"] == [1, 2]


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output.softmax(1)[:, 0] - target).square()


def absolute(output: Tensor, target: Tensor) -> Tensor:
    return (output.softmax(1)[:, 0] - target).abs()


class Bent(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Straight(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"loss": squared}, {"loss": absolute}, r"loss was squared \(\w+\) and is absolute \(\w+\) here"),
        (
            {"loss": lambda y, t: squared(y, t)},
            {"loss": lambda y, t: 2 * squared(y, t)},
            r"loss was <lambda> \(\w+\) and is <lambda> \(\w+\) here",
        ),
        (
            {"model": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))},
            {"model": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))},
            "'1' of the model was Tanh and is ReLU inplace=False here",
        ),
        (
            {"model": Bent(nn.Linear(4, 3))},
            {"model": Straight(nn.Linear(4, 3))},
            r"'\(model\)' of the model was Bent code \w+ and is Straight code \w+ here",
        ),
    ],
)
def test_another_loss_or_activation_is_refused(
    tmp_path: Path, then: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    run: dict[str, Any] = {"model": mlp(), "dataset": blobs(), "checkpoint": tmp_path, **QUIET}
    fit(**run | then, epochs=1)
    with pytest.raises(ValueError, match=f"does not fit: {said}"):
        fit(**run | now, epochs=2)
    assert fit(**run | then, epochs=2).history["epoch"] == [1, 2]


def test_a_checkpoint_without_what_a_run_needs_gets_a_sentence(tmp_path: Path) -> None:
    Checkpoints(tmp_path, keep=1).save(1, {"history": {}})
    with pytest.raises(ValueError, match=r"^the checkpoint in .* is of no run of fit: it has no 'description'\.$"):
        fit(mlp(), blobs(), epochs=2, checkpoint=tmp_path, **QUIET)


@pytest.mark.parametrize("resample", ["draws", "counts"])
def test_numbers_of_numpy_are_numbers(resample: Any) -> None:
    numbers: Any = {"epochs": np.int64(2), "batch_size": np.int64(32), "patience": np.int64(1)}
    assert fit(mlp(), blobs(), protocol=Protocol(resample=resample), **numbers, **QUIET).best_epoch in (1, 2)


class Spoiled(Dataset[tuple[Tensor, Tensor]]):
    """One sample turns to NaN after so many reads."""

    def __init__(self, after: int) -> None:
        self.data, self.left = blobs(), after

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        self.left -= 1
        return (x * math.nan if self.left < 0 else x), y


def test_a_loss_that_turns_nan_names_epoch_and_step_and_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"not finite in epoch 3, step \d+: look for bad samples"):
        fit(mlp(), Spoiled(750), epochs=9, checkpoint=tmp_path, **QUIET)
    found = fit(mlp(), Spoiled(10**9), epochs=3, checkpoint=tmp_path, **QUIET)
    whole = fit(mlp(), Spoiled(10**9), epochs=3, **QUIET)
    assert_same_bits(found.estimate.state_dict(), whole.estimate.state_dict())


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tmp_path: Path, monkeypatch: Any) -> None:
    fit(mlp(), blobs(), epochs=1, checkpoint=tmp_path, **QUIET)
    before = (tmp_path / "epoch-1.pt").read_bytes()

    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        OSError, match=r"can't write .*epoch-2.pt: No space left on device; the checkpoint before it is"
    ):
        fit(mlp(), blobs(), epochs=2, checkpoint=tmp_path, **QUIET)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("epoch-1.pt", before)]


def test_weights_that_diverge_name_epoch_and_step_and_leave_a_good_checkpoint(tmp_path: Path) -> None:
    explode = lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1e36 if epoch else 1.0)  # noqa: E731
    options: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, 0.02), "scheduler": explode}
    with pytest.raises(
        FloatingPointError, match=r"the (weights are|loss is) not finite in epoch 2, step \d+: .* lower"
    ):
        fit(mlp(), blobs(), epochs=3, progress=False, checkpoint=tmp_path, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["epoch-1.pt"]
    assert fit(mlp(), blobs(), epochs=1, progress=False, checkpoint=tmp_path, **options).best_epoch == 1


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 truncated", b"cposix\nsystem\n(S'true'\ntR."])
def test_a_damaged_checkpoint_is_named_and_never_unpickled(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "epoch-4.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"epoch-4.pt is damaged, or no checkpoint of this version of fit: delete it"):
        fit(mlp(), blobs(), epochs=5, checkpoint=tmp_path, **QUIET)


def test_the_log_has_the_whole_history_also_of_a_resumed_run(tmp_path: Path) -> None:
    path, places = tmp_path / "run.csv", {"checkpoint": tmp_path / "states", "log": tmp_path / "run.csv"}
    fit(mlp(), blobs(), epochs=2, **places, **QUIET)
    found = fit(mlp(), blobs(), epochs=4, **places, **QUIET)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(float(row["epoch"])) for row in rows] == [1, 2, 3, 4]
    assert [float(row["unseen"]) for row in rows] == found.history["unseen"]
    with pytest.raises(ValueError, match=r"log must be a file.csv"):
        fit(mlp(), blobs(), epochs=1, log="run.txt", **QUIET)


def test_a_run_that_is_finished_says_that_nothing_was_trained(tmp_path: Path, capsys: Any) -> None:
    options: Any = {"epochs": 2, "batch_size": 20, "checkpoint": tmp_path / "run"}
    first = fit(mlp(), blobs(60), **options)
    assert "finished" not in capsys.readouterr().err
    again = fit(mlp(), blobs(60), **options)
    said = capsys.readouterr().err
    best = f"finished after 2 epochs (best: {first.best_epoch}): nothing was trained."
    assert said.startswith(f"{tmp_path / 'run'} has this run, {best}")
    assert said.count("\n") == 1
    assert again.history == first.history
    fit(mlp(), blobs(60), progress=False, **options)
    fit(mlp(), blobs(60), progress=False, **options | {"epochs": 3})
    assert capsys.readouterr().err == ""


def test_progress_is_a_line_for_each_epoch(capsys: Any) -> None:
    fit(mlp(), blobs(), epochs=2, optimizer=QUIET["optimizer"])
    said = capsys.readouterr()
    assert said.out == ""
    first, second = said.err.splitlines()
    assert first.startswith("epoch 1 of 2: loss ")
    assert "accuracy" in second
    assert "0:00 left" in second


def test_autocast_trains_too() -> None:
    found = fit(mlp(), blobs(), epochs=6, amp=torch.bfloat16, **QUIET)
    assert max(found.history["accuracy"]) > 0.7


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
        ({"epochs": 2.0}, "epochs must be a whole number of at least 1, not 2.0"),
        ({"batch_size": 16.5}, "batch_size must be a whole number of at least 1, not 16.5"),
        ({"patience": 0}, "patience must be a whole number of at least 1, not 0"),
        ({"scheduler": "cosine"}, "scheduler must be a function that makes one, such as lambda optimizer: StepLR"),
        ({"noise": 0.5}, r"fit has no option 'noise': give protocol=Protocol\(noise=0.5\)"),
        ({"protocol": {"noise": 0.5}}, r"protocol must be a Protocol, such as Protocol\(mode=\"centered\"\), not \{"),
        ({"loss": "mse"}, "unknown loss 'mse'"),
        ({"dataset": TensorDataset(torch.zeros(0, 4), torch.zeros(0).long())}, "the dataset is empty"),
        ({"dataset": TensorDataset(torch.zeros(9, 4), torch.full((9,), 3))}, "label 3 is out of range"),
        ({"dataset": TensorDataset(torch.zeros(9, 4))}, "tuples of an input and a target"),
        ({"dataset": torch.zeros(9, 4)}, r"a target, such as those of TensorDataset\(X, Y\)"),
        ({"dataset": (torch.zeros(9, 4), torch.zeros(9))}, r"a tuple of arrays: use TensorDataset\(X, Y\), of tensors"),
        ({"dataset": [np.zeros((9, 4)), np.zeros(9)]}, "the dataset is a list of arrays"),
        ({"model": nn.Linear(4, 1)}, r"use two outputs \(logits\) for two classes"),
        ({"loss": nn.CrossEntropyLoss()}, 'with reduction="none"'),
        ({"epoch": 1}, "fit has no option 'epoch': did you mean 'epochs'?"),
        ({"num_worker": 1}, "fit has no option 'num_worker': did you mean 'num_workers'?"),
        ({"lr": 1e-3}, r"no option 'lr': give optimizer=lambda p: torch.optim.Adam\(p, lr=0.001\)"),
        ({"learning_rate": 0.1}, "no option 'learning_rate': give optimizer=lambda p"),
        ({"share": (0, 1)}, "fit has no option 'share': it trains all twins on every rank"),
        ({"share": (0, 1), "twin": 0}, "fit has no option '(share|twin)': it trains"),
        ({"amp": "bf16"}, "amp must be a dtype, torch.bfloat16 or torch.float16, not 'bf16'"),
        ({"amp": torch.float32}, "amp must be a dtype, torch.bfloat16 or torch.float16, not torch.float32"),
        ({"device": "cudaa"}, "the device 'cudaa' can't be used: "),
        ({"bootstrap": 5}, r"bootstrap must be a Bootstrap, such as Bootstrap\(len\(dataset\)\), not 5"),
        ({"checkpoint": ""}, "checkpoint must be the path of a directory, such as 'run', not ''"),
        ({"optimizer": lambda p: torch.optim.Adam(list(p)[-2:])}, "to train a part of the model, freeze the rest"),
        ({"bootstrap": Bootstrap(240, replicas=12)}, "every sample is seen .* give a Bootstrap with cover=True"),
        ({"bootstrap": Bootstrap(240, cover=True), "patience": 3}, "patience needs samples that no twin sees"),
        (
            {"bootstrap": Bootstrap(240, cover=True), "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            "ReduceLROnPlateau needs samples that no twin sees",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(change: dict[str, Any], said: str) -> None:
    options: dict[str, Any] = {"model": mlp(), "dataset": blobs(), "epochs": 1, **QUIET}
    with pytest.raises((ValueError, TypeError), match=said):
        fit(**options | change)


@pytest.mark.parametrize(
    "option", ["accumulate_grad_batches", "gradient_accumulation_steps", "gradient_clip_val", "max_grad_norm"]
)
def test_accumulation_and_clipping_are_refused_with_what_to_do(option: str) -> None:
    with pytest.raises(TypeError, match=f"fit has no option '{option}': for accumulation and clipping write the loop"):
        fit(mlp(), blobs(), epochs=1, **QUIET, **{option: 2})


def fit_shards() -> None:
    model = fully_shard(mlp())
    with pytest.raises(ValueError, match="fit wraps twins in DDP: write the loop, and shard Twins there"):
        fit(model, blobs(), epochs=1, **QUIET)


def test_a_sharded_model_is_refused() -> None:
    together(fit_shards)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": lambda p: torch.optim.Adam(p, np.float64(0.02))},
        {"scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, np.float64(0.9))},
        {"scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: np.cos(epoch / 10))},
        {"scheduler": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0)},
    ],
)
def test_numbers_of_numpy_and_any_scheduler_survive_a_resume(tmp_path: Path, options: dict[str, Any]) -> None:
    settings = QUIET | options
    fit(mlp(), blobs(), epochs=2, checkpoint=tmp_path, **settings)
    resumed = fit(mlp(), blobs(), epochs=4, checkpoint=tmp_path, **settings)
    assert without_time(resumed) == without_time(fit(mlp(), blobs(), epochs=4, **settings))


def test_a_state_that_could_not_be_read_back_is_refused_before_it_is_kept(tmp_path: Path) -> None:
    class Odd(torch.optim.lr_scheduler.ConstantLR):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer)
            self.path = tmp_path

    with pytest.raises(TypeError, match="cannot be read back without unpickling"):
        fit(mlp(), blobs(), epochs=2, checkpoint=tmp_path, scheduler=Odd, **QUIET)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": lambda p: torch.optim.Adam(p, 0.01)}, r"learning rate was \[0.02\] and is \[0.01\] here"),
        ({"optimizer": lambda p: torch.optim.SGD(p, 0.02)}, "optimizer was Adam and is SGD here"),
        (
            {"optimizer": lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1)},
            "settings was .*'weight_decay': '0'.* and",
        ),
        ({"protocol": Protocol(noise=2.0)}, "noise was 1.0 and is 2.0 here"),
        ({"protocol": Protocol(pooled=0.5)}, "pooled was 0.0 and is 0.5 here"),
        ({"protocol": Protocol(local=True)}, "local was False and is True here"),
        ({"protocol": Protocol(mode="mean")}, "mode was sample and is mean here"),
        ({"epochs": 1}, "holds a run of more than 1 epochs"),
        ({"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 3)}, "scheduler was NoneType and is StepLR here"),
    ],
)
def test_a_run_does_not_go_on_with_other_options(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    fit(mlp(), blobs(), epochs=2, checkpoint=tmp_path, **QUIET)
    with pytest.raises(ValueError, match=said):
        fit(**{"model": mlp(), "dataset": blobs(), "epochs": 3, "checkpoint": tmp_path, **QUIET} | change)


def test_a_checkpoint_never_writes_into_a_frozen_part(tmp_path: Path) -> None:
    def frozen(seed: int) -> nn.Sequential:
        model = mlp(seed=seed)
        model[0].requires_grad_(False)
        return model

    fit(frozen(0), blobs(), epochs=1, checkpoint=tmp_path, **QUIET)
    other = frozen(1)
    before = other[0].weight.clone()
    with pytest.raises(ValueError, match=r"the frozen parameter '.*0.weight' differs from that of then"):
        fit(other, blobs(), epochs=2, checkpoint=tmp_path, **QUIET)
    assert torch.equal(other[0].weight, before)


class FrozenBody(nn.Module):
    """The body stays in evaluation, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 3)
        self.body.requires_grad_(False)
        assert self.body[1].running_mean is not None
        self.body[1].running_mean.fill_(5.0)

    def train(self, mode: bool = True) -> "FrozenBody":
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def test_statistics_of_a_frozen_batchnorm_are_kept() -> None:
    found = fit(FrozenBody(), blobs(), epochs=2, **QUIET)
    assert (found.estimate.module.body[1].running_mean == 5).all()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 3), nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.norm(self.first(x) + self.second(z))  # type: ignore[no-any-return]


@pytest.mark.parametrize("batch_size", [32, 103])
def test_batchnorm_with_two_inputs_and_with_a_last_batch_of_one(batch_size: int) -> None:
    x, y = blobs(120).tensors
    seen = len(Bootstrap(120, seed=0).seen)
    assert (seen % 103 == 1) == (seen == 104)
    found = fit(TwoInputs(), TensorDataset(x, x.flip(0), y), epochs=1, batch_size=batch_size, **QUIET)
    assert math.isfinite(found.history["unseen"][0])


def test_unseen_samples_go_through_the_same_collate_function() -> None:
    class Ragged(Dataset[tuple[Tensor, int]]):
        def __len__(self) -> int:
            return 90

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.full((1 + index % 3,), float(index % 2)), index % 2

    def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        x = nn.utils.rnn.pad_sequence([s for s, _ in samples], True)
        return nn.functional.pad(x, (0, 3 - x.shape[1])), torch.tensor([label for _, label in samples])

    found = fit(nn.Linear(3, 2), Ragged(), epochs=3, collate_fn=padded, **QUIET)
    assert len(found.history["unseen"]) == 3


class OpenedByWorkers(Dataset[tuple[Tensor, Tensor]]):
    """Data of which each worker has to open a handle of its own."""

    def __init__(self) -> None:
        self.handle: Any = None

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.handle is None:
            raise RuntimeError("not opened")
        x, y = self.handle[index]
        return x, y


def open_in_worker(number: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    data = info.dataset
    while not isinstance(data, OpenedByWorkers):
        data = data.dataset
    data.handle = blobs(90)


def test_workers_that_judge_are_begun_as_those_that_train_are() -> None:
    found = fit(mlp(), OpenedByWorkers(), epochs=1, num_workers=1, worker_init_fn=open_in_worker, **QUIET)
    assert math.isfinite(found.history["unseen"][0])


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (torch.optim.Adam(mlp().parameters()), "optimizer must be a function that makes one"),
        (lambda p: torch.optim.Adam(mlp().parameters()), "those of the twins"),
        (torch.optim.LBFGS, "which LBFGS is not made for"),
    ],
)
def test_an_optimizer_that_would_train_nothing_is_refused(optimizer: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        fit(mlp(), blobs(), epochs=1, progress=False, optimizer=optimizer)


def test_a_stream_is_refused_as_by_the_loader() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    with pytest.raises(TypeError, match="the dataset must be map-style"):
        fit(mlp(), Stream(), epochs=1, **QUIET)


def test_what_a_model_draws_from_any_generator_depends_on_the_step_alone() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            factor = 1 + 0.1 * random.random() + 0.1 * np.random.random()  # noqa: NPY002
            return self.inner(x * factor if self.training else x)  # type: ignore[no-any-return]

    first, second = (fit(Draws(), blobs(), epochs=2, **QUIET) for _ in range(2))
    assert_same_bits(first.estimate.state_dict(), second.estimate.state_dict())


def test_a_compiled_model_learns_the_same() -> None:
    compiled: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(1)
        return graph.forward

    found = fit(torch.compile(mlp(), backend=backend), blobs(), epochs=2, **QUIET)
    plain = fit(mlp(), blobs(), epochs=2, **QUIET)
    assert compiled
    assert found.history["unseen"] == pytest.approx(plain.history["unseen"], rel=1e-5)
    assert found.history["sigma_most"] == pytest.approx(plain.history["sigma_most"], rel=1e-4)


class Counted(Dataset[Any]):
    """Samples of which it is known when each was read."""

    def __init__(self, data: TensorDataset) -> None:
        self.data, self.read = data, list[int]()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.data[index]


def test_samples_for_calibration_are_not_read_before_the_epoch_is_chosen() -> None:
    data = Counted(blobs())
    during: list[int] = []

    def note(*_: Any) -> None:
        during.extend(data.read)

    data.read.clear()
    found = fit(mlp(), data, epochs=3, calibration=0.5, callback=note, **QUIET)
    reserved = set(found.bootstrap.calibration.tolist())
    assert len(reserved) == len(Bootstrap(240).unseen) // 2
    assert reserved & set(during) <= {min(reserved)}  # one is read before training, to see whether it can be scored
    assert during.count(min(reserved)) == 3  # once, in each of the three notes
    assert found.estimate.scores is not None
    assert len(found.estimate.scores) == len(reserved)
    assert found.estimate.predict(data.data.tensors[0]).set(0.8).any(1).all()


@pytest.mark.parametrize("model", ["classification", "regression", "gaussian"])
def test_other_values_of_calibration_samples_change_nothing_but_sets_and_intervals(model: Any) -> None:
    x, labels = blobs().tensors
    target = labels if model == "classification" else x[:, :1] + 0.1 * labels[:, None]
    reserved = Bootstrap(240, calibration=0.5).calibration
    other = target.clone()
    other[reserved] = target.roll(1, 0)[reserved]
    outputs = {"classification": 3, "regression": 1, "gaussian": 2}[model]
    results = [
        fit(mlp(outputs=outputs), TensorDataset(x, own), model, epochs=3, calibration=0.5, **QUIET)
        for own in (target, other)
    ]
    one, two = (found.estimate for found in results)
    assert_same_bits(one.state_dict(), two.state_dict())
    assert results[0].history["unseen"] == results[1].history["unseen"]
    assert one.scores is not None
    assert two.scores is not None
    assert one.scores.noise == two.scores.noise
    assert (one.scores.noise is not None) == (model == "regression")
    assert not torch.equal(one.scores.values, two.scores.values)


def test_intervals_of_fit_hold_new_values_as_often_as_theory_says() -> None:
    """The model is wrong: a line for a parabola. Coverage over 80 data sets, with 40 new samples in each; the variance
    over data sets is at most that of one sample each."""
    sets, level, covered = 80, 0.8, []
    for seed in range(sets):
        generator = seeded(seed)
        x = torch.rand(160, 1, generator=generator)
        y = x**2 + 0.1 * torch.randn(x.shape, generator=generator)
        data = TensorDataset(x[:120], y[:120])
        torch.manual_seed(seed)
        options: dict[str, Any] = {**QUIET, "optimizer": lambda p: torch.optim.Adam(p, 0.1)}
        found = fit(nn.Linear(1, 1), data, "regression", epochs=2, calibration=0.5, seed=seed, **options)
        low, high = found.estimate.predict(x[120:]).conformal_interval(level)
        covered.append(((low <= y[120:]) & (y[120:] <= high)).double().mean().item())
    most = level + 1 / (min(len(Bootstrap(120, seed=s, calibration=0.5).calibration) for s in range(sets)) + 1)
    width = 4 * statistics.stdev(covered) / math.sqrt(sets)
    assert level - width < statistics.mean(covered) < most + width


def test_a_calibration_that_cannot_be_gets_a_sentence_before_training() -> None:
    with pytest.raises(ValueError, match=r"give the calibration to the bootstrap: Bootstrap\(n, calibration=0.5\)"):
        fit(mlp(), blobs(), bootstrap=Bootstrap(240), calibration=0.5, **QUIET)
    with pytest.raises(ValueError, match='give the loss as "classification", "regression" or "gaussian"'):
        fit(mlp(), blobs(), lambda output, target: output.sum(1), calibration=0.5, **QUIET)
    with pytest.raises(ValueError, match="calibration must be a share below 1"):
        fit(mlp(), blobs(), calibration=50, **QUIET)
    x, labels = blobs().tensors
    with pytest.raises(TypeError, match="calibration needs one integer label for each sample"):
        fit(nn.Conv1d(4, 3, 1), TensorDataset(x[:, :, None], labels[:, None]), calibration=0.5, **QUIET)


def test_a_run_with_other_samples_for_calibration_is_not_continued(tmp_path: Path) -> None:
    fit(mlp(), blobs(), epochs=1, calibration=0.5, checkpoint=tmp_path, **QUIET)
    with pytest.raises(ValueError, match="the checkpoint does not fit: calibration was"):
        fit(mlp(), blobs(), epochs=2, calibration=0.4, checkpoint=tmp_path, **QUIET)
    again = fit(mlp(), blobs(), epochs=2, calibration=0.5, checkpoint=tmp_path, **QUIET)
    whole = fit(mlp(), blobs(), epochs=2, calibration=0.5, **QUIET)
    assert again.estimate.scores is not None
    assert whole.estimate.scores is not None
    assert_same_bits(again.estimate.scores.values, whole.estimate.scores.values)
    assert again.estimate.df_per_weight == 1
