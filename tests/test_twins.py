import copy
import io
import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import assert_same_bits, classes, mlp, pairs, seeded, snapshot, train
from torch import Tensor, nn

import twinboot.twins as twins_module
from twinboot import Blocks, Bootstrap, Twins, pool_gradients
from twinboot._core import noise as noise_module
from twinboot.distributed.apart import Remote
from twinboot.groups import Partition
from twinboot.twins import rows_that_differ, variance


class Mean(nn.Module):
    """The paper's first example: D numbers that are to become the mean of the data."""

    def __init__(self, dimensions: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dimensions, dtype=dtype))


def place(twins: Twins, *values: Tensor) -> None:
    """Set the twins of a one-parameter model to the values given."""
    with torch.no_grad():
        for twin, value in zip(twins, values, strict=True):
            next(twin.parameters()).copy_(value)


def within_four_standard_errors(values: Tensor, expected: float) -> None:
    values = values.double()
    assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(len(values))


# --- Algorithm 1, against closed forms


@pytest.mark.parametrize("replicas", [2, 5])
def test_sigma_of_a_gaussian_mean_has_the_expectation_and_variance_of_the_closed_form(replicas: int) -> None:
    n, dimensions, seeds, variance = 200, 8, 600, 3.0
    estimates = []
    for seed in range(seeds):
        data = math.sqrt(variance) * torch.randn(n, dimensions, generator=seeded(seed))
        twins = Twins(Mean(dimensions), replicas)
        # Full-batch gradient descent on the squared error of a bootstrap sample ends at the mean of that sample.
        counts = Bootstrap(n, replicas, seed).counts.float()
        place(twins, *(counts @ data / n))
        twins.update()
        estimates.append(float(twins.sigma["(model)"]) ** 2)
    squared = torch.tensor(estimates)
    # The variance of a bootstrap mean is that of the sample, (n - 1) / n times the population's, divided by n.
    tau2 = variance / n * (n - 1) / n
    within_four_standard_errors(squared, tau2)
    # For normal weights the estimate is tau^2 times chi-squared of (B - 1) D degrees of freedom over their number; the
    # sampling of the data themselves adds 2 tau^4 / (D n), from the variance of each dimension's sample variance.
    degrees = (replicas - 1) * dimensions
    expected = 2 * tau2**2 / degrees + 2 * tau2**2 / (dimensions * n)
    standard_error = expected * math.sqrt((2 + 12 / degrees) / seeds)  # of a variance, with chi-squared's kurtosis
    assert abs(float(squared.var()) - expected) < 4 * standard_error


def test_trained_twins_of_a_gaussian_mean_stand_where_the_bootstrap_means_are() -> None:
    n, data = 50, 2 * torch.randn(50, 3, generator=seeded(0)) + 1
    twins, bootstrap = Twins(Mean(3)), Bootstrap(n)
    optimizer = torch.optim.SGD(twins.parameters(), lr=0.25)
    for _ in range(200):
        # The noise is left out: it would add its own variance, as it does in the paper's algorithm.
        loss = sum((data[bootstrap.indices(r)] - twins[r].w).square().sum(1).mean() for r in range(2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()
    means = torch.stack([data[bootstrap.indices(r)].mean(0) for r in range(2)])
    torch.testing.assert_close(torch.stack([t.w.detach() for t in twins]), means)
    torch.testing.assert_close(twins.sigma["(model)"], ((means[0] - means[1]).square().sum() / 6).sqrt())


def test_sigma_of_linear_regression_is_the_sandwich_variance() -> None:
    n, features, seeds = 400, 3, 300
    x = torch.randn(n, features, generator=seeded(1), dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5])
    noise = torch.randn(n, generator=seeded(2), dtype=torch.float64) * (0.5 + x[:, 0].abs())  # heteroscedastic
    y = x @ torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64) + noise
    w = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    scores = x * (y - x @ w)[:, None]
    bread = torch.linalg.inv(x.T @ x)
    sandwich = (bread @ (scores.T @ scores) @ bread).diagonal()
    squared = []
    for seed in range(seeds):
        twins = Twins(Mean(features, torch.float64), groups=Blocks((1,)))
        for twin, c in zip(twins, Bootstrap(n, seed=seed).counts.double(), strict=True):
            with torch.no_grad():
                twin.w.copy_(torch.linalg.solve(x.T @ (c[:, None] * x), x.T @ (c * y)))
        twins.update()
        squared.append(twins.sigma["w"].square())
    for estimate, exact in zip(torch.stack(squared).T, sandwich, strict=True):
        # Four standard errors, and the O(1 / n) by which a bootstrap at finite n differs from its linearisation.
        error = 4 * estimate.std() / math.sqrt(seeds) + exact * 2 * features / n
        assert abs(estimate.mean() - exact) < error


def test_two_twins_give_the_papers_formula() -> None:
    twins = Twins(mlp())
    with torch.no_grad():
        for i, p in enumerate(twins.parameters()):
            p.normal_(generator=seeded(i))
    twins.update()
    for name, layer in [("0", 0), ("2", 2)]:
        w1, w2 = (torch.cat([p.detach().flatten() for p in twin[layer].parameters()]).double() for twin in twins)
        expected = ((w1 - w2).square().sum() / (2 * len(w1))).sqrt()
        assert float(twins.sigma[name]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("replicas", [2, 3, 4, 7])
def test_b_twins_give_the_sample_variance(replicas: int) -> None:
    twins = Twins(Mean(50), replicas)
    values = 100 + torch.randn(replicas, 50, generator=seeded(0))
    place(twins, *values)
    twins.update()
    expected = values.double().var(0).mean().sqrt()
    assert float(twins.sigma["(model)"]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("replicas", [2, 3])
def test_equal_data_keep_sigma_exactly_zero(replicas: int) -> None:
    twins = Twins(mlp(), replicas)
    optimizer = torch.optim.Adam(twins.parameters())
    x, y = classes().tensors
    train(twins, [((x, y),) * replicas] * 20, optimizer)
    twins.reset()
    twins.update()
    assert all(float(s) == 0.0 for s in twins.sigma.values())


def test_one_step_by_hand_equals_one_step_of_the_library() -> None:
    lr, torch_seed = 0.1, 11
    x1, y1 = classes(seed=1).tensors
    x2, y2 = classes(seed=5).tensors
    twins = Twins(nn.Linear(4, 3))
    place_both = [p.detach().clone() for p in twins[0].parameters()]
    optimizer = torch.optim.SGD(twins.parameters(), lr)
    train(twins, [((x1, y1), (x2, y2))], optimizer)  # the first step makes sigma positive

    # The second step, by hand. w[i] is the weight and bias of twin i.
    w = [[p.detach().clone() for p in twin.parameters()] for twin in twins]
    sigma = twins.sigma["(model)"]
    assert sigma > 0
    draws = seeded(torch_seed)
    noisy = [[(p + sigma * torch.empty_like(p).normal_(generator=draws)).requires_grad_() for p in wi] for wi in w]
    for (weight, bias), x, y in zip(noisy, (x1, x2), (y1, y2), strict=True):
        F.cross_entropy(x @ weight.T + bias, y).backward()
    stepped = [[p - lr * q.grad for p, q in zip(wi, ni, strict=True)] for wi, ni in zip(w, noisy, strict=True)]
    apart = sum((a - b).square().sum() for a, b in zip(*stepped, strict=True))
    expected_sigma = (apart / (2 * 15)).sqrt()

    with twins.sampled(generator=seeded(torch_seed)):
        sum(F.cross_entropy(twin(x), y) for twin, x, y in zip(twins, (x1, x2), (y1, y2), strict=True)).backward()
    optimizer.step()
    twins.update()
    for twin, wi in zip(twins, stepped, strict=True):
        torch.testing.assert_close([p.detach() for p in twin.parameters()], wi)
    torch.testing.assert_close(twins.sigma["(model)"], expected_sigma)
    assert not torch.equal(place_both[0], w[0][0])


def test_noise_has_the_scale_of_its_group_and_is_independent_between_twins() -> None:
    model = nn.Sequential(nn.Linear(200, 100, bias=False), nn.Linear(100, 200, bias=False))
    twins = Twins(model)
    twins.partition.sigma.copy_(torch.tensor([0.5, 2.0]))
    before = [[p.detach().clone() for p in twin.parameters()] for twin in twins]
    with twins.sampled(scale=3.0):
        noise = torch.stack(
            [
                torch.stack([(p.detach() - q).flatten() for p, q in zip(twin.parameters(), w, strict=True)])
                for twin, w in zip(twins, before, strict=True)
            ]
        )
    for layer, sigma in enumerate([1.5, 6.0]):
        for twin in range(2):
            within_four_standard_errors(noise[twin, layer], 0.0)
            within_four_standard_errors(noise[twin, layer].square(), sigma**2)
        within_four_standard_errors(noise[0, layer] * noise[1, layer], 0.0)


# --- resets


@pytest.mark.parametrize("mode", ["sample", "centered"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_reset_keeps_the_expected_distance(mode: Any, replicas: int) -> None:
    twins = Twins(Mean(40), replicas)
    start = torch.randn(replicas, 40, generator=seeded(3)) * 2 + 5
    squared = []
    for _ in range(400):
        place(twins, *start)
        twins.update()
        before = float(twins.sigma["(model)"]) ** 2
        twins.reset(mode)
        twins.update()
        squared.append(float(twins.sigma["(model)"]) ** 2)
    within_four_standard_errors(torch.tensor(squared), before)


def test_sample_reset_draws_each_twin_around_the_mean_independently() -> None:
    twins = Twins(Mean(20_000))
    place(twins, torch.full((20_000,), 1.0), torch.full((20_000,), 3.0))
    twins.update()  # sigma^2 = 4 / 2
    twins.reset()
    first, second = (twin.w.detach() - 2.0 for twin in twins)
    for deviation in (first, second):
        within_four_standard_errors(deviation, 0.0)
        within_four_standard_errors(deviation.square(), 2.0)
    within_four_standard_errors(first * second, 0.0)


@pytest.mark.parametrize("replicas", [2, 3])
def test_centered_reset_leaves_the_mean_to_rounding(replicas: int) -> None:
    twins = Twins(mlp(), replicas)
    with torch.no_grad():
        for i, p in enumerate(twins.parameters()):
            p.normal_(generator=seeded(i))
    twins.update()
    before = twins.estimate().module.state_dict()
    twins.reset("centered")
    after = twins.estimate().module.state_dict()
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-6)
    assert not torch.equal(twins[0][0].weight, twins[1][0].weight)


def test_mean_reset_puts_all_at_the_mean_and_leaves_sigma_until_the_next_update() -> None:
    twins = Twins(Mean(4))
    place(twins, torch.zeros(4), torch.ones(4))
    twins.update()
    twins.reset("mean")
    for twin in twins:
        assert torch.equal(twin.w, torch.full((4,), 0.5))
    assert float(twins.sigma["(model)"]) == pytest.approx(math.sqrt(0.5))
    twins.update()
    assert float(twins.sigma["(model)"]) == 0.0


def test_unknown_reset_mode_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match='unknown reset mode \'average\': use "sample", "mean" or "centered"'):
        Twins(mlp()).reset("average")  # type: ignore[arg-type]


# --- the copies


def test_the_copies_share_one_start_and_the_model_is_left_alone() -> None:
    model = mlp()
    before = snapshot(model)
    twins = Twins(model, replicas=3)
    assert len(twins) == 3
    assert len(list(twins)) == 3
    for twin in twins:
        assert_same_bits(twin.state_dict(), before)
    train(twins, [(classes().tensors,) * 3] * 3, torch.optim.SGD(twins.parameters(), 0.1))
    assert_same_bits(model.state_dict(), before)


def test_frozen_parameters_are_shared_and_left_alone() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    frozen = snapshot(model[0])
    twins = Twins(model)
    assert twins[0][0].weight is twins[1][0].weight
    assert twins[0][0].weight.data_ptr() == model[0].weight.data_ptr()
    assert twins[0][2].weight is not twins[1][2].weight
    assert sum(p.numel() for p in twins.parameters()) == 40 + 2 * 27
    train(twins, pairs(), torch.optim.Adam([p for p in twins.parameters() if p.requires_grad]))
    with twins.sampled():
        assert_same_bits(twins[0][0].state_dict(), frozen)
    assert list(twins.sigma) == ["2"]
    estimate = twins.estimate()
    assert estimate.module[0].weight.data_ptr() == model[0].weight.data_ptr()
    estimate.half()  # casting or moving one of them leaves the others as they are
    twins.double()
    assert model[0].weight.dtype == torch.float32
    assert twins[0][0].weight.dtype == twins[1][0].weight.dtype == torch.float64
    assert estimate.module[0].weight.dtype == torch.float16


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens))

    twins = Twins(Tied())
    for twin in twins:
        assert twin.head.weight is twin.embed.weight
    tokens = torch.arange(7)
    train(twins, [((tokens, tokens), (tokens[:4], tokens[:4]))] * 3, torch.optim.SGD(twins.parameters(), 0.1))
    estimate = twins.estimate()
    assert estimate.module.head.weight is estimate.module.embed.weight
    assert len(list(twins.parameters())) == 2


def test_calling_the_twins_runs_each_copy_on_its_own_input() -> None:
    class Adder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, a: Tensor, b: Tensor | float = 0.0) -> Tensor:
            return self.w * a + b

    twins = Twins(Adder())
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert [y.item() for y in twins(one, two)] == [1, 2]
    assert [y.item() for y in twins((one, two), [two, two])] == [3, 4]
    assert [y.item() for y in twins({"a": one, "b": two}, {"a": two})] == [3, 2]
    with pytest.raises(ValueError, match="2 twins take 2 inputs, one each, but got 1"):
        twins(one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_dtype(dtype: torch.dtype) -> None:
    twins = Twins(Mean(1000, dtype))
    place(twins, torch.full((1000,), 1.0), torch.full((1000,), 1.5))
    twins.update()
    sigma = twins.sigma["(model)"]
    assert sigma.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(sigma) == pytest.approx(math.sqrt(0.125), rel=1e-6)
    before = snapshot(twins)
    with twins.sampled():
        assert twins[0].w.dtype == dtype
        within_four_standard_errors((twins[0].w.detach().double() - 1).square(), 0.125)
    assert_same_bits(twins.state_dict()["copies.0.w"], before["copies.0.w"])
    twins.reset("centered")
    assert twins[1].w.dtype == dtype
    assert twins.estimate().module.w.dtype == dtype


def test_dtypes_may_differ_between_parameters() -> None:
    model = mlp()
    model[0].double()
    model[2].bfloat16()
    twins = Twins(model)
    with torch.no_grad():
        for p, q in zip(twins[0].parameters(), twins[1].parameters(), strict=True):
            p.fill_(1.0)
            q.fill_(1.25)
    twins.update()
    for sigma in twins.sigma.values():
        assert float(sigma) == pytest.approx(0.25 / math.sqrt(2))
    before = [p.detach().clone() for p in twins.parameters()]
    with twins.sampled():
        pass
    assert_same_bits([p.detach() for p in twins.parameters()], before)
    twins.reset()
    assert [p.dtype for p in twins[0].parameters()] == [torch.float64] * 2 + [torch.bfloat16] * 2


def test_half_does_not_make_sigma_coarse_and_to_moves_it() -> None:
    twins = Twins(mlp())
    twins.partition.sigma.fill_(0.1)
    twins.half()
    assert twins[0][0].weight.dtype == torch.float16
    assert twins.sigma["0"].dtype == torch.float32
    assert torch.equal(twins.sigma["0"], torch.tensor(0.1))
    assert twins.to("meta").partition.sigma.device.type == "meta"


@pytest.mark.parametrize("groups", ["layer", "tensor", "unit", lambda name, p: "everything"])
def test_all_groupings_train(groups: Any) -> None:
    twins = Twins(mlp(), groups=groups)
    train(twins, pairs(), torch.optim.Adam(twins.parameters(), 1e-2))
    twins.reset()
    assert all((s > 0).all() for s in twins.sigma.values())


def test_blocks_train_and_show_their_grid() -> None:
    twins = Twins(nn.Linear(6, 4, bias=False), groups=Blocks((2, 3)))
    train(
        twins,
        [((torch.eye(6), torch.arange(6) % 4), (torch.eye(6), torch.arange(6) % 3))],
        torch.optim.Adam(twins.parameters()),
    )
    assert twins.sigma["weight"].shape == (2, 2)


# --- state


def test_state_dict_carries_sigma_and_the_noise_to_come() -> None:
    twins = Twins(mlp(), seed=4)
    train(twins, pairs(), torch.optim.Adam(twins.parameters(), 1e-2))
    file = io.BytesIO()
    torch.save(twins.state_dict(), file)
    file.seek(0)
    again = Twins(mlp(seed=9))
    again.load_state_dict(torch.load(file, weights_only=True))
    assert_same_bits(again.sigma, twins.sigma)
    with twins.sampled(), again.sampled():
        assert_same_bits([p.detach() for p in again.parameters()], [p.detach() for p in twins.parameters()])
    twins.reset()
    again.reset()
    assert_same_bits(snapshot(again), snapshot(twins))


@pytest.mark.parametrize("other", [{"replicas": 3}, {"groups": "tensor"}, {"groups": "unit"}])
def test_a_checkpoint_of_other_twins_is_refused_in_a_sentence(other: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"the checkpoint does not fit: (replicas|'0' of the groups) was .* and is .* here"
    ):
        Twins(mlp()).load_state_dict(Twins(mlp(), **other).state_dict())


def test_a_checkpoint_of_another_model_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"'0.weight' of the parameters was \[9, 4\] and is \[8, 4\] here"):
        Twins(mlp()).load_state_dict(Twins(mlp(hidden=9)).state_dict())


def test_what_is_no_state_of_twins_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"this is no state of twins: .* load them into it before Twins\(model\)"):
        Twins(mlp()).load_state_dict(mlp().state_dict())
    damaged = {**Twins(mlp()).state_dict(), "_extra_state": torch.zeros(3, dtype=torch.uint8)}
    with pytest.raises(ValueError, match="the checkpoint is damaged"):
        Twins(mlp()).load_state_dict(damaged)


def test_a_reset_draws_from_the_generator_that_is_given() -> None:
    first, second = Twins(mlp()), Twins(mlp(), seed=1)
    for twins in (first, second):
        twins.partition.sigma.fill_(0.5)
        twins.reset(generator=seeded(8))
    assert_same_bits([p.detach() for p in second.parameters()], [p.detach() for p in first.parameters()])


def test_large_copies_are_drawn_side_by_side_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinboot._core.noise._LARGE", 2**18)
    threads = set()
    fill = noise_module._fill_copy
    monkeypatch.setattr(noise_module, "_fill_copy", lambda *a: (threads.add(threading.get_ident()), fill(*a)))

    def draw() -> Tensor:
        twins = Twins(Mean(2**17), seed=3)
        twins.partition.sigma.fill_(2.0)
        with twins.sampled():
            return torch.stack([twin.w.detach() for twin in twins])

    noise = draw()
    assert_same_bits(draw(), noise)
    assert threading.get_ident() not in threads
    assert threads
    for twin in noise:
        within_four_standard_errors(twin, 0.0)
        within_four_standard_errors(twin.square(), 4.0)
    within_four_standard_errors(noise[0] * noise[1], 0.0)


def test_deepcopy_gives_independent_twins_with_the_same_future() -> None:
    twins = Twins(mlp())
    train(twins, pairs(), torch.optim.Adam(twins.parameters(), 1e-2))
    again = copy.deepcopy(twins)
    before = snapshot(twins)
    train(again, pairs(), torch.optim.Adam(again.parameters(), 1e-2))
    assert_same_bits(snapshot(twins), before)
    train(twins, pairs(), torch.optim.Adam(twins.parameters(), 1e-2))
    assert_same_bits(snapshot(again), snapshot(twins))


def test_same_seed_same_run_and_no_global_generator_is_moved() -> None:
    model, data = mlp(), classes()

    def run(seed: int) -> dict[str, Tensor]:
        twins = Twins(model, seed=seed)
        train(twins, pairs(), torch.optim.Adam(twins.parameters(), 1e-2))
        twins.reset()
        twins.estimate().predict(data.tensors[0], samples=4, task="classification")
        return snapshot(twins)

    state = torch.get_rng_state()
    first = run(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert_same_bits(run(1), first)
    assert not torch.equal(run(2)["copies.0.0.weight"], first["copies.0.0.weight"])


# --- bad input


def test_weights_that_are_not_finite_stop_the_run_and_name_the_step_and_the_group() -> None:
    twins = Twins(mlp())
    optimizer = torch.optim.SGD(twins.parameters(), 0.1)
    x, y = classes().tensors
    train(twins, [((x, y), (x, y))] * 2, optimizer)
    with pytest.raises(
        FloatingPointError, match="weights of group '0' are not finite after update 3: the loss was NaN"
    ):
        train(twins, [((x * float("nan"), y), (x, y))], optimizer)


@pytest.mark.parametrize(
    ("model", "options", "error", "sentence"),
    [
        (lambda x: x, {}, TypeError, "model must be a torch.nn.Module, not a function"),
        (nn.Linear(2, 2), {"replicas": 1}, ValueError, "replicas must be a whole number of at least 2, not 1"),
        (nn.Linear(2, 2), {"groups": "neuron"}, ValueError, "unknown groups 'neuron'"),
        (nn.ReLU(), {}, ValueError, "the model has no trainable parameters"),
        (nn.Linear(2, 2), {"seed": "x"}, TypeError, "seed must be an integer"),
    ],
)
def test_bad_input_gets_a_sentence(model: Any, options: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        Twins(model, **options)


@pytest.mark.parametrize("options", [{}, {"stacked": True}, {"groups": "unit", "replicas": 3}])
def test_an_update_does_not_wait_for_a_gpu(options: dict[str, Any]) -> None:
    """Nothing can be read from the meta device, so whatever would wait for a device fails there."""
    twins = Twins(mlp(), **options).to("meta")
    for _ in range(99):
        twins.update()
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        twins.update()  # the hundredth looks


@pytest.mark.parametrize("stacked", [False, True])
def test_weights_that_are_not_finite_are_noticed_by_a_reset_and_an_estimate(
    stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins_module, "finite_check_is_due", lambda device, step: step % 100 == 0)  # as on a GPU
    twins = Twins(mlp(), stacked=stacked)
    with torch.no_grad():
        next(twins.parameters()).fill_(math.nan)
    for _ in range(99):
        twins.update()
    for call in (twins.reset, twins.estimate, twins.update):
        with pytest.raises(FloatingPointError, match=r"weights of group '0' are not finite after update \d+"):
            call()


@pytest.mark.parametrize("copies", [2, 3, 5])
@pytest.mark.parametrize("groups", ["layer", "tensor", "unit"])
def test_it_is_the_sample_variance_of_the_copies_at_once_and_one_by_one(copies: int, groups: str) -> None:
    model = mlp()
    partition = Partition.of(model, groups)
    generator = seeded(4)
    weights = [[torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(copies)]
    found = variance(partition, copies, [(range(len(weights[0])), weights)])
    spreads = [torch.stack(same).var(0) for same in zip(*weights, strict=True)]
    expected, sizes = torch.zeros_like(found), partition.sizes
    for owners, spread in zip(partition.expand(spreads, of=torch.arange(len(found))), spreads, strict=True):
        expected.index_add_(0, owners.expand_as(spread).flatten(), spread.flatten())
    torch.testing.assert_close(found, expected / sizes)
    parts = (([i], [[copy[i]] for copy in weights]) for i in range(len(weights[0])))
    assert_same_bits(variance(partition, copies, parts), found)


def test_copies_are_apart_where_any_of_them_differs() -> None:
    copies = [torch.zeros(4, 2, 3) for _ in range(3)]
    copies[1][1, 0, 2] = 1.0
    copies[2][3, 1, 1] = -1e-30
    assert rows_that_differ(copies).flatten().tolist() == [False, True, False, True]
    for whole in ([c.bfloat16() for c in copies], [c.flatten() for c in copies]):
        assert rows_that_differ(whole).tolist() is True
        assert rows_that_differ(whole[:1] * 2).tolist() is False


def test_a_reset_keeps_sigma_after_steps_that_make_entries_agree_by_chance() -> None:
    """Steps of one size, as of sign descent, leave half of the entries of two twins the same after the first."""
    twins = Twins(nn.Linear(100, 400, bias=False))
    with torch.no_grad():
        for number, twin in enumerate(twins):
            twin.weight.add_(0.01 * torch.randn(twin.weight.shape, generator=seeded(number)).sign())
    twins.update()
    before = twins.partition.sigma.clone()
    twins.reset()
    twins.update()
    width = 4 / math.sqrt(2 * 40_000)  # four standard errors of sigma from so many entries
    torch.testing.assert_close(twins.partition.sigma, before, rtol=width, atol=0)


def with_gradients(replicas: int = 2, **options: Any) -> Twins:
    twins = Twins(mlp(), replicas, **options)
    for number, p in enumerate(twins.parameters()):
        p.grad = torch.randn(p.shape, generator=seeded(number))
    return twins


def gradients(twins: Twins) -> list[Tensor]:
    """Of each weight, [twins, ...]."""
    if twins.stacked:
        return [p.grad.clone() for p in twins.parameters() if p.grad is not None]
    return [torch.stack([p.grad for p in own]) for own in zip(*(t.parameters() for t in twins), strict=True)]  # type: ignore[misc]


@pytest.mark.parametrize("share", [0.25, 0.7, 0.95])
@pytest.mark.parametrize("replicas", [2, 3, 5])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_mean_stays_and_differences_shrink(share: float, replicas: int, stacked: bool) -> None:
    twins = with_gradients(replicas, stacked=stacked)
    before = gradients(twins)
    pool_gradients(twins, share)
    for then, now in zip(before, gradients(twins), strict=True):
        torch.testing.assert_close(now.mean(0), then.mean(0))
        torch.testing.assert_close(now - now.mean(0), (1 - share) * (then - then.mean(0)))


def test_a_share_of_nothing_changes_no_bit() -> None:
    twins = with_gradients()
    before = gradients(twins)
    pool_gradients(twins, 0)
    assert_same_bits(gradients(twins), before)


def test_frozen_and_unused_weights_have_no_gradient_and_what_one_twin_did_not_use_counts_as_zero() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    twins = Twins(model)
    pool_gradients(twins, 0.5)
    assert all(p.grad is None for p in twins.parameters())
    pool_gradients(stacked := Twins(model, stacked=True), 0.5)
    assert all(p.grad is None for p in stacked.parameters())
    twins[0][2].bias.sum().backward()
    pool_gradients(twins, 0.5)
    assert twins[0][2].bias.grad.tolist() == [0.75] * 3
    assert twins[1][2].bias.grad.tolist() == [0.25] * 3
    assert all(p.grad is None for twin in twins for p in (*twin[0].parameters(), twin[2].weight))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_twins_of_quadratic_losses_end_as_far_apart_and_their_mean_moves_as_ever(share: float) -> None:
    """loss_b = h (w - m_b)^2 / 2: after t steps of size r the distance is (m_1 - m_2) (1 - (1 - r h (1 - share))^t),
    and the mean that of one model whose loss is the mean of both."""
    curvature, targets, rate = torch.tensor([0.5, 2.0]), torch.tensor([[1.0, -3.0], [2.0, 5.0]]), 0.1
    line = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(line.weight)
    twins = Twins(line)
    optimizer = torch.optim.SGD(twins.parameters(), rate)
    for step in range(1, 501):
        optimizer.zero_grad()
        for twin, target in zip(twins, targets, strict=True):
            (curvature * (twin.weight[0] - target).square() / 2).sum().backward()
        pool_gradients(twins, share)
        optimizer.step()
        if step in (1, 10, 500):
            first, second = (twin.weight.detach()[0] for twin in twins)
            left = (1 - rate * curvature * (1 - share)) ** step
            torch.testing.assert_close(first - second, (targets[0] - targets[1]) * (1 - left))
            torch.testing.assert_close((first + second) / 2, targets.mean(0) * (1 - (1 - rate * curvature) ** step))
    # Whatever the share, the distance is nearly that of the samples' own solutions.
    torch.testing.assert_close(first - second, targets[0] - targets[1], rtol=0.1, atol=0)


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_with_adam_the_mean_travels_further_where_gradients_are_mostly_noise(share: float) -> None:
    """Gradients m + n e_b, e_b normal and independent, n >> m: Adam divides by their size. That of pooled ones is
    sqrt((1 + (1 - share)^2) / 2) n instead of n, so that both the path of the mean along m and that of the distance,
    which is 1 - share times as long by itself, are so much longer."""
    weights, steps, generator = 4000, 400, seeded(0)
    twins: dict[float, Twins] = {}
    for pooled in (0.0, share):
        line = nn.Linear(weights, 1, bias=False)
        nn.init.zeros_(line.weight)
        twins[pooled] = Twins(line)
    optimizers = [torch.optim.Adam(pair.parameters(), 0.01, betas=(0.0, 0.999)) for pair in twins.values()]
    for _ in range(steps):
        for twin in range(2):
            gradient = 0.1 + torch.randn(1, weights, generator=generator)
            for pair in twins.values():
                pair[twin].weight.grad = gradient.clone()
        for (pooled, pair), optimizer in zip(twins.items(), optimizers, strict=True):
            pool_gradients(pair, pooled)
            optimizer.step()
            pair.update()
    way = {pooled: sum(twin.weight.detach().mean() for twin in pair) for pooled, pair in twins.items()}
    apart = {pooled: pair.partition.sigma.item() for pooled, pair in twins.items()}
    size = ((1 + (1 - share) ** 2) / 2) ** 0.5
    assert way[share] / way[0.0] == pytest.approx(1 / size, rel=0.02)
    assert apart[share] / apart[0.0] == pytest.approx((1 - share) / size, rel=0.02)


@pytest.mark.parametrize(
    ("share", "said"),
    [(-0.1, "a finite number of at least 0"), (float("nan"), "a finite number"), (1.0, "below 1"), (1.5, "below 1")],
)
def test_shares_that_are_none_are_refused(share: float, said: str) -> None:
    with pytest.raises(ValueError, match=f"^the share of gradients that is pooled must be {said}"):
        pool_gradients(with_gradients(), share)


def test_what_cannot_be_pooled_is_refused_in_a_sentence() -> None:
    with pytest.raises(TypeError, match="in different processes: use Twins to pool gradients"):
        Remote.__new__(Remote).gradients()
    with pytest.raises(TypeError, match="takes Twins, not Sequential: if that is around twins, give those"):
        pool_gradients(nn.Sequential(with_gradients()), 0.5)  # type: ignore[arg-type]
    twins = Twins(nn.Embedding(4, 2, sparse=True))
    twins[0](torch.tensor([1])).sum().backward()
    pool_gradients(twins, 0.0)  # nothing is pooled
    with pytest.raises(TypeError, match="sparse gradients cannot be pooled: make the embedding with sparse=False"):
        pool_gradients(twins, 0.5)
