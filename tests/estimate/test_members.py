"""Members: what they hold, how an estimate predicts with them, and how they are saved and loaded."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import assert_same_bits, classes, mlp, seeded
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call

from twinboot import Estimate, Twins
from twinboot.estimate import files
from twinboot.estimate.members import Members

X = classes(n=23, seed=8).tensors[0]


def around(model: nn.Module, number: int, seed: int = 0) -> list[nn.Module]:
    """Copies with other weights and statistics, in evaluation mode."""
    copies = [copy.deepcopy(model).eval() for _ in range(number)]
    generator = seeded(seed)
    with torch.no_grad():
        for own in copies:
            changed = [p for p in own.parameters() if p.requires_grad]
            for t in [*changed, *(b for b in own.buffers() if b.is_floating_point())]:
                t.add_(0.3 * torch.rand(t.shape, generator=generator).to(t.dtype))
    return copies


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)).eval()


def estimate_of(model: nn.Module, copies: list[nn.Module], task: Any = "classification") -> Estimate:
    estimate = Twins(model).estimate()
    estimate.task = task
    estimate.members = Members(Members.of(model, copies, estimate.partition.parameter_shapes))
    return estimate


@pytest.mark.parametrize("make", [mlp, normed])
@pytest.mark.parametrize("vectorize", [False, True, None])
@pytest.mark.parametrize("samples", [None, 2, 5, 8, 10, 99])
def test_predictions_are_those_of_the_members(make: Any, vectorize: bool | None, samples: int | None) -> None:
    model = make()
    copies = around(model, 10)
    found = estimate_of(model, copies).predict(X, samples, vectorize=vectorize)
    expected = torch.stack([own(X).softmax(1) for own in copies[-min(samples or 10, 10) :]]).detach()
    torch.testing.assert_close(found.probs, expected.mean(0))
    torch.testing.assert_close(found.std, expected.std(0), rtol=1e-3, atol=1e-6)


def test_without_samples_the_model_itself_predicts() -> None:
    model = mlp()
    estimate = estimate_of(model, around(model, 4))
    assert_same_bits(estimate(X), model(X))
    torch.testing.assert_close(estimate.predict(X, samples=0).probs, model(X).softmax(1).detach())


def test_batches_seeds_and_sigma_change_nothing() -> None:
    model = mlp()
    estimate = estimate_of(model, around(model, 4))
    first = estimate.predict(X, vectorize=False)
    estimate.partition.sigma.fill_(9.0)
    second = estimate.predict(X, batch_size=7, seed=3, vectorize=False)
    torch.testing.assert_close(first.probs, second.probs)
    torch.testing.assert_close(first.std, second.std)


def test_an_interval_has_the_degrees_of_freedom_of_the_members() -> None:
    model = mlp(outputs=1)
    copies = around(model, 5)
    prediction = estimate_of(model, copies, "regression").predict(X)
    values = torch.stack([own(X).detach() for own in copies])
    low, high = prediction.interval(0.9)
    t = 2.131846786  # the 95 % quantile of Student's t with 4 degrees of freedom
    torch.testing.assert_close((high - low) / 2, t * values.std(0), rtol=1e-3, atol=1e-6)


def test_a_scale_is_refused() -> None:
    model = mlp()
    estimate = estimate_of(model, around(model, 4))
    for ask in (lambda: estimate.predict(X, scale=0.5), lambda: estimate.sample(scale=2.0)):
        with pytest.raises(ValueError, match=r"^this estimate predicts with members, which have no scale: leave out"):
            ask()
    assert_same_bits(estimate.predict(X, scale=1.0).probs, estimate.predict(X).probs)


def test_a_sample_is_a_member_and_each_is_drawn() -> None:
    model = normed()
    copies = around(model, 3)
    estimate = estimate_of(model, copies)
    drawn = [estimate.sample(seed) for seed in range(30)]
    assert {tuple(own(X).flatten().tolist()) for own in drawn} == {tuple(own(X).flatten().tolist()) for own in copies}
    assert_same_bits(estimate.sample(4).state_dict(), estimate.sample(4).state_dict())
    assert type(drawn[0]) is nn.Sequential
    with torch.no_grad():
        drawn[0][0].weight.zero_()  # a copy  # type: ignore[index]
    assert all((member[0].weight != 0).any() for member in (estimate.sample(seed) for seed in range(3)))  # type: ignore


def test_calibrate_finds_a_temperature_and_no_scale() -> None:
    """Labels drawn from the members' mean at a temperature of 3: that is found again, within 4 standard errors."""
    model = mlp()
    estimate = estimate_of(model, around(model, 4))
    x = 2 * torch.randn(4000, 4, generator=seeded(5))
    estimate.temperature = 3.0
    labels = torch.multinomial(estimate.predict(x).probs, 1, generator=seeded(6))[:, 0]
    data = torch.utils.data.TensorDataset(x, labels)

    def nll(log_temperature: float) -> float:
        estimate.temperature = math.exp(log_temperature)
        return estimate.predict(x).nll(labels).double().mean().item()

    exact, h = math.log(3), 0.2
    curvature = (nll(exact + h) + nll(exact - h) - 2 * nll(exact)) / h**2
    found = estimate.calibrate(data)
    assert estimate.scale == 1
    assert abs(math.log(estimate.temperature) - exact) < 4 / math.sqrt(len(x) * curvature)  # by Fisher's information
    assert estimate.predict(x).nll(labels).mean().item() == pytest.approx(found, rel=1e-3)
    assert estimate.members is not None
    assert len(estimate.members) == 4


def test_prediction_sets_work_with_members(tmp_path: Path) -> None:
    model = mlp()
    estimate = estimate_of(model, around(model, 4))
    estimate.conformalize(classes(100))
    included = estimate.predict(X).set(0.9)
    assert included.shape == (23, 3)
    estimate.save(tmp_path / "estimate")
    assert torch.equal(Estimate.load(tmp_path / "estimate", mlp()).predict(X).set(0.9), included)


def test_dropout_of_members_draws_masks() -> None:
    model = normed()
    estimate = estimate_of(model, around(model, 6))
    plain = estimate.predict(X)
    estimate.dropout = True
    masked = estimate.predict(X)
    assert not torch.allclose(plain.probs, masked.probs)
    assert_same_bits(estimate.predict(X).probs, masked.probs)


def test_members_move_and_are_cast_with_the_estimate() -> None:
    model = mlp()
    estimate = estimate_of(model, around(model, 4))
    before = estimate.predict(X).probs
    estimate.to(torch.float64)
    assert estimate.members is not None
    assert {stack.dtype for stack in estimate.members.values()} == {torch.float64}
    torch.testing.assert_close(estimate.predict(X.double()).probs.float(), before)
    estimate.to("meta")
    assert {stack.device.type for stack in estimate.members.values()} == {"meta"}


def test_only_what_was_trained_and_what_training_changed_is_held() -> None:
    model = normed()
    model[0].requires_grad_(False)
    copies = around(model, 2)
    with torch.no_grad():
        for own in copies:
            own[1].num_batches_tracked += 3
            own[1].running_var.copy_(model[1].running_var)
    found = Members.of(model, copies, ["3.weight", "3.bias"])
    assert list(found) == ["3.weight", "3.bias", "1.running_mean"]
    assert {len(stack) for stack in found.values()} == {2}
    for number, own in enumerate(copies):
        assert_same_bits(found["1.running_mean"][number], own[1].running_mean)


def test_rounds_are_joined_and_what_one_lacks_is_as_in_the_model() -> None:
    model = normed()
    first, second = (around(model, 2, seed) for seed in (1, 2))
    with torch.no_grad():
        for own in first:
            own[1].running_mean.copy_(model[1].running_mean)
    names = [name for name, _ in model.named_parameters()]
    members = Members.joined(model, [Members.of(model, copies, names) for copies in (first, second)])
    assert len(members) == 4
    for number, own in enumerate([*first, *second]):
        torch.testing.assert_close(functional_call(model, members[number], (X,)), own(X))
    assert_same_bits(members[1:3], {name: stack[1:3] for name, stack in members.stacks().items()})


@pytest.mark.parametrize("make", [mlp, normed])
def test_a_file_has_the_members_and_loads_into_any_instance(make: Any, tmp_path: Path) -> None:
    model = make()
    estimate = estimate_of(model, around(model, 3))
    estimate.save(tmp_path / "estimate")
    other = make()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    found = Estimate.load(tmp_path / "estimate", other)
    assert found.members is not None
    assert estimate.members is not None
    assert_same_bits(found.state_dict(), estimate.state_dict())
    assert_same_bits(found.predict(X).probs, estimate.predict(X).probs)
    assert_same_bits(found(X), estimate(X))
    assert Estimate.load(_saved(Twins(model).estimate(), tmp_path), other).members is None


def _saved(estimate: Estimate, folder: Path) -> Path:
    estimate.save(folder / "other")
    return folder / "other"


def test_members_of_another_dtype_are_cast_to_that_of_the_model(tmp_path: Path) -> None:
    model = mlp()
    estimate = estimate_of(model, around(model, 3))
    estimate.to(torch.bfloat16).save(tmp_path / "estimate")
    found = Estimate.load(tmp_path / "estimate", mlp())
    assert found.predict(X).probs.dtype == torch.float32
    assert found.members is not None
    assert estimate.members is not None
    for here, there in zip(found.members.values(), estimate.members.values(), strict=True):
        assert_same_bits(here, there.float())


def test_a_shared_backbone_is_in_the_file_once(tmp_path: Path) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    estimate_of(model, around(model, 5)).save(tmp_path / "estimate")
    with safe_open(tmp_path / "estimate", "pt") as file:
        members = [key for key in file.keys() if key.startswith("members.")]  # noqa: SIM118 - safe_open is no mapping
    assert sorted(members) == ["members.2.bias", "members.2.weight"]


def rewritten(path: Path, change: Any) -> None:
    """Change the tensors of a file, and give it a digest that matches."""
    with safe_open(path, "pt") as file:
        header = {key: text for key, text in file.metadata().items() if key != "digest"}
    tensors = change(load_file(path))
    save_file(tensors, path, metadata={**header, "digest": files._digest(header, tensors)})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("members.0.weight", torch.zeros(2, 8, 4), "is damaged (members need the same number of values for each"),
        ("members.0.weight", torch.tensor(1.0), "is damaged (members need the same number of values for each weight"),
        ("members.0.weight", torch.zeros(3, 9, 4), "the members do not fit the model: '0.weight' is missing or has"),
        ("members.7.weight", torch.zeros(3, 8, 4), "the members do not fit the model: '7.weight' is missing or has"),
    ],
)
def test_a_file_whose_members_do_not_fit_is_refused(name: str, value: Tensor, said: str, tmp_path: Path) -> None:
    model = mlp()
    estimate_of(model, around(model, 3)).save(path := tmp_path / "estimate")
    rewritten(path, lambda tensors: tensors | {name: value})
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        Estimate.load(path, mlp())
    assert "\n" not in str(caught.value)


def test_a_damaged_file_and_one_of_another_model_are_refused(tmp_path: Path) -> None:
    model = mlp()
    estimate_of(model, around(model, 3)).save(path := tmp_path / "estimate")
    with pytest.raises(ValueError, match=r"is of another model: '0.weight' is of shape \(8, 4\) in the file"):
        Estimate.load(path, mlp(hidden=9))
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged \(its digest does not match its content\)"):
        Estimate.load(path, mlp())


@pytest.mark.parametrize(
    "values",
    [{}, {"a": torch.zeros(2, 3), "b": torch.zeros(3)}, {"a": torch.zeros(1, 3)}, {"a": torch.tensor(0.0)}],
)
def test_members_need_as_many_values_of_each_weight_and_at_least_two(values: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=r"^members need the same number of values for each weight, and at least two"):
        Members(values)
