"""The losses of `fit`: one value per sample, by name or as your own function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.checks import one_of, shown
from ..estimate.prediction import TASKS, Task, like, require_labels

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_function(loss: Task | Loss) -> Loss:
    """The loss function for a name: it maps output and target to one value per sample, [n]."""
    if callable(loss):
        return _one_each(loss)
    try:
        return _one_each({"classification": classification, "regression": regression, "gaussian": gaussian}[loss])
    except (KeyError, TypeError):
        raise ValueError(
            f"unknown loss {shown(loss)}: use {one_of(TASKS)}, or a function of (output, target) that returns one "
            "value per sample."
        ) from None


def classification(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy; the classes lie along dimension 1 of the logits."""
    _require_values(logits)
    if logits.ndim < 2:
        raise ValueError(f"classification needs logits [samples, classes], but the model gives {tuple(logits.shape)}.")
    values = F.cross_entropy(logits, require_labels(labels, logits), reduction="none")
    return _mean_of_each(values)


def regression(values: Tensor, target: Tensor) -> Tensor:
    """Squared error, averaged over the other dimensions of a sample."""
    _require_values(values)
    return _mean_of_each((values - like(target, values)).square())


def gaussian(heads: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihood of a normal distribution. The first half of the last dimension is the mean, the second
    half the log-variance."""
    _require_values(heads)
    if heads.ndim < 2 or heads.shape[-1] % 2:
        raise ValueError(
            f"gaussian needs a mean and a log-variance for each value, but the model gives {_shape(heads)}."
        )
    mean, log_variance = heads.chunk(2, -1)
    residual = mean - like(target, mean)
    values = 0.5 * (residual.square() * (-log_variance).exp() + log_variance + math.log(2 * math.pi))
    return _mean_of_each(values)


def _mean_of_each(values: Tensor) -> Tensor:
    """The mean of each sample's values, [n]."""
    if values.numel() == len(values):  # a mean of one value costs a small network as much as a layer
        return values.flatten()
    return values.reshape(len(values), -1).mean(1)


def _require_values(output: Tensor) -> None:
    if not output.is_floating_point():
        raise TypeError(f"the model must give real floating-point values, not {output.dtype}.")
    if not output.ndim or not output.numel():
        raise ValueError(
            f"the model must give values for at least one sample, not an output of shape {_shape(output)}."
        )


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)


def _samples(target: object) -> int:
    if not isinstance(target, Sized) or (isinstance(target, Tensor) and not target.ndim):
        raise TypeError(f"the target must be a tensor with one entry for each sample, not {shown(target)}.")
    if not len(target):
        raise ValueError("the batch is empty: there must be at least one sample.")
    return len(target)


def _one_each(loss: Loss) -> Loss:
    def with_checks(output: Tensor, target: Tensor) -> Tensor:
        if not isinstance(output, Tensor):
            raise TypeError(f"the model must give a tensor, not {type(output).__name__}.")
        if output.dtype in (torch.float16, torch.bfloat16):  # as under autocast: squares would be coarse or infinite
            output = output.float()
        samples = _samples(target)
        values = loss(output, target)
        if not isinstance(values, Tensor) or values.shape != (samples,):
            given = _shape(values) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"the loss must give one value for each of {samples} samples, not {given}: those of PyTorch do so "
                'with reduction="none".'
            )
        if not values.is_floating_point():
            raise TypeError(f"the loss must give real floating-point values, not {values.dtype}.")
        return values

    return with_checks
