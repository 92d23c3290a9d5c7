"""How much predictions spread, in the units of the predictions, and the scale of weight noise that gives that spread.

Two models f_1, f_2 trained on independent bootstrap samples estimate the variance of a prediction by one difference,
|f_1(x) - f_2(x)|^2 / 2. That is a poor estimate for one input, but its mean over many inputs is a good one. Draws of
the weights, f(x; w + scale * sigma * e), spread by an amount that grows with `scale`. `match` finds the scale with
which the two agree on average.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

from torch import Tensor

from .prediction import Task

DRAWS = 16  # for a spread: its square is then known to 1 / sqrt(15) for one input, and far better for their mean
WIDEST = 256.0  # scales from 1 / WIDEST to WIDEST are searched
PRECISION = 0.01  # of the logarithm of the scale


def values_of(outputs: Tensor, task: Task | None) -> Tensor:
    """What spreads: probabilities of classes, predicted means, or the outputs themselves."""
    outputs = getattr(outputs, "logits", outputs)  # of a Hugging Face model
    outputs = outputs.double() if outputs.device.type == "cpu" else outputs.float()
    if task == "classification":
        return outputs.softmax(1)
    return outputs.chunk(2, -1)[0] if task == "gaussian" else outputs


def variance(values: Sequence[Tensor]) -> float:
    """The variance over models, averaged over the inputs and outputs.

    >>> import torch
    >>> variance([torch.tensor([[1.0], [5.0]]), torch.tensor([[3.0], [5.0]])])  # (1 - 3)^2 / 2 and 0
    1.0
    """
    center = sum(values[1:], values[0]) / len(values)
    squares = sum(((v - center).square().mean().item() for v in values), 0.0)
    return squares / (len(values) - 1)


def match(spread: Callable[[float], float], target: float) -> float:
    """The scale at which `spread(scale)`, a variance that grows with the scale, is `target`.

    >>> round(match(lambda scale: 4 * scale**2, 1.0), 2)
    0.5
    """
    if not target > 0:
        return 0.0
    low, high = math.log(1 / WIDEST), math.log(WIDEST)
    if spread(WIDEST) <= target:
        found = high
    elif spread(1 / WIDEST) >= target:
        found = low
    else:
        while high - low > PRECISION:
            middle = (low + high) / 2
            low, high = (middle, high) if spread(math.exp(middle)) < target else (low, middle)
        return math.exp((low + high) / 2)
    warnings.warn(
        f"no weight noise spreads the predictions as much as the twins do: the scale was set to {math.exp(found):.3g}.",
        stacklevel=2,
    )
    return math.exp(found)
