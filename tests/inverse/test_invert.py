import math
from functools import partial
from typing import Any

import pytest
import torch
from loops import assert_same_bits, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinboot import Blocks, Bootstrap, Dense, Inversion, Protocol, invert, resets
from twinboot.estimate.student import half_width
from twinboot.inverse.posterior import clearly_lower

FAST = partial(torch.optim.Adam, lr=0.05)


def linear(rows: int = 60, unknowns: int = 12, noise: float = 0.1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """An operator, the truth, and noisy measurements of it."""
    generator = seeded(seed)
    operator = torch.randn(rows, unknowns, generator=generator)
    truth = torch.randn(unknowns, generator=generator)
    return operator, truth, operator @ truth + noise * torch.randn(rows, generator=generator)


def blurred(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Few smooth waves seen through wide kernels and much noise: run to the end, an optimizer fits the noise."""
    generator = seeded(seed)
    cells, rows, width, noise = 60, 1000, 3.0, 2.0
    centers = torch.rand(rows, 1, generator=generator) * (cells - 1)
    kernel = torch.exp(-((torch.arange(cells) - centers) ** 2) / (2 * width**2))
    kernel = kernel / kernel.norm(dim=1, keepdim=True)
    place = torch.linspace(0, math.pi, cells)
    phases = torch.rand(3, 1, generator=generator) * 2 * math.pi
    truth = torch.sin(torch.arange(1, 4)[:, None] * place + phases).mean(0)
    return kernel, truth, kernel @ truth + noise * torch.randn(rows, generator=generator)


def to_the_end(
    operator: Tensor, observed: Tensor, seed: int, steps: int = 300, decay: float = 0.98, **options: Any
) -> Inversion:
    return invert(
        lambda v: operator @ v,
        observed,
        torch.zeros(operator.shape[1]),
        steps=steps,
        optimizer=partial(torch.optim.Adam, lr=0.1),
        decay=decay,
        protocol=Protocol(reset=resets.at(20)),
        stop=None,
        check=steps,
        seed=seed,
        **options,
    )


def test_a_linear_gaussian_problem_has_its_exact_mean_and_sigma() -> None:
    """The twins' mean is the mean of two draws from the bootstrap distribution, whose covariance for least squares is
    the sandwich (A'A)^-1 A' diag(e^2) A (A'A)^-1, and sigma^2 estimates its diagonal."""
    ratio, distance = [], []
    for seed in range(20):
        operator, _, observed = linear(600, 24, noise=1.0, seed=seed)
        found = to_the_end(operator, observed, seed)
        best = torch.linalg.lstsq(operator, observed).solution
        bread = torch.linalg.inv(operator.T @ operator)
        residual = observed - operator @ best
        exact = (bread @ (operator.T * residual**2) @ operator @ bread).diag().mean()
        ratio.append(found.sigma.square().mean() / exact)
        distance.append((found.field - best).square().mean() / (exact / 2))
    for values in (torch.stack(ratio), torch.stack(distance)):
        assert abs(values.mean() - 1) < 4 * values.std() / math.sqrt(len(values))


def test_twins_that_divide_the_measurements_have_the_exact_sigma_of_their_mean() -> None:
    """Least squares of two halves are independent; the mean of both is that of all data but for terms of second order,
    and its covariance is noise^2 (A'A)^-1."""
    ratio = []
    for seed in range(10):
        operator, _, observed = linear(4000, 24, noise=1.0, seed=seed)
        halves = Bootstrap(4000, seed=seed, kind="split", cover=True)
        found = to_the_end(operator, observed, seed, steps=600, decay=0.99, bootstrap=halves)
        exact = torch.linalg.inv(operator.T @ operator).diag().mean()
        ratio.append(found.sigma.square().mean() / exact)
        best = torch.linalg.lstsq(operator, observed).solution
        assert (found.field - best).square().mean() < 0.1 * exact
    values = torch.stack(ratio)
    assert abs(values.mean() - 1) < 4 * values.std() / math.sqrt(len(values))


def test_early_stopping_beats_running_to_the_end() -> None:
    for seed in range(5):
        kernel, truth, observed = blurred(seed)
        transposed = kernel.T.contiguous()
        run = partial(
            invert,
            lambda v, k=transposed: v @ k,
            observed,
            torch.zeros(60),
            steps=400,
            optimizer=FAST,
            decay=1.0,
            seed=seed,
        )
        stopped, ended = run(), run(stop=None)
        assert stopped.best_step < 400
        assert ended.best_step == 400
        error, last_error = ((found.field - truth).square().mean() for found in (stopped, ended))
        assert last_error > 3 * error


def test_out_of_bag_measurements_affect_only_the_choice_of_the_step() -> None:
    operator, _, observed = linear()
    unseen = Bootstrap(60, seed=4).unseen
    assert len(unseen) > 3
    other = observed.clone()
    other[unseen] = 1e6
    run = partial(invert, lambda v: operator @ v, initial=torch.zeros(12), steps=60, seed=4, stop=None)
    first, second = run(observed=observed), run(observed=other)
    assert_same_bits(first.field, second.field)
    assert_same_bits(first.sigma, second.sigma)
    assert first.history["unseen"] != second.history["unseen"]
    assert first.history["train"] == second.history["train"]


def test_a_state_replaces_another_only_if_it_is_clearly_better() -> None:
    """The standard error of a difference of n values with standard deviation s is s / sqrt(n)."""
    old = torch.ones(16)
    change = torch.tensor([0.1, -0.1] * 8)  # standard deviation 0.1033, standard error 0.0258
    assert not clearly_lower(old + change - 0.025, old)
    assert clearly_lower(old + change - 0.027, old)
    assert not clearly_lower(old, old)
    assert not clearly_lower(old + 1, old)


def test_the_result_is_the_state_of_best_step() -> None:
    kernel, _, observed = blurred(1)
    run = partial(invert, lambda v: kernel @ v, observed, torch.zeros(60), optimizer=FAST, check=5, decay=1.0)
    found = run(steps=200)
    steps, unseen = found.history["step"], found.history["unseen"]
    assert steps == list(range(5, 201, 5))
    assert unseen[steps.index(found.best_step)] < unseen[0]
    again = run(steps=found.best_step, stop=None)
    assert_same_bits(found.field, again.field)
    assert_same_bits(found.sigma, again.sigma)


def test_a_run_that_patience_ends_has_the_result_of_the_whole_run() -> None:
    kernel, _, observed = blurred(1)
    told: list[int] = []
    run = partial(invert, lambda v: kernel @ v, observed, torch.zeros(60), optimizer=FAST, decay=1.0, steps=300)
    whole, ended = run(), run(patience=100, progress=told.append)
    last = ended.history["step"][-1]
    assert last == ended.best_step + 100 < 300
    assert told == list(range(1, last + 1))
    assert ended.best_step == whole.best_step
    assert_same_bits(ended.field, whole.field)
    assert_same_bits(ended.sigma, whole.sigma)
    assert ended.history["unseen"] == whole.history["unseen"][: len(ended.history["unseen"])]


def test_patience_counts_from_the_last_better_state_and_ends_at_a_check() -> None:
    operator, _, observed = linear(noise=1.0)
    run = partial(invert, lambda v: operator @ v, observed, torch.zeros(12), optimizer=FAST, decay=1.0, steps=300)
    short = run(patience=15)
    assert short.history["step"][-1] == short.best_step + 20
    assert short.best_step > 20  # it continued while the state became better
    patient = run(patience=300)
    assert patient.history["step"][-1] == 300


def test_by_default_a_run_ends_after_as_many_steps_again_as_the_best_state_took_and_at_least_300() -> None:
    kernel, _, observed = blurred(1)
    found = invert(lambda v: kernel @ v, observed, torch.zeros(60), optimizer=FAST, decay=1.0, steps=3000)
    assert found.history["step"][-1] == found.best_step + max(300, found.best_step) < 3000
    operator, _, observed = linear(noise=1.0)
    found = invert(lambda v: operator @ v, observed, torch.zeros(12), steps=400, stop=None)
    assert found.best_step == 400


def test_a_loss_that_becomes_nan_keeps_the_best_state_and_warns() -> None:
    operator, _, observed = linear()
    run = partial(invert, observed=observed, initial=torch.zeros(12), optimizer=FAST, check=5)
    whole = run(lambda v: operator @ v, steps=40)

    class Breaks:
        calls = 0

        def __call__(self, v: Tensor) -> Tensor:
            self.calls += 1
            return operator @ v * (torch.nan if self.calls > 36 else 1.0)

    with pytest.warns(RuntimeWarning, match=r"^the loss is not finite at step \d+: .* The result is the best state be"):
        found = run(Breaks(), steps=300)
    assert found.history["unseen"] == whole.history["unseen"][: len(found.history["unseen"])]
    assert found.best_step in found.history["step"]
    assert found.field.isfinite().all()
    assert found.sigma.isfinite().all()


def test_progress_prints_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    operator, _, observed = linear()
    invert(lambda v: operator @ v, observed, torch.zeros(12), steps=100, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("step 100 of 100: loss ")


def test_both_twins_go_through_the_operator_in_one_call() -> None:
    operator, _, observed = linear()
    calls = []

    def forward(v: Tensor) -> Tensor:
        calls.append(1)
        return operator @ v

    invert(forward, observed, torch.zeros(12), steps=50, check=50)
    assert len(calls) == 50 + 1 + 4  # one per step, one check, four to examine the operator


def test_an_operator_that_vmap_refuses_gives_the_same_result() -> None:
    operator, _, observed = linear()

    def stubborn(v: Tensor) -> Tensor:
        assert v.sum().item() is not None  # item() is refused under vmap
        return operator @ v

    first = invert(lambda v: operator @ v, observed, torch.zeros(12), steps=50)
    second = invert(stubborn, observed, torch.zeros(12), steps=50)
    torch.testing.assert_close(first.field, second.field)
    torch.testing.assert_close(first.sigma, second.sigma)


@pytest.mark.parametrize(("shape", "groups"), [((7,), 3), ((5, 7), 2 * 3), ((3, 4, 5), 1 * 2 * 2)])
def test_fields_of_one_to_three_dimensions_have_blocks_of_three(shape: tuple[int, ...], groups: int) -> None:
    operator, _, observed = linear(80, math.prod(shape))
    found = invert(lambda v: operator @ v.flatten(), observed, torch.zeros(shape), steps=20)
    assert found.field.shape == found.sigma.shape == shape
    assert len(found.sigma.unique()) == groups


@pytest.mark.parametrize("mode", ["sample", "mean", "centered"])
def test_the_same_seed_gives_the_same_result_and_another_one_another(mode: Any) -> None:
    operator, _, observed = linear()
    protocol = Protocol(reset=resets.every(20), mode=mode)
    run = partial(invert, lambda v: operator @ v, observed, torch.zeros(12), steps=60, protocol=protocol)
    assert_same_bits(run(seed=1).field, run(seed=1).field)
    assert not torch.equal(run(seed=1).field, run(seed=2).field)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        partial(torch.optim.LBFGS, lr=0.5, max_iter=5),
        partial(torch.optim.AdamW, lr=0.05),
    ],
)
def test_any_optimizer_finds_the_truth_of_a_good_problem(optimizer: Any) -> None:
    operator, truth, observed = linear(noise=0.01)
    found = invert(lambda v: operator @ v, observed, torch.zeros(12), steps=150, optimizer=optimizer, decay=0.99)
    torch.testing.assert_close(found.field, truth, atol=0.05, rtol=0)


def test_four_twins_with_a_sigma_per_cell_find_the_truth() -> None:
    operator, truth, observed = linear(noise=0.01)
    options: Any = {
        "replicas": 4,
        "protocol": Protocol(groups=Blocks((1,))),
        "steps": 300,
        "optimizer": FAST,
        "decay": 0.99,
    }
    found = invert(lambda v: operator @ v, observed, torch.zeros(12), **options)
    assert found.bootstrap.counts.shape == (4, 60)
    assert len(found.sigma.unique()) == 12
    torch.testing.assert_close(found.field, truth, atol=0.05, rtol=0)


@pytest.mark.parametrize("bootstrap", [Bootstrap(12), Bootstrap(60, clusters=torch.arange(12).repeat_interleave(5))])
def test_all_measurements_of_a_shot_are_seen_or_none(bootstrap: Bootstrap) -> None:
    """Measurements [shots, receivers], resampled by shots: a change in an unseen shot changes nothing, one in a seen
    shot does."""
    operator, _, observed = linear(60)
    observed = observed.view(12, 5)
    shots = bootstrap.counts.view(2, 12, -1)
    assert (shots == shots[..., :1]).all()
    seen = (shots[..., 0] > 0).any(0)
    run = partial(invert, partial(_shots, operator), initial=torch.zeros(12), steps=20, bootstrap=bootstrap, stop=None)
    before = run(observed=observed)
    for shot in range(12):
        changed = observed.clone()
        changed[shot] += 100
        assert torch.equal(run(observed=changed).field, before.field) != bool(seen[shot])


def _shots(operator: Tensor, v: Tensor) -> Tensor:
    return (operator @ v).view(12, 5)


def test_noise_resets_and_the_start_matter() -> None:
    """On a nonlinear operator, each change of them gives another field; a reset to the mean lowers sigma."""
    operator, _, observed = linear()
    start = torch.full((12,), 0.3)
    run = partial(
        invert, lambda v: torch.tanh(operator @ v), observed.tanh(), stop=None, check=1, steps=30, optimizer=FAST
    )
    due = resets.every(10)
    modes = [run(start, protocol=Protocol(reset=due, mode=mode)) for mode in ("mean", "sample", "centered")]
    others = [
        run(start, protocol=Protocol(reset=due, mode="mean", noise=0.0)),
        run(start, protocol=Protocol(reset=resets.never())),
        run(-start, protocol=Protocol(reset=due)),
    ]
    found = [result.field for result in (*modes, *others)]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    sigma = modes[0].history["sigma"]
    assert sigma[10] < sigma[9] / 2
    first = run(start, steps=1, protocol=Protocol(noise=0.0))
    assert (first.field - start).abs().max() <= 0.051  # one step of Adam from the user's own start


def test_history_has_the_losses_of_a_step_done_by_hand() -> None:
    operator, _, observed = linear()
    found = invert(
        lambda v: operator @ v, observed, torch.ones(12), steps=1, check=1, protocol=Protocol(noise=0.0), stop=None
    )
    counts = found.bootstrap.counts
    squared = (operator @ torch.ones(12) - observed).square()
    assert found.history["train"] == [pytest.approx((counts * squared).sum(1).mean().item() / 60, rel=1e-5)]
    after = (operator @ found.field - observed).square()[found.bootstrap.unseen].mean().item()
    assert found.history["unseen"] == [pytest.approx(after, rel=1e-5)]


def test_an_operator_with_parameters_checkpoints_or_writes_into_its_input_is_safe() -> None:
    operator, _, observed = linear()
    network = nn.Linear(12, 60)
    invert(network, observed, torch.zeros(12), steps=5)
    assert network.weight.grad is None
    with pytest.raises(ValueError, match="does not depend on the field"):
        invert(lambda v: network(v.detach()), observed, torch.zeros(12), steps=5)

    def checkpointed(v: Tensor) -> Tensor:
        return checkpoint(lambda u: operator @ u.tanh(), v, use_reentrant=False)  # type: ignore[no-any-return]

    plain = invert(lambda v: operator @ v.tanh(), observed, torch.zeros(12), steps=5)
    torch.testing.assert_close(invert(checkpointed, observed, torch.zeros(12), steps=5).field, plain.field)

    def writes(v: Tensor) -> Tensor:
        return operator @ v.clamp_(min=0)

    start = torch.full((12,), -0.3)
    invert(writes, observed, start, steps=1)
    assert (start == -0.3).all()


def test_progress_is_called_after_each_step() -> None:
    operator, _, observed = linear()
    told: list[int] = []
    invert(lambda v: operator @ v, observed, torch.zeros(12), steps=5, progress=told.append)
    assert told == [1, 2, 3, 4, 5]


def sometimes_nan(v: Tensor) -> Tensor:
    return torch.where(v.sum() > 0.05, torch.nan, 1.0) * (v + 1).repeat(5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"forward": lambda v: v[:2]},
            ValueError,
            r"forward\(initial\) gives shape \(2,\), .* observed has shape \(60,\)",
        ),
        ({"forward": lambda v: [v]}, ValueError, "gives a list"),
        ({"forward": lambda v: (v * torch.nan).repeat(5)}, FloatingPointError, "not finite for the initial field"),
        ({"forward": sometimes_nan}, FloatingPointError, "not finite at step"),
        ({"forward": lambda v: v.detach().repeat(5)}, ValueError, "does not depend on the field"),
        ({"forward": lambda v: torch.ones(60)}, ValueError, "does not depend on the field"),
        ({"observed": torch.zeros(0)}, ValueError, "observed is empty: there is nothing to invert"),
        ({"protocol": Protocol(pooled=0.5)}, ValueError, "invert has no setting 'pooled': leave it out"),
        ({"observed": torch.zeros(60)}, ValueError, "zero everywhere"),
        ({"observed": torch.full((60,), torch.inf)}, ValueError, "not finite: remove"),
        ({"observed": torch.ones(60, dtype=torch.long)}, TypeError, "floating-point"),
        ({"initial": torch.zeros(12, dtype=torch.long)}, TypeError, "floating-point"),
        ({"forward": lambda v: v.abs().sqrt().repeat(5)}, FloatingPointError, "no finite derivative"),
        ({"decay": 2.0}, ValueError, "decay"),
        ({"initial": [0.0] * 12}, TypeError, "initial must be a tensor"),
        ({"stop": "soon"}, ValueError, 'stop must be "unseen" or None'),
        ({"steps": 0}, ValueError, "at least 1"),
        ({"patience": 0}, ValueError, "patience must be at least 1, .*not 0 and 'unseen'"),
        ({"patience": 10, "stop": None}, ValueError, 'patience .* goes with stop="unseen", not 10 and None'),
        ({"bootstrap": Bootstrap(60, replicas=3)}, ValueError, "3 replicas, but there are 2 twins"),
        ({"bootstrap": Bootstrap(50)}, ValueError, "resamples 50 measurements"),
        ({"bootstrap": Bootstrap(60, kind="bayesian")}, ValueError, "use stop=None"),
        ({"protocol": Protocol(groups=Blocks((3, 3)))}, ValueError, "2 dimensions"),
        ({"mode": "mean"}, TypeError, r"^invert has no option 'mode': give protocol=Protocol\(mode='mean'\)\.$"),
        ({"pooled": 0.5}, TypeError, r"^invert has no option 'pooled'\.$"),
        ({"step": 5}, TypeError, r"^invert has no option 'step': did you mean 'steps'\?$"),
    ],
)
def test_bad_input_gets_one_sentence(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    operator, _, observed = linear()
    given: dict[str, Any] = {"forward": lambda v: operator @ v, "observed": observed, "initial": torch.zeros(12)}
    with pytest.raises(error, match=message) as caught:
        invert(**{**given, "steps": 100, **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("divisible", [True, False])
def test_field_and_measurements_may_have_different_dtypes(divisible: bool) -> None:
    matrix = torch.randn(60, 6, generator=seeded(0))
    operator = Dense(matrix) if divisible else lambda v: matrix @ v
    found = invert(operator, (matrix @ torch.ones(6)).double(), torch.zeros(6), steps=300)
    assert found.field.dtype == torch.float32
    assert (found.field - 1).abs().max() < 0.1


@pytest.mark.parametrize("size", [1e-30, 1e-21, 1e-3, 1.0, 1e3, 1e18])
def test_the_unit_of_the_measurements_does_not_matter(size: float) -> None:
    """Neither to Adam nor to a line search, which compares the loss with its slope."""
    operator, truth, observed = linear()
    search = partial(torch.optim.LBFGS, line_search_fn="strong_wolfe")
    for make, steps in ((FAST, 300), (search, 30)):
        found = invert(lambda v: (operator * size) @ v, observed * size, torch.zeros(12), steps=steps, optimizer=make)
        assert (found.field - truth).abs().max() < 0.1
        assert found.sigma.min() > 0


def test_sums_along_an_axis_can_be_inverted() -> None:
    """Their gradient is an expanded tensor."""
    all_seen, observed = Bootstrap(12, kind="bayesian"), torch.full((12,), 6.0)
    found = invert(lambda v: v.sum(0), observed, torch.zeros(3, 12), optimizer=FAST, stop=None, bootstrap=all_seen)
    torch.testing.assert_close(found.field.sum(0), observed, atol=0.1, rtol=0)


def test_an_operator_may_differentiate_by_itself() -> None:
    def force(v: Tensor) -> Tensor:
        x = v.clone() if v.requires_grad else v.clone().requires_grad_()
        [slope] = torch.autograd.grad((x**2).sum(), x, create_graph=True)
        return slope.repeat(6)

    with torch.no_grad():
        found = invert(force, torch.ones(24), torch.zeros(4), steps=300)
    assert (found.field - 0.5).abs().max() < 0.05
    assert found.predict(force, samples=0).mean.shape == (24,)


def test_an_optimizer_that_returns_nothing_and_one_that_is_no_function() -> None:
    class Silent(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

    operator, _, observed = linear()
    found = invert(lambda v: operator @ v, observed, torch.zeros(12), steps=20, optimizer=partial(Silent, lr=0.01))
    assert all(map(math.isfinite, found.history["train"]))
    with pytest.raises(TypeError, match="optimizer must be a function that makes one"):
        invert(lambda v: operator @ v, observed, torch.zeros(12), optimizer=torch.optim.Adam([torch.zeros(1)]))  # type: ignore[arg-type]


# --- the result


@pytest.mark.parametrize("replicas", [2, 3])
def test_intervals_have_the_degrees_of_freedom_of_their_block(replicas: int) -> None:
    operator, _, observed = linear()
    options: dict[str, Any] = {"steps": 20, "replicas": replicas, "protocol": Protocol(groups=Blocks((5,)))}
    found = invert(lambda v: operator @ v, observed, torch.zeros(12), **options)
    assert found.df is not None
    assert found.df.tolist() == [5 * (replicas - 1)] * 10 + [2 * (replicas - 1)] * 2  # the last block has two cells
    _, high = found.interval(0.9)
    expected = torch.cat([half_width(0.9, float(df)) * s.view(1) for df, s in zip(found.df, found.sigma, strict=True)])
    torch.testing.assert_close(high - found.field, expected, atol=1e-5, rtol=1e-4)


def test_intervals_and_predictions_follow_sigma() -> None:
    field, sigma = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25])
    found = Inversion(field, sigma, 1, {}, Bootstrap(2, seed=1))
    low, high = found.interval(0.9)
    torch.testing.assert_close(high - field, 1.6449 * sigma, atol=1e-3, rtol=0)
    torch.testing.assert_close(field - low, high - field)
    draws = 4000
    prediction = found.predict(lambda v: torch.stack([v.sum(), v[0] - v[1]]), samples=draws)
    spread = math.sqrt(0.5**2 + 0.25**2)
    assert (prediction.std - spread).abs().max() < 4 * spread / math.sqrt(2 * draws)
    assert (prediction.mean - torch.tensor([-1.0, 3.0])).abs().max() < 4 * spread / math.sqrt(draws)
    exact = found.predict(lambda v: v * 2, samples=0)
    torch.testing.assert_close(exact.mean, field * 2)
    assert not exact.std.any()


def test_repr_is_one_line() -> None:
    found = Inversion(torch.zeros(2, 3), torch.full((2, 3), 0.25), 40, {}, Bootstrap(2, seed=1))
    assert repr(found) == "Inversion(field of shape (2, 3), sigma 0.25 in the rms, from step 40)"


@pytest.mark.parametrize("samples", [1, -1])
def test_a_spread_needs_two_samples(samples: int) -> None:
    found = Inversion(torch.zeros(2), torch.ones(2), 1, {}, Bootstrap(2, seed=1))
    with pytest.raises(ValueError, match="samples must be 0, for the mean alone, or at least 2"):
        found.predict(lambda v: v, samples)


def test_an_operator_that_writes_leaves_the_result_as_it_is() -> None:
    found = Inversion(torch.ones(2), torch.ones(2), 1, {}, Bootstrap(2, seed=1))
    found.predict(lambda v: v.mul_(2), samples=0)
    assert torch.equal(found.field, torch.ones(2))
