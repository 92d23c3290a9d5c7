"""What the twins of a field see of the measurements, and what none of them sees.

Each twin's loss is the mean over all measurements of weight * residual^2, with the bootstrap's counts as weights. So a
measurement that no twin drew has no weight in any loss, whichever way the loss is computed:

    Weighted    any operator: all of its measurements, for all twins in one call where vmap can do it
    Divided     an operator with `rows`: each twin computes only the measurements that it drew
    Batches     an operator with `rows`: each twin's draws, a few at a time
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._core import seeds
from ..data.bootstrap import Bootstrap
from .operators import Dense, Divisible, Forward, divisible, together

UNRELATED = "what forward gives does not depend on the field by operations that PyTorch can differentiate."


def see(
    forward: Forward, observed: Tensor, initial: Tensor, bootstrap: Bootstrap, batch_size: int | None, seed: int
) -> Weighted:
    """The measurements as the twins see them, in the cheapest way that the operator allows."""
    once = _measured(forward, observed, initial)
    if not divisible(forward) or bootstrap.n != len(observed):
        if batch_size is None:
            return Weighted(forward, observed, initial, bootstrap)
        raise ValueError(
            "batch_size needs an operator with a method rows(index) that gives the operator of those measurements "
            "alone, as twinboot.Dense has, and a bootstrap of those."
        )
    _check_rows(forward, once, initial)
    if batch_size is None:
        return Divided(forward, observed, initial, bootstrap)
    if not 1 <= batch_size <= len(observed):
        raise ValueError(f"batch_size must be between 1 and the {len(observed)} measurements, not {batch_size}.")
    return Batches(forward, observed, initial, bootstrap, batch_size, seed)


class Weighted:
    """Every measurement is computed, and those that a twin did not draw have no weight for it."""

    def __init__(self, forward: Forward, observed: Tensor, initial: Tensor, bootstrap: Bootstrap) -> None:
        shape, axes = observed.shape, 0
        while math.prod(shape[:axes]) < bootstrap.n and axes < len(shape):
            axes += 1
        if math.prod(shape[:axes]) != bootstrap.n:
            raise ValueError(
                f"the bootstrap resamples {bootstrap.n} measurements, but the first axes of observed, of shape "
                f"{tuple(shape)}, do not multiply to that."
            )
        self.forward, self.observed = forward, observed
        self.none_sees = (bootstrap.counts == 0).all(0).to(observed.device)
        # Losses are computed in units of the measurements' root mean square: Adam would take the gradients of tiny
        # measurements for zero, and the squares of very small or large ones are no numbers in single precision.
        seen = observed.reshape(bootstrap.n, -1)[~self.none_sees]
        largest = seen.abs().max().item() or 1.0
        self.scale = largest * math.sqrt((seen / largest).square().mean().item()) or 1.0
        weights = bootstrap.counts.to(observed)
        weights = weights / weights.mean(1, keepdim=True) / observed.numel()
        self.weights = weights.view(bootstrap.replicas, *shape[:axes], *[1] * (len(shape) - axes))
        self._prepare(initial, bootstrap)

    def _prepare(self, initial: Tensor, bootstrap: Bootstrap) -> None:
        self.run = together(self.forward, initial, bootstrap.replicas)

    def loss(self, fields: Tensor, step: int) -> tuple[float, Tensor]:
        """The sum of the twins' losses in units of `scale` squared, and its gradient for their fields [twins, ...]."""
        fields = fields.detach().requires_grad_()
        return self._descend([self.run(fields)], [self.observed], [self.weights], [fields])

    def _descend(
        self,
        predicted: list[Tensor],
        observed: list[Tensor],
        weights: Sequence[Tensor | float],
        fields: list[Tensor],
    ) -> tuple[float, Tensor]:
        """The slope of a square is known, so that only the operator is left to differentiate."""
        if not all(p.requires_grad for p in predicted):
            raise ValueError(UNRELATED)
        with torch.no_grad():
            residuals = [(p - y) / self.scale for p, y in zip(predicted, observed, strict=True)]
            slopes = [w * r for w, r in zip(weights, residuals, strict=True)]
            value = sum(torch.dot(s.flatten(), r.flatten()).item() for s, r in zip(slopes, residuals, strict=True))
            slopes = [
                s.to(p) for s, p in zip(slopes, predicted, strict=True)
            ]  # an operator may have a dtype of its own
        gradients = torch.autograd.grad(predicted, fields, slopes, allow_unused=True)
        if any(g is None for g in gradients):
            raise ValueError(UNRELATED)
        stacked = gradients[0] if len(gradients) == 1 else torch.stack(gradients)
        return value, stacked * (2 / self.scale)

    def seen(self) -> tuple[Forward, torch.Size]:
        """The operator of the measurements that some twin sees, and the shape of what it gives."""
        rows = (~self.none_sees).nonzero().squeeze(1)

        def operator(field: Tensor) -> Tensor:
            return self.forward(field).reshape(len(self.none_sees), -1)[rows]

        return operator, torch.Size([len(rows), self.observed.numel() // len(self.none_sees)])

    def unseen_losses(self, field: Tensor) -> Tensor:
        """For each measurement that no twin sees its squared residual, a mean where it has axes of its own; in units of
        `scale` squared, as the loss."""
        squared = ((_at(self.forward, field) - self.observed) / self.scale).square()
        return squared.reshape(len(self.none_sees), -1).mean(1)[self.none_sees]


class Divided(Weighted):
    """Each twin has an operator of its own: that of the measurements that it drew. A pair of twins of a dense operator
    has one for both, of two windows of its matrix that overlap where both twins drew."""

    def _prepare(self, initial: Tensor, bootstrap: Bootstrap) -> None:
        assert divisible(self.forward)
        unseen = bootstrap.unseen.to(self.observed.device)
        self.validation = self.forward.rows(unseen), self.observed[unseen]
        order, parts = _arrange(bootstrap.counts)
        order = order.to(self.observed.device)
        operator, observed, weights = self.forward.rows(order), self.observed[order], self.weights[:, order]
        whole = divisible(operator)  # or else a part of the whole is made anew
        self.parts = [operator.rows(part) if whole else self.forward.rows(order[part]) for part in parts]
        self.drawn = [observed[part] for part in parts]
        self.drawn_weights = [weights[b][part] for b, part in enumerate(parts)]
        self.pair = None
        if isinstance(operator, Dense) and len(parts) == 2:
            # Windows are equally long: the twin that drew fewer has a few of the other's in its own, with no weight.
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

    def seen(self) -> tuple[Forward, torch.Size]:
        assert divisible(self.forward)
        rows = (~self.none_sees).nonzero().squeeze(1)
        return self.forward.rows(rows), self.observed[rows].shape

    def unseen_losses(self, field: Tensor) -> Tensor:
        operator, observed = self.validation
        squared = ((_at(operator, field) - observed) / self.scale).square()
        return squared.reshape(len(observed), math.prod(observed.shape[1:])).mean(1)


class Batches(Divided):
    """Each twin goes through its draws in batches, in an order that is new in each epoch."""

    def __init__(
        self,
        forward: Forward,
        observed: Tensor,
        initial: Tensor,
        bootstrap: Bootstrap,
        batch_size: int,
        seed: int,
    ) -> None:
        if bootstrap.kind == "bayesian":
            raise ValueError("a bayesian bootstrap has weights, not draws to take a few of: leave batch_size out.")
        self.draws = [bootstrap.indices(b) for b in range(bootstrap.replicas)]
        self.batch_size, self.seed, self.epoch = batch_size, seed, -1
        super().__init__(forward, observed, initial, bootstrap)

    def loss(self, fields: Tensor, step: int) -> tuple[float, Tensor]:
        assert divisible(self.forward)
        epoch, place = divmod(step - 1, max(1, min(map(len, self.draws)) // self.batch_size))
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(seeds.derive(self.seed, "batches", epoch))
            self.order = [own[torch.randperm(len(own), generator=generator)] for own in self.draws]
            self.epoch = epoch
        apart = [field.requires_grad_() for field in fields.detach().unbind()]
        batches = [
            order[place * self.batch_size : (place + 1) * self.batch_size].to(self.observed.device)
            for order in self.order
        ]
        predicted = [self.forward.rows(batch)(field.clone()) for batch, field in zip(batches, apart, strict=True)]
        weights = [1 / p.numel() for p in predicted]
        return self._descend(predicted, [self.observed[batch] for batch in batches], weights, apart)


def _arrange(counts: Tensor) -> tuple[Tensor, Sequence[Tensor | slice]]:
    """An order of the measurements that some twin sees, and for each twin its part of them. For two twins: those of the
    first alone, of both, of the second alone; then each twin's lie together, and no row has to be held twice."""
    seen = counts > 0
    if len(counts) > 2:
        order = seen.any(0).nonzero().squeeze(1)
        return order, [own[order].nonzero().squeeze(1) for own in seen]
    kinds = (seen[0] & ~seen[1], seen.all(0), seen[1] & ~seen[0])
    first, both, second = (which.nonzero().squeeze(1) for which in kinds)
    return torch.cat([first, both, second]), [slice(0, len(first) + len(both)), slice(len(first), None)]


def _shifted(initial: Tensor, number: int) -> Tensor:
    """Fields near the initial one, each another."""
    draw = torch.Generator(initial.device).manual_seed(0)
    shift = torch.empty(number, *initial.shape, dtype=initial.dtype, device=initial.device).normal_(generator=draw)
    return initial.detach() + 0.01 * shift * (initial.detach().square().mean().sqrt() + 1)


def _same_for_each(pair: Forward, parts: Sequence[Forward], initial: Tensor) -> bool:
    """Whether a pair of fields gives what each gives alone: not if the function before the matrix mixes cells."""
    fields = _shifted(initial, 2)
    with torch.no_grad():
        try:
            found, expected = pair(fields), torch.stack([part(f) for part, f in zip(parts, fields, strict=True)])
        except (RuntimeError, ValueError):
            return False
    return found.shape == expected.shape and torch.allclose(found, expected, 1e-3, 1e-5 * float(expected.abs().max()))


def _measured(forward: Forward, observed: Tensor, initial: Tensor) -> Tensor:
    """What the operator gives for the initial field; a sentence if that is not like what was observed."""
    once = _at(forward, initial)
    if not isinstance(once, Tensor) or once.shape != observed.shape or once.is_complex():
        given = f"shape {tuple(once.shape)}, {once.dtype}" if isinstance(once, Tensor) else f"a {type(once).__name__}"
        wanted = f"shape {tuple(observed.shape)}, {observed.dtype}"
        raise ValueError(f"forward(initial) gives {given}, but observed has {wanted}.")
    if not bool(once.isfinite().all()):
        raise FloatingPointError("forward gives values that are not finite for the initial field.")
    return once


def _at(forward: Forward, field: Tensor) -> Tensor:
    """What an operator gives, which may write into what it is given, or differentiate by itself."""
    with torch.enable_grad():
        found = forward(field.detach().clone())
    return found.detach() if isinstance(found, Tensor) else found


def _check_rows(forward: Divisible, once: Tensor, initial: Tensor) -> None:
    """In an order of its own and with a repeat, which a mask would lose; and not at 0, where all rows may be alike."""
    index = torch.tensor([len(once) - 1, 0, len(once) // 2, 0], device=once.device)
    elsewhere = _shifted(initial, 1)[0]
    once, some = _at(forward, elsewhere), _at(forward.rows(index), elsewhere)
    if some.shape != once[index].shape or not torch.allclose(some, once[index], 1e-3, 1e-5 * float(once.abs().max())):
        raise ValueError("forward.rows(index)(field) gives something else than forward(field)[index].")
