"""What a caller may hand over by mistake: values of all kinds, and models, functions and datasets of the caller's own.

An exception that is raised in this file is the caller's own (`trials.verdict`). Functions are named `callers_...`, by
which a call with the wrong number of arguments is known, too.
"""

from __future__ import annotations

import copy
import datetime
import math
import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from twinboot import Bootstrap

ROWS, INPUTS, CLASSES = 40, 2, 3


class CallersNet(nn.Module):
    """A network of the caller's own, so that what fails in it is the caller's own."""

    def __init__(self, inputs: int = INPUTS, outputs: int = CLASSES, answer: Callable[[Tensor], Any] | None = None):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(inputs, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs)
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        found = self.last(self.norm(self.first(x)).relu())
        return found if self.answer is None else self.answer(found)


def net(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    return CallersNet(outputs=outputs)


def rows() -> Tensor:
    return torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(1))


def labels() -> Tensor:
    return torch.arange(ROWS) % CLASSES


def labelled() -> TensorDataset:
    return TensorDataset(rows(), labels())


# Functions


def callers_nothing() -> None: ...


def callers_five(a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    return a


def callers_none(*args: Any, **kwargs: Any) -> None: ...


def callers_word(*args: Any, **kwargs: Any) -> str:
    return "x"


def callers_first(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else None


def callers_error(*args: Any, **kwargs: Any) -> None:
    raise LookupError("the caller's own function failed")


def callers_nan(*args: Any, **kwargs: Any) -> Tensor:
    return torch.full((3,), math.nan)


def callers_generator() -> Iterator[int]:
    yield from range(3)


class CallersClass:
    """Takes nothing."""


class CallersAdam(torch.optim.Adam):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)


class CallersLBFGS(torch.optim.LBFGS):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)


# Datasets


class CallersStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(INPUTS), 0)])


class CallersRows(Dataset[Any]):
    """Samples of a form that the caller chose."""

    def __init__(self, sample: Callable[[int], Any], n: int = ROWS) -> None:
        self.sample, self.n = sample, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


DATASETS: dict[str, Callable[[], Any]] = {
    "an IterableDataset": CallersStream,
    "a list of tensors": lambda: [rows(), labels()],
    "a tensor": rows,
    "a dataset of no rows": lambda: TensorDataset(rows()[:0], labels()[:0]),
    "a dataset of one row": lambda: TensorDataset(rows()[:1], labels()[:1]),
    "a dataset of two rows": lambda: TensorDataset(rows()[:2], labels()[:2]),
    "a dataset without targets": lambda: TensorDataset(rows()),
    "a dataset with float labels": lambda: TensorDataset(rows(), labels().double()),
    "a dataset with labels beyond the classes": lambda: TensorDataset(rows(), labels() + 7),
    "a dataset with negative labels": lambda: TensorDataset(rows(), labels() - 1),
    "a dataset with labels [n, 1]": lambda: TensorDataset(rows(), labels()[:, None]),
    "a dataset with NaN": lambda: TensorDataset(rows() * math.nan, labels()),
    "a dataset with infinity": lambda: TensorDataset(rows() * math.inf, labels()),
    "a dataset of integers": lambda: TensorDataset(rows().long(), labels()),
    "a dataset of complex numbers": lambda: TensorDataset(rows() * 1j, labels()),
    "a dataset on meta": lambda: TensorDataset(rows().to("meta"), labels().to("meta")),
    "a dataset with too many columns": lambda: TensorDataset(rows().repeat(1, 3), labels()),
    "a dataset of words": lambda: CallersRows(lambda i: ("word", "label")),
    "a dataset of None": lambda: CallersRows(lambda i: None),
    "a dataset of mappings": lambda: CallersRows(lambda i: {"x": rows()[i], "y": i % CLASSES}),
    "a dataset of three parts": lambda: CallersRows(lambda i: (rows()[i], rows()[i], i % CLASSES)),
    "a dataset of arrays": lambda: CallersRows(lambda i: (rows()[i].numpy(), i % CLASSES)),
    "a dataset that fails": lambda: CallersRows(callers_error),
    "a dataset that is too short": lambda: CallersRows(lambda i: labelled()[: ROWS // 2][i], ROWS),
    "a subset out of range": lambda: Subset(labelled(), [5, 6, 1000]),
    "a DataLoader": lambda: DataLoader(labelled(), 8),
    "a Bootstrap": lambda: Bootstrap(ROWS),
}

# Models


def _with(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = net()
        return change(model) or model

    return made


def _fill(model: nn.Module, value: float) -> None:
    for p in model.parameters():
        nn.init.constant_(p, value)


MODELS: dict[str, Callable[[], Any]] = {
    "a class of models": lambda: CallersNet,
    "a model without parameters": nn.Identity,
    "a frozen model": _with(lambda m: m.requires_grad_(False)),
    "a model of NaN": _with(lambda m: _fill(m, math.nan)),
    "a model of infinity": _with(lambda m: _fill(m, math.inf)),
    "a model on meta": _with(lambda m: m.to("meta")),
    "a model of float64": _with(lambda m: m.double()),
    "a model of bfloat16": _with(lambda m: m.bfloat16()),
    "a complex model": lambda: nn.Linear(INPUTS, CLASSES, dtype=torch.complex64),
    "a lazy model": lambda: nn.Sequential(nn.LazyLinear(CLASSES)),
    "a model with a parameter of no entries": lambda: nn.Sequential(nn.Linear(INPUTS, 0), nn.Linear(0, CLASSES)),
    "a model of one output": lambda: CallersNet(outputs=1),
    "a model of four outputs": lambda: CallersNet(outputs=4),
    "a model of other inputs": lambda: CallersNet(inputs=7),
    "a model that gives None": lambda: CallersNet(answer=lambda found: None),
    "a model that gives a tuple": lambda: CallersNet(answer=lambda found: (found, found)),
    "a model that gives a number": lambda: CallersNet(answer=lambda found: 1.0),
    "a model that gives a scalar": lambda: CallersNet(answer=lambda found: found.sum()),
    "a model that gives NaN": lambda: CallersNet(answer=lambda found: found * math.nan),
    "a model that gives one row": lambda: CallersNet(answer=lambda found: found[:1]),
    "a model that gives integers": lambda: CallersNet(answer=lambda found: found.long()),
    "a model that gives complex numbers": lambda: CallersNet(answer=lambda found: found + 0j),
    "a model that gives three dimensions": lambda: CallersNet(answer=lambda found: found[..., None]),
    "a model that gives what has no gradient": lambda: CallersNet(answer=lambda found: found.detach()),
    "a model that fails": lambda: CallersNet(answer=callers_error),
    "a state dict": lambda: net().state_dict(),
}

# Values of all kinds

TENSORS: dict[str, Callable[[], Tensor]] = {
    "an empty tensor": lambda: torch.empty(0),
    "a tensor of no rows": lambda: torch.empty(0, INPUTS),
    "a scalar tensor": lambda: torch.tensor(0.5),
    "a tensor NaN": lambda: torch.tensor(math.nan),
    "a tensor of NaN": lambda: torch.full((ROWS, INPUTS), math.nan),
    "a tensor of infinity": lambda: torch.full((ROWS, INPUTS), math.inf),
    "a complex tensor": lambda: torch.zeros(ROWS, INPUTS, dtype=torch.complex64),
    "a bool tensor": lambda: torch.ones(ROWS, dtype=torch.bool),
    "an int tensor": lambda: torch.arange(ROWS),
    "a uint8 tensor": lambda: torch.zeros(ROWS, INPUTS, dtype=torch.uint8),
    "a tensor [5]": lambda: torch.zeros(5),
    "a tensor [3, 4, 5]": lambda: torch.zeros(3, 4, 5),
    "a tensor on meta": lambda: torch.zeros(ROWS, INPUTS, device="meta"),
    "a sparse tensor": lambda: torch.eye(ROWS, INPUTS).to_sparse(),
    "a float16 tensor": lambda: torch.zeros(ROWS, INPUTS, dtype=torch.float16),
    "a tensor of 1e38": lambda: torch.full((ROWS, INPUTS), 1e38),
}

VALUES: dict[str, Callable[[], Any]] = {
    **{repr(v): lambda v=v: v for v in (None, True, False, -1, 0, 1, 7, 2**63, 0.5, -0.5, 1e308, 1j)},
    **{repr(v): lambda v=v: v for v in (math.nan, math.inf, -math.inf)},
    "10**400": lambda: 10**400,
    "-10**400": lambda: -(10**400),
    "np.float32(0.5)": lambda: np.float32(0.5),
    "np.float64(nan)": lambda: np.float64("nan"),
    "np.int64(3)": lambda: np.int64(3),
    "np.True_": lambda: np.bool_(True),
    "a Decimal": lambda: Decimal("0.5"),
    "a Fraction": lambda: Fraction(1, 2),
    "a date": lambda: datetime.date(2020, 1, 1),
    **{repr(v): lambda v=v: v for v in ("", "x", "X", b"x", "\0", "0.5", "meta", "cuda:7", "two\nlines")},
    "1,000 letters": lambda: "a" * 1000,
    "a path": lambda: Path("missing") / "x",
    **{repr(v): lambda v=v: copy.copy(v) for v in ((), (1,), [1, 2], [None], ["a", "b"], [[1], [2, 3]], {"x": 1})},
    "[]": list,
    "{}": dict,
    "set()": set,
    "range(3)": lambda: range(3),
    "40 numbers": lambda: list(range(ROWS)),
    "40 words": lambda: ["a", "b"] * (ROWS // 2),
    "a mixture": lambda: ["a", 1, None, 2.5] * (ROWS // 4),
    "object()": object,
    "a class": lambda: CallersClass,
    "an exception": lambda: ValueError("x"),
    "a module": lambda: math,
    "a slice": lambda: slice(None),
    "...": lambda: ...,
    "a generator": callers_generator,
    "an iterator": lambda: iter([]),
    "torch.float32": lambda: torch.float32,
    "torch.device('meta')": lambda: torch.device("meta"),
    "torch.Generator()": torch.Generator,
    "a function of nothing": lambda: callers_nothing,
    "a function of five": lambda: callers_five,
    "a function that gives None": lambda: callers_none,
    "a function that gives a word": lambda: callers_word,
    "a function that gives its first argument": lambda: callers_first,
    "a function that gives NaN": lambda: callers_nan,
    "a function that fails": lambda: callers_error,
    "an optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1),
    "a class of optimizers": lambda: CallersAdam,
    "LBFGS": lambda: CallersLBFGS,
    "a model": net,
    **TENSORS,
    "an array of objects": lambda: np.array([None, "a", 1] * 4, dtype=object),
    "an array of words": lambda: np.array(["a", "b"] * (ROWS // 2)),
    "an array of dates": lambda: np.zeros(ROWS, "datetime64[s]"),
    "an array of records": lambda: np.zeros(ROWS, [("a", "f4"), ("b", "i4")]),
    "an array of float16": lambda: np.zeros((ROWS, INPUTS), np.float16),
    "a complex array": lambda: np.zeros((ROWS, INPUTS), complex),
    "an array of bools": lambda: np.zeros(ROWS, bool),
    "an array of no entries": lambda: np.zeros(0),
    "an array of no dimension": lambda: np.array(0.5),
    "an array of NaN": lambda: np.full(ROWS, np.nan),
    "a masked array": lambda: np.ma.masked_all(ROWS),
    "an array in another order of bytes": lambda: np.zeros((ROWS, INPUTS), ">f8"),
}


def of_tensor(t: Tensor) -> dict[str, Callable[[], Any]]:
    """What is nearly that tensor."""
    return {
        "the same with NaN": lambda: t * math.nan,
        "the same with infinity": lambda: t * math.inf,
        "the same as integers": lambda: t.long(),
        "the same as float64": lambda: t.double(),
        "the same as float16": lambda: t.half(),
        "the same as complex numbers": lambda: t + 0j,
        "the same as bools": lambda: t.bool(),
        "the same negated": lambda: -t,
        "the same + 0.5": lambda: t + 0.5,
        "the same with one row less": lambda: t[:-1] if t.ndim else t[None],
        "the same with no row": lambda: t[:0] if t.ndim else t[None],
        "the same with a dimension more": lambda: t[..., None],
        "the same with a dimension in front": lambda: t[None],
        "the same flattened": lambda: t.flatten(),
        "the same transposed": lambda: t.mT if t.ndim > 1 else t.repeat(2),
        "the same on meta": lambda: t.to("meta"),
        "the same as sparse": lambda: t.to_sparse(),
        "the same with gradients": lambda: t.double().requires_grad_(),
        "the same as an array": lambda: t.numpy(),
        "the same as a list": lambda: t.tolist(),
        "the same as a tuple": lambda: tuple(t) if t.ndim else (t,),
    }


def of_array(a: np.ndarray[Any, Any]) -> dict[str, Callable[[], Any]]:
    return {
        **of_tensor(torch.from_numpy(a)),
        "the same as objects": lambda: a.astype(object),
        "the same as words": lambda: a.astype(str),
        "the same as a matrix of one column": lambda: a.reshape(-1, 1),
        "the same times 1e300": lambda: a * 1e300,
        "the same times 1e-300": lambda: a * 1e-300,
    }


def of_number(v: float) -> dict[str, Callable[[], Any]]:
    return {
        "the same as a word": lambda: str(v),
        "the same negated": lambda: -v,
        "the same + 0.5": lambda: v + 0.5,
        "the same as a float": lambda: float(v),
        "the same of numpy": lambda: np.asarray(v)[()],
        "the same as a tensor": lambda: torch.tensor(v),
        "the same as an array": lambda: np.array([v]),
        "the same in a list": lambda: [v],
        "10**400": lambda: 10**400,
        "nan": lambda: math.nan,
        "inf": lambda: math.inf,
        "True": lambda: True,
        "0": lambda: 0,
    }


def of_word(word: str) -> dict[str, Callable[[], Any]]:
    return {
        "the same in capitals": lambda: word.upper(),
        "the same with a space": lambda: word + " ",
        "the same as bytes": lambda: word.encode(),
        "the same in a list": lambda: [word],
    }


def of_mapping(given: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Such as a state dict."""
    items = list(given.items())
    return {
        "the same without its first key": lambda: dict(items[1:]),
        "the same without its last key": lambda: dict(items[:-1]),
        "the same with a key more": lambda: {**given, "x": 1},
        "the same with None": lambda: {**given, items[0][0]: None},
        "the same with a word": lambda: {**given, items[-1][0]: "x"},
        "the same with -1": lambda: {**given, items[0][0]: -1},
        "the same with a tensor": lambda: {**given, items[0][0]: torch.zeros(5)},
        "the same as a list": lambda: items,
    }


def near(value: Any) -> dict[str, Callable[[], Any]]:
    """What someone may give in the place of a valid value, and is nearly that."""
    if isinstance(value, Tensor):
        return of_tensor(value.detach())
    if isinstance(value, np.ndarray):
        return of_array(value)
    if isinstance(value, nn.Module):
        return MODELS
    if isinstance(value, (Dataset, DataLoader)):
        return DATASETS
    if isinstance(value, (bool, int, float)):
        return of_number(value)
    if isinstance(value, str):
        return of_word(value)
    if isinstance(value, dict):
        return of_mapping(value)
    return VALUES


def bad(draw: random.Random, valid: Any) -> tuple[str, Callable[[], Any]]:
    """A bad value for the place of a valid one, with its name."""
    values = near(valid) if draw.random() < 0.5 else VALUES
    name = draw.choice(list(values))
    return name, values[name]
