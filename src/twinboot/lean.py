"""Noise that is in what operations read of the weights, while the weights themselves stay as they are.

For where memory is short: no second copy of the weights is held. An operation that reads a weight gets a noisy one that
lives as long as the operation does; the backward pass, which reads it again, gets the same one, drawn again from the
same seed. What autograd keeps for that pass are the clean weights, which are there anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .noise import Noisy, in_order
from .seeds import derive


class Lean(Noisy):
    """A block in which all operations, those of backward passes too, read each weight with noise of its sigma."""

    def __init__(
        self,
        copies: Any,
        owners: Iterable[nn.Module],
        weights: list[Tensor],
        sigma: Sequence[Tensor],
        seed: int,
    ) -> None:
        super().__init__(copies, owners, weights, [])
        self.reads = _NoisyReads([w.detach() for w in weights], sigma, seed)
        self.gradients = list(map(_gradient, weights))

    def __enter__(self) -> Lean:
        super().__enter__()
        self.watch()
        self.reads.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.reads.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        super().__exit__(kind, error, trace)
        trained = {i for i, w in enumerate(self.weights) if _gradient(w) != self.gradients[i]}
        if trained - self.reads.seen and kind is None:
            raise RuntimeError(
                "a weight got a gradient inside sampled(lean=True), but was read past PyTorch's operations, where no "
                "noise reaches it: leave lean out."
            )

    def _keep(self) -> None:
        """Nothing: the weights stay as they are."""

    def _put_back(self) -> None:
        # What autograd kept is clean: PyTorch is to refuse a backward pass that comes now, as it does of changed ones.
        torch.autograd.graph.increment_version(self.weights)

    def _copy_of_clean(self, i: int) -> Tensor:
        return self.reads.clean(i)


class _NoisyReads(TorchDispatchMode):
    def __init__(self, weights: Sequence[Tensor], sigma: Sequence[Tensor], seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights, self.sigma, self.seed = weights, sigma, seed
        self.seen: set[int] = set()  # which weights were read
        self.paused = False
        self.stored: dict[int, list[int]] = {}  # address of memory -> the weights there: often one, of some RNNs all
        for i, w in enumerate(weights):
            self.stored.setdefault(_address(w), []).append(i)

    def clean(self, i: int) -> Tensor:
        self.paused = True
        try:
            return self.weights[i].clone()
        finally:
            self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = None if self.paused else _written(func)
        if written is not None and self._meets(args, kwargs.values()):
            args = [a if k in written else tree_map_only(Tensor, self._noisy, a) for k, a in enumerate(args)]
            kwargs = {k: a if k in written else tree_map_only(Tensor, self._noisy, a) for k, a in kwargs.items()}
        return func(*args, **kwargs)

    def _meets(self, *values: Any) -> bool:
        """Whether a weight, or a view of one, is among the values."""
        return any(
            self._meets(value) if isinstance(value, (list, tuple)) else self._place(value) is not None
            for several in values
            for value in several
        )

    def _place(self, value: Any) -> tuple[int, int] | None:
        """Which weight's memory this is, and how many bytes from its beginning."""
        if isinstance(value, Tensor) and value.layout == torch.strided and value.numel():
            for i in self.stored.get(_address(value), ()):
                w = self.weights[i]
                offset = int(value.storage_offset() * value.element_size() - w.storage_offset() * w.element_size())
                if 0 <= offset < _reach(w):
                    return i, offset
        return None

    def _noisy(self, value: Tensor) -> Tensor:
        if (place := self._place(value)) is None:
            return value
        i, offset = place
        self.seen.add(i)
        w = self.weights[i]
        noise = torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device)
        in_order(noise).normal_(generator=torch.Generator(w.device).manual_seed(derive(self.seed, i)))
        noise.mul_(self.sigma[i]).add_(w)
        start = offset // value.element_size()  # of another dtype, perhaps, for a view may be
        return value.new_empty(0).set_(noise.untyped_storage(), start, value.shape, value.stride())


@cache
def _written(func: Any) -> frozenset[int | str] | None:
    """Which arguments an operation writes to, by place and name; None if it looks at no entry of what it is given."""
    schema = func._schema
    name = schema.name.split("::")[-1]
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    if is_view or name.endswith("_like") or name.startswith("new_"):
        return None
    written = [
        (k, a.name) for k, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    return frozenset(key for pair in written for key in pair)


def _address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _reach(w: Tensor) -> int:
    """Bytes of memory from its first entry to its last."""
    return w.element_size() * (1 + sum((n - 1) * step for n, step in zip(w.shape, w.stride(), strict=True)))


def _gradient(w: Tensor) -> tuple[int, int] | None:
    return None if w.grad is None else (id(w.grad), w.grad._version)
