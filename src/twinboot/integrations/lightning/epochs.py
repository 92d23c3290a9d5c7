"""Epochs of pairs of batches, counted so that a run of Lightning's goes on in the right one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...data.loader import PairedLoader


class Pairs(PairedLoader):
    """An epoch is over when it had as many batches as Lightning takes of it (which does not ask for one more), and not
    when Lightning says so: resumed after an epoch, it may count the first batch of the next one as another of that."""

    over = False

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        self._begun = self._begun and self.over
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "epoch": self.epoch + 1, "step": 0} if self._begun and self.over else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.over = False
