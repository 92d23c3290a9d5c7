"""Batches from a dataset by PyTorch's DataLoader, whose errors become one sentence that says what to do."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, default_collate

from .checks import one_line, require_types


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
