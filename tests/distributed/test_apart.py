import copy
import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loops import assert_same_bits, classes, mlp, seeded, snapshot
from processes import together
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from twinboot import Apart, Blocks, Bootstrap, PairedLoader, Twins
from twinboot.distributed.exchange import gather
from twinboot.resets import MODES

GROUPS: list[Any] = ["layer", "unit", Blocks((2,))]
SEED = 7
SENT = [(1, None), (3, None), (3, 17), (None, 17)]  # exchange, sketch


def mesh(twins: int = 2, data: int = 1) -> Any:
    return init_device_mesh("cpu", (twins, data), mesh_dim_names=("twin", "data"))


def images() -> nn.Sequential:
    """Convolutions in another order of memory, BatchNorm, a weight that is used twice, one that is frozen, and half
    precision beside single."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        nn.Linear(4, 3),
    ).to(memory_format=torch.channels_last)
    model[7].weight = model[6].weight
    model[8].bias.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(9, dtype=torch.bfloat16)))
    return model


def scatter(modules: Any, first: int = 0, spread: float = 1.0) -> None:
    """Twin `b` gets weights, and BatchNorm statistics, that depend on `b` alone."""
    with torch.no_grad():
        for b, module in enumerate(modules, start=first):
            generator = seeded(b)
            for t in (*module.parameters(), *module.buffers()):
                if t.is_floating_point() and (t.requires_grad or not isinstance(t, nn.Parameter)):
                    t.add_(spread * torch.rand(t.shape, generator=generator).to(t.dtype))


def whole(replicas: int = 2, model: Any = images, **options: Any) -> Twins:
    twins = Twins(model(), replicas, seed=SEED, **options)
    scatter(twins)
    return twins


# --- One process's sigma, resets and estimate, bit for bit


def sigma_of_ranks(replicas: int, most: int) -> list[Tensor]:
    grid, found = mesh(replicas), []
    with at_once(most):
        for groups in GROUPS:
            twins = Apart(images(), grid, groups, SEED)
            scatter(twins, twins.twin)
            twins.update()
            found.append(twins.partition.sigma)
    return found


@contextmanager
def at_once(most: int) -> Iterator[None]:
    """Tensors of more entries are worked on in pieces."""
    with mock.patch("twinboot._core.tensors.AT_ONCE", most), mock.patch("twinboot.distributed.exchange.AT_ONCE", most):
        yield


@pytest.mark.parametrize(("replicas", "most"), [(2, 2**20), (3, 2**20), (2, 20)])
def test_exact_exchange_gives_the_sigma_of_one_process_bit_for_bit(replicas: int, most: int) -> None:
    for sigmas in together(sigma_of_ranks, replicas, most, ranks=replicas):
        for sigma, groups in zip(sigmas, GROUPS, strict=True):
            expected = whole(replicas, groups=groups)
            with at_once(most):
                expected.update()
            assert_same_bits(sigma, expected.partition.sigma)


def reset_each_way(twins: Twins, first: int = 0) -> list[Any]:
    found = []
    for mode in MODES:
        scatter(twins, first)
        twins.update()
        twins.reset(mode)
        twins.reset(mode, generator=seeded(3))
        found.append([[snapshot(twin) for twin in twins], snapshot(twins.estimate(scale=0.7))])
    return found


def reset_ranks(most: int) -> list[Any]:
    twins = Apart(images(), mesh(), seed=SEED)
    with at_once(most):
        return reset_each_way(twins, twins.twin)


@pytest.mark.parametrize("most", [2**20, 20])
def test_resets_and_estimates_are_those_of_one_process_bit_for_bit(most: int) -> None:
    with at_once(most):
        expected = reset_each_way(Twins(images(), seed=SEED))
    for b, rank in enumerate(together(reset_ranks, most)):
        for ([weights], estimate), (both, expected_estimate) in zip(rank, expected, strict=True):
            assert_same_bits(weights, both[b])
            assert_same_bits(estimate, expected_estimate)
    assert [torch.equal(*(twin["0.weight"] for twin in both)) for both, _ in expected] == [False, True, False]


def train_one_process(steps: int = 12) -> dict[str, Any]:
    twins = Twins(mlp(), seed=SEED)
    optimizer = torch.optim.Adam(twins.parameters(), 0.01)
    loader = PairedLoader(classes(), Bootstrap(40), 10, "counts", share=(0, 1))
    for step, pair in enumerate(islice(forever(loader), steps)):
        with twins.sampled(generator=seeded(step)):
            for twin, (x, y, weight) in zip(twins, pair, strict=True):
                (weight * F.cross_entropy(twin(x), y, reduction="none")).mean().backward()
        finish(twins, optimizer, step)
    return {"twins": [snapshot(twin) for twin in twins], "sigma": twins.sigma, "estimate": snapshot(twins.estimate())}


def train_rank(steps: int = 12) -> dict[str, Any]:
    twins = Apart(mlp(), mesh(), seed=SEED)
    optimizer = torch.optim.Adam(twins.parameters(), 0.01)
    loader = PairedLoader(classes(), Bootstrap(40), 10, "counts", share=twins.share, twin=twins.twin)
    for step, [(x, y, weight)] in enumerate(islice(forever(loader), steps)):
        generator = seeded(step)
        for p in list(twins.parameters()) * twins.twin:  # the draws of the twins before this one
            torch.empty_like(p).normal_(generator=generator)
        with twins.sampled(generator=generator):
            (weight * F.cross_entropy(twins(x), y, reduction="none")).mean().backward()
        finish(twins, optimizer, step)
    return {"twins": snapshot(twins[0]), "sigma": twins.sigma, "estimate": snapshot(twins.estimate())}


def forever(loader: PairedLoader) -> Iterator[Any]:
    while True:
        yield from loader


def finish(twins: Twins, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.step()
    optimizer.zero_grad()
    twins.update()
    if step % 5 == 4:
        twins.reset()


def test_a_whole_run_with_noise_and_resets_is_that_of_one_process_bit_for_bit() -> None:
    expected = train_one_process()
    for b, found in enumerate(together(train_rank)):
        assert_same_bits(found["twins"], expected["twins"][b])
        assert_same_bits(found["sigma"], expected["sigma"])
        assert_same_bits(found["estimate"], expected["estimate"])


# --- Several ranks for each twin


def train_four(sketch: int | None) -> dict[str, Any]:
    grid = mesh(2, 2)
    torch.manual_seed(distributed.get_rank())  # each rank builds another model; all use the first one's
    twins = Apart(nn.Sequential(nn.Linear(4, 60), nn.BatchNorm1d(60), nn.Tanh(), nn.Linear(60, 3)), grid, sketch=sketch)
    if sketch:
        twins._remote.exchange = 4
    start = snapshot(twins[0])
    model = DistributedDataParallel(twins, process_group=grid.get_group("data"))
    optimizer = torch.optim.Adam(twins.parameters(), 0.01)
    loader = PairedLoader(classes(), Bootstrap(40), 5, share=twins.share, twin=twins.twin)
    noisy = []
    for step, [(x, y)] in enumerate(islice(forever(loader), 25)):
        with twins.sampled(lean=step % 2 == 1):
            noisy.append(twins[0][0].weight.detach().clone())
            F.cross_entropy(model(x), y).backward()
        finish(twins, optimizer, step)
    estimate = twins.estimate().state_dict()
    del model
    weights = {name: p.detach().clone() for name, p in twins[0].named_parameters()}
    return {"start": start, "weights": weights, "sigma": twins.sigma, "noisy": noisy[-1], "estimate": estimate}


@pytest.mark.parametrize("sketch", [None, 31])
def test_replicas_of_a_twin_stay_the_same_to_the_last_bit_with_noise_of_their_own(sketch: int | None) -> None:
    ranks = together(train_four, sketch, ranks=4)
    for rank in ranks[1:]:
        for what in ("start", "sigma", "estimate"):
            assert_same_bits(rank[what], ranks[0][what])
    assert_same_bits(ranks[1]["weights"], ranks[0]["weights"])
    assert_same_bits(ranks[3]["weights"], ranks[2]["weights"])
    assert not torch.equal(ranks[0]["weights"]["0.weight"], ranks[2]["weights"]["0.weight"])
    assert len({float(rank["noisy"].sum()) for rank in ranks}) == 4
    assert all(float(s) > 0 for s in ranks[0]["sigma"].values())


# --- What is held, and what travels


def noise_in_what_is_read() -> None:
    twins = Apart(images(), mesh(), seed=SEED)
    twins.partition.sigma.fill_(0.1)
    clean, x = snapshot(twins[0]), torch.rand(5, 1, 6, 6)
    names = {name for name, p in twins[0].named_parameters() if p.requires_grad}

    def noisy() -> set[str]:
        return {name for name, p in twins[0].named_parameters() if not torch.equal(p, clean[name])}

    with twins.sampled(lean=True):
        assert twins._store._spare == []
        assert noisy() == names
        first = twins(x)
        first.sum().backward()
        twins(x).sum().backward()  # repeatedly
        assert torch.equal(twins(x), first)
        assert_same_bits(dict(twins[0].state_dict()), {**clean, **dict(twins[0].named_buffers())})
        for refused in (twins.update, twins.reset, twins.estimate):
            with pytest.raises(RuntimeError, match="leave the block first"):
                refused()
        optimizer = torch.optim.SGD(twins.parameters(), 0.1)
        with pytest.raises(RuntimeError, match="call it after the block"):
            optimizer.step()
        late = twins(x)
        shift = next(p for p in twins.parameters() if p.requires_grad).square()  # without the twin's forward pass
    assert not noisy()
    with pytest.raises(RuntimeError, match="inside the block"):
        late.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        shift.sum().backward()
    with twins.sampled(lean=True):
        assert not torch.equal(twins(x), first)  # new noise in each block
    drawn = []
    for seed in (1, 1, 2):
        with twins.sampled(generator=seeded(seed), lean=True):
            drawn.append(twins(x).detach())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    with twins.sampled(0.0, lean=True):
        assert not noisy()

    def failing() -> None:
        with twins.sampled(lean=True):
            twins(x).sum().backward()
            raise ZeroDivisionError

    def nested() -> None:
        with twins.sampled(lean=True), twins.sampled():
            pass

    def changing() -> None:
        with twins.sampled(lean=True), torch.no_grad():
            twins[0].unused.zero_()

    for broken, error, said in (
        (failing, ZeroDivisionError, ""),
        (nested, RuntimeError, "leave the block first"),
        (changing, RuntimeError, "the weights were changed inside"),
    ):
        with pytest.raises(error, match=said):
            broken()
        assert not twins._store.inside


def test_with_lean_noise_operations_read_noise_and_the_weights_stay_clean() -> None:
    together(noise_in_what_is_read)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank hands to each all-gather."""
    sent: list[int] = []
    given = distributed.all_gather

    def gather(out: list[Tensor], t: Tensor, **options: Any) -> None:
        sent.append(t.numel() * t.element_size())
        given(out, t, **options)

    others = dict.fromkeys(
        ("all_gather_into_tensor", "all_reduce", "broadcast", "all_to_all", "send", "isend"), mock.DEFAULT
    )
    with mock.patch.object(distributed, "all_gather", gather), mock.patch.multiple(distributed, **others):
        yield sent
        assert not any(other.called for other in (getattr(distributed, name) for name in others))


def largest_messages() -> list[int]:
    twins = Apart(mlp(40, 30, 5), mesh())
    found = []
    with at_once(100):
        for act in (twins.update, twins.reset, twins.estimate):
            with mock.patch("twinboot.distributed.exchange.gather", side_effect=gather) as sent:
                act()
            found.append(max(call.args[0].numel() for call in sent.call_args_list))
    return found


def test_large_tensors_are_sent_piece_by_piece() -> None:
    for found in together(largest_messages):
        assert len(found) == 3
        assert all(40 < largest <= 100 for largest in found)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell what a process held")
def test_a_process_holds_no_more_than_plain_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the benchmark: with a copy of the clean weights it would be 1.14, and with both twins 1.8."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    memory = importlib.import_module("apart_memory")
    plain, lean = (memory.run(case, "words", 8)["peak"] for case in ("plain training", memory.LEAN))
    assert lean < 1.07 * plain


def traffic(groups: str) -> list[dict[str, Any]]:
    grid, found = mesh(), []
    for exchange, sketch in SENT:
        twins = Apart(mlp(40, 30, 5), grid, groups, exchange=exchange, sketch=sketch)
        scatter(twins, twins.twin)
        per_update, sigmas = [], []
        for _ in range(6):
            with counted() as sent:
                twins.update()
            per_update.append(sum(sent))
            sigmas.append(bool(twins.partition.sigma.any()))
        with counted() as sent:
            twins.reset("mean")
        held = [list(p.shape) for p in twins.parameters()]
        said = twins.bytes_sent()
        found.append({"updates": per_update, "reset": sum(sent), "said": said, "held": held, "sigmas": sigmas})
    return found


@pytest.mark.parametrize("groups", ["layer", "unit"])
def test_bytes_sent_reports_what_is_sent(groups: str) -> None:
    weights = 4 * (40 * 30 + 30 + 30 * 5 + 5)
    # Units of 40 weights are sketched, those of 30 sent.
    numbers = {"layer": 17 + 30 + 17 + 5, "unit": 30 * 17 + 30 + 30 * 5 + 5}[groups]
    for rank in together(traffic, groups):
        for found, (exchange, sketch) in zip(rank, SENT, strict=True):
            between = 4 * numbers if sketch else 0
            expected = [weights if exchange and update % exchange == 0 else between for update in range(1, 7)]
            assert found["updates"] == expected
            assert found["reset"] == weights
            assert found["said"] == {"exchange": weights, "sketch": between, "update": pytest.approx(sum(expected) / 6)}
            assert found["held"] == [list(p.shape) for p in mlp(40, 30, 5).parameters()]  # one model's
        # Where nothing travels, sigma stays as it is.
        assert rank[1]["sigmas"] == [False, False, True, True, True, True]


def sketched_sigmas() -> Tensor:
    twins = Apart(mlp(300, 40, 5), mesh(), exchange=None, sketch=61)
    scatter(twins, twins.twin)
    found = []
    for _ in range(400):
        twins.update()
        found.append(twins.partition.sigma.double().square())
    return torch.stack(found)


def test_a_sketched_sigma_is_equal_on_all_ranks_unbiased_and_has_the_error_of_theory() -> None:
    first, second = together(sketched_sigmas)
    assert_same_bits(first, second)
    expected = whole(model=lambda: mlp(300, 40, 5))
    expected.update()
    exact = expected.partition.sigma.double().square()
    # Only the two weights have errors, of relative variance 2 / 61 at most; their biases are sent as they are.
    assert ((first.mean(0) / exact - 1).abs() < 4 * math.sqrt(2 / 61 / len(first))).all()
    spread = first.var(0) / exact.square()
    assert 0.7 * 2 / 61 < float(spread[0]) < 1.3 * 2 / 61  # a variance of 400 draws has a standard error of 7 %
    assert 0 < float(spread[1]) < 1.3 * 2 / 61


# --- Checkpoints, and what is refused


def stop_and_go_on() -> list[Any]:
    def build() -> tuple[Apart, torch.optim.Optimizer, PairedLoader]:
        twins = Apart(mlp(4, 60), grid, seed=SEED, exchange=4, sketch=31)
        loader = PairedLoader(classes(), Bootstrap(40), 10, share=twins.share, twin=twins.twin)
        return twins, torch.optim.Adam(twins.parameters(), 0.01), loader

    def train(twins: Apart, optimizer: torch.optim.Optimizer, loader: PairedLoader, steps: range) -> list[Any]:
        states = []
        for step, [(x, y)] in zip(steps, forever(loader), strict=False):
            with twins.sampled():
                F.cross_entropy(twins(x), y).backward()
            finish(twins, optimizer, step)
            states.append([copy.deepcopy(part.state_dict()) for part in (twins, optimizer, loader)])
        return states

    grid = mesh()
    straight = build()
    states = train(*straight, steps=range(13))[5]  # within an epoch, and between two exchanges
    resumed = build()
    for part, state in zip(resumed, states, strict=True):
        part.load_state_dict(state)
    train(*resumed, steps=range(6, 13))
    ends = [snapshot(straight[0]), snapshot(resumed[0])]
    distributed.broadcast(states[0]["_extra_state"], src=0)  # that of the first twin
    try:
        resumed[0].load_state_dict(states[0])
    except ValueError as error:
        return [*ends, str(error)]
    return [*ends, ""]


def test_killed_and_resumed_equals_uninterrupted_and_another_twins_state_is_refused() -> None:
    first, second = together(stop_and_go_on)
    for straight, resumed, _ in (first, second):
        assert_same_bits(straight, resumed)
    assert first[2] == ""
    assert "twin was 0 and is 1 here" in second[2]


def refusals() -> list[str]:
    grid = mesh()
    attempts: list[Any] = [
        lambda: Apart(mlp(), init_device_mesh("cpu", (2,), mesh_dim_names=("data",))),
        lambda: Apart(mlp(), init_device_mesh("cpu", (2,))),
        lambda: Apart(mlp(), None),  # type: ignore[arg-type]
        lambda: Apart(mlp(), mesh(1, 2)),
        lambda: Apart(mlp(), grid, exchange=0),
        lambda: Apart(mlp(), grid, exchange="often"),  # type: ignore[arg-type]
        lambda: Apart(mlp(), grid, sketch=True),
        lambda: Apart(mlp(), grid, exchange=None),
        lambda: Apart(mlp(), grid, seed=distributed.get_rank()),
        lambda: Apart(mlp(hidden=8 + distributed.get_rank()), grid),
    ]
    said = []
    for attempt in attempts:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            attempt()
        said.append(str(error.value))
    twins = Apart(mlp(), init_device_mesh("cpu", (2,), mesh_dim_names=("twin",)), exchange=np.int64(2))  # type: ignore[arg-type]
    assert twins.exchange == 2
    assert twins.share == (0, 1)
    with twins.sampled(), pytest.raises(RuntimeError, match=r"update\(\) was called inside sampled"):
        twins.update()
    with torch.no_grad():
        next(twins.parameters()).fill_(math.nan if twins.twin else 1)
    twins.update()
    with pytest.raises(FloatingPointError, match="group '0' are not finite after update 2"):
        twins.update()
    sharded = Apart(mlp(), grid)
    fully_shard(sharded, mesh=grid["data"])
    with pytest.raises(RuntimeError, match="Apart cannot be sharded: use DistributedDataParallel"):
        sharded.update()
    return said


def test_bad_input_gets_one_sentence() -> None:
    for said in together(refusals):
        assert all(s.startswith('mesh must have a dimension "twin", and may have "data", not (') for s in said[:3])
        assert "not ('data',): use init_device_mesh" in said[0]
        assert said[3].startswith("the mesh has room for one twin, but at least two are needed")
        assert said[4] == "exchange must be a whole number of at least 1, not 0; None is for never."
        assert said[5] == "exchange must be a whole number of at least 1, not 'often'; None is for never."
        assert said[6] == "sketch must be a whole number of at least 1, not True; None is for never."
        assert said[7] == "exchange and sketch are both None, so sigma would stay 0: give one of them."
        assert said[8] == said[9]
        assert said[8].startswith("the ranks disagree")


def test_all_ranks_learn_that_one_disagrees() -> None:
    assert together(disagreeing, ranks=4) == ["the ranks disagree"] * 4


def disagreeing() -> str:
    with pytest.raises(ValueError, match="give all of them the same model, with the same frozen weights") as error:
        Apart(mlp(), mesh(2, 2), seed=int(distributed.get_rank() == 0))
    return str(error.value).split(":")[0]


def test_frozen_weights_are_the_callers_own_and_never_written_to() -> None:
    assert together(frozen) == ["the ranks disagree"] * 2


def frozen() -> str:
    same, other = mlp(), mlp(seed=distributed.get_rank())
    for model in (same, other):
        model[0].requires_grad_(False)
    before = snapshot(other)
    Apart(same, mesh())
    with pytest.raises(ValueError, match="with the same frozen weights") as error:
        Apart(other, mesh())
    assert_same_bits(snapshot(other), before)
    return str(error.value).split(":")[0]
