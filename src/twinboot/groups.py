"""Which weights share one sigma.

A grouping is a function of a parameter's name and the parameter. It returns the name of a group, when all entries of
the parameter share one sigma with whatever else bears that name:

    def by_stage(name, parameter):
        return name.split(".")[0]

or a name and integer labels that broadcast against the parameter, when its entries are split among several sigmas of
that group: entry `i` uses `sigma[name][labels[i]]`. `"layer"`, `"tensor"`, `"unit"` and `Blocks` are such functions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ._core.checks import require_types, shown

ROOT = "(model)"  # the group of the parameters that the model itself owns, outside any submodule


class Assignment(NamedTuple):
    """The group of a parameter; labels of its entries, None for one sigma; the shape in which sigmas are shown."""

    group: str
    labels: Tensor | None = None
    shape: tuple[int, ...] | None = None


Grouping = Callable[[str, Tensor], "str | tuple[str, Tensor] | Assignment"]


@dataclass(frozen=True, init=False)
class Blocks:
    """One sigma for each block of neighbouring entries, such as 3 x 3 patches of a field (section 4.3).

    The block covers the last dimensions of a parameter; blocks at the far edges may be smaller. A parameter with fewer
    dimensions than the block is refused, so that no weight gets a patch by accident.

    >>> Blocks((3, 3))("field", torch.zeros(30, 30)).shape
    (10, 10)
    """

    block: tuple[int, ...]

    def __init__(self, block: Sequence[int]) -> None:
        sizes = block if isinstance(block, (tuple, list)) else ()
        if not sizes or any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in sizes):
            raise ValueError(f"Blocks needs whole numbers of at least 1, such as Blocks((3, 3)), not {shown(block)}.")
        object.__setattr__(self, "block", tuple(block))

    def __call__(self, name: str, parameter: Tensor) -> Assignment:
        require_types(Blocks.__call__, locals())
        missing = parameter.ndim - len(self.block)
        if missing < 0:
            raise ValueError(
                f"Blocks({self.block}) needs parameters of at least {len(self.block)} dimensions, but {name!r} has "
                f"shape {tuple(parameter.shape)}; group it by a function of your own."
            )
        block = (1,) * missing + self.block
        grid = tuple(math.ceil(size / b) for size, b in zip(parameter.shape, block, strict=True))
        labels = torch.zeros((), dtype=torch.long, device="cpu")
        for size, b, cells in zip(parameter.shape, block, grid, strict=True):
            labels = labels[..., None] * cells + torch.arange(size, device="cpu") // b
        return Assignment(name, labels, grid)


def assign(model: nn.Module, grouping: str | Grouping) -> dict[str, Assignment]:
    """The group of each trainable parameter, by the parameter's name; each answer of the grouping is checked."""
    rule = _rule(grouping, model)
    return {name: _checked(rule(name, p.detach()), name, p) for name, p in trainable(model)}


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that each twin has a copy of, tied ones once; a sentence where there are none or none usable."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError(
            "the model has no trainable parameters: set requires_grad=True on those that should be twinned."
        )
    for name, p in named:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run one batch through the lazy model first.")
        if not p.is_floating_point():
            raise TypeError(f"parameter {name!r} is {p.dtype}, but twins need real floating-point parameters.")
        if p.numel() == 0:
            raise ValueError(f"parameter {name!r} has no entries: freeze it or remove it.")
    return named


def fixed_entries(model: nn.Module) -> dict[str, Tensor]:
    """Parameter name -> which of its entries never have a gradient, as a mask that broadcasts against it: the padding
    row of an embedding, and what `torch.nn.utils.prune` has masked. In a tied weight another layer may train them."""
    tied = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None or tied[id(p)] > 1:
                continue
            masks = []
            padding = module.padding_idx if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else None
            if padding is not None and name in ("weight", "weight_orig"):
                masks.append(torch.arange(len(p), device="cpu")[:, None] == padding)
            if name.endswith("_orig") and (mask := module._buffers.get(f"{name[:-5]}_mask")) is not None:
                masks.append(mask.cpu() == 0)
            if masks:
                found[names[id(p)]] = torch.stack(torch.broadcast_tensors(*masks)).any(0)
    return found


def layer_of(model: nn.Module, name: str) -> str:
    """The module that the user wrote: a parametrization belongs to the module that carries it."""
    path = name.split(".")[:-1]
    for i, part in enumerate(path):
        if part == "parametrizations" and parametrize.is_parametrized(model.get_submodule(".".join(path[:i]))):
            path = path[:i]
            break
    return ".".join(path)


def _rule(grouping: str | Grouping, model: nn.Module) -> Grouping:
    if callable(grouping):
        return grouping
    if isinstance(grouping, str) and grouping == "tensor":
        return lambda name, parameter: name
    if isinstance(grouping, str) and grouping == "layer":
        return lambda name, parameter: layer_of(model, name) or ROOT
    if isinstance(grouping, str) and grouping == "unit":
        return _Units(model)
    raise ValueError(
        f'unknown groups {shown(grouping)}: use "layer", "tensor", "unit", Blocks(shape) or a function of '
        "(name, parameter)."
    )


class _Units:
    """One sigma per output unit: the entries of a layer at the same place along the output dimension.

    Parameters of a layer with equally many outputs join (a weight and its bias). One with another number of outputs
    is kept apart, under the layer's name and that number.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.outputs: dict[str, int] = {}

    def __call__(self, name: str, parameter: Tensor) -> str | Assignment:
        if parameter.ndim == 0:
            return name
        layer = layer_of(self.model, name)
        labels = self._labels(self.model.get_submodule(layer), parameter)
        if labels is None:
            return name
        outputs = int(labels.max()) + 1
        group = layer or ROOT
        if self.outputs.setdefault(layer, outputs) != outputs:
            group = f"{group}[{outputs}]"
        return Assignment(group, labels, (outputs,))

    @staticmethod
    def _labels(module: nn.Module, parameter: Tensor) -> Tensor | None:
        labels = torch.arange(parameter.shape[0], device="cpu")
        if isinstance(module, nn.modules.conv._ConvTransposeNd) and parameter.ndim > 1:
            # Stored as [in, out / groups, ...]: the outputs lie along dimension 1, one group of inputs after another.
            share = module.out_channels // module.groups
            if parameter.shape[:2] != (module.in_channels, share):
                return None  # the norms of a weight-normed one, which belong to its inputs
            of_input = labels // (module.in_channels // module.groups)
            labels = of_input[:, None] * share + torch.arange(share, device="cpu")
        return labels.view(*labels.shape, *[1] * (parameter.ndim - labels.ndim))


def _checked(answer: object, name: str, parameter: Tensor) -> Assignment:
    if isinstance(answer, str):
        return Assignment(answer)
    if not isinstance(answer, tuple) or len(answer) not in (2, 3) or not isinstance(answer[0], str):
        raise TypeError(
            f"groups must give a name, or a name and labels; for parameter {name!r} it gave {shown(answer)}."
        )
    group, labels, shape = Assignment(*answer)
    if labels is None:
        return Assignment(group)
    if (
        not isinstance(labels, Tensor)
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.dtype == torch.bool
    ):
        raise TypeError(f"the labels of parameter {name!r} must be a tensor of integers, not {shown(labels)}.")
    labels = labels.detach().cpu().long()
    if labels.numel() == 0 or int(labels.min()) < 0:
        raise ValueError(f"the labels of parameter {name!r} must be 0 or more.")
    if shape is not None and int(labels.max()) >= math.prod(shape):
        raise ValueError(f"parameter {name!r} has label {int(labels.max())}, beyond the shape {shape} of its group.")
    missing = parameter.ndim - labels.ndim
    if missing < 0 or any(a not in (1, b) for a, b in zip(labels.shape, parameter.shape[missing:], strict=True)):
        raise ValueError(
            f"the labels of parameter {name!r} have shape {tuple(labels.shape)}, which does not broadcast to its shape "
            f"{tuple(parameter.shape)}."
        )
    return Assignment(group, labels.reshape((1,) * missing + tuple(labels.shape)), shape)
