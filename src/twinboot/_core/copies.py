"""Copies of a model, and `Copies`: twins that are models of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .local import NoisyLayers, layers_of
from .noise import NoisyBlock, filler, normals, room_for
from .ranks import local as local_part
from .seeds import derive
from .tensors import expanded

if TYPE_CHECKING:
    from ..groups import Partition

# Some parameters, by their indices in the partition, and for each twin its weights of them.
Part = tuple[Sequence[int], Sequence[Sequence[Tensor]]]


class Copies:
    """Holds the weights of the twins: here in a model for each of them.

    `Stack` holds one stack of weights for all twins, and `Remote` the one twin of this process, while the others are in
    other processes. All have the same methods, so that `Twins` works with any of them.
    """

    name = "copies"  # of `module` in the twins' state
    stacked = False  # whether each parameter is held once, for all twins together
    module: nn.Module  # holds the parameters

    def __init__(self, model: nn.Module, partition: Partition, replicas: int) -> None:
        self.partition, self.replicas = partition, replicas
        self.hold(model)

    def __len__(self) -> int:
        """How many twins are in this process."""
        return self.replicas

    def hold(self, model: nn.Module) -> None:
        """Make the copies."""
        self.module: nn.Module = nn.ModuleList(replicate(model, len(self)))
        self._places = [Places(twin, list(self.partition.parameter_shapes)) for twin in self.twins]
        self._owners = [m for m in self.module.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        self._layers = [
            NoisyLayers(layers_of(twin, own, self.partition))
            for twin, own in zip(self.twins, self.weights(), strict=True)
        ]
        self._spare: list[Tensor] = []
        self._block: NoisyBlock | None = None

    @property
    def twins(self) -> nn.ModuleList:
        """The twins in this process. Read anew each time, because others may wrap or replace them in place."""
        return self.module  # type: ignore[return-value]

    def run(self, *inputs: Any) -> Any:
        """Call each twin on its own input."""
        require_one_each(inputs, self)
        return tuple(call(twin, x) for twin, x in zip(self.twins, inputs, strict=True))

    def models(self) -> list[nn.Module]:
        """Models with the weights of the twins in this process."""
        return list(self.twins)

    def means(self) -> list[nn.Module]:
        """Models whose mean is that of the twins in this process: the twins, or what is quicker to make."""
        return self.models()

    def weights(self) -> list[list[Tensor]]:
        """For each twin in this process its trainable weights, in the order of the partition."""
        return [places.read() for places in self._places]

    def stacked_weights(self) -> list[Tensor]:
        """The trainable weights [twins, ...], with their noise inside a noisy block."""
        return [torch.stack(own) for own in zip(*self.weights(), strict=True)]

    def gradients(self) -> list[list[Tensor]]:
        """For each twin the gradients of its weights, not copied."""
        used = [own for own in zip(*self.weights(), strict=True) if any(p.grad is not None for p in own)]
        for p in (p for own in used for p in own if p.grad is None):
            p.grad = torch.zeros_like(p)  # of a twin whose pass did not use the weight
        return [[local_part(p.grad) for p in own] for own in zip(*used, strict=True)]

    @contextmanager
    def with_noise(
        self, twins: nn.Module, scale: float, seed: int, generator: torch.Generator | None, local: bool = False
    ) -> Iterator[None]:
        """A block inside which the twins run with noise of scale * sigma: on their weights, or, with `local`, on the
        outputs of the layers that have `_layers`, and on the other weights."""
        weights = self.weights()
        layers = self._layers if local else []
        clean = {i for layer in layers[0].layers for i in layer.own} if layers else set()
        noisy = [i for i in range(len(weights[0])) if i not in clean]
        flat = [own[i] for own in weights for i in noisy]
        self._spare = room_for(flat, self._spare)
        sigmas = self.partition.expand(weights[0], scale)
        with NoisyBlock(twins, self._owners, flat, self._spare) as self._block, ExitStack() as blocks:
            with torch.no_grad():  # line 6: w + sigma * e, in the memory of w
                here = [[local_part(own[i]) for i in noisy] for own in weights]
                filler(here)(seed, generator)
                own_sigmas = [sigmas[i].to(weights[0][i].dtype) for i in noisy] * len(weights)
                noise = [e for own in here for e in own]
                for e, w, sigma in zip(noise, map(local_part, self._spare), own_sigmas, strict=True):
                    torch.addcmul(w, e, sigma, out=e)  # one pass, where torch._foreach_ functions need two
            self._block.watch()
            # An output needs the sigma of its whole row of weights, of which this process may hold a part.
            whole = self.partition.expand(list(map(local_part, weights[0])), scale) if layers else []
            for b, own in enumerate(layers):
                blocks.enter_context(own.with_noise(whole, normals(derive(seed, "outputs", b), generator)))
            yield

    @property
    def inside(self) -> bool:
        """Whether a noisy block is open."""
        return self._block is not None and self._block.inside

    def parts(self, update: int, seed: int) -> Iterable[Part] | None:
        """The weights of all twins, from which this update computes sigma: in one part, or in several if they are not
        all in memory. None if sigma does not change at this update."""
        (which, first), *others = map(self.partition.pieces, self.weights())
        return [(which, [first, *(own for _, own in others)])]

    def pieces(self) -> Iterator[Sequence[Tensor]]:
        """For each weight that of all twins; large ones piece by piece."""
        return zip(*(self.partition.pieces(own)[1] for own in self.weights()), strict=True)

    def average_(self, module: nn.Module) -> None:
        """Turn a mean over the twins in this process into the mean over all twins."""

    def describe(self) -> dict[str, Any]:
        """What a checkpoint of these twins must agree with."""
        return {"replicas": self.replicas, "stacked": self.stacked}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_spare": [], "_block": None}  # a copy or pickle makes its own


def require_one_each(inputs: tuple[Any, ...], twins: Any) -> None:
    if len(inputs) != len(twins):
        raise ValueError(f"{len(twins)} twins take {len(twins)} inputs, one each, but got {len(inputs)}.")


def call(model: Callable[..., Any], x: Any) -> Any:
    """Call a model on a tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
    args, kwargs = arguments(x)
    return model(*args, **kwargs)


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x) if isinstance(x, (tuple, list)) else (x,)), {}


def replicate(
    model: nn.Module,
    copies: int = 1,
    copy_frozen: bool = False,
    replace: Mapping[int, Tensor] | None = None,
    own: Iterable[str] = (),
) -> list[nn.Module]:
    """Copies of a model. Each has its own trainable weights, and all share the frozen parameters.

    Args:
        copy_frozen: copy the frozen parameters, too. Shared ones use the memory of the model's. They are other objects,
            so that moving or casting the copies does not change the model.
        replace: `id` of a parameter or buffer -> what the copies hold instead.
        own: names of parameters that are not shared even if they are frozen. A model that is loaded for use is.
    """
    frozen: dict[int, object] = {}
    not_shared = {id(p) for p in Places(model, list(own)).read()}
    for p in () if copy_frozen else model.parameters():
        if not p.requires_grad and id(p) not in not_shared:
            # A subclass, such as quantized weights, has more than its data, and is shared as it is.
            frozen[id(p)] = nn.Parameter(p.detach(), requires_grad=False) if type(p) is nn.Parameter else p
    found = []
    for _ in range(copies):
        # Entries of an expanded buffer share their memory, and no state could be loaded into it.
        memo = {**frozen, **{id(b): b.detach().contiguous() for b in model.buffers() if expanded(b)}, **(replace or {})}
        for module in model.modules():
            for value in vars(module).values():
                # PyTorch refuses to copy results of computations. torch.nn.utils.weight_norm (the old one, with hooks)
                # recomputes its weight before each forward pass.
                if isinstance(value, Tensor) and not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
        found.append(copy.deepcopy(model, memo))
    return found


class Places:
    """Where a model holds some of its parameters. `.to()` or a load may replace them, so read them each time."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]

    def read(self) -> list[Tensor]:
        return [module._parameters[name] for module, name in self._owners]  # type: ignore[misc]


def held(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def require_like(model: nn.Module, trained: nn.Module) -> None:
    """Refuse a model with other parameters and buffers than the trained one. Shapes are compared in order, because
    wrappers may have added prefixes to the trained one's names."""
    given, known = ([(n, tuple(t.shape)) for n, t in held(m).items()] for m in (model, trained))
    for (name, here), (_, there) in zip(given, known, strict=False):
        if here != there:
            raise ValueError(f"the model given is another one: {name!r} is of shape {here}, where {there} was trained.")
    if len(given) != len(known):
        raise ValueError(
            f"the model given is another one: it has {len(given)} parameters and buffers, where {len(known)} were "
            "trained."
        )
