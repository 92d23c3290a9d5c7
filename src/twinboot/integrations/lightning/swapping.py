"""One LightningModule that runs with the weights of each twin in turn.

Steps, hooks, metrics and optimizers are methods and attributes of one module: a step reads what a hook has set, and a
metric sums over an epoch. So `TwinModule` keeps one module and replaces its parameters and buffers by those of the twin
whose turn it is, or of the mean of the twins. No tensor is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def use_weights(module: nn.Module, source: nn.Module) -> None:
    """Make a module use the parameters and buffers of `source`, a copy of it, from now on."""
    for ours, theirs in _matching_parts(module, source):
        if type(ours).__setattr__ is nn.Module.__setattr__:
            ours._parameters.update(theirs._parameters)
        else:  # recurrent layers also keep their weights in a list
            for name, p in theirs._parameters.items():
                setattr(ours, name, p)
        ours._buffers.update(theirs._buffers)


@contextmanager
def using_weights(module: nn.Module, source: nn.Module) -> Iterator[None]:
    """As `use_weights`. If the module assigns a new tensor to a buffer inside the block, `source` gets it."""
    use_weights(module, source)
    yield
    for ours, theirs in _matching_parts(module, source):
        for name in theirs._buffers:
            theirs._buffers[name] = ours._buffers[name]


def _matching_parts(module: nn.Module, source: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Submodules of the same name. A hook may have added some to the module, such as metrics, that `source` lacks."""
    parts = dict(module.named_modules())
    return ((parts[name], part) for name, part in source.named_modules() if part._parameters or part._buffers)


def copy_attributes(module: nn.Module, to: nn.Module, shared: Iterable[Any] = (), skip: Iterable[str] = ()) -> None:
    """Copy what a module holds besides its weights to a copy of it: numbers, lists, metrics that a hook added.

    References to parts of `module` become references to the same parts of `to`. Objects in `shared` are not copied;
    attributes named in `skip` are left alone.
    """
    parts = dict(to.named_modules(remove_duplicate=False))
    memo: dict[int, Any] = {id(value): value for value in shared}
    for name, part in module.named_modules(remove_duplicate=False):
        if name in parts:
            memo[id(part)] = parts[name]
            for ours, theirs in ((part._parameters, parts[name]._parameters), (part._buffers, parts[name]._buffers)):
                memo |= {id(t): theirs[key] for key, t in ours.items() if t is not None and key in theirs}
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in ("training", *skip):
            vars(to)[name] = _deep_copy(value, memo)
    for name, added in module._modules.items():
        if name not in to._modules:
            to.add_module(name, _deep_copy(added, memo))


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, Dataset, DataLoader)):
        return value  # large, and not changed by a step
    try:
        return copy.deepcopy(value, dict(memo))  # a copy of the memo: a failed attempt would leave half-built objects
    except Exception:  # it has a gradient history, a lock or a file: copy the rest of a container
        if isinstance(value, Tensor):
            return value.detach().clone()
        if type(value) is dict:
            return {key: _deep_copy(part, memo) for key, part in value.items()}
        return type(value)(_deep_copy(part, memo) for part in value) if type(value) in (list, tuple, set) else value


def merge_optimizers(answers: Sequence[Any]) -> None:
    """Make the optimizers of the first answer train the weights of all twins.

    `answers` are what `configure_optimizers` returned for each twin. The first keeps its parameter groups, so its
    learning rate schedulers still work; it takes over the parameters and the optimizer state of the others.
    """
    first, *others = [list(optimizers_in(answer)) for answer in answers]
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in first):
        raise TypeError("LBFGS needs several gradients per step, but twins compute one: use another optimizer.")
    for same in zip(first, *others, strict=True):
        for groups in zip(*(optimizer.param_groups for optimizer in same), strict=True):
            known = set(map(id, groups[0]["params"]))  # the twins share frozen parameters
            for group in groups[1:]:
                new = [i for i, p in enumerate(group["params"]) if id(p) not in known]
                for key in {"params", "param_names"} & group.keys():
                    groups[0][key].extend(group[key][i] for i in new)
        for optimizer in same[1:]:
            same[0].state.update(optimizer.state)


def optimizers_in(answer: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers in an answer of `configure_optimizers`, which may be nested."""
    if isinstance(answer, torch.optim.Optimizer):
        yield answer
    elif isinstance(answer, Mapping):
        yield from optimizers_in(answer.get("optimizer"))
    elif isinstance(answer, (list, tuple)):
        for part in answer:
            yield from optimizers_in(part)
