"""Twins with stacked weights: each parameter is held once, and its first dimension is that of the twins.

A step then costs less. The optimizer has as many tensors as for one model. Noise is added in the forward pass, and the
parameters stay clean: nothing has to be put back, and a backward pass or an optimizer step may come inside the block or
after it. A chain of linear layers and elementwise functions runs all twins at once, as batched matrix products. Other
models run twin by twin on slices of the stack: `torch.func.vmap` saves nothing on a CPU and cannot run every model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from .copies import Copies, Places, call, replicate, require_one_each
from .local import OutputNoise, in_a_row, keeps_samples_apart, layers_of, require_vectors, uncompiled
from .noise import filler, normals
from .seeds import derive
from .tensors import mean

if TYPE_CHECKING:
    from ..groups import Partition

AddNoise = Callable[[nn.Module, Tensor, Tensor], Tensor]  # of (layer, input, output) to the output


class Stack(Copies):
    """Twins in one stack of weights.

    Parameters have the model's names and the shape [twins, ...]. Optimizers that treat each entry alone (SGD, Adam,
    RMSprop) train them like separate twins. Clipping by norm, for instance, takes the norm over all twins. A model must
    not be stacked if it checkpoints activations, makes buffers, hooks or layers after the twins were built, changes its
    own weights as it runs, or is called from several threads at once. All twins share its plain attributes.
    """

    name = "stack"
    stacked = True

    def hold(self, model: nn.Module) -> None:
        self._names = list(self.partition.parameter_shapes)
        self.module = _changed(model, self._names, lambda t: torch.stack([t] * self.replicas))
        self._stacks = Places(self.module, self._names)
        self._buffer_names = {name for name, _ in self.module.named_buffers()}
        self._chain = Chain.of(self.module, self._stacks.read())
        # Of a model that is no chain each twin runs alone, through functions that know nothing of noise per output.
        self._chain_layers = layers_of(self.module, self._stacks.read(), self.partition) if self._chain else []
        self._cached: _Slices | None = None
        self._noise: _Noise | None = None  # of the open block

    @property
    def twins(self) -> NoReturn:
        raise TypeError(
            "stacked twins run together: call twins(x1, x2), which gives the output of each; for plain models that "
            "show what each twin is now, call twins.unstack()."
        )

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        require_one_each(inputs, self)
        weights = self.stacked_weights()
        local = self._noise is not None and self._noise.of_outputs is not None
        if self._chain is not None and self._chain.takes(inputs):
            return self._chain.run(inputs, weights, partial(uncompiled, self._add_noise) if local else None)
        if local:
            require_vectors(inputs)
        tensors = dict(zip(self._names, weights, strict=True)) | self._buffers()
        slices = zip(*(t.unbind() for t in tensors.values()), strict=True)
        twins = (partial(_call_with, self.module, dict(zip(tensors, own, strict=True))) for own in slices)
        return tuple(call(twin, x) for twin, x in zip(twins, inputs, strict=True))

    def _add_noise(self, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert self._noise is not None
        assert self._noise.of_outputs is not None
        return self._noise.of_outputs(layer, x, y)

    def weights(self) -> list[list[Tensor]]:
        return self._slices().by_twin

    def stacked_weights(self) -> list[Tensor]:
        weights = self._stacks.read()
        if self._noise is None:
            return weights
        # Not torch._foreach_addcmul: it would keep the noise for the backward pass, and the next block overwrites it.
        noise = zip(weights, self._noise.normals, self._noise.sigmas, strict=True)
        return [w if e is None else torch.addcmul(w, e, sigma) for w, e, sigma in noise]

    def models(self) -> list[nn.Module]:
        return [_changed(self.module, self._names, lambda t, b=b: t[b].clone()) for b in range(self.replicas)]  # type: ignore[misc]

    def means(self) -> list[nn.Module]:
        if self._buffer_names:
            return self.models()
        return [_changed(self.module, self._names, lambda t: mean(t.unbind()).to(t.dtype))]

    @property
    def inside(self) -> bool:
        return self._noise is not None

    @contextmanager
    def with_noise(
        self, twins: nn.Module, scale: float, seed: int, generator: torch.Generator | None, local: bool = False
    ) -> Iterator[None]:
        slices, layers = self._slices(), self._chain_layers if local else []
        sigmas = slices.sigma() if scale == 1.0 else self.partition.expand(slices.noise, scale)
        found = slices.draw(seed, generator, frozenset().union(*(layer.own for layer in layers)))
        fill_ = normals(derive(seed, "outputs"), generator)
        of_outputs = partial(OutputNoise(layers, sigmas).add, fill_=fill_) if layers else None
        # In the weights' own precision, which the noise must not raise.
        own = [sigma.to(e.dtype) for sigma, e in zip(sigmas, slices.noise, strict=True)]
        self._noise = _Noise(found, own, of_outputs)
        try:
            yield
        finally:
            self._noise = None

    def gradients(self) -> list[list[Tensor]]:
        used = [p.grad.unbind() for p in self._stacks.read() if p.grad is not None]
        return [list(own) for own in zip(*used, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cached": None}

    def _buffers(self) -> dict[str, Tensor]:
        found = dict(self.module.named_buffers())
        if new := sorted(found.keys() - self._buffer_names):
            raise RuntimeError(
                f"buffer {new[0]!r} was made after the twins were: use Twins(model) without stacked=True."
            )
        return found

    def _slices(self) -> _Slices:
        weights = self._stacks.read()
        where = [self.partition.sigma.data_ptr(), *[w.data_ptr() for w in weights]]
        if self._cached is None or self._cached.where != where:
            with torch.inference_mode(False):  # they are used after such a mode, too
                self._cached = _Slices(where, weights, self.partition)
        return self._cached


class _Noise(NamedTuple):
    """The noise of an open block: standard normals and sigma for each parameter, None for one with noise per output."""

    normals: list[Tensor | None]
    sigmas: list[Tensor]
    of_outputs: AddNoise | None


class _Slices:
    """Views of each twin's weights, sigma for each of their entries, and memory for noise. Valid until a tensor moves.
    To make the views in each step would cost as much as the noise of a small model."""

    def __init__(self, where: list[int], weights: Sequence[Tensor], partition: Partition) -> None:
        self.where = where
        self.noise = [torch.empty_like(w, requires_grad=False) for w in weights]
        self.sigma = partition.expander(self.noise)
        self.by_twin = self._split(weights)
        self._fillers: dict[frozenset[int], Callable[[int, torch.Generator | None], None]] = {}

    def draw(self, seed: int, generator: torch.Generator | None, but: frozenset[int]) -> list[Tensor | None]:
        """Standard normals for the weights, but not for those with these numbers."""
        found = [None if i in but else e for i, e in enumerate(self.noise)]
        if but not in self._fillers:
            self._fillers[but] = filler(self._split([e for e in found if e is not None]))
        self._fillers[but](seed, generator)
        return found

    @staticmethod
    def _split(stacks: Sequence[Tensor]) -> list[list[Tensor]]:
        return [list(slices) for slices in zip(*(t.detach().unbind() for t in stacks), strict=True)]


def _changed(model: nn.Module, names: Sequence[str], change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of the model with a change of the named weights and of all buffers."""
    weights = {id(p): nn.Parameter(change(p.detach())) for p in Places(model, names).read()}
    return replicate(model, replace={**weights, **{id(b): change(b) for b in model.buffers()}})[0]


def _call_with(module: nn.Module, tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    given = dict(tensors)
    output = functional_call(module, tensors, args, kwargs)  # buffers that the module replaces are put into the dict
    for name, t in tensors.items():
        if t is not given[name]:
            given[name].data.copy_(t)
    return output


class Chain:
    """Linear layers and elementwise functions one after another, for all twins at once.

    Samples are columns here, W x + b: gradients then have the layout of W, and are not copied.
    """

    def __init__(self, modules: Sequence[nn.Module], trained: Sequence[Tensor]) -> None:
        index = {id(p): i for i, p in enumerate(trained)}
        self.flatten = bool(modules) and isinstance(modules[0], nn.Flatten)  # after it there is nothing to flatten
        self.layers = [
            (m, index.get(id(m.weight)), index.get(id(m.bias))) if isinstance(m, nn.Linear) else (m, None, None)
            for m in modules
            if not isinstance(m, nn.Flatten)
        ]

    @classmethod
    def of(cls, model: nn.Module, trained: Sequence[Tensor]) -> Chain | None:
        """The model as a chain, or None if it has other modules."""
        modules = in_a_row(model)
        return cls(modules, trained) if all(map(keeps_samples_apart, modules)) else None

    def takes(self, inputs: Sequence[Any]) -> bool:
        """Whether these are batches of vectors. They may differ in size."""
        return all(
            isinstance(x, Tensor)
            and (x.ndim == 2 or (x.ndim > 2 and self.flatten))
            and x.shape[1:] == inputs[0].shape[1:]
            and x.dtype == inputs[0].dtype
            for x in inputs
        )

    def run(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], noise: AddNoise | None = None
    ) -> tuple[Tensor, ...]:
        sizes = [len(x) for x in inputs]
        equal = min(sizes) == max(sizes)
        # Samples do not mix, so a shorter batch is padded with zeros, and its output is cut.
        h = torch.stack(inputs) if equal else pad_sequence(inputs, batch_first=True)  # type: ignore[arg-type]
        h = h.flatten(2).mT
        for module, w, b in self.layers:
            if isinstance(module, nn.Linear):
                weight = module.weight.expand(len(sizes), -1, -1) if w is None else weights[w]
                if module.bias is None:
                    y = weight.bmm(h)
                else:
                    bias = module.bias.expand(len(sizes), -1) if b is None else weights[b]
                    y = torch.baddbmm(bias.unsqueeze(2), weight, h)
                h = y if noise is None else noise(module, h.mT, y.mT).mT
            else:
                h = module(h)
        outputs = h.mT.contiguous()
        # The results of unbind can't be changed in place, as PyTorch says. Slices would cost 2 % of a twin step.
        return outputs.unbind() if equal else tuple(outputs[b, :n] for b, n in enumerate(sizes))
