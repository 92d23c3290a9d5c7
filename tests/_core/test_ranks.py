from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from loops import assert_same_bits, classes, mlp, seeded, snapshot
from processes import together
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from twinboot import Blocks, Bootstrap, Estimate, PairedLoader, Twins, fit
from twinboot._core import ranks


def test_one_process_is_rank_0_of_1_and_adds_nothing_to_a_seed() -> None:
    assert ranks.rank_and_size() == (0, 1)
    assert ranks.own() == ()


def test_each_process_knows_its_share() -> None:
    assert together(asked, ranks=3) == [[(0, 3), ()], [(1, 3), (1,)], [(2, 3), (2,)]]


def asked() -> list[tuple[int, ...]]:
    return [ranks.rank_and_size(), ranks.own()]


def test_ranks_fit_one_estimate_and_go_on_from_the_checkpoint_of_the_first(tmp_path: Path) -> None:
    whole = together(fitted, 4, None)
    assert_same_bits(whole[0], whole[1])
    assert whole[0]["train"][-1] < whole[0]["train"][0]
    folder = tmp_path / "run"
    together(fitted, 2, str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["epoch-1.pt", "epoch-2.pt", "log-0.csv"]
    for continued in together(fitted, 4, str(folder)):
        assert_same_bits(continued, whole[0])


def fitted(epochs: int, folder: str | None) -> dict[str, Any]:
    if folder:
        Path(folder).mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    x = torch.randn(90, 4, generator=seeded(1))
    data = TensorDataset(x, (x[:, 0] > 0).long())
    log = f"{folder}/log-{ranks.rank_and_size()[0]}.csv" if folder else None
    options: dict[str, Any] = {"progress": False, "optimizer": lambda p: torch.optim.Adam(p, 0.02)}
    found = fit(model, data, epochs=epochs, batch_size=8, checkpoint=folder, log=log, **options)
    del found.history["seconds"]
    return {**found.history, "best": found.best_epoch, "estimate": found.estimate.state_dict()}


def test_the_mean_over_ranks() -> None:
    assert together(mean_of_ranks, ranks=3) == [1.0] * 3


def mean_of_ranks() -> float:
    own = torch.tensor(float(ranks.rank_and_size()[0]))
    found = ranks.mean(own).item()
    assert own.item() == ranks.rank_and_size()[0]
    return found


def test_all_ranks_refuse_checkpoints_that_differ(tmp_path: Path) -> None:
    for said in together(refused, str(tmp_path)):
        assert said == f"the ranks do not find the same checkpoints: {tmp_path}/"


def refused(folder: str) -> str:
    own = Path(folder) / str(ranks.rank_and_size()[0])  # as without a common disk, where the first rank alone writes
    own.mkdir()
    fitted(1, str(own))
    with pytest.raises(ValueError, match="must be one directory for all") as error:
        fitted(2, str(own))
    return str(error.value).split(own.name + " must")[0]


def sharded(twins: Twins, **options: Any) -> Twins:
    """As in the documentation of PyTorch: the layers, then the whole."""
    for module in list(twins.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    return fully_shard(twins)


def apart(groups: Any = "layer", hidden: int = 8) -> Twins:
    """Twins with different weights, equal in each process, and their sigma."""
    twins = Twins(mlp(hidden=hidden), groups=groups)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in twins.parameters():
            p.add_(torch.randn(p.shape, generator=generator))
    twins.update()
    return twins


def train(twins: Twins, steps: int, call: Any = None, scale: float = 1.0, loader: PairedLoader | None = None) -> Any:
    optimizer = torch.optim.Adam(twins.parameters(), 0.01)
    loader = loader or PairedLoader(classes(48), Bootstrap(48), 6)
    call, done = call or twins, 0
    while done < steps:
        for pair in loader:
            step(twins, call, optimizer, pair, scale)
            done += 1
            if done % 3 == 0:
                twins.reset("sample" if done % 2 else "centered")
            if done == steps:
                break
    return optimizer


def step(twins: Twins, call: Any, optimizer: torch.optim.Optimizer, pair: Any, scale: float = 1.0) -> None:
    with twins.sampled(scale):
        outputs = call(*(x for x, _ in pair))
        sum(F.cross_entropy(output, y) for output, (_, y) in zip(outputs, pair, strict=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
    twins.update()


def full(twins: nn.Module) -> dict[str, Tensor]:
    found = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in twins.named_parameters()}
    return {name: p.detach().clone() for name, p in found.items()}


@pytest.mark.parametrize("groups", ["layer", "tensor", "unit", Blocks((3,))], ids=str)
@pytest.mark.parametrize(("ranks", "most"), [(2, 2**20), (3, 2**20), (2, 10)])
def test_sigma_and_resets_of_shards_are_those_of_one_process(groups: Any, ranks: int, most: int) -> None:
    twins = apart(groups)
    sigma = twins.sigma
    resets = {}
    for mode in ("sample", "mean", "centered"):
        twins = apart(groups)
        with mock.patch("twinboot._core.tensors.AT_ONCE", most):
            twins.reset(mode)  # type: ignore[arg-type]
        resets[mode] = full(twins)
    for found in together(sigma_and_resets, groups, most, ranks=ranks):
        for name, value in sigma.items():
            torch.testing.assert_close(found["sigma"][name], value)  # sums in another order
        for mode, weights in resets.items():
            torch.testing.assert_close(found[mode], weights)


def sigma_and_resets(groups: Any, most: int) -> dict[str, Any]:
    twins = sharded(apart(groups))
    twins.partition.sigma.zero_()
    twins.update()
    found: dict[str, Any] = {"sigma": twins.sigma}
    for mode in ("sample", "mean", "centered"):
        twins = sharded(apart(groups))
        with mock.patch("twinboot._core.tensors.AT_ONCE", most):
            twins.reset(mode)  # type: ignore[arg-type]
        found[mode] = full(twins)
    return found


def test_sigma_is_the_same_on_all_ranks_to_the_last_bit() -> None:
    first, *others = together(sigma_after_training, ranks=3)
    for other in others:
        assert_same_bits(first, other)
    assert all(value > 0 for value in first.values())


def sigma_after_training() -> dict[str, Tensor]:
    twins = sharded(Twins(mlp()))
    train(twins, 7)
    return twins.sigma


def test_without_noise_shards_train_as_one_process_does() -> None:
    alone = Twins(mlp())
    train(alone, 9, scale=0.0, loader=PairedLoader(classes(48), Bootstrap(48), 12))
    for found in together(trained_without_noise):
        for name, weights in full(alone).items():
            torch.testing.assert_close(found[name], weights, rtol=1e-4, atol=1e-5)


def trained_without_noise() -> dict[str, Tensor]:
    twins = sharded(Twins(mlp()))
    train(twins, 9, scale=0.0)
    return full(twins)


def test_each_shard_has_its_own_noise_and_is_restored_bit_for_bit() -> None:
    for found in together(noise_of_shards):
        noise = found["noise"]
        assert noise.numel() == 2 * sum(p.numel() for p in mlp(hidden=64).parameters())
        assert abs(noise.mean()) < 4 / noise.numel() ** 0.5
        assert abs(noise.var() - 1) < 4 * (2 / noise.numel()) ** 0.5
        assert found["halves apart"] > 0.5  # equal seeds would make both halves of a tensor equal
        assert_same_bits(found["before"], found["after"])
        assert_same_bits(found["before"], found["after an error"])
        assert_same_bits(found["before"], found["state inside"])


def noise_of_shards() -> dict[str, Any]:
    twins = sharded(apart("tensor", hidden=64))
    twins.partition.sigma.fill_(1.0)
    before = full(twins)
    x = torch.zeros(2, 4)
    with twins.sampled():
        inside = full(twins)
        state = {name: t.full_tensor() for name, t in twins.state_dict().items() if hasattr(t, "full_tensor")}
        twins(x, x)  # leaves whole weights in memory, which no backward pass frees
    found = {"before": before, "after": full(twins), "state inside": state}
    clean = twins(x, x)
    torch.testing.assert_close(clean, tuple(twin(x) for twin in apart("tensor", hidden=64)))
    with pytest.raises(ValueError, match="2 twins take 2 inputs"), twins.sampled():
        twins(x)
    found["after an error"] = full(twins)
    differences = {name: inside[name] - before[name] for name in before}
    weight = differences["copies.0.0.weight"]
    found["halves apart"] = (weight[:32] - weight[32:]).abs().mean().item()
    found["noise"] = torch.cat([d.flatten() for d in differences.values()])
    return found


def test_the_estimate_of_shards_is_whole_on_each_rank() -> None:
    wanted = apart().estimate()
    for found in together(estimate_of_shards):
        assert "sharded twins cannot be copied: call estimate(model)" in found.pop("refused")
        torch.testing.assert_close(found, wanted.state_dict())


def estimate_of_shards() -> dict[str, Any]:
    twins = sharded(apart())
    with pytest.raises(RuntimeError) as refused:
        twins.estimate()
    with pytest.raises(RuntimeError, match="sharded twins cannot be copied"):
        twins.unstack()
    left_whole = sharded(apart(), reshard_after_forward=False)
    left_whole(torch.ones(2, 4), torch.ones(2, 4))
    assert all(isinstance(w, DTensor) for w in left_whole.weights().values())
    estimate = twins.estimate(mlp(seed=9))
    assert isinstance(estimate, Estimate)
    return {**estimate.state_dict(), "refused": str(refused.value)}


@pytest.mark.parametrize("how", ["one layer", "two copies of the shards"])
def test_sigma_where_only_a_part_is_sharded_or_shards_have_copies(how: str) -> None:
    wanted = apart("unit").sigma
    for found in together(sigma_of_some_shards, how, ranks=4):
        torch.testing.assert_close(found, wanted)


def sigma_of_some_shards(how: str) -> dict[str, Tensor]:
    twins = apart("unit")
    if how == "one layer":
        for twin in twins:
            fully_shard(twin[0])
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        for twin in twins:
            fully_shard(twin, mesh=mesh)
    twins.partition.sigma.zero_()
    twins.update()
    return twins.sigma


def test_a_users_method_named_reshard_is_not_called() -> None:
    assert together(update_of_one_with_reshard) == [True, True]


class Resharding(nn.Linear):
    def reshard(self, plan: Any) -> None:
        raise AssertionError


def update_of_one_with_reshard() -> bool:
    twins = Twins(Resharding(2, 2))
    with twins.sampled():
        pass
    twins.update()
    return True


def test_an_estimate_in_a_given_model_needs_no_shards() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    twins = Twins(model)
    twins(torch.randn(5, 2), torch.randn(5, 2))
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    before = snapshot(other)
    assert_same_bits(twins.estimate(other).state_dict(), twins.estimate().state_dict())
    assert_same_bits(snapshot(other), before)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_sharded_checkpoint_goes_on_with_another_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    [reference, _] = together(write_and_go_on, str(tmp_path))
    for found in together(read_and_go_on, str(tmp_path), ranks=ranks):
        assert_same_bits(found["read"], reference["written"])
        torch.testing.assert_close(found["end"], reference["end"], rtol=1e-4, atol=1e-5)


def parts(twins: Twins, optimizer: torch.optim.Optimizer, loader: PairedLoader) -> dict[str, Any]:
    model, steps = get_state_dict(twins, optimizer)
    return {"twins": model, "optimizer": steps, "loader": loader.state_dict()}


def loader_of_twelve() -> PairedLoader:
    return PairedLoader(classes(48), Bootstrap(48), 12 // distributed.get_world_size())


def go_on(twins: Twins, optimizer: torch.optim.Optimizer, loader: PairedLoader) -> dict[str, Tensor]:
    for pair in loader:
        step(twins, twins, optimizer, pair, scale=0.0)  # noise is each rank's own
    twins.reset()
    return full(twins)


def write_and_go_on(folder: str) -> dict[str, Any]:
    twins, loader = sharded(Twins(mlp())), loader_of_twelve()
    optimizer = train(twins, 5, loader=loader)  # noise included, and in the middle of an epoch
    checkpoint.save(parts(twins, optimizer, loader), checkpoint_id=folder)
    written = full(twins)
    loader.load_state_dict(loader.state_dict())  # so that the epoch is continued
    return {"written": written, "end": go_on(twins, optimizer, loader)}


def read_and_go_on(folder: str) -> dict[str, Any]:
    twins, loader = sharded(Twins(mlp(seed=5))), loader_of_twelve()
    optimizer = torch.optim.Adam(twins.parameters(), 0.01)
    state = parts(twins, optimizer, loader)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(twins, optimizer, model_state_dict=state["twins"], optim_state_dict=state["optimizer"])
    loader.load_state_dict(state["loader"])
    return {"read": full(twins), "end": go_on(twins, optimizer, loader)}


@pytest.mark.parametrize("stacked", [False, True])
def test_ranks_of_ddp_hold_the_same_bits_after_many_steps_and_resets(stacked: bool) -> None:
    first, second = together(trained_with_ddp, stacked)
    assert_same_bits(first["state"], second["state"])
    assert not torch.equal(first["noise"], second["noise"])


def trained_with_ddp(stacked: bool) -> dict[str, Any]:
    twins = Twins(mlp(), stacked=stacked)
    train(twins, 40, DistributedDataParallel(twins))
    with twins.sampled():
        noisy = next(iter(twins.weights().values())) if stacked else next(twins.parameters())  # type: ignore[operator]
        noise = noisy.detach() - (next(twins.parameters()).detach() if stacked else twins._store._spare[0])
    return {"state": snapshot(twins), "noise": noise}


def test_without_noise_ddp_trains_as_one_process_does() -> None:
    alone = Twins(mlp())
    train(alone, 9, scale=0.0, loader=PairedLoader(classes(48), Bootstrap(48), 12))
    for found in together(trained_with_ddp_without_noise):
        torch.testing.assert_close(found, full(alone), rtol=1e-4, atol=1e-5)


def trained_with_ddp_without_noise() -> dict[str, Tensor]:
    twins = Twins(mlp())
    train(twins, 9, DistributedDataParallel(twins), scale=0.0)
    return full(twins)
