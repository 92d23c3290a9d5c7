"""Noise without a second copy of the weights: operations read noisy weights, and the weights themselves stay clean.

An operation that reads a weight gets a noisy tensor, which is freed after the operation. The backward pass reads the
weight again and gets the same noise, drawn again from the same seed. Autograd saves the clean weights, which are in
memory anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only

from .._core.noise import NoisyBlock
from .._core.seeds import derive
from .._core.tensors import in_order


@dataclass(eq=False, repr=False)
class Lean(NoisyBlock):
    """A block in which PyTorch's operations, also those of backward passes, read weights with noise.

    Other ways to read memory see the clean weights: `.numpy()`, or hooks that store elsewhere what autograd saves.
    Other threads would see them, too, and are refused.
    """

    sigma: Sequence[Tensor]
    seed: int

    def __post_init__(self) -> None:
        self.reads = _NoisyReads([w.detach() for w in self.weights], self.sigma, self.seed)

    def __enter__(self) -> Lean:
        super().__enter__()
        self.watch()
        self.reads.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.reads.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        super().__exit__(kind, error, trace)

    def _keep(self) -> None:
        # As if the weights had changed: PyTorch then refuses a backward pass on the other side of the block's edge.
        torch.autograd.graph.increment_version(self.weights)

    def _put_back(self) -> None:
        torch.autograd.graph.increment_version(self.weights)
        for w, clean in zip(self.weights, self.reads.weights, strict=True):
            if w.data_ptr() != clean.data_ptr() or w.dtype != clean.dtype:  # converted, so it was read with noise
                w.data = clean

    def _copy_of_clean(self, i: int) -> Tensor:
        return self.reads.clean(i)

    def _remember(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self.reads not in _get_current_dispatch_mode_stack():
            raise RuntimeError(
                "inside sampled(lean=True) a twin was called in another thread, where its weights have no noise: leave "
                "lean out."
            )
        super()._remember(module, inputs, output)


class _NoisyReads(TorchDispatchMode):
    def __init__(self, weights: Sequence[Tensor], sigma: Sequence[Tensor], seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights, self.sigma, self.seed = weights, sigma, seed
        self.paused = False
        self.stored: dict[int, list[int]] = {}  # address of memory -> its weights: often one, in some RNNs all
        for i, w in enumerate(weights):
            self.stored.setdefault(w.untyped_storage().data_ptr(), []).append(i)

    def clean(self, i: int) -> Tensor:
        self.paused = True
        try:
            return self.weights[i].clone()
        finally:
            self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads, may_be_view, written = _about(func)
        if self.paused or not reads or not self._meets(args, kwargs.values()):
            return func(*args, **kwargs)
        if may_be_view:
            view = func(*args, **kwargs)
            if self._meets([view]):
                return view
            # Else it is a copy, such as a weight that is cast in inference mode. The copy must be noisy.
        args = [a if k in written else tree_map_only(Tensor, self._with_noise, a) for k, a in enumerate(args)]
        kwargs = {k: a if k in written else tree_map_only(Tensor, self._with_noise, a) for k, a in kwargs.items()}
        return func(*args, **kwargs)

    def _meets(self, *values: Any) -> bool:
        """Whether a weight, or a view of one, is among the values."""
        return any(
            self._meets(value) if isinstance(value, (list, tuple)) else self._place(value) is not None
            for several in values
            for value in several
        )

    def _place(self, value: Any) -> tuple[int, int] | None:
        """Which weight's memory this is, and the offset in bytes."""
        if not isinstance(value, Tensor) or value.layout != torch.strided or not value.numel():
            return None
        for i in self.stored.get(value.untyped_storage().data_ptr(), ()):
            offset = _begin(value) - _begin(self.weights[i])
            if -_reach(value) < offset < _reach(self.weights[i]):
                if offset < 0 or offset + _reach(value) > _reach(self.weights[i]):
                    raise RuntimeError(
                        "inside sampled(lean=True) memory of several weights was read as one tensor: leave lean out."
                    )
                return i, offset
        return None

    def _with_noise(self, value: Tensor) -> Tensor:
        if (place := self._place(value)) is None:
            return value
        i, offset = place
        w = self.weights[i]
        noise = torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device)
        in_order(noise).normal_(generator=torch.Generator(w.device).manual_seed(derive(self.seed, i)))
        noise.mul_(self.sigma[i]).add_(w)
        start = offset // value.element_size()  # a view may have another dtype
        return value.new_empty(0).set_(noise.untyped_storage(), start, value.shape, value.stride())


@cache
def _about(func: Any) -> tuple[bool, bool, frozenset[int | str]]:
    """Whether an operation reads values, or only makes a tensor like its argument; whether its result may be a view;
    and the arguments that it writes to, by position and by name."""
    schema, arguments = func._schema, enumerate(func._schema.arguments)
    name = schema.name.split("::")[-1]
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    written = (key for k, a in arguments if a.alias_info and a.alias_info.is_write for key in (k, a.name))
    return not (name.endswith("_like") or name.startswith("new_")), view, frozenset(written)


def _begin(t: Tensor) -> int:
    """Bytes of memory before the first entry."""
    return int(t.storage_offset() * t.element_size())


def _reach(t: Tensor) -> int:
    """Bytes of memory from the first entry to the last."""
    return t.element_size() * (1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)))
