"""Lean noise: gradients are those at noisy weights, bit for bit, and no noisy weight is stored."""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from loops import assert_same_bits, mlp, snapshot
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from twinboot.distributed.lean import Lean

SIGMA = 0.1


class Tied(nn.Module):
    """One matrix embeds words and predicts the next one, in part by its transpose, with a frozen shift."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(6, 8), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(self.words(x)).tanh()
        return hidden @ self.words.weight.T + self.words.weight[:, 0] + self.shift


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(4, 8, 8), mlp(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=False))  # type: ignore[no-any-return]


def channels_last() -> nn.Module:
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(16, 3)).to(memory_format=torch.channels_last)


def normalised() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Conv2d(2, 4, 3)), nn.Tanh(), nn.Flatten(), weight_norm(nn.Linear(64, 3)))


def one_memory() -> nn.Module:
    """All weights are parts of one vector, with a frozen one between."""
    model = mlp(4, 8, 3)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.data = part.view(p.shape)
    model[0].bias.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(5, 4)),
    "convolutions": (channels_last, lambda: torch.randn(5, 2, 6, 6)),
    "weight norm": (normalised, lambda: torch.randn(5, 2, 6, 6)),
    "tied": (Tied, lambda: torch.randint(6, (5, 3))),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), lambda: torch.randn(5, 3, 8)),
    "recurrent": (lambda: nn.LSTM(4, 8, 2), lambda: torch.randn(5, 3, 4)),
    "checkpointed": (Checkpointed, lambda: torch.randn(5, 4)),
    "one memory": (one_memory, lambda: torch.randn(5, 4)),
    "half precision": (lambda: mlp().bfloat16(), lambda: torch.randn(5, 4).bfloat16()),
}


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def noisy_reads(weights: list[Tensor], sigma: Sequence[Tensor] | None = None, seed: int = 3) -> Lean:
    return Lean(nn.ModuleList(), [], weights, [], sigma or [torch.tensor(SIGMA)] * len(weights), seed)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return (output[0] if isinstance(output, tuple) else output).float().square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "autocast"), [*((name, False) for name in MODELS), ("mlp", True), ("convolutions", True), ("tied", True)]
)
def test_gradients_are_those_of_a_model_with_the_noisy_weights_bit_for_bit(name: str, autocast: bool) -> None:
    make, data = MODELS[name]
    model, x = make(), data()
    reference, weights = copy.deepcopy(model), trained(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with noisy_reads(weights):
        noisy = [w.detach().clone() for w in weights]
        for _ in range(2):  # the noise is the same in the whole block
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value = loss(model, x)
            value.backward()
    assert_same_bits(dict(model.named_parameters()), before)
    assert not any(torch.equal(w, e) for w, e in zip(weights, noisy, strict=True))
    with torch.no_grad():
        for w, e in zip(trained(reference), noisy, strict=True):
            w.copy_(e)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = loss(reference, x)
        expected.backward()
    assert_same_bits(value, expected)
    assert_same_bits([w.grad for w in weights], [w.grad for w in trained(reference)])
    assert_same_bits(dict(model.named_buffers()), dict(reference.named_buffers()))


@pytest.mark.parametrize("name", ["mlp", "convolutions"])
def test_no_noisy_weight_is_kept_for_the_backward_pass(name: str) -> None:
    make, data = MODELS[name]
    model, x, kept = make(), data(), {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    weights = trained(model)
    with noisy_reads(weights), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss(model, x)
    own = {w.untyped_storage().data_ptr() for w in weights}
    sizes = {w.numel() for w in weights if w.ndim > 1}  # no activation has this size
    assert own & kept.keys()
    assert not any(t.untyped_storage().nbytes() // 4 in sizes for address, t in kept.items() if address not in own)


def test_noise_is_normal_of_sigma_for_each_weight_by_itself_and_by_the_seed() -> None:
    weights = [torch.zeros(200, 100, requires_grad=True), torch.ones(200, 100, requires_grad=True)]
    sigma = [torch.tensor(0.5), torch.linspace(0, 2, 200)[:, None]]

    def read(seed: int) -> list[Tensor]:
        with noisy_reads(weights, sigma, seed):
            return [w.detach().clone() for w in weights]

    first, second = read(1)
    n = first.numel()
    assert abs(first.std().item() / 0.5 - 1) < 4 / (2 * n) ** 0.5
    apart = (second - 1) / sigma[1]
    assert torch.equal(second[0], torch.ones(100))
    assert abs(apart[1:].std().item() - 1) < 4 / (2 * n) ** 0.5
    assert abs(torch.corrcoef(torch.stack([first[1:].flatten(), apart[1:].flatten()]))[0, 1].item()) < 4 / n**0.5
    assert_same_bits(read(1), [first, second])
    assert not torch.equal(read(2)[0], first)


def test_a_compiled_model_has_the_noise_too() -> None:
    model, x = mlp(), torch.randn(5, 4)
    compiled: Any = torch.compile(model, backend="aot_eager")
    for w in trained(model):
        w.grad = None
    clean = loss(compiled, x).item()  # compiled before there is noise
    with noisy_reads(trained(model)):
        noisy, eager = loss(compiled, x), loss(model, x)
        noisy.backward()
    assert noisy.item() == eager.item() != clean


@pytest.mark.parametrize("name", ["mlp", "convolutions"])
def test_there_is_noise_without_gradients_too(name: str) -> None:
    make, data = MODELS[name]
    model, x = make().eval(), data()
    reference, weights = copy.deepcopy(model), trained(model)
    with noisy_reads(weights), torch.no_grad():
        noisy = [w.clone() for w in weights]
        plain = model(x)
    with torch.no_grad():
        for w, e in zip(trained(reference), noisy, strict=True):
            w.copy_(e)
    # In this mode a cast reaches us as one operation that may be a view, and is none.
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        with noisy_reads(weights):
            cast = model(x)
            turned = [w.double() for w in weights]
        expected = reference(x)
    with torch.no_grad():
        assert torch.equal(plain, reference(x))
    assert torch.equal(cast, expected)
    assert all(torch.equal(t, e.double()) for t, e in zip(turned, noisy, strict=True))


def test_a_backward_pass_of_an_earlier_forward_pass_is_refused_inside() -> None:
    model, x = mlp(), torch.randn(5, 4)
    before = loss(model, x)
    with noisy_reads(trained(model)), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss(model, x) - before).backward()


def test_weights_that_were_converted_in_the_block_are_put_back() -> None:
    model = mlp()
    before = snapshot(model)
    with noisy_reads(trained(model)):
        model.double().float()
    assert_same_bits(snapshot(model), before)


def test_another_thread_is_refused() -> None:
    model, x = mlp(), torch.randn(5, 4)
    block = Lean(nn.ModuleList([model]), [], trained(model), [], [torch.tensor(SIGMA)] * 4, 3)
    with block, ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="called in another thread"):
        pool.submit(model, x).result()


def test_gradients_may_be_cleared_and_set_inside() -> None:
    heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    heads.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    optimizer, x = torch.optim.SGD(heads.parameters(), 0.1), torch.randn(5, 4)
    for head in heads:
        with noisy_reads(trained(heads)):
            optimizer.zero_grad()
            loss(head, x).backward()


def test_memory_of_several_weights_is_not_read_as_one_tensor() -> None:
    flat = torch.ones(6)
    weights = [flat[:4].requires_grad_(), flat[4:].requires_grad_()]
    with noisy_reads(weights):
        assert not torch.equal(weights[1][1:].detach().clone(), torch.ones(1))
        with pytest.raises(RuntimeError, match="memory of several weights was read as one tensor: leave lean out"):
            flat.clone()


def test_writes_reach_the_clean_weight() -> None:
    weight, copied = torch.ones(3, requires_grad=True), torch.zeros(3)

    @torch.no_grad()
    def write() -> None:
        with noisy_reads([weight]):
            weight.mul_(2)
            copied.copy_(weight)
            torch.add(torch.ones(3), torch.ones(3), alpha=3, out=weight)

    with pytest.raises(RuntimeError, match="the weights were changed inside"):
        write()
    assert weight.tolist() == [4, 4, 4]
    assert 0 < (copied - 2).abs().max() < 5 * SIGMA


def test_sparse_gradients_and_views_of_another_type_are_read_as_well() -> None:
    embedding = nn.Embedding(6, 4, sparse=True)
    with noisy_reads([embedding.weight]):
        noisy = embedding.weight.detach().clone()
        loss(embedding, torch.tensor([1, 3])).backward()
        bits = embedding.weight.detach().view(torch.int32)[2:].clone()
    assert torch.equal(bits.view(torch.float32), noisy[2:])
    gradient = embedding.weight.grad
    assert gradient is not None
    assert torch.equal(gradient.coalesce().values(), 2 * noisy[[1, 3]])
