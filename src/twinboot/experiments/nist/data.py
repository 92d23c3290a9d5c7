"""NIST's Statistical Reference Datasets for nonlinear regression: files as they are published, read as models.

A file has a formula such as `y = b1*(1-exp[-b2*x])  +  e`, two starts, certified estimates with standard deviations,
and the data. The formula is read, too: it may use numbers, the parameters, the predictors, pi, arithmetic and a few
functions, and nothing else.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

EMBEDDED = ("Misra1a", "Chwirut2")  # of those files in this package, which are facts of a US agency
LAYOUT = "a directory with the files *.dat of NIST's nonlinear regressions (www.itl.nist.gov/div898/strd)"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sin": torch.sin,
    "cos": torch.cos,
    "arctan": torch.atan,
}
OPERATORS: dict[type[Any], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


@dataclass(frozen=True, eq=False)
class Set:
    """A data set with its formula and what is certified about it."""

    name: str
    level: str  # of difficulty, in NIST's words
    formula: str
    response: str  # as the formula has it, such as log(y)
    starts: Tensor  # [2, p]
    certified: Tensor  # [p]
    deviations: Tensor  # [p], which assume equal variances
    squares: float  # the residual sum of squares
    columns: Mapping[str, Tensor]  # by name: y and the predictors, [n]

    @property
    def predictors(self) -> list[str]:
        return [name for name in self.columns if name != "y"]

    def dataset(self) -> TensorDataset:
        """Inputs [n, predictors] and targets [n]."""
        x = torch.stack([self.columns[name] for name in self.predictors], 1)
        return TensorDataset(x, _value(_parsed(self.response), self.columns))

    def model(self, start: Tensor) -> Curve:
        return Curve(self.formula, self.predictors, start)


class Curve(nn.Module):
    """A formula with parameters b1, b2, and so on.

    >>> Curve("b1 * exp(-b2 * x)", ["x"], torch.tensor([2.0, 1.0]))(torch.tensor([[0.0], [1.0]]))
    tensor([2.0000, 0.7358], grad_fn=<MulBackward0>)
    """

    def __init__(self, formula: str, predictors: list[str], start: Tensor) -> None:
        super().__init__()
        self.tree, self.predictors = _parsed(formula), predictors
        for number, value in enumerate(start, 1):
            self.register_parameter(f"b{number}", nn.Parameter(value.clone()))
        _value(self.tree, self._names(torch.ones(1, len(predictors), dtype=start.dtype)))  # refuses unknown names

    def _names(self, x: Tensor) -> dict[str, Tensor]:
        return {**dict(zip(self.predictors, x.unbind(1), strict=True)), **dict(self.named_parameters())}

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _value(self.tree, self._names(x))
        return found


def _parsed(formula: str) -> ast.expr:
    try:
        return ast.parse(formula.replace("[", "(").replace("]", ")"), mode="eval").body
    except SyntaxError:
        raise ValueError(f"the formula {formula!r} cannot be read.") from None


def _value(node: ast.expr, names: Mapping[str, Tensor]) -> Any:
    """The value of a formula. Anything but arithmetic and known names is refused."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand, names))
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Name) and node.id == "pi":
        return math.pi
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1 and not node.keywords:
        function = FUNCTIONS.get(node.func.id)
        if function is not None:
            return function(_value(node.args[0], names))
    raise ValueError(f"a formula has {ast.unparse(node)!r}, which is no arithmetic, name or function that is known.")


def read(directory: str | None) -> dict[str, Set]:
    """All sets of a directory by name, or without one those of this package."""
    if directory is None:
        folder = resources.files(__package__)
        return {name: parse(folder.joinpath(f"{name}.dat").read_text(), name) for name in EMBEDDED}
    files = sorted(Path(directory).glob("*.dat"))
    if not files:
        raise ValueError(f"{directory} has no *.dat files: it must be {LAYOUT}.")
    found = [parse(path.read_text(errors="replace"), str(path)) for path in files]
    return {one.name: one for one in found}


def parse(text: str, where: str) -> Set:
    """The set in the text of a file."""
    try:
        return _parse(text)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{where} is not a file of NIST's nonlinear regressions: {error}.") from None


def _found(what: str, pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text, re.DOTALL | re.MULTILINE)
    if match is None:
        raise ValueError(f"it has no {what}")
    return match.groups()


def _parse(text: str) -> Set:
    [name] = _found("name", r"Dataset Name:\s+(\w+)", text)
    [level] = _found("level", r"(\w+) Level of Difficulty", text)
    [model] = _found("model", r"^Model:(.*?)^\s+Starting [vV]alues", text)
    response, formula = _found("formula", r"((?:log\[)?y\]?)\s*=(.*?)\+\s*e\s*\Z", model)
    [squares] = _found("sum of squares", r"Residual Sum of Squares:\s+(\S+)", text)
    [observations] = _found("number of observations", r"Number of Observations:\s+(\d+)", text)
    rows = re.findall(r"^ +b\d+ =((?: +\S+){4}) *$", text, re.MULTILINE)
    numbers = torch.tensor([[float(word) for word in row.split()] for row in rows], dtype=torch.float64)
    *_, heading = re.finditer(r"^Data:((?: +\w+)+) *$", text, re.MULTILINE)
    lines = text[heading.end() :].strip().splitlines()
    table = torch.tensor([[float(word) for word in line.split()] for line in lines], dtype=torch.float64)
    if len(table) != int(observations):
        raise ValueError(f"it has {len(table)} rows of data and says {observations}")
    columns = dict(zip(heading[1].split(), table.unbind(1), strict=True))
    return Set(
        name=name,
        level=level.lower(),
        formula=" ".join(formula.split()),
        response=response,
        starts=numbers[:, :2].T.contiguous(),
        certified=numbers[:, 2],
        deviations=numbers[:, 3],
        squares=float(squares),
        columns=columns,
    )
