"""The measurements as the twins of a field see them, and the out-of-bag measurements, which no twin sees.

Each twin's loss is the mean over all measurements of weight * residual^2, with the bootstrap's counts as weights. An
out-of-bag measurement has weight 0 in all losses. There are three ways to compute them:

    Weighted    any operator: all measurements, for all twins in one call if vmap can do it
    Divided     an operator with `rows`: each twin computes only the measurements that it drew
    Batches     an operator with `rows`: each twin goes through its draws in batches

With a prior, `Stacked` computes the measurements of any number of fields, and `posterior.py` their losses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from .._core import seeds
from ..data.bootstrap import Bootstrap
from .operators import Dense, Forward, divisible, mappable, nearly_equal, one_by_one, together

UNRELATED = "the result of forward does not depend on the field by operations that PyTorch can differentiate."


def see(
    forward: Forward, observed: Tensor, initial: Tensor, bootstrap: Bootstrap, batch_size: int | None, seed: int
) -> Losses:
    """The measurements, in the cheapest way that the operator allows."""
    examine(forward, observed, initial, bootstrap, batch_size)
    if not divisible(forward) or bootstrap.n != len(observed):
        return Weighted(forward, observed, initial, bootstrap)
    if batch_size is None:
        return Divided(forward, observed, initial, bootstrap)
    return Batches(forward, observed, initial, bootstrap, batch_size, seed)


def examine(forward: Forward, observed: Tensor, initial: Tensor, bootstrap: Bootstrap, batch_size: int | None) -> None:
    """Refuse an operator that does not give the measurements, or not those of some rows."""
    predicted = _evaluate(forward, initial)
    if not isinstance(predicted, Tensor) or predicted.shape != observed.shape or predicted.is_complex():
        given = f"a {type(predicted).__name__}"
        if isinstance(predicted, Tensor):
            given = f"shape {tuple(predicted.shape)}, {predicted.dtype}"
        wanted = f"shape {tuple(observed.shape)}, {observed.dtype}"
        raise ValueError(f"forward(initial) gives {given}, but observed has {wanted}.")
    if not bool(predicted.isfinite().all()):
        raise FloatingPointError("forward gives values that are not finite for the initial field.")
    if not divisible(forward) or bootstrap.n != len(observed):
        if batch_size is None:
            return
        raise ValueError(
            "batch_size needs an operator with a method rows(index) that gives the operator of those measurements "
            "alone, as twinboot.Dense has, and a bootstrap of those."
        )
    # Not the initial field: all measurements of 0 may be alike. The repeat and the order reveal a mask instead of rows.
    index = torch.tensor([len(observed) - 1, 0, len(observed) // 2, 0], device=observed.device)
    rows, whole = (_evaluate(operator, _near(initial, 1)[0]) for operator in (forward.rows(index), forward))
    if not nearly_equal(rows, whole[index], unit=whole):
        raise ValueError("forward.rows(index)(field) gives something else than forward(field)[index].")
    if batch_size is not None and not 1 <= batch_size <= len(observed):
        raise ValueError(f"batch_size must be between 1 and the {len(observed)} measurements, not {batch_size}.")


class Measurements:
    """The measurements, their unit, and those that are out of bag."""

    def __init__(self, forward: Forward, observed: Tensor, bootstrap: Bootstrap) -> None:
        self.forward, self.observed, self.n = forward, observed, bootstrap.n
        unseen = (bootstrap.counts == 0).all(0).to(observed.device)
        self.seen, self.unseen = (which.nonzero().squeeze(1) for which in (~unseen, unseen))
        # The unit of losses is the mean square of the measurements: Adam would take the gradients of tiny measurements
        # for zero, and squares of very small or large values overflow in single precision.
        values = observed.reshape(self.n, -1)[self.seen]
        largest = values.abs().max().item() or 1.0
        self.unit = largest * math.sqrt((values / largest).square().mean().item()) or 1.0
        self.unseen_operator = self.part(self.unseen)

    def part(self, index: Tensor) -> Forward:
        """The operator of some measurements. Its result is [measurements, values of each]."""
        if divisible(self.forward) and self.n == len(self.observed):
            operator, shape = self.forward.rows(index), (len(index), self.observed.numel() // self.n)
            return lambda field: operator(field).reshape(shape)
        return lambda field: self.forward(field).reshape(self.n, -1)[index]

    def unseen_losses(self, field: Tensor) -> Tensor:
        """For each out-of-bag measurement the mean square of its residuals, in units of `unit` squared."""
        observed = self.observed.reshape(self.n, -1)[self.unseen]
        return ((_evaluate(self.unseen_operator, field) - observed) / self.unit).square().mean(1)


class Losses(Measurements, ABC):
    """What `invert` asks of the measurements."""

    @abstractmethod
    def loss(self, fields: Tensor, step: int) -> tuple[float, Tensor]:
        """The sum of the twins' losses in units of `unit` squared, and its gradient for their fields [twins, ...]."""

    def _descend(
        self,
        predicted: list[Tensor],
        observed: Sequence[Tensor],
        weights: Sequence[Tensor | float],
        fields: list[Tensor],
    ) -> tuple[float, Tensor]:
        """Loss and gradient. The derivative of the square is known, so autograd goes through the operator alone."""
        if not all(p.requires_grad for p in predicted):
            raise ValueError(UNRELATED)
        with torch.no_grad():
            residuals = [(p - y) / self.unit for p, y in zip(predicted, observed, strict=True)]
            slopes = [w * r for w, r in zip(weights, residuals, strict=True)]
            value = sum(torch.dot(s.flatten(), r.flatten()).item() for s, r in zip(slopes, residuals, strict=True))
            slopes = [s.to(p) for s, p in zip(slopes, predicted, strict=True)]  # the operator may have another dtype
        gradients = torch.autograd.grad(predicted, fields, slopes, allow_unused=True)
        if any(g is None for g in gradients):
            raise ValueError(UNRELATED)
        stacked = gradients[0] if len(gradients) == 1 else torch.stack(gradients)
        return value, stacked * (2 / self.unit)


class Weighted(Losses):
    """Every measurement is computed. For a twin that did not draw it, its weight is 0."""

    def __init__(self, forward: Forward, observed: Tensor, initial: Tensor, bootstrap: Bootstrap) -> None:
        shape, axes = observed.shape, _resampled_axes(observed, bootstrap)
        super().__init__(forward, observed, bootstrap)
        weights = bootstrap.counts.to(observed)
        weights = weights / weights.mean(1, keepdim=True) / observed.numel()
        self.weights = weights.view(bootstrap.replicas, *shape[:axes], *[1] * (len(shape) - axes))
        self._prepare(initial, bootstrap)

    def _prepare(self, initial: Tensor, bootstrap: Bootstrap) -> None:
        self.run = together(self.forward, initial, bootstrap.replicas)

    def loss(self, fields: Tensor, step: int) -> tuple[float, Tensor]:
        fields = fields.detach().requires_grad_()
        return self._descend([self.run(fields)], [self.observed], [self.weights], [fields])


class Divided(Weighted):
    """Each twin has its own operator, of the measurements that it drew. Two twins of a dense operator use one product:
    their rows are two windows of one matrix, which overlap in the measurements that both drew."""

    def _prepare(self, initial: Tensor, bootstrap: Bootstrap) -> None:
        assert divisible(self.forward)
        order, parts = _arrange(bootstrap.counts)
        order = order.to(self.observed.device)
        operator, observed, weights = self.forward.rows(order), self.observed[order], self.weights[:, order]
        again = divisible(operator)  # else the operator of a part is made from the whole
        self.parts = [operator.rows(part) if again else self.forward.rows(order[part]) for part in parts]
        self.drawn = [observed[part] for part in parts]
        self.drawn_weights = [weights[b][part] for b, part in enumerate(parts)]
        self.pair = None
        if isinstance(operator, Dense) and len(parts) == 2:
            # The windows have one length, so the shorter one also has rows of the other twin, with weight 0.
            length = max(map(len, self.drawn))
            ends = [slice(0, length), slice(len(order) - length, None)]
            pair = operator.ends(length)
            if _same_for_each(pair, [operator.rows(end) for end in ends], initial):
                self.pair, self.drawn_pair = pair, torch.stack([observed[end] for end in ends])
                self.pair_weights = torch.stack([weights[b][end] for b, end in enumerate(ends)])

    def loss(self, fields: Tensor, step: int) -> tuple[float, Tensor]:
        if self.pair is not None:
            fields = fields.detach().requires_grad_()
            return self._descend([self.pair(fields)], [self.drawn_pair], [self.pair_weights], [fields])
        apart = [field.requires_grad_() for field in fields.detach().unbind()]
        predicted = [operator(field.clone()) for operator, field in zip(self.parts, apart, strict=True)]
        return self._descend(predicted, self.drawn, self.drawn_weights, apart)


class Batches(Losses):
    """Each twin goes through its draws in batches, in a new order in each epoch."""

    def __init__(
        self, forward: Forward, observed: Tensor, initial: Tensor, bootstrap: Bootstrap, batch_size: int, seed: int
    ) -> None:
        if bootstrap.kind == "bayesian":
            raise ValueError("a bayesian bootstrap has weights, not draws to take a few of: leave batch_size out.")
        super().__init__(forward, observed, bootstrap)
        self.draws = [bootstrap.indices(b) for b in range(bootstrap.replicas)]
        # Twins that divide the measurements divide a batch, too, as in `PairedLoader`.
        self.batch_size = max(min(2, batch_size), round(batch_size / bootstrap.parts))
        self.seed, self.epoch = seed, -1

    def loss(self, fields: Tensor, step: int) -> tuple[float, Tensor]:
        assert divisible(self.forward)
        epoch, place = divmod(step - 1, max(1, min(map(len, self.draws)) // self.batch_size))
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(seeds.derive(self.seed, "batches", epoch))
            self.order = [own[torch.randperm(len(own), generator=generator)] for own in self.draws]
            self.epoch = epoch
        now = slice(place * self.batch_size, (place + 1) * self.batch_size)
        batches = [order[now].to(self.observed.device) for order in self.order]
        apart = [field.requires_grad_() for field in fields.detach().unbind()]
        predicted = [self.forward.rows(batch)(field.clone()) for batch, field in zip(batches, apart, strict=True)]
        weights = [1 / p.numel() for p in predicted]
        return self._descend(predicted, [self.observed[batch] for batch in batches], weights, apart)


class Stacked(Measurements):
    """The measurements of any number of fields at once. An operator with `rows` computes those alone that count."""

    def __init__(self, forward: Forward, observed: Tensor, initial: Tensor, bootstrap: Bootstrap) -> None:
        _resampled_axes(observed, bootstrap)
        super().__init__(forward, observed, bootstrap)
        self.table = observed.reshape(self.n, -1).to(initial.dtype)  # [measurements, values of each]
        self.mappable = mappable(forward, initial)
        # One product with a whole matrix is quicker than one with each twin's rows.
        self.apart = divisible(forward) and self.n == len(observed) and not isinstance(forward, Dense)

    def predict(self, fields: Tensor, counts: Tensor, rows: Tensor | None = None) -> Tensor:
        """The measurements of fields [members, ...]: all of them, or some rows, as [members, rows, values]. They may be
        0 where the counts, [members or 1, measurements], are."""
        if rows is None and self.apart:
            each = counts.expand(len(fields), -1)
            return torch.stack([self._some(field, own) for field, own in zip(fields, each, strict=True)])
        operator = self.forward
        if rows is not None:
            assert divisible(operator)
            operator = operator.rows(rows)
        run = vmap(operator) if self.mappable else one_by_one(operator)
        return run(fields).reshape(len(fields), -1, self.table.shape[1])

    def _some(self, field: Tensor, counts: Tensor) -> Tensor:
        assert divisible(self.forward)
        rows = counts.nonzero().squeeze(1)
        found = self.forward.rows(rows)(field.clone()).reshape(len(rows), -1)
        return found.new_zeros(self.table.shape).index_copy(0, rows, found)


def _resampled_axes(observed: Tensor, bootstrap: Bootstrap) -> int:
    """How many of the first axes of the measurements the bootstrap resamples."""
    shape, axes = observed.shape, 0
    while math.prod(shape[:axes]) < bootstrap.n and axes < len(shape):
        axes += 1
    if math.prod(shape[:axes]) != bootstrap.n:
        raise ValueError(
            f"the bootstrap resamples {bootstrap.n} measurements, but the first axes of observed, of shape "
            f"{tuple(shape)}, do not multiply to that."
        )
    return axes


def _arrange(counts: Tensor) -> tuple[Tensor, Sequence[Tensor | slice]]:
    """An order of the measurements that some twin sees, and each twin's part of them. The order for two twins is: first
    alone, both, second alone. Each part is then a slice, and no row is stored twice."""
    seen = counts > 0
    if len(counts) > 2:
        order = seen.any(0).nonzero().squeeze(1)
        return order, [own[order].nonzero().squeeze(1) for own in seen]
    kinds = (seen[0] & ~seen[1], seen.all(0), seen[1] & ~seen[0])
    first, both, second = (which.nonzero().squeeze(1) for which in kinds)
    return torch.cat([first, both, second]), [slice(0, len(first) + len(both)), slice(len(first), None)]


def _near(initial: Tensor, number: int) -> Tensor:
    """Different fields near the initial one."""
    draw = torch.Generator(initial.device).manual_seed(0)
    shift = torch.empty(number, *initial.shape, dtype=initial.dtype, device=initial.device).normal_(generator=draw)
    return initial.detach() + 0.01 * shift * (initial.detach().square().mean().sqrt() + 1)


@torch.no_grad()
def _same_for_each(pair: Forward, parts: Sequence[Forward], initial: Tensor) -> bool:
    """Whether a pair of fields gives what each gives alone: not if the function before the matrix mixes cells."""
    fields = _near(initial, 2)
    try:
        return nearly_equal(pair(fields), torch.stack([part(f) for part, f in zip(parts, fields, strict=True)]))
    except (RuntimeError, ValueError):
        return False


def _evaluate(forward: Forward, field: Tensor) -> Tensor:
    """The result of an operator without its graph. The operator may write into its input, and differentiate."""
    with torch.enable_grad():
        found = forward(field.detach().clone())
    return found.detach() if isinstance(found, Tensor) else found
