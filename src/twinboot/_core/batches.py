"""Batches: PyTorch's DataLoader, whose errors become one sentence that says what to do, and the devices of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate

from .checks import one_line, require_types

LABELS = "labels"  # the key of the target in batches that are mappings


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    """`DataLoader(dataset, **options)`. Samples are collated by `collate` unless the options have a `collate_fn`."""
    require_types(DataLoader.__init__, options)
    if options.get("timeout") and not options.get("num_workers"):
        raise ValueError("timeout is for workers: give num_workers, too.")
    try:
        return DataLoader(dataset, **{"collate_fn": collate, **options})
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"the options of the DataLoader do not fit together: {one_line(error)}.") from None


def collate(samples: list[Any]) -> Any:
    """`default_collate(samples)`."""
    try:
        return default_collate(samples)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"the samples cannot be collated into a batch, give a collate_fn: {one_line(error)}.") from None


def parted(batch: Any) -> tuple[Any, Any]:
    """The inputs of a batch, as arguments of a model, and its target: the last element of a tuple or list, or what a
    mapping has under "labels", as those of Hugging Face do."""
    if isinstance(batch, Mapping):
        if LABELS not in batch:
            raise TypeError(f'samples that are mappings need their target under the key "{LABELS}".')
        for name, value in batch.items():
            if isinstance(value, (list, tuple)):
                raise TypeError(
                    f"batches have a {type(value).__name__} for {name!r}, not a tensor: give a collate_fn, such as "
                    "DataCollatorWithPadding(tokenizer) of transformers."
                )
        return {name: value for name, value in batch.items() if name != LABELS}, batch[LABELS]
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise TypeError("samples must be tuples of an input and a target, such as those of TensorDataset(X, Y).")
    return tuple(batch[:-1]), batch[-1]


def usable(device: str | int | torch.device) -> torch.device:
    """The device of that name, after a try whether it is there."""
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"the device {str(device)!r} can't be used: {why}.") from None
    if found.type == "meta":
        raise ValueError("the device 'meta' can't be used: tensors on it have no values.")
    return torch.device(device)


def finite_check_is_due(device: torch.device, step: int) -> bool:
    """Whether to check in this step that the numbers on a device are finite. On a GPU only in each hundredth: to read a
    number there is to wait until all that was begun is done, and steps would no longer follow without a gap."""
    return device.type == "cpu" or step % 100 == 0


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with all of its tensors on a device, however deep they lie in tuples, lists and mappings."""
    return _each(lambda t: t.to(device), batch)


def copied(batch: Any, device: torch.device) -> Any:
    """The same with copies of the tensors, so that nothing that is done to them reaches the batch."""
    return _each(lambda t: t.detach().to(device, copy=True), batch)


def _each(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    if isinstance(batch, Tensor):
        if batch.is_meta:
            raise ValueError("a tensor is on the meta device, and has no values: load the data first.")
        return change(batch)
    if type(batch) in (tuple, list):  # tree_map would take five times as long, which shows in steps of small networks
        return type(batch)([_each(change, part) for part in batch])
    if isinstance(batch, Mapping):  # tree_map does not look into those of tokenizers
        return {key: _each(change, part) for key, part in batch.items()}
    if batch is None or type(batch) in (str, int, float, bool):
        return batch
    return tree_map(lambda value: value if value is batch else _each(change, value), batch)  # such as a named tuple
