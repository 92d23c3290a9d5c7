import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from twinboot._core.checks import (
    require_known,
    require_number,
    require_one_of,
    require_types,
    require_whole,
    shown,
)


def asked(epochs: int, **options: Any) -> None: ...


def passed_on(num_workers: int) -> None: ...


def test_options_that_are_passed_on_are_known() -> None:
    require_known(["epochs", "num_workers"], asked, passed_on)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("epoch", r"asked has no option 'epoch': did you mean 'epochs'\?$"),
        ("num_worker", r"did you mean 'num_workers'\?$"),
        ("quiet", r"asked has no option 'quiet'\.$"),
        ("options", r"asked has no option 'options'"),  # the name of what is passed on is none itself
    ],
)
def test_unknown_options_are_refused_with_the_most_similar_name(name: str, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        require_known([name], asked, passed_on)


def test_a_value_must_be_one_of_those_known() -> None:
    require_one_of(("a", "b", "c"), "letter", "b")
    with pytest.raises(ValueError, match=r"""^unknown letter 'd': use "a", "b" or "c"\.$"""):
        require_one_of(("a", "b", "c"), "letter", "d")


@pytest.mark.parametrize("value", [1, 2.0, True, "2", None])
def test_a_number_must_be_whole_and_large_enough(value: object) -> None:
    require_whole("copies", 2, 2)
    with pytest.raises(ValueError, match=rf"^copies must be a whole number of at least 2, not {value!r}; a hint\.$"):
        require_whole("copies", value, 2, "; a hint")


def annotated(
    n: int,
    x: float,
    flag: bool,
    path: str | os.PathLike[str] | None,
    kind: Literal["a", "b"],
    make: Callable[[int], int] | None,
    pair: tuple[int, int],
    anything: tuple,  # type: ignore[type-arg]
    models: Sequence[nn.Module],
    t: Tensor,
    free: Any,
) -> None:
    require_types(annotated, locals())


GOOD: dict[str, Any] = {
    "n": 3,
    "x": 0.5,
    "flag": True,
    "path": Path("here"),
    "kind": "a",
    "make": abs,
    "pair": (1, 2),
    "anything": ("a", 1, None),
    "models": [nn.ReLU()],
    "t": torch.zeros(2),
    "free": object(),
}


def test_values_of_the_annotated_types_are_accepted() -> None:
    annotated(**GOOD)
    for change in (
        {"n": np.int64(3)},
        {"x": 1},
        {"x": np.float32(1)},
        {"x": float("nan")},
        {"path": None},
        {"path": "a"},
    ):
        annotated(**GOOD | change)
    annotated(**GOOD | {"make": None, "flag": np.bool_(False), "models": nn.ModuleList([nn.ReLU()])})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("n", True, "n must be a whole number, not True."),
        ("n", 1.0, "n must be a whole number, not 1.0."),
        ("n", 10**400, "n must be a whole number, not 1000"),
        ("x", "1", "x must be a number, not '1'."),
        ("x", 10**400, "x must be a number, not 1000"),
        ("x", torch.zeros(2, 2), "x must be a number, not tensor([[0., 0.], [0., 0.]])."),
        ("flag", 2, "flag must be True or False, not 2."),
        ("path", b"here", "path must be a string, a path or None, not b'here'."),
        ("kind", 5, 'kind must be "a" or "b", not 5.'),
        ("make", 5, "make must be a function or None, not 5."),
        ("pair", (1, 2, 3), "pair must be a tuple of 2, not (1, 2, 3)."),
        ("pair", (1, "2"), "pair must be a tuple of 2, not (1, '2')."),
        ("pair", 1, "pair must be a tuple of 2, not 1."),
        ("models", [5], "models must be a sequence, each a torch.nn.Module, not [5]."),
        ("models", "x", "models must be a sequence, each a torch.nn.Module, not 'x'."),
        ("t", [0.0], "t must be a tensor, not [0.0]."),
    ],
)
def test_other_values_are_refused_in_one_sentence(name: str, value: Any, said: str) -> None:
    with pytest.raises(TypeError) as refused:
        annotated(**GOOD | {name: value})
    assert str(refused.value).startswith(said[:60])
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize("value", [None, True, "1", 1j, 10**400, torch.zeros(1), torch.tensor(True)])
def test_values_that_are_not_numbers_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^noise must be a number, not .*\.$"):
        require_number("noise", value)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, torch.tensor])
def test_infinity_of_any_type_is_refused(kind: Any) -> None:
    require_number("noise", kind(1.0))
    with pytest.raises(ValueError, match=r"^noise must be a finite number of at least 0, not .*inf.*\.$"):
        require_number("noise", kind(float("inf")))


def test_a_value_is_shown_on_one_line_without_its_address() -> None:
    assert shown(lambda: 0) == "a function"
    assert shown(object()) == "an object"
    assert "\n" not in shown(torch.zeros(9, 9))
    assert len(shown("x" * 1000)) < 100
