"""What an experiment is: a config, parts that compute tables, and what is said of them.

An experiment is a module with the names of `Experiment`. It runs as a list of parts, each of which fills rows of tidy
tables; whatever is drawn or said afterwards is a function of the config and those tables, so nothing has to run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import pandas as pd
import torch
from matplotlib.figure import Figure

Tables = Mapping[str, pd.DataFrame]
Tick = Callable[[], object]


@dataclass(frozen=True)
class Part:
    """A piece of work that is kept once it is done: its name, its length in ticks, and how its tables are computed."""

    name: str
    ticks: int
    compute: Callable[[Tick], dict[str, pd.DataFrame]]


@dataclass(frozen=True)
class Verdict:
    """What became of a claim of the paper here."""

    claim: str
    place: str  # where the paper makes it
    status: Literal["held", "partly", "not held"]
    evidence: str


class Experiment(Protocol):
    """The names that the module of an experiment has."""

    TITLE: str
    QUESTION: str
    CAPTION: str
    QUICK: Any  # the config of --quick

    @property
    def Config(self) -> type[Any]: ...  # noqa: N802 (its defaults are those of --full)

    def parts(self, config: Any) -> list[Part]: ...

    def figure(self, config: Any, tables: Tables) -> Figure: ...

    def numbers(self, config: Any, tables: Tables) -> dict[str, pd.DataFrame]:
        """Title -> a small table for people, its numbers already rounded."""

    def verdicts(self, config: Any, tables: Tables) -> list[Verdict]: ...


@contextmanager
def one_thread() -> Iterator[None]:
    """For tensors so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
