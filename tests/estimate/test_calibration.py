"""Temperature and scale, for models whose error is known."""

import copy
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from loops import assert_same_bits, classes, mlp, seeded
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from twinboot import Bootstrap, Estimate, Twins
from twinboot.estimate import calibration
from twinboot.estimate.calibration import Labels, Values


def overconfident(factor: float, n: int = 4000) -> tuple[Tensor, Tensor]:
    """Logits that are too large by a factor, and labels from the true ones."""
    true = torch.randn(n, 3, generator=seeded(0))
    labels = torch.multinomial(true.softmax(1), 1, generator=seeded(1)).squeeze(1)
    return factor * true, labels


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_temperature_undoes_what_makes_a_model_too_sure(factor: float) -> None:
    """Within four standard errors of the maximum-likelihood estimate of the temperature's logarithm."""
    logits, labels = overconfident(factor)
    target = Labels(labels)
    temperature, scale, loss = calibration.minimize(lambda scale: logits[None], target)
    assert scale == 0  # of equals the first
    assert temperature == calibration.temperature(logits[None], target)
    true = logits / factor
    probs = true.softmax(1)
    information = ((probs * true.square()).sum(1) - (probs * true).sum(1).square()).sum()
    assert abs(math.log(temperature / factor)) < 4 / math.sqrt(information)
    assert loss == target.nll(logits[None], temperature)
    assert loss <= min(target.nll(logits[None], t) for t in (0.9 * temperature, 1.1 * temperature))


@pytest.mark.parametrize("n", [5, 50, 500])
def test_samples_that_are_all_predicted_right_do_not_make_a_model_far_too_sure(n: int) -> None:
    """Two classes, with p the probability of the right one: the likelihood of n such samples and half a sample of each
    label is highest at p = (n + 1/2) / (n + 1)."""
    labels = torch.arange(n) % 2
    logits = 3.0 * F.one_hot(labels, 2)
    temperature = calibration.temperature(logits[None], Labels(labels))
    assert torch.tensor(3 / temperature).sigmoid().item() == pytest.approx((n + 0.5) / (n + 1), abs=1e-4)


def test_a_class_that_the_model_rules_out_changes_no_temperature() -> None:
    logits, labels = overconfident(3.0)
    masked = torch.cat([logits, torch.full((len(logits), 1), -1e4)], 1)
    with_mask, without = (calibration.temperature(given[None], Labels(labels)) for given in (masked, logits))
    assert with_mask == pytest.approx(without, rel=1e-3)


def test_the_scale_with_the_lowest_loss_is_taken() -> None:
    logits, labels = overconfident(1.0)
    noise = torch.randn(4000, 3, generator=seeded(2))
    _, scale, _ = calibration.minimize(lambda s: (logits + 5 * abs(s - 0.75) * noise)[None], Labels(labels))
    assert scale == 0.75


def test_a_sigma_that_is_far_too_small_gets_a_scale_that_makes_up_for_it() -> None:
    """As with pooled gradients."""
    logits, labels = overconfident(1.0)
    noise = torch.randn(4000, 3, generator=seeded(2))
    for best in (3.0, 4.0):
        found = calibration.minimize(lambda s, best=best: (logits + 5 * abs(s - best) * noise)[None], Labels(labels))  # type: ignore[misc]
        assert found[1] == best


def trained() -> tuple[Estimate, TensorDataset, Bootstrap]:
    data = classes(60)
    twins = Twins(mlp())
    with torch.no_grad():
        for p in twins[0].parameters():
            p.mul_(1.5)
    twins.update()
    estimate = twins.estimate()
    estimate.task = "classification"
    return estimate, data, Bootstrap(60)


@pytest.mark.parametrize("scale", [0.37, 1.0])
def test_with_keep_scale_only_the_temperature_is_chosen(scale: float) -> None:
    estimate, data, _ = trained()
    estimate.scale = scale
    loss = estimate.calibrate(data, keep_scale=True)
    assert estimate.scale == scale
    assert estimate.temperature != 1
    x, y = data.tensors
    assert estimate.predict(x).nll(y).mean().item() == pytest.approx(loss, rel=1e-4)


class Watched(Dataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data, self.read = data, set[int]()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.read.add(index)
        return self.data[index]


def test_only_the_given_samples_are_read_and_predictions_of_them_get_better() -> None:
    estimate, data, bootstrap = trained()
    watched = Watched(data)
    x, y = data[bootstrap.unseen]
    before = estimate.predict(x).nll(y).mean().item()
    state = torch.get_rng_state()
    loss = estimate.calibrate(Subset(watched, bootstrap.unseen.tolist()))
    assert torch.equal(torch.get_rng_state(), state)
    assert watched.read == set(bootstrap.unseen.tolist())
    samples = 0 if estimate.scale == 0 else 32
    assert estimate.predict(x, samples).nll(y).mean().item() == pytest.approx(loss, rel=1e-4)
    assert loss <= before


def test_samples_are_collated_as_the_caller_says() -> None:
    estimate, data, bootstrap = trained()
    unseen = Subset(data, bootstrap.unseen.tolist())
    expected = copy.deepcopy(estimate).calibrate(unseen)
    odd = [(x.tolist(), label) for x, label in unseen]

    def collated(samples: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.tensor([x for x, _ in samples]), torch.stack([label for _, label in samples])

    assert estimate.calibrate(cast(Any, odd), collate_fn=collated) == expected
    with pytest.raises(TypeError, match="calibrate has no option 'colate_fn': did you mean 'collate_fn'"):
        estimate.calibrate(unseen, colate_fn=collated)


class Shifted(nn.Module):
    """A network that subtracts a half from its inputs, in place if `writes`."""

    def __init__(self, outputs: int, writes: bool) -> None:
        super().__init__()
        self.layers, self.writes = mlp(outputs=outputs), writes

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.sub_(0.5) if self.writes else x - 0.5)  # type: ignore[no-any-return]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("task", ["classification", "gaussian"])
def test_a_model_that_writes_into_its_input_is_calibrated_as_one_that_does_not(task: Any, own: bool) -> None:
    """For new batches, and for a `collate_fn` that returns the dataset's own tensors."""
    pure, writing = (
        Twins(Shifted(3 if task == "classification" else 2, writes)).estimate() for writes in (False, True)
    )
    for estimate in (pure, writing):
        estimate.partition.sigma.fill_(0.4)
        estimate.task = task
    x = torch.randn(300, 4, generator=seeded(5))
    if task == "classification":
        y = torch.multinomial(pure.predict(x).probs, 1, generator=seeded(1)).squeeze(1)
    else:
        y = pure.predict(x).mean.squeeze(1) + 3 * torch.randn(300, generator=seeded(1))
    given = x.clone(), y.clone()
    data = TensorDataset(*given)
    options: dict[str, Any] = {"batch_size": 100}
    if own:
        data = cast(Any, list(zip(*(t.split(100) for t in given), strict=True)))
        options = {"batch_size": 1, "collate_fn": lambda samples: samples[0]}
    expected = pure.calibrate(TensorDataset(x, y))
    assert writing.calibrate(data, **options) == expected
    assert (writing.temperature, writing.scale) == (pure.temperature, pure.scale)
    assert pure.scale > 0
    assert_same_bits(given, (x, y))


def test_a_calibration_that_takes_all_noise_away_says_so() -> None:
    estimate, data, _ = trained()
    x = torch.randn(500, data.tensors[0].shape[1], generator=seeded(5))
    sure = TensorDataset(x, estimate.predict(x, samples=0).labels)  # as the mean model has it: noise can only harm
    with pytest.warns(UserWarning, match=r"best without weight noise.*set `estimate.scale = 1.0`\.$"):
        estimate.calibrate(sure)
    assert estimate.scale == 0
    assert estimate.predict(x).std.max() < 1e-6  # all draws are the same, to rounding


def test_with_dropout_what_is_calibrated_is_what_predict_gives() -> None:
    """Both have the same draws and masks. Without weight noise, draws still differ by their masks."""
    x, y = classes(60).tensors
    estimate = Twins(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))).estimate()
    estimate.dropout, estimate.task = True, "classification"
    with pytest.warns(UserWarning, match="the draws of `predict` have the spread of dropout alone: to keep the noise"):
        loss = estimate.calibrate(TensorDataset(x, y))
    assert estimate.predict(x).nll(y).mean().item() == pytest.approx(loss, rel=1e-4)
    assert estimate.predict(x).std.max() > 0.01


def test_a_file_keeps_the_calibration(tmp_path: Path) -> None:
    estimate, data, bootstrap = trained()
    estimate.calibrate(Subset(data, bootstrap.unseen.tolist()))
    estimate.save(tmp_path / "e.safetensors")
    loaded = Estimate.load(tmp_path / "e.safetensors", mlp())
    assert (loaded.temperature, loaded.scale) == (estimate.temperature, estimate.scale) != (1.0, 1.0)
    x = data.tensors[0]
    assert torch.equal(loaded.predict(x).probs, estimate.predict(x).probs)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (TensorDataset(torch.zeros(5, 4)), "tuples of an input and a target"),
        (TensorDataset(torch.zeros(0, 4), torch.zeros(0).long()), "the dataset is empty"),
        (TensorDataset(torch.zeros(5, 4), torch.zeros(5)), "one integer label for each sample"),
        (
            TensorDataset(torch.zeros(5, 4), torch.full((5,), 3)),
            "label 3 is out of range: the model has 3 classes, 0 to 2",
        ),
        (TensorDataset(torch.full((5, 4), torch.nan), torch.zeros(5).long()), "outputs that are not finite"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(data: TensorDataset, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        Twins(mlp()).estimate().calibrate(data, task="classification")
    values = TensorDataset(torch.zeros(2, 4), torch.tensor([[0.0], [math.inf]]))
    with pytest.raises(ValueError, match="some targets are not finite"):
        twins_of_values().estimate().calibrate(values, task="gaussian")
    with pytest.raises(ValueError, match=r"targets have shape \(2, 3\), but the model gives \(2, 1\)"):
        twins_of_values().estimate().calibrate(TensorDataset(torch.zeros(2, 4), torch.zeros(2, 3)), task="gaussian")
    with pytest.raises(ValueError, match="the estimate does not know what its model predicts: give task="):
        twins_of_values().estimate().calibrate(values)
    with pytest.raises(ValueError, match="samples must be a whole number of at least 2"):
        Twins(nn.Linear(4, 3)).estimate().calibrate(classes(10), samples=1)


def test_an_estimate_of_values_without_their_noise_has_no_likelihood() -> None:
    estimate = Twins(nn.Linear(4, 2)).estimate()
    estimate.task = "regression"
    with pytest.raises(ValueError, match='train with the loss "gaussian"'):
        estimate.calibrate(classes(10))
    assert (estimate.temperature, estimate.scale) == (1.0, 1.0)


@pytest.mark.parametrize(("n", "factor"), [(3, 0.0), (3, 4.0), (500, 0.3), (500, 1.0), (500, 300.0)])
def test_the_temperature_of_values_is_how_much_further_off_they_are_than_the_model_says(n: int, factor: float) -> None:
    """T = (sum of residual^2 / variance + 1) / (n + 1), where the 1 is the pseudo-sample."""
    variance = torch.rand(n, 1, generator=seeded(0)) + 0.5
    values = (factor * variance).sqrt() * torch.randn(n, 1, generator=seeded(1))
    outputs = torch.cat([torch.zeros(n, 1), variance.log()], 1)[None]
    expected = ((values.square() / variance).sum() + 1).item() / (n + 1)
    assert calibration.temperature(outputs, Values(values, outputs)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("true", [0.5, 1.5])
def test_the_scale_of_values_is_that_of_the_weights_that_made_them(true: float) -> None:
    """y = w x + e with w ~ N(0, true^2) for each sample: what the draws of w do not explain differs with x."""
    x, e, w = torch.randn(3, 4000, 1, generator=seeded(0)).unbind()
    values, logarithms = true * w * x + 0.1 * e, torch.full((4000, 1), math.log(0.1**2))

    def outputs(scale: float) -> Tensor:
        means = [sign * scale * x / 2**0.5 for sign in (-1, 1)]  # two draws, of variance (scale x)^2
        return torch.stack([torch.cat([mean, logarithms], 1) for mean in means])

    temperature, scale, _ = calibration.minimize(outputs, Values(values, outputs(1.0)))
    assert scale == true
    assert 0.7 < temperature < 1.4


def test_the_pseudo_sample_is_the_same_for_all_scales() -> None:
    """Its loss is lowest where the variance is that before calibration: at scale 1."""
    draws = torch.tensor([[[-1.0, 0.0]], [[1.0, 0.0]]])  # two draws of one sample, each with a variance of 1
    target = Values(torch.zeros(1, 1), draws)
    assert target.expected.item() == 3

    def pseudo(scale: float) -> float:
        outputs = draws * torch.tensor([scale, 1.0])
        return 2 * target.smoothed_nll(outputs, 1.0) - target.nll(outputs, 1.0)

    assert min(calibration.SCALES, key=pseudo) == 1


def test_a_model_that_predicts_a_variance_uses_what_calibrate_finds(tmp_path: Path) -> None:
    x = torch.randn(200, 4, generator=seeded(0))
    y = x.sum(1) + 3 * torch.randn(200, generator=seeded(1))
    estimate = twins_of_values().estimate()
    estimate.task = "gaussian"
    before = estimate.predict(x)
    loss = estimate.calibrate(TensorDataset(x, y))
    found = estimate.predict(x)
    assert found.nll(y[:, None]).mean().item() == pytest.approx(loss, rel=1e-4)
    assert loss < before.nll(y[:, None]).mean().item() - 0.1
    unscaled = estimate.predict(x, scale=1.0).noise
    assert unscaled is not None
    assert before.noise is not None
    torch.testing.assert_close(unscaled, estimate.temperature**0.5 * before.noise)
    estimate.save(tmp_path / "e.safetensors")
    again = Estimate.load(tmp_path / "e.safetensors", nn.Linear(4, 2)).predict(x)
    assert again.noise is not None
    assert found.noise is not None
    assert torch.equal(again.noise, found.noise)
    one, other = (estimate.predict(x, vectorize=vectorize) for vectorize in (False, True))
    torch.testing.assert_close((one.mean, one.std, one.noise), (other.mean, other.std, other.noise))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_several_values_of_a_sample_are_calibrated_together_and_targets_stay_as_fine_as_they_are(
    dtype: torch.dtype,
) -> None:
    x = torch.randn(300, 4, generator=seeded(0), dtype=dtype)
    y = 100 + 0.3 * torch.randn(300, 2, generator=seeded(1))
    estimate = Twins(nn.Linear(4, 4)).estimate().to(dtype)
    with torch.no_grad():
        estimate.module.get_parameter("weight").zero_()
        estimate.module.get_parameter("bias").copy_(torch.tensor([100.0, 100.0, -4.0, -4.0]))
    with pytest.warns(UserWarning, match="predicted best without weight noise"):  # sigma is 0: of equals the first
        loss = estimate.calibrate(TensorDataset(x, y), task="gaussian")
    expected = ((y - 100).square().mean(0) / math.exp(-4)).mean().item()
    assert estimate.temperature == pytest.approx(expected, rel=0.01)
    found = estimate.predict(x, samples=0, task="gaussian").nll(y).mean().item()
    assert found == pytest.approx(loss, rel=1e-3)


def twins_of_values() -> Twins:
    twins = Twins(nn.Linear(4, 2))
    with torch.no_grad():
        for twin, sign in zip(twins, (-1, 1), strict=True):
            for p in twin.parameters():
                p.fill_(0.05 * sign)
    twins.update()
    return twins
