"""What an experiment is: a config, parts that compute tables, and what is shown of those tables.

An experiment is a module with the names of `Experiment`. It runs as a list of parts. Each part computes rows of tidy
tables. The figure, numbers and verdicts are functions of the config and the tables, so drawing needs no new run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import pandas as pd
from matplotlib.figure import Figure

from ..._core.threads import one_thread as one_thread  # which many experiments use

Tables = Mapping[str, pd.DataFrame]
Tick = Callable[[], object]
Status = Literal["held", "partly", "not held", "undecided"]


@dataclass(frozen=True)
class Part:
    """A piece of work whose result is stored: its name, its length in ticks, and the function that computes it.

    Parts may run in processes of their own, so `compute` must be picklable: a function of a module or a `partial` of
    one, not a lambda.
    """

    name: str
    ticks: int
    compute: Callable[..., dict[str, pd.DataFrame]]
    resumes: bool = False  # `compute` also gets a directory for checkpoints, which survives a stop
    alone: bool = False  # it measures time, so it runs by itself after all other parts


@dataclass(frozen=True)
class Verdict:
    """How a claim fared in a run. `ours` are claims that the paper does not make, or not about this task."""

    claim: str
    place: str  # where the paper makes the claim, or what about it is ours
    status: Status  # "undecided": there were too few runs
    evidence: str
    ours: bool = False

    @property
    def source(self) -> str:
        return f"our claim: {self.place}" if self.ours else self.place


class UnavailableError(Exception):
    """An experiment needs a package or file that is missing. The message is one sentence that says what to do."""


def agrees(value: float, error: float, expected: float = 1.0, margin: float = 0.05) -> bool | None:
    """Whether a measured value equals the expected one, up to a relative margin or three standard errors.

    If the standard error is above a tenth of the expected value, the answer is False beyond five standard errors and
    None otherwise: too few runs to say.
    """
    off = abs(value - expected)
    if error <= 0.1 * abs(expected):
        return off <= max(margin * abs(expected), 3 * error)
    return False if off > max(margin * abs(expected), 5 * error) else None


def overall(answers: Iterable[bool | None], partly: float = 1 / 2) -> Status:
    """One status for several answers of `agrees`: "partly" if at least the share `partly` of them is True."""
    found = list(answers)
    return status(all(found), sum(map(bool, found)) >= partly * len(found), None in found)


class Experiment(Protocol):
    """The names that the module of an experiment has. It may also have `in_words(config, tables)`, which returns a
    paragraph for the top of its section."""

    TITLE: str
    QUESTION: str
    CAPTION: str
    QUICK: Any  # the config of --quick

    @property
    def Config(self) -> type[Any]: ...  # noqa: N802 (a class; its defaults are those of --full)

    def parts(self, config: Any) -> list[Part]: ...

    def figure(self, config: Any, tables: Tables) -> Figure: ...

    def numbers(self, config: Any, tables: Tables) -> dict[str, pd.DataFrame]:
        """Small tables for readers, by title, their numbers already rounded."""

    def verdicts(self, config: Any, tables: Tables) -> list[Verdict]: ...


def label(name: str, experiment: Experiment, config: Any) -> str:
    """The name of an experiment, with the preset of its config unless that is the default."""
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
    """Raise ValueError if one of these lists in a config is empty or has a value twice."""
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
