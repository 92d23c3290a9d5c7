import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import assert_same_bits, mlp, pairs, seeded, snapshot
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from twinboot import Blocks, Twins


def with_sigma(model: nn.Module | None = None, **options: Any) -> Twins:
    """Twins without training, with a sigma of their own for each group."""
    twins = Twins(model or mlp(), **options)
    twins.partition.sigma.copy_(0.2 + torch.rand(twins.partition.sigma.shape, generator=seeded(9)))
    return twins


def train(twins: Twins, optimizer: torch.optim.Optimizer, forward: Any = None) -> None:
    for pair in pairs():
        with twins.sampled(local=True):
            outputs = (forward or twins)(*(x for x, _ in pair))
            sum(F.cross_entropy(output, y) for output, (_, y) in zip(outputs, pair, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()


def sigmas(twins: Twins) -> list[Tensor]:
    """Of each parameter, with the same number of dimensions as it, or none."""
    return twins.partition.expand([p.detach() for p in twins.unstack()[0].parameters()])


# --- the distribution


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", ["layer", "tensor", "unit"])
@pytest.mark.parametrize("stacked", [False, True])
def test_each_sample_has_the_moments_of_noisy_weights_and_noise_of_its_own(
    stacked: bool, groups: Any, bias: bool
) -> None:
    """sigma^2 |x|^2 + sigma'^2, within four standard errors of a variance, a mean and a correlation."""
    n, model = 20_000, nn.Sequential(nn.Linear(3, 2, bias=bias))
    twins = with_sigma(model, groups=groups, stacked=stacked)
    x = torch.tensor([1.0, -2.0, 0.5])
    of_weight, *of_bias = sigmas(twins)
    exact = of_weight.flatten() ** 2 * x.square().sum() + (of_bias[0] ** 2 if bias else 0.0)
    with twins.sampled(local=True):
        outputs = [y.detach() - model(x).detach() for y in twins(x.expand(n, 3), x.expand(n, 3))]
    for noise in outputs:
        assert ((noise.var(0) / exact - 1).abs() < 4 * math.sqrt(2 / n)).all()
        assert (noise.mean(0).abs() < 4 * (exact / n).sqrt()).all()
    columns = torch.cat([torch.cat(outputs, 1), outputs[0].roll(1, 0)], 1)  # outputs, twins and neighbouring samples
    assert (columns.T.corrcoef() - torch.eye(6)).abs().max() < 4 / math.sqrt(n)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_expected_gradients_are_those_of_noisy_weights(stacked: bool, local: bool) -> None:
    """Of the mean square of two layers' outputs, whose expectation is known. With m = W x + b of the first layer, which
    has h outputs, and its variance v = sigma^2 (|x|^2 + 1), the second, with `o` outputs and a variance of s^2, gives

        |W' m + b'|^2 + v |W'|^2 + o s^2 (|m|^2 + h v + 1)

    Within 4.5 standard errors for 26 gradients.
    """
    model = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 2))
    twins = with_sigma(model, stacked=stacked)
    x = torch.tensor([1.0, -2.0, 0.5])
    first, second = twins.sigma.values()
    w, b, w2, b2 = (p.detach().clone().requires_grad_() for p in model.parameters())
    m, v = w @ x + b, first**2 * (x.square().sum() + 1)
    expected = (w2 @ m + b2).square().sum() + v * w2.square().sum() + 2 * second**2 * (m.square().sum() + 4 * v + 1)
    exact = torch.autograd.grad(expected, [w, b, w2, b2])
    found = []
    for k in range(400):
        twins.zero_grad()
        with twins.sampled(generator=seeded(k), local=local):
            outputs = twins(*[x.expand(8, 3)] * 2)
            outputs[0].square().sum(1).mean().backward()
        gradients = [p.grad if not stacked else p.grad[0] for p in list(twins.parameters())[:4] if p.grad is not None]
        found.append(torch.cat([g.flatten() for g in gradients]))
    every = torch.stack(found)
    error = every.std(0) / math.sqrt(len(every))
    assert ((every.mean(0) - torch.cat([g.flatten() for g in exact])).abs() < 4.5 * error).all()


def test_the_scale_multiplies_the_noise() -> None:
    twins = with_sigma(nn.Sequential(nn.Linear(3, 2)))
    x = torch.ones(5, 3)
    clean = twins(x, x)[0]
    noise = []
    for scale in (1.0, 0.0, 2.0):
        with twins.sampled(scale, seeded(0), local=True):
            noise.append(twins(x, x)[0] - clean)
    assert not noise[1].any()
    torch.testing.assert_close(noise[2], 2 * noise[0])


@pytest.mark.parametrize("stacked", [False, True])
def test_an_input_of_zeros_without_a_bias_has_finite_gradients(stacked: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False))
    twins = with_sigma(model, stacked=stacked)
    with twins.sampled(local=True):  # a shorter batch is padded with zeros, too
        sum(y.sum() for y in twins(torch.zeros(4, 3), torch.zeros(2, 3))).backward()
    assert all(p.grad.isfinite().all() for p in twins.parameters() if p.grad is not None)


# --- which layers


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[1].weight = model[0].weight
    return model


def twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3))


def shared() -> nn.Module:
    wrapped = Wrapped()
    wrapped.layer = nn.Linear(4, 4)
    return nn.Sequential(wrapped, wrapped.layer, nn.Linear(4, 3))


def half_frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "groups", "clean"),
    [
        (mlp(), "layer", {"0.weight", "0.bias", "2.weight", "2.bias"}),
        (mlp(), "unit", {"0.weight", "0.bias", "2.weight", "2.bias"}),
        (mlp(), "weight", set()),
        (mlp(), Blocks((2,)), set()),
        (
            nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)),
            "layer",
            {"3.weight", "3.bias"},
        ),
        (nn.Sequential(nn.Conv1d(4, 2, 1), nn.Flatten(), nn.Linear(2, 3)), "layer", {"2.weight", "2.bias"}),
        (nn.Sequential(mlp(), nn.Softmax(1)), "layer", set()),
        (
            nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2)),
            "layer",
            {"1.weight", "1.bias"},
        ),
        (tied(), "layer", {"2.weight", "2.bias"}),
        (twice(), "layer", {"3.weight", "3.bias"}),
        (shared(), "layer", {"2.weight", "2.bias"}),
        (half_frozen(), "layer", {"2.weight"}),
        (Wrapped(), "layer", set()),
    ],
)
def test_only_layers_for_which_it_is_exact_have_clean_weights(model: nn.Module, groups: Any, clean: set[str]) -> None:
    twins = with_sigma(model, groups=groups)
    before = twins.weights()
    with twins.sampled(local=True):
        inside = twins.weights()
    assert {name for name, w in inside.items() if torch.equal(w, before[name])} == clean
    assert_same_bits(twins.weights(), before)


def test_a_pruned_layer_keeps_noise_on_its_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    prune.custom_from_mask(model[0], "weight", torch.tensor([[1.0, 0.0]]))  # type: ignore[no-untyped-call]
    twins = with_sigma(model)
    with twins.sampled(local=True):
        first, second = (y.detach() for y in twins(torch.zeros(9, 2), torch.zeros(9, 2)))
    assert first.unique().numel() == second.unique().numel() == 1  # one draw for all samples


def test_of_a_stacked_model_that_is_no_chain_all_weights_have_noise() -> None:
    twins = with_sigma(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)), stacked=True)
    before = twins.weights()
    with twins.sampled(local=True):
        assert not any(torch.equal(w, before[name]) for name, w in twins.weights().items())
        first = twins(torch.zeros(9, 4), torch.zeros(9, 4))[0]
    assert first.unique(dim=0).shape[0] == 1


# --- as any block


@pytest.mark.parametrize("stacked", [False, True])
def test_one_seed_gives_one_run_and_no_global_generator_moves(stacked: bool) -> None:
    runs = []
    for seed in (0, 0, 1):
        twins = with_sigma(seed=seed, stacked=stacked)
        state = torch.get_rng_state()
        train(twins, torch.optim.Adam(twins.parameters(), 1e-2))
        runs.append(snapshot(twins))
    assert_same_bits(runs[0], runs[1])
    assert not torch.equal(*(next(iter(run.values())) for run in (runs[0], runs[2])))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_resumed_run_equals_the_one_that_was_not_stopped_bit_for_bit(stacked: bool) -> None:
    twins, again = (with_sigma(stacked=stacked, seed=seed) for seed in (3, 4))
    optimizer, resumed = (torch.optim.Adam(t.parameters(), 1e-2) for t in (twins, again))
    train(twins, optimizer)
    again.load_state_dict(snapshot(twins))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(twins, optimizer)
    train(again, resumed)
    assert_same_bits(snapshot(again), snapshot(twins))


@pytest.mark.parametrize("stacked", [False, True])
def test_autocast_and_bfloat16_have_noise(stacked: bool) -> None:
    x = torch.randn(6, 4, generator=seeded(0))
    for twins, dtype in ((with_sigma(stacked=stacked), torch.float32), (with_sigma(stacked=stacked).bfloat16(), None)):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            given = x if dtype else x.bfloat16()
            clean = twins(given, given)[0]
            with twins.sampled(local=True):
                noisy = twins(given, given)[0]
        assert noisy.dtype == torch.bfloat16
        assert not torch.equal(noisy, clean)


@pytest.mark.parametrize("stacked", [False, True])
def test_an_exception_ends_the_noise(stacked: bool) -> None:
    twins = with_sigma(stacked=stacked)
    x = torch.randn(3, 4, generator=seeded(0))
    clean = twins(x, x)
    with pytest.raises(KeyError), twins.sampled(local=True):
        raise KeyError
    assert_same_bits(twins(x, x), clean)
    with twins.sampled(local=True), pytest.raises(RuntimeError, match=r"update\(\) was called inside sampled\(\)"):
        twins.update()


def test_backward_after_the_block_is_refused_or_right() -> None:
    x = torch.randn(3, 4, generator=seeded(0))
    apart = with_sigma()
    with apart.sampled(local=True):
        loss = apart(x, x)[0].sum()
    with pytest.raises(RuntimeError, match=r"call loss.backward\(\) inside the block"):
        loss.backward()
    found = []
    for inside in (True, False):
        twins = with_sigma(stacked=True)
        with twins.sampled(local=True):
            loss = twins(x, x)[0].sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append([p.grad for p in twins.parameters()])
    assert_same_bits(*found)


def test_a_state_taken_inside_the_block_holds_the_clean_weights() -> None:
    twins = with_sigma(nn.Sequential(nn.Conv1d(4, 2, 1), nn.Flatten(), nn.Linear(2, 3)))
    before = snapshot(twins[0])
    with twins.sampled(local=True):
        assert_same_bits(snapshot(twins[0]), before)


@pytest.mark.parametrize("stacked", [False, True])
def test_inputs_that_are_no_batch_of_vectors_get_a_sentence(stacked: bool) -> None:
    twins = with_sigma(stacked=stacked)
    x = torch.randn(2, 5, 4)
    with (
        twins.sampled(local=True),
        pytest.raises(
            ValueError, match=r"takes a batch of vectors for linear layers, not \(2, 5, 4\): leave local out"
        ),
    ):
        twins(x, x)
    with twins.sampled():
        twins(x, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_that_are_computed_again_are_refused(reentrant: bool) -> None:
    twins = with_sigma()
    x = torch.randn(3, 4, generator=seeded(0)).requires_grad_()
    with twins.sampled(local=True), pytest.raises(RuntimeError, match="leave local out with activation checkpointing"):
        checkpoint(twins[0], x, use_reentrant=reentrant).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of PyTorch's own, where a graph ends
@pytest.mark.parametrize("stacked", [False, True])
def test_compiled_twins_give_the_same_run(stacked: bool) -> None:
    plain, compiled = (with_sigma(stacked=stacked) for _ in range(2))
    x = torch.randn(10, 4, generator=seeded(0))
    forward = torch.compile(compiled, backend="aot_eager")
    clean = forward(x, x)  # a graph without noise comes first, and must not be used in the block
    train(plain, torch.optim.SGD(plain.parameters(), 0.1))
    train(compiled, torch.optim.SGD(compiled.parameters(), 0.1), forward)
    torch.testing.assert_close(dict(compiled.named_parameters()), dict(plain.named_parameters()), rtol=1e-4, atol=1e-6)
    assert not torch.equal(forward(x, x)[0], clean[0])
    torch.testing.assert_close(forward(x, x), plain(x, x), rtol=1e-3, atol=1e-5)
