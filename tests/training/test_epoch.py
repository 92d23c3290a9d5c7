"""The README's loop under everything that people do in their own: precision, accumulation, clipping, optimizers."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import assert_same_bits, classes, mlp, pairs, seeded, snapshot, train
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import clip_grad_norm_, parametrizations

from twinboot import Bootstrap, PairedLoader, Twins, resets


def accuracy(twins: Twins, x: Tensor, y: Tensor) -> float:
    return (twins.estimate()(x).argmax(1) == y).float().mean().item()


def separable(n: int = 200) -> torch.utils.data.TensorDataset:
    x = torch.randn(n, 4, generator=seeded(0))
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def losses(twins: Twins, pair: Any) -> Tensor:
    return sum((F.cross_entropy(twin(x), y) for twin, (x, y) in zip(twins, pair, strict=True)), torch.zeros(()))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.Adam(p, 3e-2),
        lambda p: torch.optim.Adam(p, 3e-2, fused=True),
        lambda p: torch.optim.AdamW(p, 3e-2, foreach=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, 1e-2),
    ],
    ids=["Adam", "fused Adam", "AdamW", "SGD with momentum", "RMSprop"],
)
@pytest.mark.parametrize("mode", ["sample", "mean", "centered"])
def test_the_loop_learns_with_any_optimizer_and_reset(optimizer: Any, mode: Any) -> None:
    data = separable()
    twins = Twins(mlp())
    loader = PairedLoader(data, Bootstrap(200), 32)
    steps, due = optimizer(twins.parameters()), resets.every(2)
    unseen = [t[loader.bootstrap.unseen] for t in data.tensors]
    before = F.cross_entropy(twins.estimate()(unseen[0]), unseen[1])
    for epoch in range(1, 13):
        train(twins, loader, steps)
        if due(epoch):
            twins.reset(mode)
    assert F.cross_entropy(twins.estimate()(unseen[0]), unseen[1]) < 0.5 * before
    assert all(s > 0 for s in twins.sigma.values())


def test_counts_and_draws_have_the_same_full_batch_gradient() -> None:
    data, bootstrap = classes(60), Bootstrap(60, seed=2)
    gradients = []
    for resample in ("draws", "counts"):
        twins = Twins(mlp())
        [pair] = PairedLoader(data, bootstrap, 60, resample)  # type: ignore[arg-type]
        for twin, (x, y, *weight) in zip(twins, pair, strict=True):
            per_sample = F.cross_entropy(twin(x), y, reduction="none")
            (per_sample * weight[0] if weight else per_sample).mean().backward()
        gradients.append([p.grad for p in twins.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_counts_and_draws_have_the_same_objective_in_small_batches(batch_size: int) -> None:
    """The gradient of a sample is a vector of its own here, so that an epoch shows how much each sample counts."""
    n, bootstrap = 64, Bootstrap(64, seed=1)
    data = torch.utils.data.TensorDataset(torch.eye(n))
    for r in range(2):
        weight = nn.Parameter(torch.zeros(n))
        loader = PairedLoader(data, bootstrap, batch_size, "counts")
        for pair in loader:
            x, w = pair[r]
            (w * (x @ weight)).mean().mul(len(x)).backward()  # batches of equal sizes would need no correction
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad / weight.grad.sum() * n, bootstrap.counts[r].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_gradient_scaling(dtype: torch.dtype) -> None:
    data = separable()
    twins = Twins(mlp())
    optimizer = torch.optim.Adam(twins.parameters(), 3e-2)
    scaler = torch.amp.GradScaler("cpu")
    loader = PairedLoader(data, Bootstrap(200), 32)
    for _ in range(12):
        for pair in loader:
            with twins.sampled():
                with torch.autocast("cpu", dtype):
                    assert twins[0](pair[0][0]).dtype == dtype
                    loss = losses(twins, pair)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            twins.update()
    assert accuracy(twins, *data.tensors) > 0.8


def test_a_step_that_the_scaler_skips_leaves_weights_and_sigma_as_they_were() -> None:
    twins = Twins(mlp())
    optimizer = torch.optim.SGD(twins.parameters(), 0.1)
    train(twins, pairs(), optimizer)
    scaler, [pair, *_] = torch.amp.GradScaler("cpu"), list(pairs())
    before = [p.detach().clone() for p in twins.parameters()], twins.sigma
    with twins.sampled():
        scaler.scale(losses(twins, pair) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    twins.update()
    assert_same_bits(([p.detach() for p in twins.parameters()], twins.sigma), before)


@pytest.mark.parametrize("per", ["step", "micro-batch"])
def test_accumulation_uses_one_draw_per_block(per: str) -> None:
    """A block around the micro-batches is one draw for the step; a block around each is a draw for each."""
    twins = Twins(mlp())
    train(twins, pairs(), torch.optim.Adam(twins.parameters(), 1e-2))
    seen = []
    outer, inner = (twins.sampled, contextlib.nullcontext) if per == "step" else (contextlib.nullcontext, twins.sampled)
    clean = [p.detach().clone() for p in twins.parameters()]
    gradient = torch.zeros_like(clean[0])
    with outer():
        for pair in list(pairs())[:3]:
            with inner():
                seen.append(twins[0][0].weight.detach().clone())
                (losses(twins, pair) / 3).backward()
                noisy = nn.Sequential(*mlp())
                noisy.load_state_dict(dict(zip(noisy.state_dict(), twins[0].parameters(), strict=True)))
                x, y = pair[0]
                [g] = torch.autograd.grad(F.cross_entropy(noisy(x), y) / 3, [noisy[0].weight])
                gradient += g
    assert torch.equal(seen[0], seen[1]) == (per == "step")
    assert not torch.equal(seen[0], clean[0])
    torch.testing.assert_close(twins[0][0].weight.grad, gradient)
    assert_same_bits([p.detach() for p in twins.parameters()], clean)


def test_gradients_are_clipped_per_twin() -> None:
    twins = Twins(mlp())
    with twins.sampled():
        (1000 * losses(twins, next(iter(pairs())))).backward()
    for twin in twins:
        clip_grad_norm_(twin.parameters(), 1.0)
        norm = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None]).norm()
        assert norm.item() == pytest.approx(1.0, rel=1e-4)


def test_schedulers_and_parameter_groups_work() -> None:
    twins = Twins(mlp())
    decay = [p for p in twins.parameters() if p.ndim > 1]
    plain = [p for p in twins.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for pair in [*pairs(), *pairs()]:
        train(twins, [pair], optimizer)
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-2 / 2**8] * 2)


def test_lbfgs_works_with_a_closure_that_repeats_its_draw() -> None:
    """Each evaluation of the closure opens a block; the same seed in each keeps the line search consistent."""
    x = torch.randn(200, 4, generator=seeded(0))
    y = x.sum(1, keepdim=True) + torch.randn(200, 1, generator=seeded(1))
    twins, bootstrap = Twins(nn.Linear(4, 1)), Bootstrap(200)
    optimizer = torch.optim.LBFGS(twins.parameters(), line_search_fn="strong_wolfe")
    pair = [(x[bootstrap.indices(r)], y[bootstrap.indices(r)]) for r in range(2)]
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            with twins.sampled(generator=seeded(step)):
                loss = sum((F.mse_loss(t(x), y) for t, (x, y) in zip(twins, pair, strict=True)), torch.zeros(()))
                loss.backward()
            return loss

        optimizer.step(closure)
        twins.update()
    # Linear in its weights: the minimum of a step is the least-squares solution, moved by exactly that step's draw.
    draws = seeded(3)
    for twin, (a, b) in zip(twins, pair, strict=True):
        solution = torch.linalg.lstsq(torch.cat([a, torch.ones(200, 1)], 1), b).solution[:, 0]
        found = torch.cat([p.detach().flatten() for p in twin.parameters()])
        moved = torch.cat([torch.empty_like(p).normal_(generator=draws).detach().flatten() for p in twin.parameters()])
        shift = solution - found
        sigma = (shift @ moved) / (moved @ moved)
        assert 0 < sigma < 1
        torch.testing.assert_close(shift, sigma * moved, rtol=0, atol=1e-3)


class Wrapped(nn.Module):
    """A class of one's own, whose compile() takes effect (that of nn.Sequential has none)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("whole", [True, False], ids=["the twins", "each twin"])
def test_compiled_twins_give_the_same_run(whole: bool) -> None:
    backend = CompileCounterWithBackend("aot_eager")

    def run(compiled: bool) -> dict[str, Tensor]:
        twins = Twins(Wrapped())
        forward: Any = twins
        if compiled and whole:
            forward = torch.compile(twins, backend=backend)
        elif compiled:
            for twin in twins:
                twin.compile(backend=backend)
        optimizer = torch.optim.SGD(twins.parameters(), 0.1)
        for (x1, y1), (x2, y2) in list(pairs())[:3]:
            with twins.sampled():
                out1, out2 = forward(x1, x2)
                (F.cross_entropy(out1, y1) + F.cross_entropy(out2, y2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            twins.update()
        twins.reset()
        return snapshot(twins)

    torch.testing.assert_close(run(True), run(False))
    assert backend.frame_count > 0


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_by_inductor_the_noise_is_seen_and_late_backward_is_refused() -> None:
    twins = Twins(mlp())
    x, _ = classes(10).tensors
    twins.partition.sigma.fill_(0.3)
    forward = torch.compile(twins)
    plain = torch.stack(twins(x, x)).detach()
    with twins.sampled():
        noisy = torch.stack(twins(x, x)).detach()
        out = torch.stack(forward(x, x))
        torch.testing.assert_close(out.detach(), noisy)
    assert (noisy - plain).abs().max() > 0.1
    with pytest.raises(RuntimeError, match=r"inplace operation|after sampled\(\)"):
        out.sum().backward()
    torch.testing.assert_close(torch.stack(forward(x, x)).detach(), plain)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_layers_train(norm: Any) -> None:
    data = separable()
    model = nn.Sequential(norm(nn.Linear(4, 16)), nn.Tanh(), norm(nn.Linear(16, 3)))
    twins = Twins(model)
    loader = PairedLoader(data, Bootstrap(200), 32)
    optimizer = torch.optim.Adam(twins.parameters(), 3e-2)
    before = F.cross_entropy(twins.estimate()(data.tensors[0]), data.tensors[1])
    for _ in range(12):
        train(twins, loader, optimizer)
        twins.reset("centered")
    assert list(twins.sigma) == ["0", "2"]
    assert F.cross_entropy(twins.estimate()(data.tensors[0]), data.tensors[1]) < 0.8 * before
    prediction = twins.estimate().predict(data.tensors[0], 8, "classification")
    assert (prediction.std > 0).any()


def test_dropout_and_batchnorm_train_and_each_twin_has_its_own_statistics() -> None:
    data = separable()
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    twins = Twins(model)
    loader = PairedLoader(data, Bootstrap(200), 32)
    optimizer = torch.optim.Adam(twins.parameters(), 3e-2)
    for _ in range(8):
        train(twins, loader, optimizer)
        twins.reset()
    assert not torch.equal(twins[0][1].running_mean, twins[1][1].running_mean)
    estimate = twins.estimate()
    estimate.update_batchnorm(torch.utils.data.DataLoader(data, 50))
    assert (estimate(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean() > 0.8
