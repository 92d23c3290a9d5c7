"""The estimators pass the checks of scikit-learn, and their intervals have the promised coverage."""

import copy
import importlib
import io
import math
import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_diabetes, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from twinboot import Estimate, Protocol
from twinboot.estimate import calibration
from twinboot.integrations import sklearn as integration
from twinboot.integrations.sklearn import (
    Rows,
    RowSplit,
    TwinBootClassifier,
    TwinBootRegressor,
    center_and_spread,
    sort_rows,
    split_rows,
)

TINY: dict[str, Any] = {"hidden": (8,), "epochs": 8, "learning_rate": 0.1, "samples": 2}
BOTH = [TwinBootClassifier, TwinBootRegressor]


def classifier(**options: Any) -> TwinBootClassifier:
    return TwinBootClassifier(**{**TINY, "random_state": 0, **options})


def regressor(**options: Any) -> TwinBootRegressor:
    return TwinBootRegressor(**{**TINY, "random_state": 0, **options})


def values(n: int = 120, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noise that is heavy-tailed and larger for some rows."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    return x, x[:, 0] - x[:, 1] ** 2 + np.exp(x[:, 2]) * rng.standard_t(3, n)


def outputs(model: Any, x: Any) -> np.ndarray:
    return np.column_stack([model.predict_proba(x)] if hasattr(model, "predict_proba") else model.predict_interval(x))


# With a seed: without one, each of scikit-learn's checks would depend on the tests before it.
CHECKED = [kind(**TINY, random_state=0) for kind in BOTH]


@parametrize_with_checks(CHECKED)  # type: ignore[untyped-decorator]
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_intervals_have_the_coverage_of_conformal_theory() -> None:
    """With c calibration rows and the k-th score, the coverage is distributed as Beta(k, c + 1 - k)."""
    level, tables, new = 0.8, 40, 200
    held, expected, variance = [], [], []
    for number in range(tables):
        x, y = values(150 + new, seed=number)
        order = np.argsort(y[:150])  # the order of the table must not matter
        model = regressor(epochs=2).fit(x[:150][order], y[:150][order])  # one seed for all tables
        low, high = model.predict_interval(x[150:], level)
        held.append(((low <= y[150:]) & (y[150:] <= high)).mean())
        c = len(model.scores_)
        k = math.ceil(round((c + 1) * level, 9))
        p = k / (c + 1)
        expected.append(p)
        variance.append(p * (1 - p) / (c + 2) * (1 - 1 / new) + p * (1 - p) / new)
        assert k <= c
    assert min(expected) >= level
    assert abs(np.mean(held) - np.mean(expected)) < 4 * math.sqrt(np.mean(variance) / tables)


def test_calibration_changes_only_the_width_of_intervals() -> None:
    x, y = values()
    model = regressor().fit(x, y)
    score = model.scores_.max()
    mean, std = model.predict(x, return_std=True)
    [row] = np.flatnonzero(np.isclose(np.abs(y - mean) / std, score, rtol=1e-9))  # the row of that score
    assert score > 0
    said = f"are infinite: they need .* rows for calibration, but there are {len(model.scores_)}"
    with pytest.warns(UserWarning, match=said):
        np.testing.assert_allclose(model.predict_interval(x[row : row + 1], 1 - 1e-9), [[-np.inf], [np.inf]])
    low, high = model.predict_interval(x, 0.5)
    np.testing.assert_allclose(low + high, 2 * mean)
    np.testing.assert_allclose((high - low) / std, (high - low)[0] / std[0])


def rows_and_split(model: Any, x: np.ndarray, y: np.ndarray) -> tuple[Rows, RowSplit]:
    rows = sort_rows(x, y, np.ones(len(x)), model.seed_)
    return rows, split_rows(len(x), model.seed_, calibrate=isinstance(model, TwinBootRegressor))


@pytest.mark.parametrize("make", [classifier, regressor])
def test_rows_are_standardized_by_the_rows_seen_in_training(make: Any) -> None:
    x, y = values()
    y = np.digitize(y, [0.0]) if make is classifier else y
    model = make(epochs=1).fit(x, y)
    rows, split = rows_and_split(model, x, y)
    seen = rows.x[split.seen.numpy()]
    np.testing.assert_allclose(model.center_, seen.mean(0))
    np.testing.assert_allclose(model.spread_, seen.std(0))
    if make is regressor:
        targets = rows.y[split.seen.numpy()]
        assert (model.target_center_, model.target_spread_) == pytest.approx((targets.mean(), targets.std()))


def test_scores_come_from_calibration_rows_and_noise_from_stopping_rows() -> None:
    x, y = values()
    model = regressor(samples=0).fit(x, y)
    rows, split = rows_and_split(model, x, y)
    aside, stopping = split.calibration.numpy(), split.stopping.numpy()
    mean, std = model.predict(rows.x, return_std=True)
    np.testing.assert_allclose(model.scores_, np.abs(rows.y - mean)[aside] / std[aside])
    assert model.noise_**2 == pytest.approx(np.mean((rows.y - mean)[stopping] ** 2))  # the mean model has no spread


def test_a_classifier_is_calibrated_by_the_out_of_bag_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(Estimate, "calibrate", lambda self, dataset, **options: used.append(dataset))
    x, y = values(600)
    y = np.digitize(y, [0.0])
    model = classifier(epochs=1).fit(x, y)
    rows, split = rows_and_split(model, x, y)
    [(inputs, labels)] = [dataset.tensors for dataset in used]
    unseen = split.stopping.numpy()
    np.testing.assert_allclose(inputs, (rows.x[unseen] - model.center_) / model.spread_, rtol=1e-5)
    np.testing.assert_array_equal(labels, rows.y[unseen])


def test_the_standard_deviation_includes_the_measurement_noise() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(800, 2))
    y = 1000 + 50 * x[:, 0] + 20 * rng.normal(size=800)
    model = regressor(epochs=15, samples=16, learning_rate=0.02).fit(x, y)
    stopping = (800 * math.exp(-2)) / 2
    assert model.noise_ == pytest.approx(20, rel=4 / math.sqrt(2 * stopping) + 0.05)  # and 5 % for the error of the fit
    mean, std = model.predict(x, return_std=True)
    assert (std >= model.noise_).all()
    assert (std > model.noise_).any()
    assert np.sqrt(np.mean((y - mean) ** 2)) == pytest.approx(20, rel=0.15)
    _, certain = regressor(samples=0).fit(x, y).predict(x[:5], return_std=True)
    np.testing.assert_array_equal(certain, certain[0])  # the mean model has no spread


@pytest.mark.parametrize("make", [classifier, regressor])
def test_weights_equal_repetitions_and_row_order_does_not_matter(make: Any) -> None:
    x, y = values(200)
    y = np.sign(y) if make is classifier else y
    often = np.random.default_rng(1).integers(0, 3, 200)
    mixed = np.random.default_rng(2).permutation(200)
    weighted = make().fit(x[mixed], y[mixed], sample_weight=often[mixed])
    repeated = make().fit(x.repeat(often, 0), y.repeat(often))
    np.testing.assert_array_equal(outputs(weighted, x), outputs(repeated, x))
    halves = make().fit(x, y, sample_weight=np.full(200, 0.5))
    np.testing.assert_array_equal(outputs(halves, x), outputs(make().fit(x, y), x))


def test_fractional_weights_move_the_prediction_to_the_weighted_mean() -> None:
    """Two values have the same input, so the prediction is their weighted mean: 0.9 * 1 + 0.1 * (-1)."""
    x, y = np.zeros((400, 1)), np.tile([1.0, -1.0], 200)
    weight = np.where(y > 0, 1.8, 0.2)
    model = regressor(hidden=(), epochs=60, learning_rate=0.02).fit(x, y, sample_weight=weight)
    assert model.estimate_.task == "regression"  # although the loss is a function
    assert model.predict(x[:1])[0] == pytest.approx(0.8, abs=0.1)
    probs = classifier(hidden=(), epochs=60, learning_rate=0.02).fit(x, y, sample_weight=weight).predict_proba(x[:1])
    assert probs[0, 1] == pytest.approx(0.9, abs=0.06)


@pytest.mark.parametrize("make", [classifier, regressor])
def test_a_seed_gives_the_same_bits_and_moves_no_global_generator(make: Any) -> None:
    x, y = load_iris(return_X_y=True)
    before = torch.get_rng_state()
    first, second, other = (make(random_state=seed).fit(x, y) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(outputs(first, x), outputs(second, x))
    assert (outputs(first, x) != outputs(other, x)).any()
    assert make(random_state=None).fit(x, y).seed_ != make(random_state=None).fit(x, y).seed_


@pytest.mark.parametrize(("options", "threads"), [({}, 1), ({"network": nn.Linear}, 2), ({"hidden": (4096, 4096)}, 2)])
@pytest.mark.parametrize("make", [classifier, regressor])
def test_a_small_default_network_trains_on_one_thread(
    make: Any, options: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def fit(network: nn.Module, *args: Any, **settings: Any) -> Any:
        found.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(integration, "fit", fit)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x, y = values()
        with pytest.raises(KeyboardInterrupt):
            make(**options).fit(x, y > 0 if make is classifier else y)
        assert (found, torch.get_num_threads()) == ([threads], 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("make", [classifier, regressor])
def test_copies_of_a_fitted_estimator_predict_the_same(make: Any, tmp_path: Path) -> None:
    x, y = load_iris(return_X_y=True)
    model = make().fit(x, y)
    buffer = io.BytesIO()
    joblib.dump(model, buffer)
    buffer.seek(0)
    for other in (joblib.load(buffer), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(outputs(model, x), outputs(other, x))
    with pytest.raises(NotFittedError):
        clone(model).predict(x)
    model.estimate_.save(tmp_path / "estimate.safetensors")
    loaded = Estimate.load(tmp_path / "estimate.safetensors", model.estimate_.module)
    inputs = torch.from_numpy((x - model.center_) / model.spread_).float()
    assert torch.equal(loaded(inputs), model.estimate_(inputs))


def test_classes_may_be_strings() -> None:
    x, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = classifier(epochs=30).fit(x, names)
    assert model.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert model.score(x, names) > 0.9
    np.testing.assert_allclose(model.predict_proba(x).sum(1), 1)
    np.testing.assert_array_equal(model.predict(x), model.classes_[model.predict_proba(x).argmax(1)])


def test_the_spread_of_a_regressor_is_matched_by_default_and_its_mean_network_stays_the_same() -> None:
    x, y = values()
    plain, usual, given = (regressor(spread=spread).fit(x, y) for spread in (0.0, None, 0.3))
    assert plain.estimate_.scale == 1
    assert usual.estimate_.scale != 1
    assert usual.estimate_.scale == given.estimate_.scale
    for name, tensor in plain.estimate_.module.state_dict().items():
        assert torch.equal(usual.estimate_.module.state_dict()[name], tensor)
    assert not torch.equal(plain.estimate_.partition.sigma, usual.estimate_.partition.sigma)


def test_the_spread_of_a_classifier_is_matched_on_demand_and_calibration_keeps_it() -> None:
    x, y = values(600)
    y = np.digitize(y, [0.0])
    usual, matched = classifier().fit(x, y), classifier(spread=0.3).fit(x, y)
    assert usual.estimate_.scale in calibration.SCALES
    assert matched.estimate_.scale not in calibration.SCALES
    assert matched.estimate_.temperature != 1


def test_without_draws_or_with_equal_targets_no_twins_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinboot.training.fit.settle", None)  # a call would fail
    x, y = values()
    regressor(samples=0).fit(x, y)
    regressor().fit(x, np.full(len(y), 3.0))


@pytest.mark.parametrize("value", [-0.1, math.inf, "x"])
def test_a_spread_that_is_no_share_gets_a_sentence(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^spread must be a (finite )?number"):
        regressor(spread=value).fit(*values())


def test_the_temperature_is_calibrated_if_enough_rows_are_out_of_bag() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 2))
    y = x[:, 0] + rng.logistic(size=600) > 0  # the probability of True is a logistic function of x
    assert classifier().fit(x, y).estimate_.temperature != 1
    assert classifier().fit(x[:100], y[:100]).estimate_.temperature == 1


@pytest.mark.parametrize("make", [classifier, regressor])
def test_sparse_tables_and_data_frames(make: Any) -> None:
    x, y = load_iris(return_X_y=True)
    dense = outputs(make().fit(x, y), x)
    for kind in (sparse.csr_matrix, sparse.csc_array, sparse.coo_matrix):
        np.testing.assert_array_equal(outputs(make().fit(kind(x), y), kind(x)), dense)
    frame = pd.DataFrame(x, columns=list("abcd"))
    model = make().fit(frame, pd.Series(y))
    assert model.feature_names_in_.tolist() == list("abcd")
    assert model.n_features_in_ == 4
    np.testing.assert_array_equal(outputs(model, frame), dense)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[list("dcba")])


def test_pipelines_grid_search_and_calibration_of_scikit_learn_work() -> None:
    x, y = load_diabetes(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), regressor(learning_rate=0.02))
    assert cross_val_score(pipeline, x, y, cv=3).mean() > 0.2
    search = GridSearchCV(regressor(), {"hidden": [(4,), (8, 8)]}, cv=2).fit(x, y)
    assert search.best_score_ > 0.2
    x, y = load_iris(return_X_y=True)
    calibrated = CalibratedClassifierCV(classifier(epochs=30), cv=3).fit(x, y)
    assert calibrated.score(x, y) > 0.9


def test_a_custom_network_with_early_stopping() -> None:
    made = []

    def network(inputs: int, outputs: int) -> nn.Module:
        made.append((inputs, outputs))
        return nn.Sequential(nn.Linear(inputs, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, outputs))

    x, y = load_iris(return_X_y=True)
    model = classifier(network=network, epochs=300, patience=3).fit(x, y)
    assert made == [(4, 3)]
    assert len(model.history_["epoch"]) == model.best_epoch_ + 3 < 300
    regressor(network=network).fit(x, x[:, 0])
    assert made[1:] == [(4, 1)]
    assert len(classifier(patience=None).fit(x, y).history_["epoch"]) == TINY["epochs"]


class Odd(nn.Module):
    """A linear network whose output is changed."""

    def __init__(self, inputs: int, outputs: int, change: Any) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(inputs, outputs), change

    def forward(self, x: Any) -> Any:
        return self.change(self.linear(x))


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (lambda i, o: nn.Linear(i, o + 1), r"must return shape \(2, {0}\) for 2 rows, not \(2, {1}\)"),
        (lambda i, o: Odd(i, o, lambda out: out[:, 0]), r"must return shape \(2, {0}\) for 2 rows, not \(2,\)"),
        (lambda i, o: Odd(i, o, lambda out: out[None]), r"must return shape \(2, {0}\) for 2 rows, not \(1, 2, {0}\)"),
        (lambda i, o: Odd(i, o, lambda out: (out,)), "the network must return a tensor, not tuple"),
        (lambda i, o: Odd(i, o, lambda out: None), "the network must return a tensor, not NoneType"),
        (lambda i, o: nn.Linear(i + 1, o), "the network does not run on 3 inputs in float32: mat1 and mat2"),
        (lambda i, o: nn.Linear(i, o).double(), "the network does not run on 3 inputs in float32: mat1 and mat2"),
        (lambda i, o: None, "network must make an nn.Module, not None"),
        (lambda i, o: nn.Linear, "network must make an nn.Module, not <class"),
        (nn.Linear(3, 1), "network must be a function that makes one"),
        ("mlp", "network must be a function that makes one, .* not 'mlp'"),
    ],
)
@pytest.mark.parametrize("make", [classifier, regressor])
def test_a_network_that_does_not_fit_the_table_is_refused_before_training(
    make: Any, network: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "fit", lambda *_, **__: pytest.fail("trained"))
    x, y = values(30)
    y, needed = (np.arange(30) % 3, 3) if make is classifier else (y, 1)
    with pytest.raises((ValueError, TypeError), match=said.format(needed, needed + 1)):
        make(network=network).fit(x, y)


@pytest.mark.parametrize("make", [classifier, regressor])
def test_the_check_of_a_network_does_not_change_the_training(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def network(inputs: int, outputs: int) -> nn.Module:
        layers = [nn.Linear(inputs, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, outputs)]
        made.append(nn.Sequential(*layers))
        return made[-1]

    x, y = values(200)
    y = np.digitize(y, [0.0]) if make is classifier else y
    state = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]  # noqa: NPY002
    checked = outputs(make(network=network).fit(x, y), x)
    assert torch.equal(state[0], torch.get_rng_state())
    assert (state[1] == np.random.get_state()[1]).all()  # type: ignore[index]  # noqa: NPY002
    assert made[0].training
    assert made[0][1].num_batches_tracked == 0
    monkeypatch.setattr(integration, "_check_network", lambda *_: None)
    np.testing.assert_array_equal(outputs(make(network=network).fit(x, y), x), checked)


FACTORS = [1e-300, 1e-165, 1e-20, 1e20, 1e153, 1e300, 2.0**-990, 2.0**990]


@pytest.fixture
def table_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the order of the table: sorted by hashes, it would depend on the units."""
    monkeypatch.setattr(integration, "sort_rows", lambda x, y, weight, seed: Rows(x, y, weight))


@pytest.mark.usefixtures("table_order")
@pytest.mark.parametrize("weighted", [False, True])
def test_predictions_are_in_the_units_of_the_targets(weighted: bool) -> None:
    def found(factor: float) -> list[np.ndarray]:
        model = regressor().fit(x, factor * y, sample_weight=weight)
        return [*model.predict(x, return_std=True), *model.predict_interval(x, 0.5), np.array(model.noise_)]

    x, y = values()
    weight = np.random.default_rng(0).uniform(0.5, 1.5, len(y)) if weighted else None
    expected = found(1.0)
    for factor in FACTORS:
        exact = math.frexp(factor)[0] == 0.5
        for ours, theirs in zip(found(factor), expected, strict=True):  # training is in float32, which rounds
            np.testing.assert_allclose(ours / factor, theirs, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4)


@pytest.mark.usefixtures("table_order")
@pytest.mark.parametrize("make", [classifier, regressor])
def test_predictions_do_not_depend_on_the_units_of_the_inputs(make: Any) -> None:
    x, y = values(200)
    y = np.digitize(y, [0.0]) if make is classifier else y
    expected = outputs(make(learning_rate=0.01).fit(x, y), x)
    for factor in FACTORS:
        exact = math.frexp(factor)[0] == 0.5
        units = np.array([1.0, factor, 1 / factor])
        found = outputs(make(learning_rate=0.01).fit(units * x, y), units * x)
        np.testing.assert_allclose(found, expected, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4)


@pytest.mark.parametrize("factor", FACTORS)
def test_tiny_and_huge_values_are_learned(factor: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    y = x[:, 0] + 0.1 * rng.normal(size=300)
    mean, std = regressor().fit(x / factor, factor * y).predict(x / factor, return_std=True)
    assert np.corrcoef(mean / factor, y)[0, 1] > 0.95
    assert 0.05 < np.median(std / factor) < 0.5
    labels = classifier().fit(factor * x, y > 0).predict(factor * x)
    assert (labels == (y > 0)).mean() > 0.9


@pytest.mark.parametrize("value", [-5e-200, 3e300])
def test_constant_targets_are_predicted_whatever_their_size(value: float) -> None:
    x, _ = values()
    mean, std = regressor(epochs=30).fit(x, np.full(len(x), value)).predict(x, return_std=True)
    np.testing.assert_allclose(mean / value, 1, atol=0.2)
    assert (std < 0.2 * abs(value)).all()


def test_values_beyond_float64_are_refused() -> None:
    x, y = values(30)
    far = x.copy()
    far[:2, 1] = -1.7e308, 1.7e308
    with pytest.raises(ValueError, match="the range of a column of X is too large for float64"):
        classifier().fit(far, y > 0)
    with pytest.raises(ValueError, match="the range of y is too large for float64"):
        regressor().fit(x, far[:, 1])
    model = regressor().fit(1e-10 * x, 1e200 * y)
    for row in ([[1.7e308, 0, 0]], [[1e200, 0, 0]]):
        with pytest.raises(ValueError, match="so far from the training data"):
            model.predict(row)
    with pytest.raises(ValueError, match="so far from the training data"):
        classifier().fit(1e-10 * x, y > 0).predict_proba([[1.7e308, 0, 0]])


def test_training_stops_by_default_when_the_out_of_bag_loss_rises() -> None:
    rng = np.random.default_rng(0)  # random labels, so there is nothing to learn
    model = TwinBootClassifier(random_state=0).fit(rng.normal(size=(200, 5)), rng.integers(2, size=200))
    assert len(model.history_["epoch"]) == model.best_epoch_ + model.patience < model.epochs


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("make", [classifier, regressor])
def test_a_handful_of_rows_is_enough_to_predict_and_too_few_for_intervals(make: Any, n: int) -> None:
    for seed in range(5):
        x, y = np.arange(2.0 * n).reshape(n, 2), np.arange(n) % 2
        model = make(random_state=seed, batch_size=1).fit(x, y)
        with (
            nullcontext()
            if make is classifier
            else pytest.warns(UserWarning, match="need 9 rows for calibration, .* about 134 rows")
        ):
            found = outputs(model, x)
        assert np.isfinite(found).all() if make is classifier else np.isinf(found).all()


@pytest.mark.parametrize("kind", BOTH)
def test_partial_fit_is_refused_with_a_reason(kind: Any) -> None:
    assert not hasattr(kind(), "partial_fit")
    with pytest.raises(AttributeError, match="the bootstrap samples are drawn once"):
        kind().partial_fit([[0.0]], [0])


def test_mistakes_get_one_sentence() -> None:
    x, y = values(30)
    for options, weight, said in [
        ({"hidden": 50}, None, r"hidden must be a sequence of widths, such as \(50,\), not 50"),
        ({"hidden": (0,)}, None, "hidden must be a sequence of widths"),
        ({"hidden": "x"}, None, "hidden must be a sequence of widths, .* not 'x'"),
        ({"hidden": (50, None)}, None, "hidden must be a sequence of widths"),
        ({"samples": 1}, None, "samples must be 0"),
        ({"hidden": (True,)}, None, "hidden must be a sequence of widths"),
        ({"hidden": torch.tensor(3)}, None, "hidden must be a sequence of widths"),
        ({"hidden": np.array(3)}, None, "hidden must be a sequence of widths"),
        ({"hidden": (10**15,)}, None, "hidden=.* does not fit into memory"),
        ({"samples": 2.5}, None, "samples must be 0, .* not 2.5"),
        ({"samples": None}, None, "samples must be 0, .* not None"),
        ({"epochs": 0}, None, "epochs must be a whole number of at least 1, not 0"),
        ({"epochs": "3"}, None, "epochs must be a whole number of at least 1, not '3'"),
        ({"patience": 0.5}, None, "patience must be a whole number of at least 1, not 0.5"),
        (
            {"batch_size": "all"},
            None,
            "batch_size must be a whole number of at least 1, not 'all'; \"auto\" chooses one",
        ),
        ({"batch_size": np.zeros(2)}, None, "batch_size must be a whole number of at least 1"),
        ({"learning_rate": None}, None, "learning_rate must be a number, not None"),
        ({"learning_rate": 0}, None, "learning_rate must be a finite number above 0, not 0"),
        ({"learning_rate": 10**400}, None, "learning_rate must be a"),
        (
            {"random_state": -1},
            None,
            r"random_state must be None, a whole number from 0 to 2\*\*32 - 1 or a .*, not -1",
        ),
        ({"random_state": "0"}, None, "random_state must be None, a whole number .* not '0'"),
        ({"verbose": np.zeros(2)}, None, "verbose must be True or False"),
        ({"protocol": Protocol(groups=lambda name, p: 3)}, None, "groups"),
        ({"protocol": "centered"}, None, "protocol must be a Protocol"),
        ({}, -np.ones(30), "sample_weight must not be negative"),
        ({}, (np.arange(30) == 3), "sample_weight leaves 1 sample"),
        ({}, np.where(np.arange(30) == 3, 1e-60, 1), "sample_weight has ratios that are too small for float32"),
    ]:
        with pytest.raises((ValueError, TypeError), match=said):
            regressor(**options).fit(x, y, sample_weight=weight)
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        regressor().fit(x, y).predict_interval(x, 90)
    with pytest.raises(ValueError, match=r"level must lie between 0 and 1, .*, not None"):
        regressor().fit(x, y).predict_interval(x, None)
    with pytest.raises(TypeError, match="return_std must be True or False, not array"):
        regressor().fit(x, y).predict(x, np.zeros(0))
    with pytest.raises(ValueError, match="y must be a real number for each row, not array"):
        regressor().fit(x, np.array(["a", "b"] * 15))
    with pytest.raises(ValueError, match="the classes in y cannot be sorted"):
        classifier().fit(x, np.array(["a", 1] * 15, object))
    for make in (classifier, regressor):
        with pytest.raises(ValueError, match=r"^Complex data not supported: X and y must be real\.$"):
            make().fit(x, np.round(y) + 1j)
    for given in (list(y + 1j), torch.from_numpy(y) + 1j, np.array([1j] * 30, object)):
        with pytest.raises(ValueError, match="y must be a real number for each row, not "):
            regressor().fit(x, given)
    with pytest.raises(ValueError, match="at least two classes"):
        classifier().fit(x, np.zeros(30))


# The order of rows, and which rows are set aside


def table(n: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 3)), rng.normal(size=n), rng.integers(1, 4, n).astype(float)


def assert_same(first: Rows, second: Rows) -> None:
    for name in ("x", "y", "weight"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("whole", [True, False])
def test_the_order_of_the_table_does_not_matter(whole: bool) -> None:
    x, y, weight = table()
    weight = weight if whole else weight + 0.5
    mixed = np.random.default_rng(1).permutation(len(x))
    assert_same(sort_rows(x, y, weight, 0), sort_rows(x[mixed], y[mixed], weight[mixed], 0))


def test_a_whole_weight_repeats_its_row() -> None:
    x, y, weight = table()
    often = weight.astype(int)
    found = sort_rows(x, y, weight, 0)
    assert_same(found, sort_rows(x.repeat(often, 0), y.repeat(often), np.ones(often.sum()), 0))
    assert len(found.x) == weight.sum()


def test_of_fractional_weights_only_the_ratios_matter() -> None:
    x, y, weight = table()
    found = sort_rows(x, y, weight + 0.5, 0)
    assert found.weight.mean() == pytest.approx(1)
    assert len(found.x) == len(x)
    of = {row.tobytes(): w for row, w in zip(x, (weight + 0.5) / (weight + 0.5).mean(), strict=True)}
    np.testing.assert_allclose(found.weight, [of[row.tobytes()] for row in found.x])


@pytest.mark.parametrize("factor", [3.0, 0.1, 1e20])
def test_a_factor_on_the_weights_does_not_change_the_order(factor: float) -> None:
    x, y, weight = table()
    x[:20], y[:20] = x[0], y[0]  # equal rows, some of them with other weights
    weight = weight + 0.7
    first, second = sort_rows(x, y, weight, 0), sort_rows(x, y, factor * weight, 0)
    np.testing.assert_array_equal(first.x, second.x)
    np.testing.assert_allclose(first.weight, second.weight, rtol=1e-12)
    mixed = np.random.default_rng(1).permutation(len(x))
    assert_same(first, sort_rows(x[mixed], y[mixed], weight[mixed], 0))


@pytest.mark.parametrize("value", [0.7, 2, 100, 1e20])
def test_equal_weights_are_the_same_as_no_weights(value: float) -> None:
    x, y, _ = table()
    assert_same(sort_rows(x, y, np.full(len(x), value), 0), sort_rows(x, y, np.ones(len(x)), 0))


@pytest.mark.parametrize("factor", [11, 10**20])
def test_large_whole_weights_do_not_repeat_rows(factor: float) -> None:
    x, y, weight = table()
    found = sort_rows(x, y, factor * weight, 0)
    assert len(found.x) == len(x)
    np.testing.assert_allclose(found.weight, sort_rows(x, y, 0.1 * weight, 0).weight)


def test_signed_zeros_are_equal() -> None:
    zeros, y = np.array([[0.0, 1.0], [-0.0, 2.0]]), np.zeros(2)
    assert_same(sort_rows(zeros, y, np.ones(2), 0), sort_rows(np.abs(zeros), -y, np.ones(2), 0))


def test_a_seed_does_not_pick_the_same_ranks_of_every_table() -> None:
    """Over tables, the mean rank of the calibration rows of seed 0 has the variance of a fair sample."""
    tables, n = 200, 100
    aside = split_rows(n, 0, calibrate=True).calibration.numpy()
    ranks = []
    for number in range(tables):
        y = np.random.default_rng(number).normal(size=n)
        rows = sort_rows(np.zeros((n, 1)), y, np.ones(n), 0)
        ranks.append(np.argsort(np.argsort(rows.y))[aside].mean())
    m = len(aside)
    variance = (n + 1) * (n - m) / (12 * m)  # of the mean of m of n ranks, without replacement
    assert abs(np.mean(ranks) - (n - 1) / 2) < 4 * math.sqrt(variance / tables)
    assert np.var(ranks) == pytest.approx(variance, rel=4 * math.sqrt(2 / tables))


@pytest.mark.parametrize("n", [2, 3, 4, 10, 500])
@pytest.mark.parametrize("set_aside", [True, False])
def test_the_split_of_rows_has_no_overlap_even_for_small_tables(n: int, set_aside: bool) -> None:
    for seed in range(5):
        split = split_rows(n, seed, set_aside)
        parts = torch.cat([split.seen, split.stopping, split.calibration])
        assert sorted(parts.tolist()) == list(range(n))
        assert len(split.stopping) >= 1
        assert len(split.stopping) - len(split.calibration) in ((0, 1) if set_aside else (len(split.stopping),))
        assert split.bootstrap.counts.sum(1).tolist() == [n, n]


@pytest.mark.parametrize("factor", [1e-300, 1e-165, 1e-20, 1e20, 1e153, 1e300])
def test_mean_and_scale_follow_the_units_of_the_values(factor: float) -> None:
    values, _, weight = table()
    values[:, 2] = 7.0  # a constant
    center, spread = center_and_spread(values, weight)
    for found, expected in zip(center_and_spread(factor * values, weight), (center, spread), strict=True):
        np.testing.assert_allclose(found[:2] / factor, expected[:2], rtol=1e-12)
    exact = 2.0 ** round(math.log2(factor))
    for found, expected in zip(center_and_spread(exact * values, weight), (center, spread), strict=True):
        np.testing.assert_array_equal(found / exact, expected)


def test_mean_and_scale_of_ordinary_values_equal_numpys_bit_for_bit() -> None:
    values, _, weight = table()
    center, spread = center_and_spread(values, weight)
    np.testing.assert_array_equal(center, np.average(values, axis=0, weights=weight))
    variance = np.average((values - center) ** 2, axis=0, weights=weight)
    np.testing.assert_array_equal(spread, np.sqrt(variance))


def test_mean_and_scale_of_values_of_very_different_size() -> None:
    center, spread = center_and_spread(np.array([[1e300, 5e-324], [1.0, 0.0]]), np.ones(2))
    np.testing.assert_allclose(center[0], 5e299)
    np.testing.assert_allclose(spread[0], 5e299)
    assert spread[1] > 0


@pytest.mark.parametrize("factor", [1e308 / 4, 1e-320])
def test_of_extreme_weights_only_the_ratios_matter(factor: float) -> None:
    x, y, weight = table()
    weight = np.where(weight > 1, 1.0, 0.5)
    assert_same(sort_rows(x, y, factor * weight, 0), sort_rows(x, y, weight, 0))


def test_the_scale_of_constant_columns_is_a_power_of_two_near_their_value() -> None:
    values = np.c_[np.full(7, 0.1), np.arange(7.0), np.ones(7), np.zeros(7), np.full(7, -5e-200)]
    center, spread = center_and_spread(values, np.ones(7))
    np.testing.assert_allclose(center, [0.1, 3, 1, 0, -5e-200])
    np.testing.assert_allclose(spread[:4], [1 / 16, 2, 1, 1])
    assert 0.5 < spread[4] / 5e-200 <= 1


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "twinboot.integrations.sklearn")
    with pytest.raises(ImportError, match=r'pip install "twinboot\[sklearn\]"$'):
        importlib.import_module("twinboot.integrations.sklearn")


def test_the_package_itself_does_not_load_scikit_learn() -> None:
    code = "import sys, twinboot; print([m for m in sys.modules if m.split('.')[0] in ('sklearn', 'scipy', 'pandas')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
