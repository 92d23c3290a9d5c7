"""Which weights share one sigma.

A grouping is a function of a parameter's name and the parameter. It returns the name of a group, if all entries of the
parameter share one sigma. Parameters with the same group name share it, too:

    def by_stage(name, parameter):
        return name.split(".")[0]

Or it returns a name and integer labels that broadcast against the parameter, if the group has several sigmas: entry `i`
then uses `sigma[name][labels[i]]`. `Blocks` is such a function, and `KINDS` holds those that are chosen by name. To add
a kind, add an entry there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ._core.checks import is_whole, require_number, require_types, shown
from ._core.ranks import cut, holders, is_sharded, summed
from ._core.tensors import checksum, is_integer, split, wide

ROOT = "(model)"  # the group of the parameters that the model itself owns, outside any submodule
Shape = tuple[int, ...]


class Assignment(NamedTuple):
    """The group of a parameter, the labels of its entries (None: one sigma for all), and the shape of the sigmas."""

    group: str
    labels: Tensor | None = None
    shape: Shape | None = None


Grouping = Callable[[str, Tensor], "str | tuple[str, Tensor] | Assignment"]


@dataclass(frozen=True, init=False)
class Blocks:
    """One sigma for each block of neighbouring entries, such as 3 x 3 patches of a field (section 4.3).

    The block covers the last dimensions of a parameter. Blocks at the far edges may be smaller. A parameter with fewer
    dimensions than the block is refused.

    >>> Blocks((3, 3))("field", torch.zeros(30, 30)).shape
    (10, 10)
    """

    block: Shape

    def __init__(self, block: Sequence[int]) -> None:
        sizes = block if isinstance(block, (tuple, list)) else ()
        if not sizes or not all(is_whole(b) and b >= 1 for b in sizes):
            raise ValueError(f"Blocks needs whole numbers of at least 1, such as Blocks((3, 3)), not {shown(block)}.")
        object.__setattr__(self, "block", tuple(map(int, block)))

    def __call__(self, name: str, parameter: Tensor) -> Assignment:
        require_types(Blocks.__call__, locals())
        missing = parameter.ndim - len(self.block)
        if missing < 0:
            raise ValueError(
                f"Blocks({self.block}) needs parameters of at least {len(self.block)} dimensions, but {name!r} has "
                f"shape {tuple(parameter.shape)}: group it by a function of your own."
            )
        block = (1,) * missing + self.block
        grid = tuple(math.ceil(size / b) for size, b in zip(parameter.shape, block, strict=True))
        labels = torch.zeros((), dtype=torch.long, device="cpu")
        for size, b, cells in zip(parameter.shape, block, grid, strict=True):
            labels = labels[..., None] * cells + torch.arange(size, device="cpu") // b
        return Assignment(name, labels, grid)


def layer_of(model: nn.Module, name: str) -> str:
    """The module of a parameter. The parameters of a parametrization belong to the module that carries it."""
    path = name.split(".")[:-1]
    for i, part in enumerate(path):
        if part == "parametrizations" and parametrize.is_parametrized(model.get_submodule(".".join(path[:i]))):
            return ".".join(path[:i])
    return ".".join(path)


def _each_weight(name: str, parameter: Tensor) -> Assignment:
    labels = torch.arange(parameter.numel(), device="cpu")
    return Assignment(name, labels.view(parameter.shape), tuple(parameter.shape))


def _each_unit(model: nn.Module) -> Grouping:
    """The entries of a layer at the same place along the output dimension.

    Parameters of a layer with the same number of outputs, such as a weight and its bias, share their units. One with
    another number of outputs has a group of its own, named after the layer and that number.
    """
    outputs_of: dict[str, int] = {}

    def unit(name: str, parameter: Tensor) -> str | Assignment:
        layer = layer_of(model, name)
        module, labels = model.get_submodule(layer), torch.arange(len(parameter) if parameter.ndim else 0, device="cpu")
        if isinstance(module, nn.modules.conv._ConvTransposeNd) and parameter.ndim > 1:
            # Stored as [in, out / groups, ...]: the outputs lie along dimension 1, one group of inputs after another.
            outputs = module.out_channels // module.groups
            if parameter.shape[:2] != (module.in_channels, outputs):
                return name  # the norms of weight_norm, which belong to the inputs
            of_input = labels // (module.in_channels // module.groups)
            labels = of_input[:, None] * outputs + torch.arange(outputs, device="cpu")
        if not len(labels):
            return name
        number, group = int(labels.max()) + 1, layer or ROOT
        if outputs_of.setdefault(layer, number) != number:
            group = f"{group}[{number}]"
        return Assignment(group, labels.view(*labels.shape, *[1] * (parameter.ndim - labels.ndim)), (number,))

    return unit


# Name of a kind -> a function that makes the grouping of a model. With "weight" and two twins, sigma is a very noisy
# estimate: it comes from one difference.
KINDS: dict[str, Callable[[nn.Module], Grouping]] = {
    "layer": lambda model: lambda name, parameter: layer_of(model, name) or ROOT,  # as in the paper
    "tensor": lambda model: lambda name, parameter: name,
    "unit": _each_unit,
    "weight": lambda model: _each_weight,
}


def assign(model: nn.Module, grouping: str | Grouping) -> dict[str, Assignment]:
    """Name of each trainable parameter -> its group. What the grouping returns is checked."""
    if not callable(grouping):
        require_kind(grouping)
    rule = grouping if callable(grouping) else KINDS[grouping](model)
    return {name: _as_assignment(rule(name, p.detach()), name, p) for name, p in _trainable(model)}


def require_kind(grouping: str) -> None:
    if not isinstance(grouping, str) or grouping not in KINDS:
        kinds = ", ".join(f'"{kind}"' for kind in KINDS)
        raise ValueError(
            f"unknown groups {shown(grouping)}: use {kinds}, Blocks(shape) or a function of (name, parameter)."
        )


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that each twin has a copy of, tied ones once."""
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not found:
        raise ValueError("the model has no trainable parameters: set requires_grad=True on those to train.")
    for name, p in found:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run one batch through the lazy model first.")
        if not p.is_floating_point():
            raise TypeError(f"parameter {name!r} is {p.dtype}, but twins need real floating-point parameters.")
        if p.numel() == 0:
            raise ValueError(f"parameter {name!r} has no entries: freeze it or remove it.")
    return found


def _as_assignment(answer: object, name: str, parameter: Tensor) -> Assignment:
    if isinstance(answer, str):
        return Assignment(answer)
    if not isinstance(answer, tuple) or len(answer) not in (2, 3) or not isinstance(answer[0], str):
        raise TypeError(
            f"groups must return a name, or a name and labels; for parameter {name!r} it returned {shown(answer)}."
        )
    group, labels, shape = Assignment(*answer)
    if labels is None:
        return Assignment(group)
    if not isinstance(labels, Tensor) or not is_integer(labels):
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


def fixed_entries(model: nn.Module) -> dict[str, Tensor]:
    """Parameter name -> mask of its entries that never have a gradient; it broadcasts against the parameter.

    They are the padding row of an embedding and what `torch.nn.utils.prune` masks. An entry of a tied weight is fixed
    if no layer trains it. If the model uses the weight of an embedding outside of the embedding, that is not noticed.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    of_owners: dict[str, list[Tensor]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            masks = [torch.zeros(1, dtype=torch.bool, device="cpu")]
            padding = module.padding_idx if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else None
            if padding is not None and name in ("weight", "weight_orig"):
                masks.append(torch.arange(len(p), device="cpu")[:, None] == padding)
            if name.endswith("_orig") and (mask := module._buffers.get(f"{name[:-5]}_mask")) is not None:
                masks.append(mask.cpu() == 0)
            of_owners.setdefault(names[id(p)], []).append(torch.stack(torch.broadcast_tensors(*masks)).any(0))
    found = {name: torch.stack(torch.broadcast_tensors(*masks)).all(0) for name, masks in of_owners.items()}
    return {name: mask for name, mask in found.items() if bool(mask.any())}


class Partition(nn.Module):
    """The sigmas of a model in one vector, and which entry uses which. A module, so that labels move with the weights.

    Args:
        groups: group name -> the shape of its sigmas.
        parameters: name of each trainable parameter -> its shape.
        owners: for each parameter the index of its sigma, or labels that hold the index for each entry.
        sigma: all sigmas, group by group.
        fixed: see `fixed_entries`.
    """

    sigma: Tensor
    sizes: Tensor  # for each sigma, how many trained entries use it
    _owners: Tensor

    def __init__(
        self,
        groups: Mapping[str, Shape],
        parameters: Mapping[str, Shape],
        owners: Sequence[int | Tensor],
        sigma: Tensor,
        fixed: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self.groups = {name: tuple(shape) for name, shape in groups.items()}
        self.parameter_shapes = {name: tuple(shape) for name, shape in parameters.items()}
        self._whole = {i: owner for i, owner in enumerate(owners) if isinstance(owner, int)}
        self._labelled = [i for i in range(len(owners)) if i not in self._whole]
        self._fixed = [i for i, name in enumerate(self.parameter_shapes) if name in fixed]
        number = sum(map(math.prod, self.groups.values()))
        sizes, untrained = (torch.zeros(number, dtype=torch.long, device="cpu") for _ in range(2))
        for i, (owner, (name, shape)) in enumerate(zip(owners, self.parameter_shapes.items(), strict=True)):
            places = torch.as_tensor(owner, device="cpu")
            entries = math.prod(shape) // places.numel()  # of the parameter, for each label
            sizes.index_add_(0, places.flatten(), torch.full_like(places.flatten(), entries))
            if isinstance(owner, Tensor):
                self.register_buffer(f"labels_{i}", owner, persistent=False)
            if name in fixed:
                self.register_buffer(f"fixed_{i}", fixed[name].detach().clone(), persistent=False)
                of_fixed = places.broadcast_to(shape)[fixed[name].cpu().broadcast_to(shape)]
                untrained.index_add_(0, of_fixed, torch.ones_like(of_fixed))
        for group, own in self.by_group(sizes).items():
            if (empty := (own.flatten() == 0).nonzero()).numel():
                raise ValueError(
                    f"label {int(empty[0])} of group {group!r} has no entries: use 0, 1, 2, ... without gaps."
                )
        self.register_buffer("sigma", sigma)
        # Without a trained entry the size is 1: sigma is then 0, and not 0 / 0.
        self.register_buffer("sizes", (sizes - untrained).clamp_(min=1), persistent=False)
        # On the device of the sums, so that no index is moved at each update. Labelled parameters do not use it.
        places = torch.tensor([self._whole.get(i, 0) for i in range(len(owners))], dtype=torch.long, device="cpu")
        self.register_buffer("_owners", places, persistent=False)

    @classmethod
    def of(cls, model: nn.Module, grouping: str | Grouping) -> Partition:
        """The partition of a model's trainable parameters by a grouping. Sigma is 0."""
        assigned = assign(model, grouping)
        groups = _group_shapes(assigned)
        *starts, number = accumulate(map(math.prod, groups.values()), initial=0)
        first = dict(zip(groups, starts, strict=True))
        owners = [first[a.group] if a.labels is None else a.labels + first[a.group] for a in assigned.values()]
        parameters = {name: model.get_parameter(name) for name in assigned}
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters.values()) else torch.float32
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        partition = cls(groups, shapes, owners, torch.zeros(number, dtype=dtype, device="cpu"), fixed_entries(model))
        return partition.to(next(iter(parameters.values())).device)

    def by_group(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat vector as group name -> its part, in the group's shape."""
        parts = flat.split([math.prod(shape) for shape in self.groups.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.groups.items(), parts, strict=True)}

    def scaled(self, scale: float) -> Partition:
        """A copy with all sigmas multiplied by `scale`."""
        require_number("scale", scale)
        scaled = copy.copy(self)  # labels and sizes do not change, and are shared
        scaled._buffers = {**self._buffers, "sigma": self.sigma * scale}
        return scaled

    def snapshot(self) -> dict[str, Tensor]:
        """Group name -> a copy of its sigmas."""
        return self.by_group(self.sigma.clone())

    def expand(self, like: Sequence[Tensor], scale: float = 1.0, of: Tensor | None = None) -> list[Tensor]:
        """For each parameter, the sigma of its entries: a tensor on the parameter's device that broadcasts against it,
        or against the local part of a sharded one. Sigma is 0 where no gradient reaches. `of` replaces sigma by another
        vector with one value for each sigma."""
        sigma = self.sigma if of is None else of
        sigma = sigma if scale == 1.0 else sigma * scale
        single = sigma.unbind() if self._whole else ()  # with labels only, there may be thousands of sigmas
        found = [
            single[self._whole[i]] if i in self._whole else sigma[cut(self._labels(i, sigma), p)]
            for i, p in enumerate(like)
        ]
        for i in self._fixed:
            found[i] = found[i].masked_fill(cut(self.get_buffer(f"fixed_{i}").to(sigma.device), like[i]), 0.0)
        return [s if s.device == p.device else s.to(p.device) for s, p in zip(found, like, strict=True)]

    def is_per_output(self, i: int) -> bool:
        """Whether all inputs of an output have one sigma, in a parameter [outputs, ...]."""
        return i in self._whole or all(n == 1 for n in self.get_buffer(f"labels_{i}").shape[1:])

    def expander(self, like: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """A function that returns `expand(like)`, as fast as it can be called again and again. The tensors are
        overwritten at the next call."""
        if self._fixed or any(p.device != self.sigma.device or is_sharded(p) for p in like):
            return lambda: self.expand(like)
        if not self._labelled:
            views = self.expand(like)  # which follow sigma
            return lambda: views
        owners = [torch.as_tensor(self._owner(i), device=self.sigma.device) for i in range(len(like))]
        every = torch.cat([owner.flatten() for owner in owners])
        memory = torch.empty(every.shape, dtype=self.sigma.dtype, device=every.device)
        parts = memory.split([owner.numel() for owner in owners])
        found = [part.view(owner.shape) for part, owner in zip(parts, owners, strict=True)]

        def gather() -> list[Tensor]:
            torch.index_select(self.sigma, 0, every, out=memory)
            return found

        return gather

    def _owner(self, i: int) -> int | Tensor:
        return self._whole[i] if i in self._whole else self._labels(i, self.sigma)

    def pieces(self, weights: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        """The weights, large ones in several pieces, and for each piece the index of its parameter."""
        found = [(i, piece) for i, w in enumerate(weights) for piece in self._pieces(i, w)]
        return [i for i, _ in found], [piece for _, piece in found]

    def expand_pieces(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """`expand` for each of the `pieces`."""
        found: list[Tensor] = []
        for i, (w, sigma) in enumerate(zip(weights, self.expand(weights), strict=True)):
            pieces = self._pieces(i, w)
            found += [sigma] if len(pieces) == 1 else sigma.expand(w.shape).split([len(piece) for piece in pieces])
        return found

    def _pieces(self, i: int, weight: Tensor) -> Sequence[Tensor]:
        return split(weight) if i in self._whole else [weight]  # labels are those of the whole parameter

    def sum_of_squares(self, deviations: Sequence[Tensor]) -> Tensor:
        """For each sigma, the sum of its entries' squared deviations, in float32 or better."""
        total = torch.zeros_like(self.sigma)
        self.add_squares_(total, range(len(deviations)), deviations, deviations)
        return total

    def add_squares_(
        self, total: Tensor, which: Sequence[int], deviations: Sequence[Tensor], like: Sequence[Tensor]
    ) -> None:
        """Add the squared deviations of some parameters to `total`, which has one value for each sigma.

        `which` holds the indices of the parameters, in order, and `like` the parameters. For sharded parameters the
        deviations are those of the local part, and the sums are over all processes.
        """
        by_holders: dict[tuple[Any, ...], list[tuple[int, Tensor, Tensor]]] = {}
        for i, deviation, p in zip(which, deviations, like, strict=True):
            by_holders.setdefault(holders(p), []).append((i, wide(deviation), p))
        for groups, here in by_holders.items():
            part = torch.zeros_like(total) if groups else total
            if whole := [(i, deviation) for i, deviation, _ in here if i in self._whole]:
                norms = torch._foreach_norm([deviation for _, deviation in whole])
                places = [i for i, _ in whole]
                all_once = places == list(range(len(self._owners)))
                owners = self._owners if all_once else torch.stack([self._owners[i] for i in places])
                part.index_add_(0, owners, torch.stack([n.to(part) for n in norms]).square_())
            if several := [(cut(self._labels(i, part), p), d) for i, d, p in here if i not in self._whole]:
                squares = torch._foreach_mul(*[[d for _, d in several]] * 2)
                sums = [s.sum_to_size(labels.shape).flatten() for s, (labels, _) in zip(squares, several, strict=True)]
                part.index_add_(0, torch.cat([labels.flatten() for labels, _ in several]), torch.cat(sums).to(part))
            if groups:
                total += summed(part, groups)

    def _apply(self, fn: Any, recurse: bool = True) -> Partition:
        sigma = self.sigma
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.sigma = sigma.to(self.sigma.device)  # it moves with the weights, but .half() keeps its precision
        return self

    def extra_repr(self) -> str:
        trained = not self.sigma.is_meta and bool(self.sigma.any())
        spread = f", sigma={self.sigma.min():.3g} to {self.sigma.max():.3g}" if trained else ""
        return f"groups={len(self.groups)}{spread}"

    def _labels(self, i: int, beside: Tensor) -> Tensor:
        labels = self._buffers[f"labels_{i}"]  # `get_buffer` takes longer, and this is in each step
        return labels.to(beside.device)  # type: ignore[union-attr]

    def labels(self) -> dict[str, Tensor]:
        """Parameter name -> labels, for the parameters with several sigmas."""
        return self._named("labels", self._labelled)

    def fixed(self) -> dict[str, Tensor]:
        """Parameter name -> mask, for the parameters with entries that no gradient reaches."""
        return self._named("fixed", self._fixed)

    def _named(self, kind: str, which: Sequence[int]) -> dict[str, Tensor]:
        names = list(self.parameter_shapes)
        return {names[i]: self.get_buffer(f"{kind}_{i}") for i in which}

    def describe(self) -> dict[str, Any]:
        """The partition as plain data for JSON, with checksums in place of labels and masks."""
        return {
            "parameters": {name: list(shape) for name, shape in self.parameter_shapes.items()},
            "groups": {name: list(shape) for name, shape in self.groups.items()},
            "owners": [self._whole.get(i) for i in range(len(self.parameter_shapes))],
            "labels": {name: checksum(labels) for name, labels in self.labels().items()},
            "fixed": {name: checksum(mask) for name, mask in self.fixed().items()},
        }

    @classmethod
    def restore(
        cls,
        description: Mapping[str, Any],
        labels: Mapping[str, Tensor],
        sigma: Tensor,
        fixed: Mapping[str, Tensor],
    ) -> Partition:
        """The partition with this `describe`, `labels`, `sigma` and `fixed`."""
        owners = [
            labels[name] if owner is None else owner
            for name, owner in zip(description["parameters"], description["owners"], strict=True)
        ]
        partition = cls(description["groups"], description["parameters"], owners, sigma, fixed)
        here, then = partition.describe()["fixed"], description["fixed"]
        for name in {**here, **then}:
            if here.get(name) != then.get(name):
                raise ValueError(
                    f"the model given has another padding row or other pruned entries in {name!r} than the one that "
                    "was trained."
                )
        return partition


def _group_shapes(assigned: Mapping[str, Assignment]) -> dict[str, Shape]:
    """Group name -> the shape of its sigmas, in the order in which the groups first appear."""
    shapes: dict[str, Shape] = {}
    for parameter, (group, labels, shape) in assigned.items():
        seen = shapes.get(group)
        wanted = shape
        if wanted is None:
            wanted = () if labels is None else (max([int(labels.max()) + 1, *(seen or ())]),)
        if (seen is not None and len(seen) != len(wanted)) or (shape is not None and seen not in (None, shape)):
            raise ValueError(
                f"group {group!r} has sigmas of shape {seen}, but parameter {parameter!r} wants {wanted}: give "
                "labels to all parameters of a group or to none."
            )
        shapes[group] = wanted
    return shapes
