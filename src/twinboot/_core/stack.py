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
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from .copies import Copies, Places, call, replicate, require_one_each
from .noise import filler

if TYPE_CHECKING:
    from ..groups import Partition

# Functions of single entries, so twins and samples may share one tensor. No subclasses: they may do something else.
_ELEMENTWISE = {
    *(nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish),
}


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
        self._cached: _Slices | None = None
        self._noise: list[Tensor] = []  # of the open block

    @property
    def twins(self) -> NoReturn:
        raise TypeError(
            "stacked twins run together: call twins(x1, x2), which gives the output of each; for plain models that "
            "show what each twin is now, call twins.unstack()."
        )

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        require_one_each(inputs, self)
        weights = self.stacked_weights()
        if self._chain is not None and self._chain.takes(inputs):
            return self._chain.run(inputs, weights)
        tensors = dict(zip(self._names, weights, strict=True)) | self._buffers()
        slices = zip(*(t.unbind() for t in tensors.values()), strict=True)
        twins = (partial(_call_with, self.module, dict(zip(tensors, own, strict=True))) for own in slices)
        return tuple(call(twin, x) for twin, x in zip(twins, inputs, strict=True))

    def weights(self) -> list[list[Tensor]]:
        return self._slices().by_twin

    def stacked_weights(self) -> list[Tensor]:
        weights = self._stacks.read()
        if self._noise:
            # Not torch._foreach_add: it would keep the noise for the backward pass, and the next block overwrites it.
            weights = [w + e for w, e in zip(weights, self._noise, strict=True)]
        return weights

    def models(self) -> list[nn.Module]:
        return [_changed(self.module, self._names, lambda t, b=b: t[b].clone()) for b in range(self.replicas)]  # type: ignore[misc]

    @property
    def inside(self) -> bool:
        return bool(self._noise)

    @contextmanager
    def with_noise(
        self, twins: nn.Module, scale: float, seed: int, generator: torch.Generator | None
    ) -> Iterator[None]:
        slices = self._slices()
        slices.fill(seed, generator)
        sigma = slices.sigma if scale == 1.0 else None
        torch._foreach_mul_(slices.noise, sigma or self.partition.expand(slices.noise, scale))
        try:
            self._noise.extend(slices.noise)
            yield
        finally:
            self._noise.clear()

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


class _Slices:
    """Views of each twin's weights and of sigma, and memory for noise. Valid until a tensor moves. To make the views in
    each step would cost as much as the noise of a small model."""

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
        modules = _in_a_row(model)
        return None if modules is None else cls(modules, trained)

    def takes(self, inputs: Sequence[Any]) -> bool:
        """Whether these are batches of vectors. They may differ in size."""
        return all(
            isinstance(x, Tensor)
            and (x.ndim == 2 or (x.ndim > 2 and self.flatten))
            and x.shape[1:] == inputs[0].shape[1:]
            and x.dtype == inputs[0].dtype
            for x in inputs
        )

    def run(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        sizes = [len(x) for x in inputs]
        equal = min(sizes) == max(sizes)
        # Samples do not mix, so a shorter batch is padded with zeros, and its output is cut.
        h = torch.stack(inputs) if equal else pad_sequence(inputs, batch_first=True)  # type: ignore[arg-type]
        h = h.flatten(2).mT
        for module, w, b in self.layers:
            if isinstance(module, nn.Linear):
                weight = module.weight.expand(len(sizes), -1, -1) if w is None else weights[w]
                if module.bias is None:
                    h = weight.bmm(h)
                else:
                    bias = module.bias.expand(len(sizes), -1) if b is None else weights[b]
                    h = torch.baddbmm(bias.unsqueeze(2), weight, h)
            else:
                h = module(h)
        outputs = h.mT.contiguous()
        # The results of unbind can't be changed in place, as PyTorch says. Slices would cost 2 % of a twin step.
        return outputs.unbind() if equal else tuple(outputs[b, :n] for b, n in enumerate(sizes))


def _in_a_row(model: nn.Module) -> list[nn.Module] | None:
    """The modules of a chain in order; None if one of them is of another kind."""
    if "forward" in vars(model) or any(hooks for name, hooks in vars(model).items() if name.endswith("_hooks")):
        return None  # hooks need a call of the module itself
    if type(model) is nn.Sequential:
        parts = [_in_a_row(child) for child in model]
        return None if None in parts else [m for part in parts for m in part or ()]
    flattens = type(model) is nn.Flatten and (model.start_dim, model.end_dim) == (1, -1)
    return [model] if flattens or type(model) in {nn.Linear, *_ELEMENTWISE} else None
