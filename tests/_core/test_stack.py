import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import assert_same_bits, classes, mlp, pairs, seeded, snapshot, train
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from twinboot import Blocks, Bootstrap, Estimate, Twins
from twinboot._core.stack import Chain


def train_together(twins: Twins, batches: Any, optimizer: torch.optim.Optimizer, forward: Any = None) -> None:
    """One pass of the README's loop for stacked twins."""
    for pair in batches:
        with twins.sampled():
            outputs = (forward or twins)(*(x for x, _ in pair))
            sum(F.cross_entropy(output, y) for output, (_, y) in zip(outputs, pair, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()


def stacked(model: nn.Module | None = None, **options: Any) -> Twins:
    return Twins(model or mlp(), stacked=True, **options)


def trained(model: nn.Module | None = None, steps: int = 1, **options: Any) -> Twins:
    twins = stacked(model, **options)
    replicas = options.get("replicas", 2)
    optimizer = torch.optim.Adam(twins.parameters(), 1e-2)
    train_together(twins, [b for _ in range(steps) for b in pairs(replicas=replicas)], optimizer)
    return twins


def weights(twins: Twins) -> dict[str, Tensor]:
    return snapshot(twins.stack)


class Counting(nn.Module):
    """Replaces a buffer instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)
        return self.layer(x) + self.seen / 100


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 2, 2))[0][:, -1])


class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 3, bias=False), nn.Linear(4, 3)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(x) + self.encode(x).tanh()


def half_frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


def tied_chain() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    return model


MODELS: dict[str, Any] = {
    "a chain": mlp,
    "a nested chain": lambda: nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(4, 8, bias=False), nn.GELU(), mlp(8))
    ),
    "a chain with a frozen weight": half_frozen,
    "a chain with tied weights": tied_chain,
    "tied weights": TiedWeights,
    "BatchNorm": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
    "LayerNorm": lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3))),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3))),
    "a replaced buffer": Counting,
    "LSTM": Recurrent,
}


@pytest.mark.parametrize("mode", ["sample", "mean", "centered"])
@pytest.mark.parametrize("name", MODELS)
def test_a_stacked_run_follows_the_run_of_separate_twins(name: str, mode: Any) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    apart, together = Twins(model, seed=3), stacked(model, seed=3)
    first, second = (torch.optim.Adam(t.parameters(), 1e-2) for t in (apart, together))
    for _ in range(2):
        train(apart, pairs(), first)
        train_together(together, pairs(), second)
        apart.reset(mode)
        together.reset(mode)
    train(apart, pairs(), first)
    train_together(together, pairs(), second)
    for twin, other in zip(apart, together.unstack(), strict=True):
        torch.testing.assert_close(other.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.sigma, apart.sigma, rtol=1e-4, atol=1e-6)
    estimate = together.estimate()
    assert type(estimate) is Estimate
    torch.testing.assert_close(estimate.module.state_dict(), apart.estimate().module.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", ["layer", "tensor", "unit", Blocks((2,)), lambda name, p: "everything"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_sigma_has_the_names_and_values_of_separate_twins(groups: Any, replicas: int) -> None:
    apart, together = (Twins(mlp(), replicas, groups, stacked=s) for s in (False, True))
    train(apart, pairs(replicas=replicas), torch.optim.SGD(apart.parameters(), 0.1))
    train_together(together, pairs(replicas=replicas), torch.optim.SGD(together.parameters(), 0.1))
    assert list(together.sigma) == list(apart.sigma)
    torch.testing.assert_close(together.sigma, apart.sigma, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "rows"),
    # One row has no variance to normalise by, so BatchNorm itself refuses it.
    [(name, rows) for name in MODELS for rows in ((5, 8), (1, 6), (7, 7)) if name != "BatchNorm" or 1 not in rows],
)
def test_batches_may_differ_in_size(name: str, rows: tuple[int, int]) -> None:
    model = MODELS[name]()
    inputs = [torch.randn(n, 4, generator=seeded(n)) for n in rows]
    apart, together = Twins(model), stacked(model)
    expected, outputs = apart(*inputs), together(*inputs)
    torch.testing.assert_close(outputs, expected)
    assert all(y.is_contiguous() for y in outputs)


def test_gradients_of_padded_batches_are_those_of_separate_twins() -> None:
    apart, together = Twins(mlp()), stacked()
    inputs = torch.randn(5, 4, generator=seeded(0)), torch.randn(8, 4, generator=seeded(1))
    for twins in (apart, together):
        sum(y.square().mean() for y in twins(*inputs)).backward()
    for name, p in mlp().named_parameters():
        expected = torch.stack([twin.get_parameter(name).grad for twin in apart])
        torch.testing.assert_close(together.stack.get_parameter(name).grad, expected)
        assert p.shape == expected.shape[1:]


def test_inputs_may_be_tuples_mappings_or_tensors_of_any_rank() -> None:
    apart, together = Twins(mlp()), stacked()
    x = torch.randn(2, 3, 4, generator=seeded(0))
    for inputs in [(x, x + 1), ((x[0],), [x[1]]), ({"input": x[0]}, {"input": x[1]}), (x[0, 0], x[0, 1]), (x, x[:1])]:
        torch.testing.assert_close(together(*inputs), apart(*inputs))
    with pytest.raises(ValueError, match="2 twins take 2 inputs, one each, but got 1"):
        together(x)


def test_parameters_have_the_names_and_number_of_the_models() -> None:
    twins = stacked(replicas=3)
    assert {n: p.shape[1:] for n, p in twins.named_parameters()} == {
        f"stack.{n}": p.shape for n, p in mlp().named_parameters()
    }
    assert all(len(p) == 3 for p in twins.parameters())
    assert len(twins) == 3


def test_frozen_parameters_are_shared_not_stacked() -> None:
    model = half_frozen()
    twins = trained(model)
    assert twins.stack[0].weight.shape == model[0].weight.shape
    assert twins.stack[0].weight.data_ptr() == model[0].weight.data_ptr()
    assert not twins.stack[0].weight.requires_grad
    assert twins.estimate().module[0].weight.data_ptr() == model[0].weight.data_ptr()


def test_tied_weights_stay_tied() -> None:
    twins = trained(TiedWeights())
    assert twins.stack.encode.weight is twins.stack.decode.weight
    for twin in [*twins.unstack(), twins.estimate().module]:
        assert twin.encode.weight is twin.decode.weight


def test_dropout_masks_differ_between_the_twins() -> None:
    twins = stacked(nn.Sequential(nn.Dropout(0.5), nn.Linear(200, 1)))
    with torch.no_grad():
        twins.stack[1].weight.fill_(1.0)
    first, second = twins(torch.ones(1, 200), torch.ones(1, 200))
    assert not torch.equal(first, second)
    twins.eval()
    first, second = twins(torch.ones(1, 200), torch.ones(1, 200))
    assert torch.equal(first, second)


# --- the noise


def test_the_parameters_stay_clean_and_the_output_is_that_of_noisy_weights() -> None:
    twins, apart = trained(), Twins(mlp())
    apart.partition.sigma.copy_(twins.partition.sigma)
    for twin, plain in zip(apart, twins.unstack(), strict=True):
        twin.load_state_dict(plain.state_dict())
    before = weights(twins)
    x = torch.randn(6, 4, generator=seeded(0))
    clean = twins(x, x)
    with twins.sampled(2.0, generator=seeded(5)), apart.sampled(2.0, generator=seeded(5)):
        noisy = twins(x, x)
        torch.testing.assert_close(noisy, apart(x, x))
        assert_same_bits(twins(x, x), noisy)  # one draw for the block
        assert_same_bits(weights(twins), before)
    assert not torch.equal(noisy[0], clean[0])
    assert_same_bits(twins(x, x), clean)


def test_backward_and_step_may_come_inside_or_after_the_block() -> None:
    def run(where: str) -> dict[str, Tensor]:
        twins = trained()
        optimizer = torch.optim.SGD(twins.parameters(), 0.1)
        x = torch.randn(6, 4, generator=seeded(0))
        with twins.sampled():
            loss = sum(y.square().mean() for y in twins(x, x + 1))
            if where == "inside":
                loss.backward()
                optimizer.step()
        if where == "after":
            with twins.sampled():  # another draw, in between
                pass
            loss.backward()
            optimizer.step()
        return weights(twins)

    assert_same_bits(run("inside"), run("after"))


def test_an_exception_ends_the_noise() -> None:
    twins = trained()
    x = torch.randn(3, 4, generator=seeded(0))
    clean = twins(x, x)
    with pytest.raises(KeyError), twins.sampled():
        raise KeyError
    assert_same_bits(twins(x, x), clean)


def test_scale_zero_is_no_noise() -> None:
    twins = trained()
    x = torch.randn(3, 4, generator=seeded(0))
    clean = twins(x, x)
    with twins.sampled(scale=0.0):
        assert_same_bits(twins(x, x), clean)


# --- state


@pytest.mark.parametrize("name", ["a chain", "BatchNorm"])
def test_a_resumed_run_equals_the_one_that_was_not_stopped_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    twins = stacked(model, seed=4)
    optimizer = torch.optim.Adam(twins.parameters(), 1e-2)
    train_together(twins, pairs(), optimizer)
    file = io.BytesIO()
    torch.save([twins.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    again = stacked(MODELS[name]())
    resumed = torch.optim.Adam(again.parameters(), 1e-2)
    saved = torch.load(file, weights_only=True)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for t, o in ((twins, optimizer), (again, resumed)):
        train_together(t, pairs(), o)
        t.reset()
        train_together(t, pairs(), o)
    assert_same_bits(snapshot(again), snapshot(twins))


def test_states_of_separate_and_stacked_twins_do_not_mix() -> None:
    with pytest.raises(ValueError, match="the checkpoint does not fit: stacked was False and is True here"):
        stacked().load_state_dict(Twins(mlp()).state_dict())
    with pytest.raises(ValueError, match="the checkpoint does not fit: stacked was True and is False here"):
        Twins(mlp()).load_state_dict(stacked().state_dict())
    with pytest.raises(ValueError, match="this is no state of twins"):
        stacked().load_state_dict(mlp().state_dict())


def test_weights_may_be_moved_cast_and_assigned() -> None:
    twins = trained()
    twins.double()
    train_together(
        twins, [tuple((x.double(), y) for x, y in pair) for pair in pairs()], torch.optim.SGD(twins.parameters(), 0.1)
    )
    first, second = (torch.cat([p.detach().flatten() for p in t[0].parameters()]) for t in twins.unstack())
    expected = ((first - second).square().sum() / (2 * len(first))).sqrt()
    assert float(twins.sigma["0"]) == pytest.approx(float(expected), rel=1e-6)
    twins.load_state_dict(snapshot(trained(steps=2)), assign=True)
    twins.update()
    assert float(twins.sigma["0"]) == pytest.approx(float(trained(steps=2).sigma["0"]), rel=1e-6)
    assert twins.to("meta").partition.sigma.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype(dtype: torch.dtype) -> None:
    apart, together = (Twins(mlp().to(dtype), groups="unit", stacked=s) for s in (False, True))
    x = torch.randn(6, 4, generator=seeded(0)).to(dtype)
    for twins in (apart, together):
        twins.partition.sigma.fill_(0.1)
    with apart.sampled(), together.sampled():
        outputs = together(x, x)
        torch.testing.assert_close(outputs, apart(x, x))
    assert outputs[0].dtype == dtype


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda twins: pickle.loads(pickle.dumps(twins))])
def test_copies_and_pickles_are_independent_twins_with_the_same_future(copied: Any) -> None:
    twins = trained()
    again = copied(twins)
    assert vars(again).keys() == vars(twins).keys()
    assert again._store._cached is None  # views of the old weights
    before = snapshot(twins)
    for t in (again, twins):
        train_together(t, pairs(), torch.optim.Adam(t.parameters(), 1e-2))
        if t is again:
            assert_same_bits(snapshot(twins), before)
    assert_same_bits(snapshot(again), snapshot(twins))


def test_unstacked_models_and_the_estimate_are_independent_of_the_twins() -> None:
    twins = trained()
    before = snapshot(twins)
    with torch.no_grad():
        for model in [*twins.unstack(), twins.estimate().module]:
            for p in model.parameters():
                assert p.requires_grad
                p.zero_()
    assert_same_bits(snapshot(twins), before)


def test_the_scale_of_an_estimate_multiplies_sigma() -> None:
    twins = trained()
    torch.testing.assert_close(twins.estimate(scale=0.5).partition.sigma, twins.partition.sigma / 2)
    for wrong in (-1.0, math.nan, math.inf, Bootstrap(40), True):
        with pytest.raises((ValueError, TypeError), match=r"scale must be a (finite number of at least 0|number), not"):
            twins.estimate(scale=wrong)  # type: ignore[arg-type]


def test_autocast_uses_the_noise() -> None:
    twins = trained()
    x = torch.randn(6, 4, generator=seeded(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        clean = twins(x, x)
        with twins.sampled():
            noisy = twins(x, x)
        assert_same_bits(twins(x, x), clean)
    assert noisy[0].dtype == torch.bfloat16
    assert not torch.equal(noisy[0], clean[0])


def test_compiled_stacked_twins_give_the_same_run() -> None:
    plain, compiled = stacked(), stacked()
    train_together(plain, pairs(), torch.optim.SGD(plain.parameters(), 0.1))
    forward = torch.compile(compiled, backend="aot_eager")
    train_together(compiled, pairs(), torch.optim.SGD(compiled.parameters(), 0.1), forward)
    torch.testing.assert_close(dict(compiled.named_parameters()), dict(plain.named_parameters()), rtol=1e-4, atol=1e-6)


# --- what is refused


def test_iterating_and_indexing_are_refused_with_the_call_to_use() -> None:
    twins = stacked()
    for use in (lambda: list(twins), lambda: twins[0], lambda: train(twins, pairs(), torch.optim.SGD([torch.ones(1)]))):
        with pytest.raises(TypeError, match=r"stacked twins run together: call twins\(x1, x2\)"):
            use()


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.update(),
        lambda t: t.reset(),
        lambda t: t.estimate(),
        lambda t: t.unstack(),
        lambda t: t.double(),
        copy.deepcopy,
        lambda t: t.sampled().__enter__(),
    ],
)
def test_calls_that_need_clean_twins_are_refused_inside_a_block(call: Any) -> None:
    twins = trained()
    with (
        twins.sampled(),
        pytest.raises(RuntimeError, match=r"was called inside sampled\(\), where the weights are noisy"),
    ):
        call(twins)
    call(twins)


def test_a_subclass_of_twins_can_be_stacked() -> None:
    class Mine(Twins):
        pass

    twins = Mine(mlp(), stacked=True)
    assert type(twins) is Mine
    assert [len(y) for y in twins(torch.ones(3, 4), torch.ones(2, 4))] == [3, 2]


def test_separate_and_stacked_twins_return_weights_in_one_form() -> None:
    apart, together = Twins(mlp(), 3), stacked(replicas=3)
    assert {n: w.shape for n, w in apart.weights().items()} == {n: w.shape for n, w in together.weights().items()}
    for twins in (apart, together):
        twins.partition.sigma.fill_(0.1)
        clean = twins.weights()["0.weight"]
        with twins.sampled(generator=seeded(1)):
            assert (twins.weights()["0.weight"] - clean).std().item() == pytest.approx(0.1, rel=0.5)
        assert [type(m) for m in twins.unstack()] == [nn.Sequential] * 3
        twins.unstack()[0][0].weight.data.zero_()
        assert_same_bits(twins.weights()["0.weight"], clean)


def test_weights_that_are_not_finite_stop_the_run() -> None:
    twins = stacked()
    x, y = classes().tensors
    with pytest.raises(FloatingPointError, match="weights of group '0' are not finite after update 1"):
        train_together(twins, [((x * float("nan"), y), (x, y))], torch.optim.SGD(twins.parameters(), 0.1))


def test_a_model_that_checkpoints_activations_fails_in_the_backward_pass() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=False)

    twins = stacked(Checkpointed())
    x = torch.randn(5, 4, generator=seeded(0))
    with pytest.raises(RuntimeError, match="self is 3D"):
        sum(y.sum() for y in twins(x, x)).backward()


def test_a_buffer_made_in_forward_is_refused() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("seen", None)

        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.mean(0)
            return self.layer(x)

    twins, x = Twins(Late(), stacked=True), torch.randn(5, 4)
    twins(x, x)
    with pytest.raises(RuntimeError, match="buffer 'seen' was made after the twins were"):
        twins(x, x)


# --- which models are a chain


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def hooked() -> nn.Module:
    model = mlp()
    model[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def patched() -> nn.Module:
    model = mlp()
    model[0].forward = lambda x: x  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)),
        nn.Sequential(nn.Linear(4, 4), nn.PReLU()),
        nn.Sequential(nn.Flatten(0), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        nn.Sequential(mlp(), Doubled(3, 3)),
        hooked(),
        patched(),
        nn.Conv2d(1, 1, 1),
    ],
)
def test_modules_that_mix_entries_and_subclasses_are_no_chain(model: nn.Module) -> None:
    assert Chain.of(model, list(model.parameters())) is None


@pytest.mark.parametrize(
    ("model", "inputs", "taken"),
    [
        (mlp(), [torch.zeros(2, 4), torch.zeros(3, 4)], True),
        (mlp(), [torch.zeros(2, 5, 4), torch.zeros(2, 5, 4)], False),
        (nn.Sequential(nn.Flatten(), mlp()), [torch.zeros(2, 2, 2), torch.zeros(2, 2, 2)], True),
        (nn.Sequential(nn.Flatten(), mlp()), [torch.zeros(2, 2, 2), torch.zeros(2, 1, 4)], False),
        (mlp(), [torch.zeros(4), torch.zeros(4)], False),
        (mlp(), [torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.float64)], False),
        (mlp(), [(torch.zeros(2, 4),), torch.zeros(2, 4)], False),
    ],
)
def test_a_chain_takes_batches_of_vectors(model: nn.Module, inputs: list[Any], taken: bool) -> None:
    chain = Chain.of(model, list(model.parameters()))
    assert chain is not None
    assert chain.takes(inputs) == taken


def test_each_model_of_the_stack_runs_on_its_own_input() -> None:
    models = [mlp(seed=s) for s in range(3)]
    inputs = [torch.randn(n, 4, generator=seeded(n)) for n in (5, 2, 5)]
    chain = Chain.of(models[0], list(models[0].parameters()))
    assert chain is not None
    weights = [torch.stack(same) for same in zip(*(m.parameters() for m in models), strict=True)]
    torch.testing.assert_close(chain.run(inputs, weights), tuple(m(x) for m, x in zip(models, inputs, strict=True)))


def test_frozen_weights_and_biases_run_as_they_are() -> None:
    from twinboot import Twins

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2))
    for frozen in (model[0].bias, model[2].weight, model[2].bias):
        frozen.requires_grad_(False)
    x = torch.randn(5, 4)
    for output in Twins(model, stacked=True)(x, x):
        torch.testing.assert_close(output, model(x))
