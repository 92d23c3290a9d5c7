"""How much predictions spread, in the units of the predictions, and the scale of weight noise that gives that spread.

Two models f_1, f_2 trained on independent bootstrap samples estimate the variance of a prediction by one difference,
|f_1(x) - f_2(x)|^2 / 2. That is a poor estimate for one input, but its mean over many inputs is a good one. Draws of
the weights, f(x; w + scale * sigma * e), spread by an amount that grows with `scale`. `match` finds the scale with
which the two agree on average.
Such draws are centered (centered.py).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._core.batches import copied
from .._core.copies import call
from .._core.seeds import own_randomness
from .centered import around, in_parts
from .prediction import Task

if TYPE_CHECKING:
    from .estimate import Estimate

DRAWS = 16  # for a spread: its square is then known to 1 / sqrt(15) for one input, and far better for their mean
WIDEST = 64.0  # scales from 1 / WIDEST to WIDEST are searched
PRECISION = 0.01  # of the logarithm of the scale


def values_of(outputs: Tensor, task: Task | None) -> Tensor:
    """What spreads: probabilities of classes, predicted means, or the outputs themselves."""
    outputs = getattr(outputs, "logits", outputs)  # of a Hugging Face model
    outputs = outputs.double() if outputs.device.type == "cpu" else outputs.float()
    if task == "classification":
        return outputs.softmax(1)
    return outputs.chunk(2, -1)[0] if task == "gaussian" else outputs


def variance(values: Iterable[Tensor]) -> float:
    """The variance over models, averaged over the inputs and outputs. The values of one model at a time are in memory.

    >>> variance([torch.tensor([[1.0], [5.0]]), torch.tensor([[3.0], [5.0]])])  # (1 - 3)^2 / 2 and 0
    1.0
    """
    number, center, squares = 0, torch.zeros(()), torch.zeros(())
    for number, value in enumerate(values, start=1):  # Welford's algorithm
        apart = value - center
        center = center + apart / number
        squares = squares + apart * (value - center)
    return squares.mean().item() / (number - 1)


def match(spread: Callable[[float], float], target: float) -> float:
    """The scale at which `spread(scale)`, a variance that grows with the scale, is `target`.

    >>> round(match(lambda scale: 4 * scale**2, 1.0), 2)
    0.5
    """
    low, high = math.log(1 / WIDEST), math.log(WIDEST)
    exact = {low: 1 / WIDEST, high: WIDEST}

    @cache
    def at(place: float) -> float:
        return spread(exact.get(place, math.exp(place)))

    if not math.isfinite(target) or not any(map(math.isfinite, (at(0.0), at(low)))):
        warnings.warn(
            "the predictions for some samples are not finite, so the spread of the twins is not known, and the scale "
            "was left at 1: look for bad samples.",
            stacklevel=2,
        )
        return 1.0
    if at(0.0) == 0:
        return 1.0  # sigma is 0
    below, above = _bounds(at, target, low, high)
    if below <= low and (least := at(low)) >= target:
        return math.sqrt(max(target, 0.0) / least) / WIDEST  # so small a variance grows as the square of the scale
    if above >= high and at(high) <= target:
        warnings.warn(
            f"no weight noise spreads the predictions as much as the twins do: the scale was set to {WIDEST:g}.",
            stacklevel=2,
        )
        return WIDEST
    while high - low > PRECISION:
        middle = (low + high) / 2
        # A spread is that of 16 passes over all samples, so those that the bounds imply are not computed.
        is_below = middle <= below or (middle < above and at(middle) < target)
        low, high = (middle, high) if is_below else (low, middle)
    return math.exp((low + high) / 2)


def _bounds(spread: Callable[[float], float], target: float, low: float, high: float) -> tuple[float, float]:
    """Bounds of the logarithm of the scale, between `low` and `high`, by a few steps along power laws."""
    place, power, before = 0.0, 2.0, (0.0, 0.0)  # a small variance grows as the square of the scale
    for _ in range(5):
        value = spread(place)
        low, high = (place, high) if value < target else (low, place)
        if high - low <= PRECISION or not (0 < value < math.inf and 0 < target < math.inf):
            break
        if abs(apart := place - before[0]) > PRECISION:
            power = max(math.log(value / before[1]) / apart, 0.5)
        before, step = (place, value), math.log(target / value) / power
        # A little beyond the target, so that the next bound is on its other side even where a spread saturates.
        place += 1.1 * step + math.copysign(PRECISION / 4, step)
        if not low < place < high:
            break
    return low, high


@torch.no_grad()
def match_spread_(
    estimate: Estimate, twins: Iterable[nn.Module], inputs: Sequence[Any], seed: int, factor: float = 1.0
) -> None:
    """Center the draws of an estimate, and set the scale with which they spread the predictions for some batches of
    inputs as much as the twins do, times `factor` (`Bootstrap.scale`)."""
    device, task = estimate.partition.sigma.device, estimate.task

    def outputs(run: Callable[[Any], Any], some: slice = slice(None)) -> list[Tensor]:
        with own_randomness(device, seed, "spread"):  # for a model with random layers
            return [run(copied(x, device)) for x in inputs[some]]  # copies, as a model may write into its input

    def spread(models: Iterable[list[Tensor]]) -> float:
        return variance(torch.cat([values_of(batch, task).flatten() for batch in model]) for model in models)

    def by_draws(scale: float) -> float:
        if task != "classification":  # a shift of all draws does not change the variance of values
            return spread(map(outputs, estimate._models(DRAWS, scale, seed)))
        squares = 0.0
        for some in in_parts([DRAWS * own.numel() for own in center]):
            drawn = zip(*(outputs(draw, some) for draw in estimate._models(DRAWS, scale, seed)), strict=True)
            for mean, own in zip(center[some], drawn, strict=True):
                if mean.numel():  # a batch may be empty
                    shifted = around(torch.stack(own), mean, task)
                    squares += mean.numel() * variance(values_of(draw, task) for draw in shifted)
        return squares / sum(own.numel() for own in center)

    for twin in (twins := list(twins)):
        twin.eval()
    target = spread(outputs(partial(call, twin)) for twin in twins) * factor**2
    [center] = map(outputs, estimate._models(0, 0.0, seed))
    estimate.scale, estimate.centered = match(by_draws, target), True
