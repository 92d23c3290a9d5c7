"""What an experiment is: a config, parts that compute tables, and what is said of them.

An experiment is a module with the names of `Experiment`. It runs as a list of parts, each of which fills rows of tidy
tables; whatever is drawn or said afterwards is a function of the config and those tables, so nothing has to run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import pandas as pd
import torch
from matplotlib.figure import Figure

Tables = Mapping[str, pd.DataFrame]
Tick = Callable[[], object]
Status = Literal["held", "partly", "not held", "undecided"]


@dataclass(frozen=True)
class Part:
    """A piece of work that is kept once it is done: its name, its length in ticks, and how its tables are computed.

    Parts may run at once, each in a process of its own, so `compute` must be picklable: a function of a module or a
    `partial` of one, not a lambda. One that takes hours `resumes`: `compute` then gets a directory too, which is there
    again after a stop. One that measures time runs `alone`, when all others are done.
    """

    name: str
    ticks: int
    compute: Callable[..., dict[str, pd.DataFrame]]
    resumes: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Verdict:
    """What became of a claim here. `"undecided"`: there were too few runs to say.

    A claim is the paper's, or `ours`: about something that the paper does not claim, or not of this task or protocol.
    """

    claim: str
    place: str  # where the paper makes it, or what of it is ours
    status: Status
    evidence: str
    ours: bool = False

    @property
    def source(self) -> str:
        return f"our claim: {self.place}" if self.ours else self.place


class UnavailableError(Exception):
    """What an experiment needs is not installed: one sentence that names the extra."""


def agrees(value: float, error: float, expected: float = 1.0, margin: float = 0.05) -> bool | None:
    """Whether a measured value is the expected one but for a margin or three standard errors. A value that is known to
    no better than a tenth may be five errors off, which says no, or else says nothing: None."""
    off = abs(value - expected)
    if error <= 0.1 * abs(expected):
        return off <= max(margin * abs(expected), 3 * error)
    return False if off > max(margin * abs(expected), 5 * error) else None


def overall(answers: Iterable[bool | None], partly: float = 1 / 2) -> Status:
    """One status for several answers of `agrees`; "partly" if at least that share of them is yes."""
    found = list(answers)
    if None in found:
        return "undecided"
    return "held" if all(found) else "partly" if sum(map(bool, found)) >= partly * len(found) else "not held"


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


def label(name: str, experiment: Experiment, config: Any) -> str:
    """The name of an experiment, with the preset of its config where that is not the usual one."""
    preset = getattr(config, "preset", None)
    return name if preset == getattr(experiment.Config(), "preset", None) else f"{name}-{preset}"


def command(name: str, experiment: Experiment, config: Any) -> str:
    """The command that runs an experiment with a config."""
    changes = [
        {key: value for key, value in asdict(config).items() if value != getattr(preset, key)}
        for preset in (experiment.Config(), experiment.QUICK)
    ]
    quick = len(changes[1]) < len(changes[0])
    words = ["twinboot", name, *(["--quick"] if quick else [])]
    for key, value in changes[quick].items():
        values = [] if value is True else value if isinstance(value, (tuple, list)) else [value]
        words += [f"--{key.replace('_', '-')}", *map(str, values)]
    return " ".join(words)


def refuse_repeated(config: Any, *names: str) -> None:
    """Lists of values in a config must have some, each once."""
    for name in names:
        values = getattr(config, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} must have at least one value and none twice, not {values}.")


def require_positive(config: Any, *names: str) -> None:
    """The named settings must be above 0; NaN is not."""
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be above 0, not {getattr(config, name)}.")


def require_at_least(config: Any, least: float, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(f"{name} must be at least {least}, not {getattr(config, name)}.")


def status(held: bool, partly: bool = False, too_few: bool = False) -> Status:
    """The status of a claim that holds, or holds in part; with too few runs it is undecided."""
    return "undecided" if too_few else "held" if held else "partly" if partly else "not held"
