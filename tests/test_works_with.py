"""What people switch on in a training loop, together with DDP and FSDP2: the ranks end where one process ends."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import assert_same_bits, classes
from processes import together
from torch import Tensor, distributed, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from twinboot import Apart, Bootstrap, PairedLoader, Twins, pool_gradients

STEPS = 8


class Adapted(nn.Module):
    """A frozen layer with a trained adapter of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 8), nn.Linear(4, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def model(option: str, seed: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    norm: list[nn.Module] = [nn.BatchNorm1d(8)] if option == "BatchNorm" else []
    first = Adapted() if option == "LoRA" else nn.Linear(4, 8)
    return nn.Sequential(first, *norm, nn.Tanh(), nn.Linear(8, 3))


def wrapped(twins: Twins, way: str, option: str, compiler: Any) -> nn.Module:
    if way == "alone":
        return twins
    if way == "DDP":
        return DistributedDataParallel(twins)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if option == "bf16" else MixedPrecisionPolicy()
    for module in list(twins.modules()):
        if isinstance(module, nn.Linear) and module.weight.requires_grad:  # what is frozen belongs to both twins
            if option == "compile":  # before it is sharded: afterwards PyTorch leaves it as it is
                module.forward = torch.compile(module.forward, backend=compiler)
            fully_shard(module, mp_policy=policy)
    return fully_shard(twins, mp_policy=policy)


def trained(way: str, option: str, scale: float) -> dict[str, Tensor]:
    """Weights and sigma after some steps and a reset; `scale` of the noise. After a comma `way` says how it comes."""
    twins: Twins
    way, _, added = way.partition(", ")
    how: dict[str, Any] = {added: True} if added else {}
    compiler = CompileCounterWithBackend("aot_eager")
    if way == "apart":
        twins = Apart(model(option), init_device_mesh("cpu", (2,), mesh_dim_names=("twin",)))
        call: Any = lambda x: (twins(x),)  # noqa: E731
        loader = PairedLoader(classes(96), Bootstrap(96), 12, share=twins.share, twin=twins.twin)
    else:
        twins = Twins(model(option), groups="unit" if option == "units" else "layer")
        call = wrapped(twins, way, option, compiler)
        loader = PairedLoader(classes(96), Bootstrap(96), 12 if way == "alone" else 12 // distributed.get_world_size())
    if option == "compile" and way != "FSDP2":
        call = torch.compile(call, backend=compiler)
    optimizer = torch.optim.SGD((p for p in twins.parameters() if p.requires_grad), 0.1, momentum=0.9)
    accumulated = 2 if option == "accumulation" else 1
    for number, pair in enumerate(loader, start=1):
        # With FSDP2 its own policy casts; parameters on the way to the ranks are then half as large.
        cast = torch.autocast("cpu", torch.bfloat16, enabled=option == "bf16" and way != "FSDP2")
        with twins.sampled(scale, **how), cast:
            outputs = call(*(x for x, _ in pair))
            assert all(out.dtype == (torch.bfloat16 if option == "bf16" else torch.float32) for out in outputs)
            losses = (F.cross_entropy(out.float(), y) for out, (_, y) in zip(outputs, pair, strict=True))
            (sum(losses) / accumulated).backward()  # type: ignore[union-attr]
        if number % accumulated == 0:
            if option == "pooling":
                pool_gradients(twins, 0.5)
            if option == "clipping":
                for twin in twins.copies:
                    nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            twins.update()
        if number == STEPS:
            break
    # With lean or local noise the model runs uncompiled. With FSDP2 the layers are compiled, inside of local noise.
    assert (compiler.frame_count > 0) == (option == "compile" and (not added or way == "FSDP2"))
    if scale:  # what is computed has the noise in it, inside the block alone
        twins.eval()
        with torch.no_grad(), cast:
            clean = call(*(x for x, _ in pair))
            with twins.sampled(scale, **how):
                noisy = call(*(x for x, _ in pair))
            again = call(*(x for x, _ in pair))
        assert not any(map(torch.equal, clean, noisy))
        assert all(map(torch.equal, clean, again))
    twins.reset()
    estimate = twins.estimate(model(option, seed=9))  # any instance will do
    return {**estimate.state_dict(), "sigma": twins.partition.sigma.clone()}


OPTIONS = ["nothing", "bf16", "accumulation", "clipping", "BatchNorm", "LoRA", "compile"]


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
@pytest.mark.parametrize("option", [*OPTIONS, "pooling"])
def test_ranks_end_where_one_process_ends(way: str, option: str) -> None:
    first, second = together(trained, way, option, 0.0)
    ignored = {name for name in first if "running" in name}  # BatchNorm: each rank has seen its own samples
    assert_same_bits(*({k: v for k, v in found.items() if k not in ignored} for found in (first, second)))
    if option == "BatchNorm":  # which is over a rank's own samples, so the ranks agree, but not with one process
        return
    alone = trained("alone", option, 0.0)
    loose = {"rtol": 0.1, "atol": 0.02} if option == "bf16" else {"rtol": 1e-4, "atol": 1e-5}
    for name, value in alone.items():
        torch.testing.assert_close(first[name], value, **loose)
    if option != "nothing":  # it does something, or its test would mean nothing
        plain = trained("alone", "nothing", 0.0)
        changed = option != "compile"
        assert torch.equal(plain["sigma"], alone["sigma"]) != changed


@pytest.mark.parametrize("way", ["apart", "apart, lean"])
@pytest.mark.parametrize("option", OPTIONS)
def test_twins_in_different_processes_end_where_one_process_ends(way: str, option: str) -> None:
    alone = trained("alone", option, 0.0)
    for found in together(trained, way, option, 0.0):
        assert_same_bits(found, alone)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of PyTorch's own, where a graph ends
@pytest.mark.parametrize(
    ("way", "option"),
    [(way, option) for way in ("DDP", "FSDP2", "apart", "apart, lean") for option in OPTIONS]
    + [
        (f"{way}, local", option) for way in ("DDP", "FSDP2", "apart") for option in ("bf16", "accumulation", "compile")
    ],
)
def test_with_noise_the_ranks_stay_together(way: str, option: str) -> None:
    first, second = together(trained, way, option, 1.0)
    same = {name for name in first if "running" not in name}
    assert_same_bits(*({name: found[name] for name in same} for found in (first, second)))
    assert all(torch.isfinite(value).all() for value in first.values())
