"""Copies of a model, and the plainest way to hold twins: each of them a model of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .noise import Noisy, fill_copies_, room_for
from .sharding import local
from .tensors import expanded

if TYPE_CHECKING:
    from ..groups import Partition

# Which parameters, by their places in the partition, and for each twin those of its weights.
Part = tuple[Sequence[int], Sequence[Sequence[Tensor]]]


class Store:
    """Where the weights of the twins are. All stores answer the same questions, so that `Twins` need not ask which.

    `Copies` holds a model for each twin, `Stack` one stack of weights for all twins, and `Remote` the one twin of this
    process, while the others are in other processes.
    """

    name: str  # of `module` in the twins' state
    module: nn.Module  # holds the parameters
    twins: list[nn.Module]  # those in this process

    def __init__(self, model: nn.Module, partition: Partition, replicas: int) -> None:
        self.partition, self.replicas = partition, replicas
        self.hold(model)

    def hold(self, model: nn.Module) -> None:
        """Make the copies."""
        raise NotImplementedError

    def __len__(self) -> int:
        """How many twins are in this process."""
        raise NotImplementedError

    def run(self, *inputs: Any) -> Any:
        """Each twin on its own input."""
        raise NotImplementedError

    def models(self) -> list[nn.Module]:
        """Models with the weights of the twins in this process."""
        raise NotImplementedError

    def weights(self) -> list[list[Tensor]]:
        """For each twin in this process its trainable weights, in the order of the partition."""
        raise NotImplementedError

    def stacked_weights(self) -> list[Tensor]:
        """The trainable weights [twins, ...], inside a block with their noise."""
        raise NotImplementedError

    def gradients(self) -> list[list[Tensor]]:
        """For each twin the gradients of its weights, in their own memory."""
        raise NotImplementedError

    def noisy(
        self, twins: nn.Module, scale: float, seed: int, generator: torch.Generator | None
    ) -> AbstractContextManager[None]:
        """A block inside which the twins run with noise of scale * sigma on their weights."""
        raise NotImplementedError

    @property
    def inside(self) -> bool:
        """Whether such a block is open."""
        raise NotImplementedError

    def parts(self, update: int, seed: int) -> Iterable[Part] | None:
        """The weights of all twins, from which this update computes sigma: in one part, or in several where they are
        not all in memory. None: sigma stays as it is at this update."""
        (which, first), *others = map(self.partition.pieces, self.weights())
        return [(which, [first, *(own for _, own in others)])]

    def pieces(self) -> Iterator[Sequence[Tensor]]:
        """Weight by weight, large ones piece by piece, that of all twins."""
        return zip(*(self.partition.pieces(own)[1] for own in self.weights()), strict=True)

    def average_(self, module: nn.Module) -> None:
        """Make a mean over the twins in this process one over all twins."""

    def describe(self) -> dict[str, Any]:
        """What a state of these twins must agree with."""
        return {"replicas": self.replicas, "stacked": self.name == "stack"}


class Copies(Store):
    """Twins as copies of the model. Inside a block of noise their parameters hold the noisy values."""

    name = "copies"

    def hold(self, model: nn.Module) -> None:
        self._copy(model, self.replicas)

    def _copy(self, model: nn.Module, number: int) -> None:
        self.twins = replicate(model, number)
        self.module = nn.ModuleList(self.twins)
        self._places = [Places(twin, list(self.partition.parameter_shapes)) for twin in self.twins]
        self._owners = [m for m in self.module.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        self._spare: list[Tensor] = []
        self._block: Noisy | None = None

    def __len__(self) -> int:
        return len(self.twins)

    def run(self, *inputs: Any) -> Any:
        require_one_each(inputs, self)
        return tuple(call(twin, x) for twin, x in zip(self.twins, inputs, strict=True))

    def models(self) -> list[nn.Module]:
        return self.twins

    def weights(self) -> list[list[Tensor]]:
        return [places.read() for places in self._places]

    def stacked_weights(self) -> list[Tensor]:
        return [torch.stack(own) for own in zip(*self.weights(), strict=True)]

    def gradients(self) -> list[list[Tensor]]:
        used = [own for own in zip(*self.weights(), strict=True) if any(p.grad is not None for p in own)]
        for p in (p for own in used for p in own if p.grad is None):
            p.grad = torch.zeros_like(p)  # of a twin whose pass did not use the weight
        return [[local(p.grad) for p in own] for own in zip(*used, strict=True)]

    @contextmanager
    def noisy(self, twins: nn.Module, scale: float, seed: int, generator: torch.Generator | None) -> Iterator[None]:
        weights = self.weights()
        flat = [w for own in weights for w in own]
        self._spare = room_for(flat, self._spare)
        with Noisy(twins, self._owners, flat, self._spare) as self._block:
            with torch.no_grad():  # w + sigma * e, in the place of w
                here = [list(map(local, own)) for own in weights]
                fill_copies_(here, seed, generator)
                noise = [e for own in here for e in own]
                torch._foreach_mul_(noise, self.partition.expand(weights[0], scale) * len(weights))
                torch._foreach_add_(noise, list(map(local, self._spare)))
            self._block.watch()
            yield

    @property
    def inside(self) -> bool:
        return self._block is not None and self._block.inside

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_spare": [], "_block": None}  # a copy or pickle makes its own


def require_one_each(inputs: tuple[Any, ...], twins: Any) -> None:
    if len(inputs) != len(twins):
        raise ValueError(f"{len(twins)} twins take {len(twins)} inputs, one each, but got {len(inputs)}.")


def call(model: Callable[..., Any], x: Any) -> Any:
    """A model on a tensor, on a tuple or list of arguments, or on a mapping of keyword arguments."""
    args, kwargs = arguments(x)
    return model(*args, **kwargs)


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x) if isinstance(x, (tuple, list)) else (x,)), {}


def replicate(
    model: nn.Module,
    copies: int = 1,
    share_frozen: bool = True,
    replace: Mapping[int, Tensor] | None = None,
    own: Iterable[str] = (),
) -> list[nn.Module]:
    """Copies with trainable weights of their own and the same frozen parameters.

    The copies have one set of frozen parameters between them, which uses the memory of the model's own. It is another
    set of objects, so that moving or casting the copies leaves the model as it is.
    `replace`, by the `id` of a parameter or buffer, gives what the copies hold in its place. The parameters that `own`
    names are not shared, frozen or not: a model that is loaded for use is all frozen.
    """
    frozen: dict[int, object] = {}
    not_shared = {id(p) for p in Places(model, list(own)).read()}
    for p in model.parameters() if share_frozen else ():
        if not p.requires_grad and id(p) not in not_shared:
            # A subclass (quantized weights, say) carries more than its data and is shared as it is.
            frozen[id(p)] = nn.Parameter(p.detach(), requires_grad=False) if type(p) is nn.Parameter else p
    made = []
    for _ in range(copies):
        # Of a buffer that was expanded several entries are one in memory, into which no state could be loaded.
        laid_out = {id(b): b.detach().contiguous() for b in model.buffers() if expanded(b)}
        memo = {**frozen, **laid_out, **(replace or {})}
        for module in model.modules():
            for value in vars(module).values():
                # The weight that torch.nn.utils.weight_norm (the old, hook-based one) recomputes before each forward
                # pass: the result of a computation, which PyTorch refuses to copy.
                if isinstance(value, Tensor) and not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
        made.append(copy.deepcopy(model, memo))
    return made


class Places:
    """Where a model keeps some of its parameters: read anew each time, since `.to()` or a load may replace them."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]

    def read(self) -> list[Tensor]:
        return [module._parameters[name] for module, name in self._owners]  # type: ignore[misc]


def held(module: nn.Module) -> dict[str, Tensor]:
    """All that a model holds: its parameters and its buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def require_like(model: nn.Module, trained: nn.Module) -> None:
    """Refuse a model that does not hold what the trained one does: shapes in their order, as the names of trained ones
    may have got prefixes."""
    given, known = ([(n, tuple(t.shape)) for n, t in held(m).items()] for m in (model, trained))
    for (name, here), (_, there) in zip(given, known, strict=False):
        if here != there:
            raise ValueError(f"the model given is another one: {name!r} is of shape {here}, where {there} was trained.")
    if len(given) != len(known):
        raise ValueError(
            f"the model given is another one: it has {len(given)} parameters and buffers, where {len(known)} were "
            "trained."
        )
