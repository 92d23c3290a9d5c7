"""How a model is called to predict: on inputs of each form, in parts, in evaluation mode, with other weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from .._core.checks import require_tensor
from .._core.copies import arguments
from .._core.devices import copied
from .prediction import Task


def called(module: nn.Module, task: Task, temperature: float, weights: dict[str, Tensor], x: Any) -> Tensor:
    """The module's output for x with some of its weights replaced."""
    output = functional_call(module, weights, *arguments(x))
    output = getattr(output, "logits", output)  # where models of Hugging Face give them, and values, too
    if not isinstance(output, Tensor):
        raise TypeError(f"predict needs a model that returns a tensor, not {type(output).__name__}.")
    if task == "classification" and (output.ndim < 2 or output.shape[1] < 2):
        raise ValueError(
            "classification needs logits of at least two classes along dimension 1, but the model gives shape "
            f'{tuple(output.shape)}; for values use task="regression".'
        )
    if task == "gaussian" and (output.ndim < 2 or output.shape[-1] % 2):
        raise ValueError(
            "gaussian needs a mean and a log-variance for each value along the last dimension, but the model gives "
            f"shape {tuple(output.shape)}."
        )
    if temperature == 1 or task == "regression":
        return output
    if task == "classification":
        return output / temperature
    means, logarithms = (output if output.dtype == torch.float64 else output.float()).chunk(2, -1)
    return torch.cat([means, logarithms + math.log(temperature)], -1)


def first_tensor(batch: Any) -> Tensor:
    while isinstance(batch, (tuple, list)):
        batch = batch[0]
    if not isinstance(batch, Tensor):
        raise TypeError(f"batches are {type(batch).__name__}: say with inputs= which tensor of them the model takes.")
    return batch


def chunks_of(x: Any, size: int, device: torch.device) -> list[Callable[[], Any]]:
    """The inputs in parts of `size`. Each part is cut and moved only when it is asked for, and is a new copy each time:
    a model may write into its input, which belongs to the caller and is used for other draws, too."""
    tensors = list(x.values()) if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else [x]
    for t in tensors:
        if isinstance(t, Tensor):
            require_tensor("x", t)
    lengths = {len(t) for t in tensors if isinstance(t, Tensor) and t.ndim}
    if len(lengths) != 1:
        advice = {np.ndarray: "; use torch.from_numpy(x)", DataLoader: "; call predict for each batch"}.get(type(x), "")
        raise ValueError(
            "x must be a tensor, or a tuple or mapping of tensors, with the same number of inputs along dimension 0; "
            f"found {sorted(lengths) or f'no tensor in {type(x).__name__}'}{advice}."
        )

    def cut(start: int) -> Any:
        def part(t: Any) -> Any:
            return t[start : start + size] if isinstance(t, Tensor) and t.ndim else t

        if isinstance(x, Mapping):
            return copied({key: part(t) for key, t in x.items()}, device)
        return copied(tuple(map(part, x)) if isinstance(x, (tuple, list)) else part(x), device)

    return [lambda start=start: cut(start) for start in range(0, max(lengths.pop(), 1), size)]  # type: ignore[misc]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for the time of the block; each submodule gets back the mode that it had."""
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode
