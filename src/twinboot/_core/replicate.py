"""Copies of a model that share what is frozen, and the places where their trainable weights live."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .sharding import local


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
        laid_out = {id(b): b.detach().contiguous() for b in model.buffers() if _expanded(b)}
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


def _expanded(t: Tensor) -> list[int]:
    """The dimensions along which all entries are one in memory."""
    return [d for d in range(t.ndim) if t.shape[d] > 1 and t.layout is torch.strided and t.stride(d) == 0]


def overwrite_(t: Tensor, value: Tensor) -> None:
    """Set a tensor to another of its shape; entries that share their memory, as in a buffer that was expanded, once."""
    for d in _expanded(t):
        t, value = t.narrow(d, 0, 1), value.narrow(d, 0, 1)
    t.copy_(value)


def wide(t: Tensor) -> Tensor:
    """The tensor itself in float32 or float64, else a float32 copy: half precision is too coarse for differences. Of a
    sharded one, the part that is here."""
    t = local(t)
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def mean(copies: Sequence[Tensor]) -> Tensor:
    """The mean of equally shaped tensors in float32 or better; of equal ones exactly their value."""
    first = wide(copies[0]).detach()
    away = torch.zeros_like(first)
    for c in copies[1:]:
        away += wide(c).detach() - first
    return away.div_(len(copies)).add_(first)


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
