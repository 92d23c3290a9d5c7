"""A control for sigma: which share of sigma^2 comes from the data, and which from the randomness of the training.

Twins differ in their bootstrap samples. They also differ in the order of their batches, in the noise on their weights
and in their dropout masks. All of these drive them apart. A third copy, the control, has the first twin's sample, but
its own order, noise and masks. With weights w_1, w_2 of the twins and w_c of the control, for a group of D weights:

    sigma^2    =  ||w_1 - w_2||^2 / (2 D)     data and randomness
    control^2  =  ||w_1 - w_c||^2 / (2 D)     randomness alone
    share of the data  =  1 - control^2 / sigma^2

A reset also drives twins apart, by noise that is neither data nor the optimizer's. It must count in both distances
alike, so a reset puts the control exactly where it puts the second twin. Both distances then begin at the same value,
in every mode, and from there on only data make them differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from .._core.checks import require_types, require_whole
from .._core.copies import Copies, Part
from .._core.ranks import local, reshard
from ..groups import Grouping
from ..resets import Mode
from ..twins import Twins, variance


class ControlledTwins(Twins):
    """Twins with a control, which tells how much of sigma^2 is due to the data: `data_share()`.

    The loop stays the same, with `PairedLoader(..., control=True)`, which gives one more batch per step. The control is
    the last copy: iteration, indexing, `len` and calls include it. Everything else is about the twins alone: sigma,
    resets, `estimate`, `weights` and `unstack` are the same, bit for bit, as without a control. A step takes half as
    much time and memory again.

    Args:
        model, replicas, groups, seed: as for `Twins`. With more than two twins, the control is still compared with the
            first.

    >>> twins = ControlledTwins(nn.Linear(3, 1))
    >>> len(twins), twins.replicas
    (3, 2)
    >>> twins.data_share()  # sigma is 0 before training
    {'(model)': nan}
    """

    def __init__(
        self, model: nn.Module, replicas: int = 2, groups: str | Grouping = "layer", seed: SupportsIndex = 0
    ) -> None:
        require_types(Twins.__init__, {"replicas": replicas})
        require_whole("replicas", replicas, 2)
        self._begin(model, groups, seed, lambda partition: _CopiesAndControl(model, partition, int(replicas)))

    @property
    def control(self) -> nn.Module:
        """The third copy: the first twin's sample in another order."""
        return self[-1]

    @torch.no_grad()
    def reset(self, mode: Mode = "sample", generator: torch.Generator | None = None) -> None:
        super().reset(mode, generator)
        _, second, *_, control = self._store.weights()
        for w, placed in zip(control, second, strict=True):
            local(w).copy_(local(placed))

    @torch.no_grad()
    def data_share(self) -> dict[str, float]:
        """Group name -> the share of sigma^2 that is due to the data. Read it before a reset, not after.

        It is an estimate from one difference of weights, so it may be negative where data matter little, and it is
        rough for groups of few weights. A group with several sigmas has one share. It is NaN where sigma is 0.
        """
        self._refuse_inside("data_share()")
        reshard(self)
        store: _CopiesAndControl = self._store  # type: ignore[assignment]
        twins = variance(self.partition, self.replicas, store.parts(0, 0))
        control = variance(self.partition, 2, store.first_and_control())
        of_twins, of_control = (self.partition.by_group(found * self.partition.sizes) for found in (twins, control))
        return {name: _share(of_twins[name].sum().item(), of_control[name].sum().item()) for name in of_twins}


def _share(of_twins: float, of_control: float) -> float:
    return 1 - of_control / of_twins if of_twins > 0 else math.nan


class _CopiesAndControl(Copies):
    """A store with one more copy, the last, which counts neither in sigma nor in the mean."""

    def __len__(self) -> int:
        return self.replicas + 1

    def models(self) -> list[nn.Module]:
        return super().models()[: self.replicas]

    def stacked_weights(self) -> list[Tensor]:
        return [own[: self.replicas] for own in super().stacked_weights()]

    def parts(self, update: int, seed: int) -> Iterable[Part]:
        return [(which, copies[: self.replicas]) for which, copies in self._all_parts()]

    def first_and_control(self) -> Iterable[Part]:
        return [(which, [copies[0], copies[-1]]) for which, copies in self._all_parts()]

    def _all_parts(self) -> Iterable[Part]:
        return super().parts(0, 0) or ()

    def pieces(self) -> Iterator[Sequence[Tensor]]:
        return (copies[: self.replicas] for copies in super().pieces())

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "control": True}
