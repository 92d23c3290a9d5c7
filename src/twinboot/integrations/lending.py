"""One module of the user's that works with the weights of each twin in turn, and with those of their mean.

Code that a user wrote as methods of one module (steps, hooks, metrics, optimizers) expects one `self`: numbers that a
hook sets are read in a step, a metric adds up over an epoch. So that one module is kept, and the parameters and buffers
of whichever copy is due are put in the places of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


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
    first, *others = [list(_optimizers(answer)) for answer in made]
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


def _optimizers(answer: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(answer, torch.optim.Optimizer):
        yield answer
    elif isinstance(answer, Mapping):
        yield from _optimizers(answer.get("optimizer"))
    elif isinstance(answer, (list, tuple)):
        for part in answer:
            yield from _optimizers(part)
