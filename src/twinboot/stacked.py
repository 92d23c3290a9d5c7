"""Twins with stacked weights: each parameter is held once, with a dimension for the twins in front.

The method is that of `Twins`, line by line. What differs is where the weights are, and so what a step costs. The
optimizer has as many tensors as for one model. The noise is added in the forward pass to weights that stay clean, so
nothing has to be put back, and a backward pass or an optimizer step may come inside the block or after it. A chain of
linear layers and elementwise functions runs all twins at once, as batched matrix products. Any other model runs twin by
twin on slices of the stack: `torch.func.vmap` would save nothing on a CPU and cannot run every model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ._core import ranks
from ._core.chain import Chain
from ._core.checks import require_number, require_types
from ._core.noise import filler
from ._core.replicate import Places, replicate
from .estimate.estimate import Estimate
from .estimate.forward import call
from .groups import Partition
from .twins import Twins


class Stacked(Twins):
    """What `Twins(model, stacked=True)` makes. The twins are called together, as `twins(x1, x2)`.

    Parameters have the model's own names, after `stack.`, and the shape [twins, ...]. An optimizer that treats each
    entry alone (SGD, Adam and its kin, RMSprop) trains them as it would apart; what takes the norm of a whole tensor,
    as clipping does, takes it over all twins. A model that checkpoints activations fails in its backward pass, where it
    runs again but its weights are back in the stack; what a model keeps in plain attributes, all twins share. A model
    that makes buffers, hooks or layers after the twins were built, that changes its own weights as it runs, or that is
    called from several threads at once, needs separate twins.

    >>> twins = Twins(nn.Linear(3, 1), stacked=True)
    >>> [(name, tuple(p.shape)) for name, p in twins.named_parameters()]
    [('stack.weight', (2, 1, 3)), ('stack.bias', (2, 1))]
    """

    stacked = True
    _fresh: Mapping[str, Any] = {"_kept": None}

    def _hold(self, model: nn.Module, replicas: int) -> None:
        names = list(self.partition.parameter_shapes)
        self.stack = _changed(model, names, lambda t: torch.stack([t] * replicas))
        self._replicas = replicas
        self._stacks = Places(self.stack, names)
        self._buffer_names = {name for name, _ in self.stack.named_buffers()}
        self._chain = Chain.of(self.stack, self._stacks.read())
        self._kept: _Slices | None = None
        self._noise: list[Tensor] = []  # inside a block that of the block

    def __len__(self) -> int:
        return self._replicas

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "stacked twins run together: call twins(x1, x2), which gives the output of each; for plain models that "
            "show what each twin is now, call twins.unstack()."
        )

    def __getitem__(self, index: int) -> NoReturn:
        self.__iter__()

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Each twin on its own input: a tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
        self._require_one_each(inputs)
        weights = self.weights()
        if self._chain is not None and self._chain.takes(inputs):
            return self._chain.run(inputs, list(weights.values()))
        named = weights | self._buffers_of_twins()
        slices = zip(*(t.unbind() for t in named.values()), strict=True)
        twins = (partial(_call_with, self.stack, dict(zip(named, own, strict=True))) for own in slices)
        return tuple(call(twin, x) for twin, x in zip(twins, inputs, strict=True))

    def weights(self) -> dict[str, Tensor]:
        """Name -> the weights of all twins, [twins, ...]; inside a block with their noise."""
        weights = self._stacks.read()
        if self._noise:
            # Not torch._foreach_add: it would keep the noise for the backward pass, and the next block draws in its
            # place.
            weights = [w + e for w, e in zip(weights, self._noise, strict=True)]
        return dict(zip(self.partition.parameter_shapes, weights, strict=True))

    @contextmanager
    def sampled(self, scale: float = 1.0, generator: torch.Generator | None = None) -> Iterator[None]:
        """Inside the block each twin runs with one draw from N(weights, (scale * sigma)^2): line 6.

        The parameters themselves stay clean, so forward passes go inside, and the rest wherever it suits.
        """
        require_types(Twins.sampled, {"scale": scale, "generator": generator})
        require_number("scale", scale)
        self._refuse_inside("sampled()")
        slices = self._slices()
        slices.fill(self._next_seed("draws", *ranks.own()), generator)
        sigma = slices.sigma if scale == 1.0 else None
        torch._foreach_mul_(slices.noise, sigma or self.partition.expand(slices.noise, scale))
        try:
            self._noise.extend(slices.noise)
            yield
        finally:
            self._noise.clear()

    def unstack(self) -> list[nn.Module]:
        """Plain models with the weights that the twins have now; what is done to them does not reach the twins."""
        self._refuse_inside("unstack()")
        names = list(self.partition.parameter_shapes)
        return [_changed(self.stack, names, lambda t, b=b: t[b].clone()) for b in range(len(self))]  # type: ignore[misc]

    def estimate(self, model: nn.Module | None = None, *, scale: float = 1.0) -> Estimate:
        """What you keep and ship: the mean of the twins and sigma, times `scale`. The twins go on as they are."""
        require_types(Twins.estimate, {"model": model, "scale": scale})
        self._require_finite()
        return Estimate.of(self.unstack(), self.partition.scaled(scale), model)

    def _weights(self) -> list[list[Tensor]]:
        return self._slices().by_twin

    def _buffers_of_twins(self) -> dict[str, Tensor]:
        found = dict(self.stack.named_buffers())
        if new := sorted(found.keys() - self._buffer_names):
            raise RuntimeError(
                f"buffer {new[0]!r} was made after the twins were: use Twins(model) without stacked=True."
            )
        return found

    def _slices(self) -> _Slices:
        weights = self._stacks.read()
        where = [self.partition.sigma.data_ptr(), *[w.data_ptr() for w in weights]]
        if self._kept is None or self._kept.where != where:
            with torch.inference_mode(False):  # they outlive such a mode
                self._kept = _Slices(where, weights, self.partition)
        return self._kept

    @property
    def _inside(self) -> bool:
        return bool(self._noise)


class _Slices:
    """The part of each twin in the stacks of weights, room for noise like it, and sigma, for as long as they stay where
    they are: to make so many views anew in each step would cost as much as drawing the noise of a small model."""

    def __init__(self, where: list[int], weights: Sequence[Tensor], partition: Partition) -> None:
        self.where = where
        self.noise = [torch.empty_like(w, requires_grad=False) for w in weights]
        self.sigma = partition.views(self.noise)
        self.by_twin = self._split(weights)
        self.fill = filler(self._split(self.noise))

    @staticmethod
    def _split(stacks: Sequence[Tensor]) -> list[list[Tensor]]:
        return [list(slices) for slices in zip(*(t.detach().unbind() for t in stacks), strict=True)]


def _changed(model: nn.Module, names: Sequence[str], change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of the model with changed weights, those that are named, and changed buffers."""
    weights = {id(p): nn.Parameter(change(p.detach())) for p in Places(model, names).read()}
    [made] = replicate(model, replace={**weights, **{id(b): change(b) for b in model.buffers()}})
    return made


def _call_with(module: nn.Module, tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    given = dict(tensors)
    output = functional_call(module, tensors, args, kwargs)  # which puts into the dict what the module replaced
    for name, t in tensors.items():
        if t is not given[name]:
            given[name].data.copy_(t)
    return output
