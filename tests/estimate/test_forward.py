"""Models are run with dropout where it was in training, and with masks from the seed alone."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import assert_same_bits, classes, seeded
from torch import Tensor, nn

from twinboot import Estimate, Twins
from twinboot.estimate import files
from twinboot.estimate.forward import with_dropout

X = classes(n=23, seed=8).tensors[0]


def dropping(model: nn.Module | None = None, sigma: float = 0.1) -> Estimate:
    estimate = Twins(model or nn.Sequential(nn.Dropout(), nn.Linear(4, 1, bias=False))).estimate()
    estimate.partition.sigma.fill_(sigma)
    estimate.dropout, estimate.task = True, "regression"
    return estimate


def test_masks_have_the_variance_of_the_closed_form() -> None:
    """For a linear model, the mean is that without dropout and the variance is sum (w x)^2 p / (1 - p). Within four
    standard errors, at most those of a normal variable."""
    estimate, draws = dropping(), 4000
    found = estimate.predict(X, draws, scale=0.0)
    expected = (estimate.module[1].weight * X).square().sum(1, keepdim=True)
    assert ((found.mean - estimate.predict(X, 0).mean).abs() < 4 * (expected / draws).sqrt()).all()
    assert ((found.std.square() / expected - 1).abs() < 4 * (2 / draws) ** 0.5).all()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Dropout(), nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 1))


def test_masks_come_from_the_seed_and_the_mean_model_has_none() -> None:
    estimate = dropping(two_layers())
    state = torch.get_rng_state()
    first, again, other = (estimate.predict(X, 4, scale=0.0, seed=seed).mean for seed in (0, 0, 1))
    assert_same_bits(torch.get_rng_state(), state)
    assert_same_bits(first, again)
    assert not torch.equal(first, other)
    of_mean = estimate.predict(X, 0).mean
    estimate.dropout = False
    assert_same_bits(estimate.predict(X, 0).mean, of_mean)
    assert not torch.equal(estimate.predict(X, 4, scale=0.0).mean, first)
    estimate.dropout = True
    assert_same_bits(estimate.predict(X, 0, vectorize=True).mean, of_mean)  # there is no draw that could have a mask


def test_other_callers_of_the_model_see_no_mask() -> None:
    """Two threads predict while a third calls the mean model."""
    estimate = dropping(two_layers())
    expected, of_mean, found = estimate.predict(X, 50).mean, estimate(X), dict[str, list[Tensor]]()

    def ask(who: str) -> None:
        calls = {"mean": lambda: estimate(X), "first": lambda: estimate.predict(X, 50).mean}
        found[who] = [calls.get(who, calls["first"])() for _ in range(5)]

    threads = [threading.Thread(target=ask, args=(who,)) for who in ("first", "second", "mean")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(t, expected) for t in found["first"] + found["second"])
    assert all(torch.equal(t, of_mean) for t in found["mean"])
    assert not any(m.training for m in estimate.modules())


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True), 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 3, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0][:, -1]  # type: ignore[no-any-return]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [encoder, Recurrent, Attending])
def test_dropout_inside_layers_is_on(make: Any) -> None:
    x = torch.randn(3, 5, 4, generator=seeded(0))
    estimate = dropping(make())
    assert (estimate.predict(x, 20, scale=0.0).std.flatten(1).max(1).values > 0.01).all()


class Frozen(nn.Module):
    """The body stays in evaluation mode, as in many pretrained models."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Dropout()), head

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def test_what_had_no_masks_in_training_gets_none() -> None:
    masked = with_dropout(Frozen(nn.Dropout()))
    assert [name for name, m in masked.named_modules() if m.training] == ["head"]
    normed = with_dropout(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Dropout(0.0)))
    assert [name for name, m in normed.named_modules() if m.training] == ["1"]


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 1), nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 1)), Frozen(nn.Linear(4, 1))]
)
def test_a_model_that_drops_nothing_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"the model has no dropout layer, such as nn\.Dropout"):
        dropping(model).predict(X)


def test_other_mistakes_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="draws with dropout cannot be vectorized: leave vectorize out"):
        dropping().predict(X, vectorize=True)
    estimate = dropping()
    estimate.dropout = 0.1  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"estimate.dropout must be True or False, not 0.1: the model's layers set"):
        estimate.predict(X)
    with pytest.warns(UserWarning, match="sigma is 0 everywhere, so the draws have no weight noise"):
        dropping(sigma=0.0).predict(X)


def test_dropout_is_saved_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = dropping()
    estimate.save(tmp_path / "e.safetensors")
    loaded = Estimate.load(tmp_path / "e.safetensors", nn.Sequential(nn.Dropout(), nn.Linear(4, 1, bias=False)))
    assert_same_bits(loaded.predict(X, 4).mean, estimate.predict(X, 4).mean)
    assert "dropout=True" in repr(loaded)
    write = files.write
    monkeypatch.setattr(
        files,
        "write",
        lambda *args, **more: write(*args[:-1], {k: args[-1][k] for k in ("temperature", "scale")}, **more),
    )
    estimate.save(tmp_path / "old.safetensors")  # as it was before there was dropout
    assert not Estimate.load(tmp_path / "old.safetensors", estimate.module).dropout
    loaded.dropout = False
    assert "dropout" not in repr(loaded).replace("Dropout", "")
