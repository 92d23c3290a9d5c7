import multiprocessing
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, fit
from twinboot._core import seeds
from twinboot._core.seeds import may_draw, own_randomness, seeded


def test_a_derived_seed_depends_on_every_part_and_their_order() -> None:
    derived = {
        seeds.derive(*parts) for parts in [(0, "a", 1), (0, "a", 2), (1, "a", 0), (0, "b", 1), (0, "a"), ("a", 0)]
    }
    assert len(derived) == 6
    assert seeds.derive(1, 23) != seeds.derive(12, 3)
    assert all(0 <= seed < 2**63 for seed in derived)


def test_a_seed_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"seed must be an integer, not 1.5"):
        Bootstrap(10, seed=1.5)  # type: ignore[arg-type]


def drawn() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())  # noqa: NPY002 (what is tested)


def states() -> tuple[bytes, object, bytes]:
    numpy = np.random.get_state()[1]  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy.tobytes()  # type: ignore[union-attr]


def test_draws_in_the_block_depend_on_the_seed_alone_and_the_generators_stay() -> None:
    before = states()
    found = []
    for seed in (1, 1, 2):
        with seeded(seed):
            found.append(drawn())
    assert found[0] == found[1] != found[2]
    assert states() == before


def test_generators_stay_where_they_were_after_an_error_too() -> None:
    def fail() -> None:
        drawn()
        raise KeyError

    before = states()
    with pytest.raises(KeyError), own_randomness(torch.device("cpu"), 0, "epoch", 1):
        fail()
    assert states() == before


def test_each_purpose_has_draws_of_its_own() -> None:
    found = set()
    for purpose in ((0, 1), (1, 0), (0, "statistics"), (0, 2)):
        with own_randomness(torch.device("cpu"), *purpose):
            found.add(drawn())
    assert len(found) == 4


def test_an_accelerator_of_any_kind_is_seeded_and_gets_its_generator_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions are those that torch.cuda, torch.mps and torch.xpu have; here the generators are on the CPU."""
    first, second = (torch.device("privateuseone", index) for index in range(2))
    generators = {device: torch.Generator().manual_seed(device.index) for device in (first, second)}
    accelerator = SimpleNamespace(
        get_rng_state=lambda device: generators[device].get_state(),
        set_rng_state=lambda state, device: generators[device].set_state(state),
    )
    make = torch.Generator
    monkeypatch.setattr(torch, "privateuseone", accelerator, raising=False)
    monkeypatch.setattr(torch, "Generator", lambda device: make())
    torch.get_device_module.cache_clear()
    before = [generator.get_state() for generator in generators.values()]
    found = []
    for purpose in (1, 1, 2):
        with own_randomness(second, purpose):
            found.append(torch.rand(1, generator=generators[second]).item())
            assert torch.equal(generators[first].get_state(), before[0])
    torch.get_device_module.cache_clear()
    assert found[0] == found[1] != found[2]
    assert [generator.get_state().tolist() for generator in generators.values()] == [state.tolist() for state in before]


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns a thousand times as often as they usually do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_threads_draw_what_each_would_draw_alone_and_the_generators_stay() -> None:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :1])

    def run(seed: int) -> list[float]:
        with seeded(seed):
            model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        return fit(model, data, "regression", epochs=3, batch_size=4, seed=seed, progress=False).history["unseen"]

    alone = [run(seed) for seed in range(3)]
    before = states()
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == alone
    assert states() == before


def test_a_step_of_one_thread_does_not_meet_the_hooks_of_another_that_come_and_go() -> None:
    data = TensorDataset(torch.randn(20, 2), torch.randn(20, 1))
    others: list[threading.Thread] = []

    def run() -> None:
        fit(nn.Linear(2, 1), data, "regression", epochs=1, progress=False)

    def begin_another(*step: object) -> None:
        if not others:
            others.append(threading.Thread(target=run))
            others[0].start()
            others[0].join(0.5)  # enough time for a step that does not wait

    hooks = [register_optimizer_step_pre_hook(hook) for hook in (begin_another, lambda *step: None)]
    try:
        run()  # Python would refuse to go through hooks that change on the way
    finally:
        for hook in hooks:
            hook.remove()
        others[0].join()


def enter() -> None:
    with seeded(0):
        pass


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_that_is_forked_while_another_thread_has_a_block_does_not_wait_for_it() -> None:
    inside, end = threading.Event(), threading.Event()

    def hold() -> None:
        with seeded(1):
            inside.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    worker = multiprocessing.get_context("fork").Process(target=enter)
    worker.start()
    worker.join(20)
    end.set()
    thread.join()
    finished = worker.exitcode == 0
    worker.kill()
    assert finished


class _Custom(nn.Linear):
    """May do anything."""


def _with_hook() -> nn.Module:
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_: torch.rand(1))
    return layer


def _with_forward() -> nn.Module:
    layer = nn.Linear(1, 1)
    layer.forward = lambda x: x + torch.rand(1)
    return layer


@pytest.mark.parametrize(
    ("layer", "draws"),
    [
        (nn.ReLU(), False),
        (nn.BatchNorm1d(1), False),
        (nn.Dropout(0.5), True),
        (nn.RReLU(), True),
        (nn.LSTM(1, 1), True),
        (_Custom(1, 1), True),
        (_with_hook(), True),
        (_with_forward(), True),
    ],
)
def test_only_models_of_known_layers_are_trusted_to_draw_nothing(layer: nn.Module, draws: bool) -> None:
    assert may_draw(nn.Sequential(nn.Linear(1, 1), layer)) is draws


def test_no_layer_that_is_said_to_draw_nothing_draws() -> None:
    inputs = {"1d": torch.ones(4, 4, 8), "2d": torch.ones(4, 4, 8, 8), "3d": torch.ones(4, 4, 8, 8, 8)}
    options: dict[str, Any] = {"Linear": (8, 2), "LayerNorm": (8,), "GroupNorm": (2, 4), "Embedding": (9, 2)}
    options |= {"Unflatten": (1, (2, 2)), "Sequential": (nn.Linear(8, 2),)}
    containers = (nn.ModuleList, nn.ModuleDict)  # they do not run
    for kind in seeds._DRAW_NOTHING.difference(containers):
        name, dimensions = kind.__name__, kind.__name__[-2:]
        given = {"Conv": (4, 2, 3), "Batc": (4,), "Adap": (2,), "MaxP": (2,), "AvgP": (2,)}.get(name[:4], ())
        layer = kind(*options.get(name, given)).train()
        x = inputs.get(dimensions, inputs["1d"])
        before = torch.get_rng_state()
        layer(x.long() if kind is nn.Embedding else x)
        assert torch.equal(torch.get_rng_state(), before), name
