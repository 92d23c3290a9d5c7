"""The same model or function has the same fingerprint in each process, and others have another."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinboot._core.fingerprints import of_function, of_model

POWER = 2


def powered(x: Tensor) -> Tensor:
    return x**POWER


def loss(y: Tensor, t: Tensor) -> Tensor:
    """Squared error."""
    return powered(y - t).mean(1)


def closed(weight: Any) -> Callable[..., Any]:
    def inner(y: Tensor, t: Tensor) -> Tensor:
        return weight * loss(y, t)

    return inner


class Scaled:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, y: Tensor, t: Tensor) -> Tensor:
        return self.by * loss(y, t)


class Net(nn.Module):
    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        self.slope, self.layer = slope, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.layer(x), self.slope)


class Other(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer(x))


DIFFERENT: list[Callable[[], Any]] = [
    lambda: loss,
    lambda: powered,
    lambda: closed(1.0),
    lambda: closed(2.0),
    lambda: closed(torch.ones(3)),
    lambda: closed(torch.zeros(3)),
    lambda: Scaled(1.0),
    lambda: Scaled(2.0),
    lambda: Scaled(2.0).__call__,
    lambda: partial(F.cross_entropy, reduction="none"),
    lambda: partial(F.cross_entropy, reduction="none", label_smoothing=0.1),
    lambda: nn.CrossEntropyLoss(reduction="none"),
    lambda: nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1),
    lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]), reduction="none"),
    lambda: F.l1_loss,
    lambda: lambda y, t: (y - t).abs().mean(1),
    lambda: lambda y, t: ((y - t).abs() + 1).mean(1),
    lambda: lambda y, t: ((y - t).abs() + 2).mean(1),
    lambda: lambda y, t: y if t in {"a", "b", "c"} else t,
]


def test_each_function_has_a_fingerprint_of_its_own() -> None:
    told = [of_function(make()) for make in DIFFERENT]
    assert told == [of_function(make()) for make in DIFFERENT]
    assert len(set(told)) == len(told)
    assert all(" at 0x" not in one for one in told)


def test_another_process_computes_the_same_fingerprints() -> None:
    """With another hash seed, which decides the order of sets of strings."""
    script = "import test_fingerprints as t; print([t.of_function(make()) for make in t.DIFFERENT])"
    known = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    said = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), known]),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert "closed" in said[0]


def test_constants_and_functions_of_the_same_file_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of_function(loss)
    monkeypatch.setitem(globals(), "POWER", 3)
    assert of_function(loss) != before
    monkeypatch.setitem(globals(), "POWER", 2)
    assert of_function(loss) == before
    monkeypatch.setitem(globals(), "powered", torch.abs)
    assert of_function(loss) != before


WEIGHTS: Any = torch.tensor([1.0, 2.0])


def weighted(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y, t, weight=WEIGHTS, reduction="none")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        (np.ones(2), np.zeros(2)),
        (np.array([None, 1]), np.array([None, 2])),
        ({"a": 1}, {"a": 2}),
        (np.float32(1), np.float32(2)),
        ({"a", "b"}, {"a", "c"}),
    ],
)
def test_values_of_the_file_and_of_closures_count(monkeypatch: pytest.MonkeyPatch, one: Any, other: Any) -> None:
    told = []
    for value in (one, other):
        monkeypatch.setitem(globals(), "WEIGHTS", value)
        told.append((of_function(weighted), of_function(closed(value))))
    assert told[0][0] != told[1][0]
    assert told[0][1] != told[1][1]
    monkeypatch.setitem(globals(), "WEIGHTS", one)
    assert of_function(weighted) == told[0][0]


def test_a_mapping_among_the_attributes_of_a_module_counts() -> None:
    told = []
    for value in (1, 1, 2):
        net = Net()
        net.settings = {"k": value}  # type: ignore[assignment]
        told.append(of_model(net))
    assert told[0] == told[1] != told[2]


def test_comments_and_docstrings_do_not_count() -> None:
    told = []
    for text in ('def f(y, t):\n    "One."\n    return y\n', 'def f(y, t):\n    "Two."\n\n    # why\n    return y\n'):
        space: dict[str, Any] = {}
        exec(compile(text, "mine.py", "exec"), space)
        told.append(of_function(space["f"]))
    assert told[0] == told[1]


def test_a_model_is_its_modules_their_attributes_and_their_code() -> None:
    same = of_model(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert same == of_model(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))  # whatever its weights
    assert same["1"] == "Tanh"
    assert of_model(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))["1"] == "ReLU inplace=False"
    assert of_model(nn.Dropout(0.1)) != of_model(nn.Dropout(0.2))
    assert of_model(Net()) == of_model(Net())
    assert of_model(Net()) != of_model(Net(0.2))
    assert of_model(Net())["(model)"].split(" code ")[1] != of_model(Other())["(model)"].split(" code ")[1]


class Acting(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(self.act(x))

    @staticmethod
    def shifted(x: Tensor) -> Tensor:
        return x + 1


class Shifting(Acting):
    @staticmethod
    def shifted(x: Tensor) -> Tensor:
        return x + 2


def test_an_activation_that_is_a_function_or_a_static_method_counts() -> None:
    assert of_model(Acting(F.relu)) == of_model(Acting(F.relu)) != of_model(Acting(F.gelu))
    assert of_model(Acting(torch.tanh)) != of_model(Acting(torch.sigmoid))
    assert of_model(Acting(F.relu))["(model)"].split()[-1] != of_model(Shifting(F.relu))["(model)"].split()[-1]
    layers = [nn.TransformerEncoderLayer(8, 2, activation=act) for act in (F.silu, torch.tanh)]
    assert of_model(layers[0]) != of_model(layers[1])


class Inherited(Scaled):
    pass


@dataclass(frozen=True, slots=True)
class Slotted:
    by: float

    def __call__(self, y: Tensor, t: Tensor) -> Tensor:
        return self.by * loss(y, t)


@pytest.mark.parametrize(
    "make",
    [
        Inherited,
        Slotted,
        lambda by: torch.compile(closed(by)),
        lambda by: closed(np.full(3, by)),
        lambda by: closed({"by": by, 1: "a", "1": []}),
    ],
)
def test_values_that_a_callable_holds_change_its_fingerprint(make: Any) -> None:
    assert of_function(make(1.0)) == of_function(make(1.0)) != of_function(make(2.0))


def test_an_object_that_cannot_be_inspected_is_known_by_its_class() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    endless: list[Any] = []
    endless.append(endless)
    for odd in (Silent(), endless, torch.eye(3).to_sparse(), 10**6000, Slotted, object()):
        assert of_function(closed(odd)) == of_function(closed(odd))


def test_names_of_attributes_are_not_taken_for_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of_function(loss)  # which calls .mean()
    monkeypatch.setitem(globals(), "mean", 0.25)
    assert of_function(loss) == before


def test_the_weights_of_a_model_do_not_count_and_buffers_do() -> None:
    first, second = Net(), Net()
    assert of_function(first.forward) == of_function(second.forward)
    assert of_function(closed(first)) == of_function(closed(second))


def test_functions_that_use_each_other_are_described_once() -> None:
    space: dict[str, Any] = {"f0": lambda: 0, "f1": lambda: 1}
    for n in range(2, 40):  # each calls the two before it
        exec(compile(f"def f{n}():\n    return f{n - 1}() + f{n - 2}()", "mine.py", "exec"), space)
    began = time.perf_counter()
    assert of_function(space["f39"]) == of_function(space["f39"])
    assert time.perf_counter() - began < 5
