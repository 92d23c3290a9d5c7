import dataclasses
import math
from statistics import NormalDist
from typing import Any

import pytest
import torch
from loops import seeded
from torch.distributions import Categorical, Normal

from twinboot import Prediction
from twinboot.estimate.conformal import Scores
from twinboot.estimate.prediction import Moments, combine
from twinboot.estimate.student import half_width


def predict(outputs: torch.Tensor, task: str, blocks: list[int], chunk: int) -> Prediction:
    """The prediction from outputs [draws, inputs, ...], some draws and some inputs at a time."""
    parts = []
    for columns in outputs.split(chunk, 1):
        moments = Moments(task)  # type: ignore[arg-type]
        for block in columns.split(blocks):
            moments.add(block)
        parts.append(moments)
    return combine(parts)


@pytest.mark.parametrize("blocks", [[6], [1] * 6, [4, 1, 1]])
@pytest.mark.parametrize("chunk", [2, 5])
def test_classification_is_the_average_of_probabilities_and_splits_the_entropy(blocks: list[int], chunk: int) -> None:
    logits = 3 * torch.randn(6, 5, 4, generator=seeded(0))
    prediction = predict(logits, "classification", blocks, chunk)
    probs = logits.softmax(-1)
    torch.testing.assert_close(prediction.probs, probs.mean(0))
    torch.testing.assert_close(prediction.std, probs.std(0))
    torch.testing.assert_close(prediction.entropy, Categorical(probs.mean(0)).entropy())
    torch.testing.assert_close(prediction.expected_entropy, Categorical(probs).entropy().mean(0))
    torch.testing.assert_close(prediction.entropy, prediction.expected_entropy + prediction.mutual_information)
    assert (prediction.mutual_information > 0).all()
    assert torch.equal(prediction.labels, probs.mean(0).argmax(1))
    assert len(prediction) == 5


def test_draws_that_agree_have_no_mutual_information_and_certain_draws_that_differ_have_all_of_it() -> None:
    agree = predict(torch.tensor([[[0.3, 0.1]]]).expand(4, 1, 2), "classification", [4], 1)
    assert agree.mutual_information.item() == pytest.approx(0, abs=1e-6)
    differ = predict(torch.tensor([[[200.0, 0.0]], [[0.0, 200.0]]]), "classification", [1, 1], 1)
    assert differ.expected_entropy.item() == pytest.approx(0, abs=1e-6)
    assert differ.mutual_information.item() == pytest.approx(math.log(2))


def test_dense_outputs_have_their_classes_along_dimension_one() -> None:
    logits = torch.randn(3, 2, 4, 6, 5, generator=seeded(0))
    prediction = predict(logits, "classification", [2, 1], 1)
    torch.testing.assert_close(prediction.probs, logits.softmax(2).mean(0))
    assert prediction.entropy.shape == (2, 6, 5)
    target = torch.randint(4, (2, 6, 5), generator=seeded(1))
    torch.testing.assert_close(
        prediction.nll(target), torch.nn.functional.nll_loss(prediction.probs.log(), target, reduction="none")
    )


@pytest.mark.parametrize("blocks", [[7], [1] * 7, [3, 4]])
def test_regression_mean_and_std_are_exact_far_from_zero(blocks: list[int]) -> None:
    values = 1e4 + torch.randn(7, 9, 2, generator=seeded(0), dtype=torch.float64)
    prediction = predict(values, "regression", blocks, 4)
    torch.testing.assert_close(prediction.mean, values.mean(0))
    torch.testing.assert_close(prediction.std, values.std(0))


def test_intervals_are_central_and_include_the_noise_that_is_given() -> None:
    prediction = Prediction("regression", torch.tensor([1.0]), torch.tensor([3.0]))
    low, high = prediction.interval(0.9)
    z = NormalDist().inv_cdf(0.95)
    assert (low.item(), high.item()) == pytest.approx((1 - 3 * z, 1 + 3 * z))
    low, high = prediction.interval(0.9, noise=4.0)
    assert (low.item(), high.item()) == pytest.approx((1 - 5 * z, 1 + 5 * z))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (4, 1), (1, 1)])
def test_noise_has_a_number_for_each_value_or_one_for_all(shape: tuple[int, ...]) -> None:
    prediction = Prediction("regression", torch.zeros(4, 1), torch.full((4, 1), 3.0))
    noise = torch.full(shape, 4.0, dtype=torch.float64)
    low, high = prediction.interval(0.9, noise=noise)
    torch.testing.assert_close(high - low, torch.full((4, 1), 10 * NormalDist().inv_cdf(0.95)))
    assert prediction.nll(torch.zeros(4, 1), noise=noise).shape == (4, 1)


@pytest.mark.parametrize("shape", [(3,), (4, 4), (1, 4), (4, 1, 1)])
def test_noise_of_another_shape_is_never_broadcast(shape: tuple[int, ...]) -> None:
    prediction = Prediction("regression", torch.zeros(4, 1), torch.ones(4, 1))
    for said in (prediction.interval, lambda noise: prediction.nll(torch.zeros(4, 1), noise)):
        with pytest.raises(ValueError, match=r"the noise has shape .*, the prediction \(4, 1\): give one number, or"):
            said(noise=torch.ones(shape))


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf, torch.tensor([-1.0]), torch.tensor(math.nan), "1", 1j])
def test_noise_that_is_no_standard_deviation_gets_a_sentence(noise: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^noise must be .*\.$"):
        Prediction("regression", torch.zeros(4), torch.ones(4)).interval(noise=noise)


def test_the_mean_model_alone_has_no_interval_without_noise() -> None:
    alone = Prediction("regression", torch.zeros(4), torch.zeros(4))
    with pytest.raises(ValueError, match=r"without spread has no interval: predict with samples, or give the noise"):
        alone.interval()
    low, high = alone.interval(0.9, noise=1.0)
    assert bool((high > low).all())
    empty = Prediction("regression", torch.zeros(0), torch.zeros(0)).interval()
    assert [len(end) for end in empty] == [0, 0]


def test_intervals_are_those_of_students_t_and_known_noise_adds_degrees_of_freedom() -> None:
    prediction = Prediction("regression", torch.zeros(2), torch.tensor([3.0, 0.0]), df=2.0)
    noise = torch.tensor([4.0, 4.0])
    _, high = prediction.interval(0.9, noise)
    # df (25 / 9)^2 by Satterthwaite, and a normal distribution where there is noise alone
    expected = [5 * half_width(0.9, 2 * (25 / 9) ** 2), 4 * half_width(0.9)]
    torch.testing.assert_close(high, torch.tensor(expected))
    each = Prediction("regression", torch.zeros(2), torch.ones(2), df=torch.tensor([1.0, 9.0]))
    torch.testing.assert_close(each.interval(0.9)[1], torch.tensor([half_width(0.9, df) for df in (1, 9)]))


@pytest.mark.parametrize("draws", [2, 8])
def test_draws_have_one_degree_of_freedom_fewer_than_there_are(draws: int) -> None:
    """So do the members of an ensemble: 90 % intervals from a few of them contain the value in 90 % of the cases."""
    n = 20_000
    generator = seeded(0)
    true, spread = torch.zeros(n), torch.rand(n, generator=generator) + 0.5
    center = spread * torch.randn(n, generator=generator)
    prediction = predict(center + spread * torch.randn(draws, n, generator=generator), "regression", [draws], n)
    assert prediction.df == max(draws - 1, 1)
    low, high = dataclasses.replace(prediction, mean=center).interval(0.9)
    covered = ((low < true) & (true < high)).double().mean().item()
    assert abs(covered - 0.9) < 4 * math.sqrt(0.9 * 0.1 / n)


def test_the_mean_alone_has_no_degrees_of_freedom() -> None:
    assert predict(torch.zeros(1, 3), "regression", [1], 3).df is None


def test_sets_and_conformal_intervals_need_scores_of_the_same_kind() -> None:
    values = Prediction("regression", torch.zeros(2), torch.ones(2))
    classes = Prediction("classification", torch.tensor([[0.2, 0.7, 0.1]]), torch.zeros(1, 3), torch.zeros(1))
    for calibrated in (values.conformal_interval, classes.set):
        with pytest.raises(
            ValueError, match=r"no scores of calibration samples: use fit\(calibration=0.5\) or estimate"
        ):
            calibrated()
    with pytest.raises(AttributeError, match=r'set\(\) is for task="classification"'):
        values.set()
    with pytest.raises(AttributeError, match=r'conformal_interval\(\) is for task="regression" or'):
        classes.conformal_interval()
    scores = Scores(torch.tensor([0.0, 0.0, 0.7, 0.7]).double(), None, {})
    some = dataclasses.replace(classes, scores=scores)
    assert [some.set(level).tolist() for level in (0.4, 0.6)] == [[[False, True, False]], [[True, True, False]]]
    with pytest.warns(UserWarning, match="have all classes"):
        assert some.set(0.9).all()
    with pytest.raises(ValueError, match=r"level must lie between 0 and 1, such as 0.9, not 90"):
        some.set(90)


def test_conformal_intervals_have_one_width_unless_the_noise_is_known() -> None:
    prediction = Prediction("regression", torch.zeros(2), torch.tensor([3.0, 0.0]))
    for noise, widths in ((None, [2.0, 2.0]), (4.0, [10.0, 8.0])):
        scores = Scores(torch.ones(9).double(), noise, {})
        low, high = dataclasses.replace(prediction, scores=scores).conformal_interval(0.9)
        assert (high - low).tolist() == widths
    gaussian = dataclasses.replace(prediction, task="gaussian", noise=torch.tensor([4.0, 4.0]))
    low, high = dataclasses.replace(gaussian, scores=Scores(torch.ones(9).double(), None, {})).conformal_interval(0.9)
    assert (high - low).tolist() == [10.0, 8.0]


def test_predictions_can_be_compared_and_kept_in_a_set() -> None:
    one, other = (Prediction("regression", torch.zeros(4), torch.ones(4)) for _ in range(2))
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def test_targets_that_are_no_real_numbers_get_a_sentence() -> None:
    values = Prediction("regression", torch.zeros(2), torch.ones(2))
    with pytest.raises(TypeError, match=r"the target must be real numbers, not torch.complex64"):
        values.nll(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="the target must be a tensor, not list"):
        values.nll([0.0, 0.0])  # type: ignore[arg-type]
    classes = Prediction("classification", torch.full((2, 2), 0.5), torch.zeros(2, 2), torch.zeros(2))
    with pytest.raises(TypeError, match=r"labels must be integers, not torch.complex64"):
        classes.nll(torch.zeros(2, dtype=torch.complex64))


def test_likelihoods() -> None:
    regression = Prediction("regression", torch.tensor([1.0, 2.0]), torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(
        regression.nll(torch.tensor([0.0, 2.0]), noise=0.8),
        -Normal(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.8])).log_prob(torch.tensor([0.0, 2.0])),
    )
    classes = Prediction("classification", torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.zeros(2, 2), torch.zeros(2))
    nll = classes.nll(torch.tensor([1, 1]))
    assert nll[0].item() == pytest.approx(-math.log(0.75))
    assert nll[1].isfinite()


def test_labels_out_of_range_get_a_sentence() -> None:
    prediction = Prediction("classification", torch.full((2, 3), 1 / 3), torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(ValueError, match="label 3 is out of range: the model has 3 classes, 0 to 2"):
        prediction.nll(torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="label -1 is out of range"):
        prediction.nll(torch.tensor([0, -1]))
    with pytest.raises(ValueError, match=r"the labels have shape \(3,\), but the model's output needs \(2,\)"):
        prediction.nll(torch.tensor([0, 1, 2]))
    with pytest.raises(TypeError, match=r"labels must be integers, not torch.float32"):
        prediction.nll(torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("blocks", [[6], [1] * 6, [4, 1, 1]])
def test_the_interval_of_a_class_is_students_in_log_odds(blocks: list[int]) -> None:
    logits = 3 * torch.randn(6, 5, 3, generator=seeded(0))
    low, high = predict(logits, "classification", blocks, 2).interval(0.9)
    log_odds = logits.double().softmax(-1).logit()
    half = half_width(0.9, 5) * log_odds.std(0)
    torch.testing.assert_close(low.double(), (log_odds.mean(0) - half).sigmoid(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(high.double(), (log_odds.mean(0) + half).sigmoid(), rtol=1e-4, atol=1e-6)
    assert (low >= 0).all()
    assert (low < high).all()
    assert (high <= 1).all()


def test_log_odds_of_nearly_certain_classes_keep_their_digits() -> None:
    """In float32, 1 - p is 0 for these; the odds of two classes are exp(the difference of their logits)."""
    logits = torch.tensor([[[0.0, 20.0]], [[0.0, 24.0]], [[0.0, 25.0]]])
    found = predict(logits, "classification", [3], 1)
    assert found.center is not None
    assert found.log_odds_std is not None
    torch.testing.assert_close(found.center, torch.tensor([[-23.0, 23.0]]))
    torch.testing.assert_close(found.log_odds_std, torch.full((1, 2), torch.tensor([20.0, 24.0, 25.0]).std().item()))


def test_intervals_around_another_model_have_its_prediction_in_the_middle() -> None:
    outputs, own = torch.randn(6, 5, 2, generator=seeded(1)), torch.randn(5, 2, generator=seeded(2))
    for task in ("regression", "classification"):
        moments = Moments(task)  # type: ignore[arg-type]
        moments.add(outputs)
        low, high = combine([moments], centers=[own]).interval(0.9)
        if task == "regression":
            torch.testing.assert_close((low + high) / 2, own)
        else:
            torch.testing.assert_close((low.logit() + high.logit()) / 2, own.softmax(1).logit(), rtol=1e-3, atol=1e-3)


def test_what_belongs_to_the_other_task_gets_a_sentence() -> None:
    regression = Prediction("regression", torch.zeros(2), torch.ones(2))
    for name in ("probs", "labels", "entropy", "mutual_information", "expected_entropy"):
        with pytest.raises(AttributeError, match='is for task="classification", but this prediction was made with'):
            getattr(regression, name)
    classification = Prediction("classification", torch.ones(2, 2) / 2, torch.zeros(2, 2), torch.zeros(2))
    with pytest.raises(ValueError, match="a prediction without spread has no interval: predict with samples"):
        classification.interval()
    with pytest.raises(ValueError, match="noise is for values: leave it out for classes"):
        classification.interval(noise=1.0)
    with pytest.raises(ValueError, match=r"level must lie between 0 and 1, such as 0.9, not 95"):
        regression.interval(95)
    with pytest.raises(ValueError, match="a prediction without spread has no likelihood: give the noise"):
        Prediction("regression", torch.zeros(2), torch.zeros(2)).nll(torch.zeros(2))
    with pytest.raises(ValueError, match=r"the target has shape \(3,\), the prediction \(2,\)"):
        regression.nll(torch.zeros(3))


def test_a_prediction_is_told_in_one_short_line() -> None:
    outputs = torch.randn(6, 500, 4, generator=seeded(0))
    prediction = predict(outputs, "classification", [6], 500)
    said = repr(prediction)
    assert said.startswith("Prediction(classification, 500 inputs, 4 classes, entropy ")
    assert f"{prediction.entropy.mean():.2g} on average and up to {prediction.entropy.max():.2g}, mutual" in said
    values = predict(outputs, "regression", [6], 500)
    assert repr(values).startswith("Prediction(regression, 500 inputs, shape (500, 4), std ")
    assert f"up to {values.std.max():.2g})" in repr(values)
    assert max(len(said), len(repr(values))) < 200
    assert "of no inputs" in repr(predict(outputs[:, :0], "regression", [6], 500))
