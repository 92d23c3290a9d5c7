"""The distance of two models, from a few hundred numbers of each tensor.

Entry `w_i` of a tensor falls into bucket `i mod k` and gets a random sign `s_i`. The signs are the same for all models,
and new at each update:

    p_j = sum over i in bucket j of s_i w_i

This is linear: with `d = w_1 - w_2`, the difference of two sketches is the sketch of `d`. Signs are independent with
mean 0, so products of different signs have mean 0. With `S_j` the sum of `d_i^2` over bucket j,

    E ||p_1 - p_2||^2   = sum_j S_j = ||d||^2                                          unbiased, whatever the weights
    Var ||p_1 - p_2||^2 = 2 sum_j (S_j^2 - sum over i in bucket j of d_i^4)            at most 2 ||d||^4

If the buckets have equal shares of many entries, the variance is 2 / k of `||d||^4`: the relative error of `||d||` is
about `1 / sqrt(2 k)`, 4.5 % for k = 251. It is larger if few buckets hold most of the distance. So k is best a prime:
the columns of a weight would stay in the same buckets if their number divided k, or k divided it.

The signs cost at most about as much as the noise on the weights (docs/apart.md): a sign is one random bit, which
replaces the sign bit of the number. Gaussian projections would cost a few hundred normals for each weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._core.tensors import in_order, wide
from ..groups import Partition, Shape

_AT_ONCE = 2**18  # entries: larger parts do not fit into the cache and take twice the time
_INTEGERS = {torch.float32: (torch.int32, 32), torch.float64: (torch.int64, 64)}


class Sketch:
    """What is sent of each parameter: `numbers` sums for the entries that share a sigma. The parameter itself is sent,
    without an error, if that would not save half of it, or if its labels are not units.

    >>> from twinboot import Twins
    >>> twins = Twins(torch.nn.Linear(500, 3))
    >>> sketch = Sketch(twins.partition, numbers=100)
    >>> sketch.shapes  # 100 sums of the 1500 weights, and the three biases
    [(100,), (3,)]
    """

    def __init__(self, partition: Partition, numbers: int) -> None:
        labels = partition.labels()
        self.numbers = numbers
        self.shapes: list[Shape] = []
        self.rows: list[int] = []  # how many sketches a parameter has; 0 if it is sent itself
        for name, shape in partition.parameter_shapes.items():
            own = tuple(labels[name].shape) if name in labels else ()
            lead = max((d + 1 for d, size in enumerate(own) if size > 1), default=0)
            rows, entries = math.prod(shape[:lead]), math.prod(shape[lead:])
            fits = own[:lead] == shape[:lead] and entries > 2 * numbers
            self.rows.append(rows if fits else 0)
            # With labels, as many dimensions as the parameter: squares are summed to the shape of the labels.
            ones = (1,) * (len(shape) - lead - 1 if name in labels else 0)
            self.shapes.append((*shape[:lead], numbers, *ones) if fits else shape)

    def __len__(self) -> int:
        """The number of numbers that are sent."""
        return sum(map(math.prod, self.shapes))

    def of(self, weights: Sequence[Tensor], seed: int, beside: Tensor) -> Tensor:
        """The sketch of these weights: a flat tensor with the dtype and device of `beside`."""
        flip = _signs(seed)
        sent = []
        for w, rows in zip(weights, self.rows, strict=True):
            entries = wide(w.detach())
            if rows:
                # A single sketch does not depend on the dimensions: memory order avoids a copy.
                entries = (in_order(entries) if rows == 1 else entries).reshape(rows, -1)
                entries = _summed(entries, self.numbers, flip)
            sent.append(entries.reshape(-1).to(beside))
        return torch.cat(sent)

    def split(self, sent: Tensor) -> list[Tensor]:
        """The sketch of each parameter. Squared differences of sketches stand for those of the parameter."""
        parts = sent.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def _signs(seed: int) -> Callable[[Tensor], Tensor]:
    """A function that gives tensors random signs, the same on all ranks that call it in the same order: one random bit
    per entry, in place of its sign bit."""
    generators: dict[torch.device, torch.Generator] = {}

    def flip(t: Tensor) -> Tensor:
        device = t.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        integer, bits = _INTEGERS[t.dtype]
        words = torch.empty(-(-t.numel() // 64), dtype=torch.int64, device=device)
        words.random_(-(2**63), None, generator=generators[device])
        shifts = torch.arange(bits, dtype=integer, device=device)
        flipped = (words.view(integer)[:, None] << shifts).flatten()[: t.numel()].view(t.shape)
        flipped.bitwise_and_(-(2 ** (bits - 1))).bitwise_xor_(t.view(integer))
        return flipped.view(t.dtype)

    return flip


def _summed(rows: Tensor, numbers: int, flip: Callable[[Tensor], Tensor]) -> Tensor:
    """For each row the sums of its buckets."""
    sums = rows.new_zeros(len(rows), numbers)
    for part in rows.split(max(1, _AT_ONCE // len(rows) // numbers) * numbers, dim=1):
        signed = flip(part)
        times, rest = divmod(part.shape[1], numbers)
        sums += signed[:, : times * numbers].unflatten(1, (times, numbers)).sum(1)
        sums[:, :rest] += signed[:, times * numbers :]
    return sums
