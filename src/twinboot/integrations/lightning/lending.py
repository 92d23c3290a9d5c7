"""One module of the user's that works with the weights of each twin in turn, and with those of their mean.

Code that a user wrote as methods of one module (steps, hooks, metrics, optimizers) expects one `self`: numbers that a
hook sets are read in a step, a metric adds up over an epoch. So that one module is kept, and the parameters and buffers
of whichever copy is due are put in the places of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def lend(module: nn.Module, source: nn.Module) -> None:
    """Let a module use the parameters and buffers of a copy of it from now on. Nothing is copied."""
    for borrower, owner in _counterparts(module, source):
        if type(borrower).__setattr__ is nn.Module.__setattr__:
            borrower._parameters.update(owner._parameters)
        else:  # recurrent layers keep a list of their own besides
            for name, p in owner._parameters.items():
                setattr(borrower, name, p)
        borrower._buffers.update(owner._buffers)


@contextmanager
def lent(module: nn.Module, source: nn.Module) -> Iterator[None]:
    """As `lend`; at the end of the block the source has the buffers that the module put in the places of others."""
    lend(module, source)
    yield
    for borrower, owner in _counterparts(module, source):
        for name in owner._buffers:
            owner._buffers[name] = borrower._buffers[name]


def _counterparts(module: nn.Module, source: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """By name: hooks may have given the module parts, such as metrics, that its copies have not."""
    parts = dict(module.named_modules())
    return ((parts[name], owner) for name, owner in source.named_modules() if owner._parameters or owner._buffers)


def imitate(other: nn.Module, module: nn.Module, shared: Iterable[Any] = (), besides: Iterable[str] = ()) -> None:
    """Give a copy of a module what the module has come to hold beside its weights: numbers that a hook sets, lists that
    a step fills, metrics that were made late.

    The copy gets copies, in which a part of the module is the part of that name of the copy itself. What is `shared`,
    and the attributes named in `besides`, are left alone.
    """
    parts = dict(other.named_modules(remove_duplicate=False))
    memo: dict[int, Any] = {id(value): value for value in shared}
    for name, part in module.named_modules(remove_duplicate=False):
        if name in parts:
            memo[id(part)] = parts[name]
            for ours, theirs in ((part._parameters, parts[name]._parameters), (part._buffers, parts[name]._buffers)):
                memo |= {id(t): theirs[key] for key, t in ours.items() if t is not None and key in theirs}
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in ("training", *besides):
            vars(other)[name] = _copied(value, memo)
    for name, late in module._modules.items():
        if name not in other._modules:
            other.add_module(name, _copied(late, memo))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, Dataset, DataLoader)):
        return value  # large, and nothing that a step changes
    try:
        return copy.deepcopy(value, dict(memo))  # of a failed attempt the memo would keep halves
    except Exception:  # the result of a computation, a lock, a file: of a container the rest is copied nevertheless
        if isinstance(value, Tensor):
            return value.detach().clone()
        if type(value) is dict:
            return {key: _copied(part, memo) for key, part in value.items()}
        return type(value)(_copied(part, memo) for part in value) if type(value) in (list, tuple, set) else value


class Passed:
    """A method of `owner.module` as a method of `owner`. Whoever inspects it finds the user's own signature."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    @property
    def __wrapped__(self) -> Any:
        return getattr(self.owner.module, self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


def unite(made: Sequence[Any]) -> None:
    """Let the first of several answers of `configure_optimizers`, one for each twin, train the weights of all.

    The first keeps its groups of parameters, so that schedulers made for it go on as they are; what an optimizer noted
    about the weights of another twin when it was made, it takes over.
    """
    first, *others = [list(optimizers_in(answer)) for answer in made]
    for optimizer in first:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("twins take one gradient for each step, which LBFGS is not made for: choose another.")
    for mates in zip(first, *others, strict=True):
        for groups in zip(*(mate.param_groups for mate in mates), strict=True):
            known = set(map(id, groups[0]["params"]))  # frozen parameters are the same in all twins
            for group in groups[1:]:
                fresh = [i for i, p in enumerate(group["params"]) if id(p) not in known]
                for key in {"params", "param_names"} & group.keys():
                    groups[0][key].extend(group[key][i] for i in fresh)
        for mate in mates[1:]:
            mates[0].state.update(mate.state)


def optimizers_in(answer: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(answer, torch.optim.Optimizer):
        yield answer
    elif isinstance(answer, Mapping):
        yield from optimizers_in(answer.get("optimizer"))
    elif isinstance(answer, (list, tuple)):
        for part in answer:
            yield from optimizers_in(part)
