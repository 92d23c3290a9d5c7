"""Error bars around a trained model: the model stays as it is, the members are right, and a stopped run resumes."""

import copy
import importlib
import math
import random
import re
import signal
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loops import assert_same_bits, mlp, seeded, snapshot
from processes import Deadly, ended, together
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, Estimate, Twins, error_bars, fit
from twinboot.training import rounds
from twinboot.training.checkpoints import Checkpoints
from twinboot.training.epoch import Training
from twinboot.training.rounds import Round

module = importlib.import_module("twinboot.training.error_bars")  # the package exports the function by that name


def blobs(n: int = 120, seed: int = 0) -> TensorDataset:
    """Three classes of points around three corners."""
    labels = torch.arange(n) % 3
    return TensorDataset(2 * torch.eye(3, 4)[labels] + torch.randn(n, 4, generator=seeded(seed)), labels)


X, Y = blobs().tensors


def trained(model: nn.Module | None = None, steps: int = 30) -> nn.Module:
    """A model after an ordinary training, in evaluation mode."""
    model = mlp() if model is None else model
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def bars(model: nn.Module, data: Any = None, **options: Any) -> Estimate:
    usual: dict[str, Any] = {"rounds": 2, "epochs": 2, "batch_size": 16, "progress": False}
    return error_bars(model, blobs() if data is None else data, **usual | options)


def randomness() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


@pytest.mark.parametrize("keep", ["members", "sigma"])
@pytest.mark.parametrize("make", [mlp, normed])
def test_the_module_predicts_as_the_model_bit_for_bit_and_the_model_is_untouched(make: Any, keep: Any) -> None:
    model = trained(make())
    model[-1].train()  # a mode of its own
    model[-1].bias.requires_grad_(False)
    weights, modes = snapshot(model), [m.training for m in model.modules()]
    trainable, before = [p.requires_grad for p in model.parameters()], randomness()
    estimate = bars(model, keep=keep)
    assert_same_bits(model.state_dict(), weights)
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == trainable
    assert all(p.grad is None for p in model.parameters())
    assert randomness() == before
    assert_same_bits(estimate.module.state_dict(), weights)
    assert_same_bits(estimate(X), model(X))
    assert_same_bits(estimate.predict(X, samples=0).probs, model(X).softmax(1).detach())
    assert type(estimate.module) is type(model)
    assert not estimate.training


@pytest.mark.parametrize("keep", ["members", "sigma"])
def test_a_seed_gives_the_same_bits_and_another_one_others(keep: Any) -> None:
    model = trained(normed())
    first, again, other = (bars(model, keep=keep, seed=seed).state_dict() for seed in (1, 1, 2))
    assert_same_bits(first, again)
    changes = "members.0" if keep == "members" else "partition.sigma"
    assert not torch.equal(first[changes], other[changes])


def test_a_rate_with_which_the_twins_unlearn_gets_a_warning_at_the_line_of_the_caller() -> None:
    model = trained()
    with pytest.warns(
        UserWarning, match="training loss of .* the model has .* lower the learning rate, give more"
    ) as found:
        error_bars(model, blobs(), optimizer=lambda p: torch.optim.SGD(p, 30.0), rounds=1, epochs=1, progress=False)
    assert [warning.filename for warning in found] == [__file__]


@pytest.mark.parametrize(("rounds", "replicas"), [(1, 2), (3, 2), (2, 3)])
def test_each_round_adds_its_twins_as_members(rounds: int, replicas: int) -> None:
    model = trained()
    estimate = bars(model, rounds=rounds, bootstrap=lambda seed: Bootstrap(120, replicas, seed=seed))
    assert estimate.members is not None
    assert len(estimate.members) == rounds * replicas
    assert estimate.members.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    for stack in estimate.members.values():
        assert len({tuple(member.flatten().tolist()) for member in stack}) == rounds * replicas
    prediction = estimate.predict(X)
    assert prediction.task == "classification"
    assert (prediction.std > 0).all()


def test_fewer_rounds_are_the_first_members_of_more() -> None:
    model = trained()
    few, more = bars(model, rounds=1).members, bars(model, rounds=3).members
    assert few is not None
    assert more is not None
    assert_same_bits(few.stacks(), more[:2])


def test_a_restart_that_is_too_strong_is_followed_by_gentler_ones(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round tells, and all rounds are as the last of its attempts."""
    shares, rates, perturb = list[float](), list[float](), rounds.perturb_

    def noted(twins: Twins, share: float, seed: int) -> None:
        shares.append(share)
        perturb(twins, share, seed)

    def far_above(self: Round, model: nn.Module) -> tuple[float, float]:
        rates.append(self.rates[0])
        return 5.0, 1.0

    monkeypatch.setattr(module, "perturb_", noted)
    monkeypatch.setattr(Round, "losses", far_above)
    with pytest.warns(UserWarning, match="training loss of 5, and the model has 1 .* perturb=0 for a model that was"):
        bars(trained(), rounds=2, perturb=0.9, progress=True)
    assert shares == pytest.approx([0.9, 0.3, 0.1, 0.1])
    assert rates == pytest.approx([0.005, 0.005 / 3, 0.005 / 9])
    said = [line for line in capsys.readouterr().err.splitlines() if "begins anew" in line]
    assert said == [
        f"the twins have a loss of 5, the model 1: the first round begins anew, with {factor} times the learning rate"
        for factor in ("1.7", "0.56")
    ]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6, 7])
def test_a_run_that_stops_before_or_after_a_gentler_restart_goes_on_bit_for_bit(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs at the first rate, then two rounds of two at a third of it."""
    losses, epoch, done = Round.losses, Training.epoch, [0]
    monkeypatch.setattr(
        Round, "losses", lambda self, model: (9.0, 1.0) if self.rates[0] > 0.002 else losses(self, model)
    )
    whole = bars(trained())

    def stopping(self: Training, *args: Any) -> float:
        done[0] += 1
        if done[0] == stop:
            raise KeyboardInterrupt
        return epoch(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "epoch", stopping)
        if stop < 7:
            with pytest.raises(KeyboardInterrupt):
                bars(trained(), checkpoint=tmp_path)
        else:
            bars(trained(), checkpoint=tmp_path)
    assert_same_bits(bars(trained(), checkpoint=tmp_path).state_dict(), whole.state_dict())


def test_the_samples_of_a_round_are_those_of_its_bootstrap() -> None:
    """What no twin draws changes no member."""
    data, other, seen = blobs(), blobs(), torch.zeros(120, dtype=torch.bool)
    asked: list[int] = []

    def bootstrap(seed: int) -> Bootstrap:
        asked.append(seed)
        found = Bootstrap(120, seed=seed)
        seen[found.seen] = True
        return found

    model = trained()
    first = bars(model, data, bootstrap=bootstrap).state_dict()
    assert len(asked) == len(set(asked)) == 2  # one per round
    assert 0 < (~seen).sum() < 20
    other.tensors[0][~seen] += 9
    assert_same_bits(bars(model, other, bootstrap=bootstrap).state_dict(), first)
    other.tensors[0][seen] += 9
    assert not torch.equal(bars(model, other, bootstrap=bootstrap).state_dict()["members.0"], first["members.0"])


def last_twins(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Copies of the twins at the end of each epoch, as they are filled in."""
    found, epoch = list[nn.Module](), Training.epoch

    def spy(self: Training, *args: Any) -> float:
        loss = epoch(self, *args)
        found[:] = [copy.deepcopy(twin).eval() for twin in self.twins]
        return loss

    monkeypatch.setattr(Training, "epoch", spy)
    return found


class Frozen(nn.BatchNorm1d):
    """Stays in evaluation mode, as is usual for frozen layers."""

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


@pytest.mark.parametrize(
    "model",
    [
        normed(),
        nn.Sequential(nn.Linear(4, 8), Frozen(8), nn.ReLU(), nn.Linear(8, 3)),
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3)),
        nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3)),
    ],
    ids=["BatchNorm", "BatchNorm in evaluation", "spectral_norm", "weight_norm"],
)
def test_a_member_predicts_as_the_twin_that_it_was(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twins = trained(model), last_twins(monkeypatch)
    estimate = bars(model, rounds=1)
    for vectorize in (False, None):
        prediction = estimate.predict(X, vectorize=vectorize)
        expected = torch.stack([twin(X).softmax(1).detach() for twin in twins])
        torch.testing.assert_close(prediction.mean, expected.mean(0))
        torch.testing.assert_close(prediction.std, expected.std(0), rtol=1e-3, atol=1e-6)
    drawn = {tuple(estimate.sample(seed)(X).flatten().tolist()) for seed in range(20)}
    assert drawn == {tuple(twin(X).flatten().tolist()) for twin in twins}


def test_each_member_has_running_statistics_of_its_own_and_none_where_training_changes_none() -> None:
    estimate = bars(trained(normed()))
    assert estimate.members is not None
    means = estimate.members.stacks()["1.running_mean"]
    assert len({tuple(own.tolist()) for own in means}) == 4
    assert "1.running_var" in estimate.members.names
    assert "1.num_batches_tracked" not in estimate.members.names
    fixed = nn.Sequential(nn.Linear(4, 8), Frozen(8), nn.Linear(8, 3))
    members = bars(trained(fixed)).members
    assert members is not None
    assert not [name for name in members.names if "running" in name]


def test_a_frozen_backbone_is_held_once() -> None:
    model = trained()
    model[0].requires_grad_(False)
    weights = snapshot(model)
    estimate = bars(model)
    assert estimate.members is not None
    assert estimate.members.names == ("2.weight", "2.bias")
    assert estimate.module[0].weight.data_ptr() == model[0].weight.data_ptr()
    assert estimate.module[2].weight.data_ptr() != model[2].weight.data_ptr()
    assert_same_bits(model.state_dict(), weights)
    assert list(estimate.sigma) == ["2"]


def line(n: int = 200, seed: int = 0) -> tuple[nn.Linear, TensorDataset]:
    """Least squares, and its data with noise that grows with an input."""
    x = torch.randn(n, 3, generator=seeded(seed), dtype=torch.float64)
    noise = torch.randn(n, generator=seeded(seed + 1), dtype=torch.float64) * (0.5 + x[:, 0].abs())
    y = x @ torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64) + noise
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y[:, None]).solution.T)
    return model, TensorDataset(x, y[:, None])


def test_members_of_least_squares_have_the_standard_error_of_the_sandwich() -> None:
    model, data = line()
    x, y = data.tensors
    scores, bread = x * (y - model(x).detach()), torch.linalg.inv(x.T @ x)
    sandwich = bread @ (scores.T @ scores) @ bread
    exact = ((x @ sandwich) * x).sum(1).mean().item()  # the mean variance of a prediction
    options: dict[str, Any] = {"rounds": 4, "epochs": 120, "batch_size": 200}  # 120 steps settle it
    found, seeds = [], 20
    for seed in range(seeds):
        estimate = bars(
            model, data, loss="regression", seed=seed, optimizer=lambda p: torch.optim.Adam(p, 0.02), **options
        )
        found.append(estimate.predict(x).std.square().mean().item())
    # Four standard errors, and the O(1 / n) by which a bootstrap at finite n differs from its linearisation.
    error = 4 * statistics.stdev(found) / math.sqrt(seeds) + exact * 2 * 3 / len(x)
    assert abs(statistics.mean(found) - exact) < error < exact / 2


def test_draws_of_a_matched_sigma_spread_predictions_as_the_twins_do(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = last_twins(monkeypatch)
    found: list[Training] = []
    epoch = Training.epoch
    monkeypatch.setattr(Training, "epoch", lambda self, *args: (found.append(self), epoch(self, *args))[1])
    estimate = bars(trained(), keep="sigma")
    assert estimate.members is None
    assert estimate.scale > 0
    assert estimate.df_per_weight == 1
    assert_same_bits(estimate.partition.sigma, found[-1].twins.partition.sigma)
    x = X[found[-1].bootstrap.unseen]
    first, second = (twin(x).softmax(1).detach() for twin in twins)
    apart = ((first - second).square() / 2).mean()
    by_draws = estimate.predict(x, samples=400).std.square().mean()
    # Both are means over draws: 16 in the search, and 400 here. Draws of all weights share their errors over inputs, so
    # that in the worst case there are as many degrees of freedom as draws.
    assert abs(by_draws / apart - 1) < 4 * math.sqrt(2 / 15)


def test_twins_that_divide_the_samples_get_sigma_of_all_samples_and_no_members(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(seed: int) -> Bootstrap:
        return Bootstrap(120, kind="split", seed=seed)

    with pytest.raises(ValueError, match=r'^twins that divide the samples differ more .* give keep="sigma", which'):
        bars(trained(), bootstrap=split)
    twins = last_twins(monkeypatch)
    estimate = bars(trained(), bootstrap=split, keep="sigma")
    apart = torch.cat([(a - b).flatten() for a, b in zip(*(t[0].parameters() for t in twins), strict=True)])
    expected = (apart.square().mean() / 2).sqrt() / math.sqrt(2)
    torch.testing.assert_close(estimate.sigma["0"].float(), expected.detach())


def test_few_samples_of_which_each_is_drawn_are_enough() -> None:
    data = TensorDataset(X[:6], Y[:6])
    for keep in ("members", "sigma"):
        for seed in range(4):
            found = bars(trained(), data, batch_size=6, keep=keep, seed=seed)
            assert (found.predict(X).std > 0).any()


@pytest.mark.parametrize("loss", ["regression", "gaussian", lambda out, y: (out[:, 0] - y).abs()])
def test_any_loss_of_fit_will_do(loss: Any, tmp_path: Path) -> None:
    data = TensorDataset(X, X[:, 0] - X[:, 1])
    for keep in ("members", "sigma"):
        estimate = bars(mlp(outputs=2 if loss == "gaussian" else 1), data, loss=loss, keep=keep, checkpoint=tmp_path)
        task = loss if isinstance(loss, str) else "regression"
        assert estimate.task == (loss if isinstance(loss, str) else None)
        assert estimate.predict(X, task=task).mean.shape == (120, 1)


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Wrapped(nn.Module):
    """Returns an object with logits, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Output:
        return Output(self.inner(x))


def test_a_model_that_returns_an_object_with_logits_is_trained_as_one_that_returns_them() -> None:
    plain, wrapped = bars(mlp()), bars(Wrapped())
    assert plain.members is not None
    assert wrapped.members is not None
    assert_same_bits(plain.members.values(), wrapped.members.values())
    torch.testing.assert_close(wrapped.predict(X).probs, plain.predict(X).probs)


class Named(nn.Module):
    """Takes its inputs by their names, as a model of Hugging Face does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = normed()

    def forward(self, *, values: Tensor, factor: Tensor) -> Output:
        return Output(self.inner(values * factor[:, None]))


class InOrder(Named):
    def forward(self, values: Tensor, factor: Tensor) -> Output:
        return super().forward(values=values, factor=factor)


def named_rows(data: TensorDataset) -> list[dict[str, Any]]:
    """Samples as a tokenizer gives them: with lists, which need a collator."""
    return [{"values": x.tolist(), "factor": 2.0, "labels": y.item()} for x, y in data]


def collator(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("keep", ["members", "sigma"])
def test_samples_may_be_mappings_with_labels(keep: Any) -> None:
    held_out = blobs(60, seed=1)
    tuples = [
        TensorDataset(x, torch.full((len(x),), 2.0), y) for x, y in (data.tensors for data in (blobs(), held_out))
    ]
    torch.manual_seed(0)
    in_order, named = InOrder(), Named()
    named.load_state_dict(in_order.state_dict())
    expected = bars(in_order, tuples[0], keep=keep, calibration=tuples[1])
    rows: dict[str, Any] = {"calibration": named_rows(held_out), "collate_fn": collator}
    found = bars(named, named_rows(blobs()), keep=keep, **rows)
    x = {"values": X, "factor": torch.full((len(X),), 2.0)}
    ours, theirs = found.predict(x), expected.predict(tuple(x.values()))
    assert torch.equal(ours.probs, theirs.probs)
    assert torch.equal(ours.std, theirs.std)
    assert torch.equal(ours.set(0.8), theirs.set(0.8))
    found.calibrate(rows["calibration"], collate_fn=collator)
    expected.calibrate(tuples[1])
    assert found.temperature == expected.temperature != 1
    with pytest.raises(TypeError, match=r"^batches have a list for 'values', not a tensor: give a collate_fn, such as"):
        bars(named, named_rows(blobs()))


@pytest.mark.parametrize("keep", ["members", "sigma"])
@pytest.mark.parametrize("done", [1, 2, 3, 4, 5, 6])
def test_a_run_that_stops_after_any_epoch_goes_on_bit_for_bit(done: int, keep: Any, tmp_path: Path) -> None:
    model, options = trained(normed()), {"rounds": 3, "keep": keep}
    whole = bars(model, **options)

    class StopError(Exception):
        pass

    stopped, epoch = [0], Training.epoch

    def stopping(self: Training, *args: Any) -> float:
        if stopped[0] == done:
            raise StopError
        stopped[0] += 1
        return epoch(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "epoch", stopping)
        if done < 6:
            with pytest.raises(StopError):
                bars(model, checkpoint=tmp_path, **options)
        else:
            bars(model, checkpoint=tmp_path, **options)
        stopped[0] = done if done == 6 else -9  # a finished run trains no more
        resumed = bars(model, checkpoint=tmp_path, **options)
    assert_same_bits(resumed.state_dict(), whole.state_dict())
    assert resumed.scale == whole.scale
    assert len(list(tmp_path.iterdir())) == 2  # the last two


def killed(folder: Path, reads: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bars(trained(), Deadly(blobs(), reads), checkpoint=folder)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """kill -9 in the middle of an epoch, twice."""
    for reads in (200, 250):  # of some 150 in an epoch
        assert ended(killed, tmp_path, reads) == -signal.SIGKILL
    assert 0 < len(list(tmp_path.glob("epoch-*.pt"))) <= 2
    assert not (tmp_path / "epoch-4.pt").exists()
    assert_same_bits(bars(trained(), checkpoint=tmp_path).state_dict(), bars(trained()).state_dict())


def test_a_finished_run_goes_on_for_more_rounds_and_gives_either_kind(tmp_path: Path, capsys: Any) -> None:
    model = trained()
    bars(model, rounds=1, checkpoint=tmp_path)
    longer = bars(model, rounds=3, checkpoint=tmp_path)
    assert_same_bits(longer.state_dict(), bars(model, rounds=3).state_dict())
    assert capsys.readouterr().err == ""
    sigma = bars(model, rounds=3, keep="sigma", checkpoint=tmp_path, progress=True)
    assert capsys.readouterr().err == (
        f"{tmp_path} has this run, finished after 3 rounds: nothing was trained. To train again, delete it or use "
        "another directory.\n"
    )
    direct = bars(model, rounds=3, keep="sigma")
    assert_same_bits(sigma.state_dict(), direct.state_dict())
    assert sigma.scale == direct.scale
    with pytest.raises(ValueError, match=r"holds a run of more than 2 rounds: choose another directory\.$"):
        bars(model, rounds=2, checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 20}, "batch_size was 16 and is 20 here"),
        ({"epochs": 3}, "epochs was 2 and is 3 here"),
        ({"seed": 5}, r"checksum of the bootstrap was \d+ and is \d+ here"),
        ({"bootstrap": lambda seed: Bootstrap(120, seed=3)}, r"checksum of the bootstrap was \d+ and is \d+ here"),
        ({"loss": lambda out, y: F.cross_entropy(out, y, reduction="none")}, "loss was classification and is "),
        ({"amp": torch.bfloat16}, r"amp was None and is torch.bfloat16 here"),
        ({"optimizer": torch.optim.SGD}, "optimizer was Adam and is SGD here"),
        ({"optimizer": lambda p: torch.optim.Adam(p, 0.1)}, r"learning rate was \[0.005\] and is \[0.5\] here"),
        ({"perturb": 0.1}, "perturb was 0.6 and is 0.1 here"),
        ({"model": mlp(seed=3)}, r"'0.weight' of the weights was \d+ and is \d+ here"),
        ({"model": nn.Sequential(*mlp()[:1], nn.ReLU(), *mlp()[2:])}, "'1' of the model was Tanh and is ReLU"),
    ],
)
def test_a_checkpoint_of_other_options_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    bars(mlp(), rounds=1, checkpoint=tmp_path)
    with pytest.raises(
        ValueError, match=f"^the checkpoint does not fit: {said}.*; use the options of then, or another directory\\.$"
    ):
        bars(**{"model": mlp(), "checkpoint": tmp_path, **change})


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, {"description": torch.zeros(2, dtype=torch.uint8)})
    with pytest.raises(ValueError, match=r"is of no run of error_bars: it has no 'failed'\.$"):
        bars(mlp(), checkpoint=tmp_path)


def test_progress_has_a_line_for_each_epoch_of_each_round(capsys: Any) -> None:
    bars(trained(), progress=True)
    lines = capsys.readouterr().err.splitlines()
    places = [(1, 1), (1, 2), (2, 1), (2, 2)]
    for written, (number, epoch) in zip(lines, places, strict=True):
        start = f"round {number} of 2, epoch {epoch} of 2: loss "
        assert re.fullmatch(rf"{start}\d\.\d+, \S+( \S+)? left", written), written


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rounds": 0}, "rounds must be a whole number of at least 1, not 0."),
        ({"epochs": 1.5}, "epochs must be a whole number of at least 1, not 1.5."),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0."),
        ({"keep": "x"}, 'unknown keep \'x\': use "members" or "sigma".'),
        ({"keep": None}, 'unknown keep None: use "members" or "sigma".'),
        ({"bootstrap": Bootstrap(120)}, "bootstrap must be a function of a seed, such as lambda seed: Bootstrap(n, "),
        ({"bootstrap": lambda seed: None}, "bootstrap must be a function that makes a Bootstrap, but it made None."),
        (
            {"bootstrap": lambda seed: Bootstrap(9, seed=seed)},
            "the dataset has 120 samples, but the bootstrap draws",
        ),
        ({"optimizer": torch.optim.Adam([torch.zeros(1)])}, "optimizer must be a function that makes one, such as"),
        ({"optimizer": torch.optim.LBFGS}, "error_bars takes one gradient for each step, which LBFGS is not made for"),
        ({"lr": 0.1}, "error_bars has no option 'lr': give optimizer=lambda p: torch.optim.Adam(p, lr=0.1)."),
        ({"learning_rate": 0.1}, "error_bars has no option 'learning_rate': give optimizer=lambda p: torch.optim.A"),
        ({"round": 3}, "error_bars has no option 'round': did you mean 'rounds'?"),
        ({"num_worker": 1}, "error_bars has no option 'num_worker': did you mean 'num_workers'?"),
        ({"noise": 1.0}, "error_bars has no option 'noise': its twins train without noise and resets."),
        ({"resample": "draws"}, "error_bars has no option 'resample': its twins train without noise and resets."),
        ({"scheduler": None}, "error_bars has no option 'scheduler': in each round the learning rate falls to 0."),
        ({"control": True}, "error_bars has no control: use fit(..., control=True), or a loop with ControlledTwins."),
        ({"max_grad_norm": 1.0}, "error_bars has no option 'max_grad_norm': for accumulation and clipping write"),
        ({"perturb": -0.1}, "perturb must be"),
        ({"perturb": 1.5}, "perturb must lie between 0 and 1, not 1.5."),
        ({"perturb": "all"}, "perturb must be"),
        ({"share": (0, 1)}, "error_bars has no option 'share': it trains all twins on every rank"),
        ({"num_workers": "x"}, "num_workers must be a whole number, not 'x'."),
        ({"amp": torch.float32}, "amp must be a dtype, torch.bfloat16 or torch.float16, not torch.float32."),
        ({"loss": "mse"}, "unknown loss 'mse': use "),
        ({"model": 3}, "model must be a torch.nn.Module, not 3."),
        ({"model": mlp().requires_grad_(False)}, "has no trainable parameters"),
        ({"seed": 0.5}, "seed must be an integer, not 0.5."),
        ({"data": iter(blobs())}, "the dataset must be map-style, with len() and indexing, so that samples can"),
        ({"data": TensorDataset(X)}, "samples must be tuples of an input and a target"),
        ({"checkpoint": ""}, "checkpoint must be the path of a directory, such as 'run', not ''."),
        ({"progress": "no"}, "progress must be True or False, not 'no'."),
    ],
)
def test_every_bad_argument_gets_one_sentence(change: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(said)) as caught:
        bars(**{"model": mlp(), **change})
    assert "\n" not in str(caught.value)


def bars_of_ranks() -> list[Any]:
    torch.manual_seed(0)
    model = trained(normed())
    members, sigma = (bars(model, keep=keep) for keep in ("members", "sigma"))
    fitted = fit(model, blobs(), epochs=2, batch_size=16, progress=False).estimate
    return [members.state_dict(), sigma.state_dict(), sigma.scale, fitted.state_dict(), fitted.scale]


def test_under_torchrun_all_ranks_have_the_same_error_bars() -> None:
    first, second = together(bars_of_ranks)
    assert_same_bits(first, second)
    assert len({tuple(own.flatten().tolist()) for own in first[0]["members.0"]}) == 4


def bars_of_shards() -> None:
    with pytest.raises(ValueError, match="error_bars wraps twins in DDP: write the loop, and shard Twins there"):
        bars(fully_shard(mlp()))


def test_a_sharded_model_is_refused() -> None:
    together(bars_of_shards)


def test_a_learning_rate_that_diverges_is_named() -> None:
    model, data = line()
    with pytest.raises(FloatingPointError, match=r"(are|is) not finite in epoch .* lower the learning rate"):
        bars(model, data, loss="regression", epochs=200, optimizer=lambda p: torch.optim.SGD(p, 1e3))


def test_a_rate_that_is_a_tensor_stays_the_users() -> None:
    rate = torch.tensor(0.01)
    bars(trained(), optimizer=lambda p: torch.optim.Adam(p, rate, foreach=False, capturable=False))
    assert rate.item() == pytest.approx(0.01)


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    estimate = bars(trained(model))
    assert estimate.members is not None
    assert estimate.members.names == ("0.weight", "0.bias", "2.bias")
    drawn = estimate.sample()
    assert drawn[0].weight is drawn[2].weight  # type: ignore[index]


def test_calibration_samples_give_prediction_sets() -> None:
    estimate = bars(trained(), calibration=blobs(60, seed=1))
    x, labels = blobs(300, seed=2).tensors
    sets = estimate.predict(x).set(0.8)
    inside = sets.gather(1, labels[:, None]).double().mean().item()
    # The guarantee is over calibration samples, too; for 60 of them the coverage has a standard deviation of
    # sqrt(0.8 * 0.2 / 62) = 0.05, and that of 300 new samples adds 0.02.
    assert inside > 0.8 - 4 * 0.055
    with pytest.raises(ValueError, match="calibration needs to know what the model predicts: give the loss as"):
        bars(trained(), loss=lambda output, target: output.sum(1), calibration=blobs(60, seed=1))


def test_without_weights_drawn_anew_the_restart_is_gentler(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, losses = list[float](), Round.losses

    def noted(self: Round, model: nn.Module) -> tuple[float, float]:
        rates.append(self.rates[0])
        return losses(self, model)

    monkeypatch.setattr(Round, "losses", noted)
    for perturb in (0.1, 0.0):
        bars(trained(), rounds=1, perturb=perturb)
    assert rates == pytest.approx([0.005, 0.005 / 3])
