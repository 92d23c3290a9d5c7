"""Noise per output of a linear layer instead of per weight: less work, and the same distribution for each sample.

With one sigma for the weights of an output and one for its bias, and standard normals E, e and z,

    (W + sigma E) x + b + sigma' e    is distributed as    W x + b + sqrt(sigma^2 |x|^2 + sigma'^2) z

for one sample x (Kingma, Salimans and Welling 2015). A batch then needs a normal for each of its outputs, where noise
on the weights needs one for each weight. Samples have noise of their own, which is exact for a loss that is a sum over
samples, as long as no later layer mixes them and none is called twice for a sample. So it is for the linear layers in
the last part of a `Sequential`, where only linear layers and elementwise functions follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # as torch.compiler.disable, which takes a second to import

from .checks import shown
from .tensors import wide

if TYPE_CHECKING:
    from ..groups import Partition

# Functions of single entries, so twins and samples may share one tensor. No subclasses: they may do something else.
_ELEMENTWISE = {
    *(nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish),
}


def in_a_row(model: nn.Module) -> list[nn.Module]:
    """The modules that a model calls one after another; itself, unless it is a `Sequential` without hooks."""
    if type(model) is not nn.Sequential or not _is_plain(model):
        return [model]
    return [m for child in model for m in in_a_row(child)]


def keeps_samples_apart(module: nn.Module) -> bool:
    """Whether this is a linear layer, an elementwise function or `Flatten()`."""
    flattens = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    return (flattens or type(module) in {nn.Linear, *_ELEMENTWISE}) and _is_plain(module)


def _is_plain(module: nn.Module) -> bool:
    # Hooks need a call of the module itself.
    return "forward" not in vars(module) and not any(h for name, h in vars(module).items() if name.endswith("_hooks"))


class Layer(NamedTuple):
    """A linear layer whose noise may be drawn per output, and its parameters in the partition."""

    module: nn.Linear
    weight: int
    bias: int | None  # None: it has none, or a frozen one

    @property
    def own(self) -> set[int]:
        return {self.weight} if self.bias is None else {self.weight, self.bias}


def layers_of(model: nn.Module, trained: Sequence[Tensor], partition: Partition) -> list[Layer]:
    """The linear layers of a model for which noise per output is exact, in the order of their calls."""
    found: list[Layer] = []
    modules = in_a_row(model)
    index = {id(p): i for i, p in enumerate(trained)}
    owners = list(model.modules())
    places = [id(p) for owner in owners for p in (*owner._parameters.values(), *owner._modules.values())]
    for module in reversed(modules):
        if not keeps_samples_apart(module):
            break
        if isinstance(module, nn.Linear):
            layer = Layer(module, index.get(id(module.weight), -1), index.get(id(module.bias)))
            parts = [part for part in (module, module.weight, module.bias) if part is not None]
            once = modules.count(module) == 1 and all(places.count(id(part)) <= 1 for part in parts)
            if layer.weight >= 0 and once and all(map(partition.is_per_output, layer.own)):
                found.append(layer)
    return found[::-1]


class OutputNoise:
    """The noise of some layers for the duration of a block."""

    def __init__(self, layers: Sequence[Layer], sigmas: Sequence[Tensor]) -> None:
        # The squares of the sigmas of weight and bias: numbers, or one for each output.
        self._squares: dict[nn.Module, tuple[Tensor, Tensor | float]] = {}
        for module, weight, bias in layers:
            of_bias = 0.0 if bias is None else sigmas[bias].square()
            self._squares[module] = sigmas[weight].flatten().squeeze().square(), of_bias

    def std(self, layer: nn.Module, x: Tensor) -> Tensor:
        """The standard deviation of the outputs for x [..., inputs]: [..., 1] or [..., outputs]."""
        of_weight, of_bias = self._squares[layer]
        variance = of_weight * wide(x).square().sum(-1, keepdim=True) + of_bias
        # The root of 0 has no derivative: without a bias, an input of zeros is such a point.
        return (variance + torch.finfo(variance.dtype).tiny).sqrt()

    def add(self, layer: nn.Module, x: Tensor, y: Tensor, fill_: Callable[[Tensor], None]) -> Tensor:
        """The output y [..., outputs] of a layer for x [..., inputs], with noise. Of other layers: y."""
        if layer not in self._squares:
            return y
        z = torch.empty_like(y, requires_grad=False)
        fill_(z)
        return torch.addcmul(y, z, self.std(layer, x).to(y.dtype))


class NoisyLayers:
    """Some layers of a twin that can be made to add noise to their outputs.

    Their `forward` is replaced, always by the same function: a compiled graph notices that, but not a hook.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self._forwards = [_as_function(partial(self._forward, layer.module)) for layer in layers]

    @contextmanager
    def with_noise(self, sigmas: Sequence[Tensor], fill_: Callable[[Tensor], None]) -> Iterator[None]:
        self._noise, self._fill_ = OutputNoise(self.layers, sigmas), fill_
        self._own = {module: vars(module).get("forward") for module, _, _ in self.layers}  # such as a compiled one
        try:
            for module, forward in zip(self._own, self._forwards, strict=True):
                vars(module)["forward"] = forward
            yield
        finally:
            for module, own in self._own.items():
                vars(module).pop("forward", None)
                if own is not None:
                    vars(module)["forward"] = own
            del self._noise, self._fill_, self._own

    def _forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "inside sampled(local=True) activations were computed again in a backward pass, with noise of other "
                "numbers: leave local out with activation checkpointing."
            )
        require_vectors([x])
        own = self._own[layer]
        return self._noise.add(layer, x, nn.Linear.forward(layer, x) if own is None else own(x), self._fill_)

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["layers"])  # type: ignore[misc]


def _as_function(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: uncompiled(forward, x)


def uncompiled(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a function outside of compiled graphs, which hold no generators of random numbers."""
    return _outside(function, *args) if torch.compiler.is_compiling() else function(*args)


@_disable_dynamo
def _outside(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


def require_vectors(inputs: Sequence[Any]) -> None:
    for x in inputs:
        if not isinstance(x, Tensor) or x.ndim != 2:
            raise ValueError(
                "sampled(local=True) takes a batch of vectors for linear layers, not "
                f"{shown(tuple(x.shape) if isinstance(x, Tensor) else x)}: leave local out."
            )
