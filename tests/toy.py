"""An experiment of three parts that takes no time, for tests of what runs and reports experiments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from twinboot.experiments.runner.experiment import Part, Tables, Tick, Verdict

TITLE = "A toy <experiment> & more"
QUESTION = "Does it run?"
CAPTION = "Three numbers."


@dataclass(frozen=True, kw_only=True)
class Config:
    """A toy."""

    scale: float = 1.0
    """By which all is multiplied."""
    sizes: tuple[int, ...] = (1, 2)
    """Some numbers."""
    seed: int = 0
    """Of nothing."""

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError(f"scale must be above 0, not {self.scale}.")


QUICK = Config(sizes=(1,))
computed: list[str] = []  # the parts that were computed, for tests to look at
before: Callable[[str], None] = lambda part: None  # noqa: E731 (tests replace it)


def parts(config: Config) -> list[Part]:
    def compute(i: int, tick: Tick) -> dict[str, pd.DataFrame]:
        before(f"part-{i}")
        tick()
        tick()
        computed.append(f"part-{i}")
        return {"numbers": pd.DataFrame({"part": [i], "value": [i * config.scale / 3], "word": ["NA"]})}

    return [Part(f"part-{i}", 2, lambda tick, i=i: compute(i, tick)) for i in range(3)]  # type: ignore[misc]


def figure(config: Config, tables: Tables) -> Figure:
    drawn = Figure(figsize=(4, 3))
    drawn.subplots().plot(tables["numbers"]["value"])
    return drawn


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    return {"Values < 1 & more": tables["numbers"][["part", "value"]].round(3).rename(columns={"value": "|value|"})}


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    return [
        Verdict("It runs.", "nowhere", "held", "<script>alert(1)</script>"),
        Verdict("It is useful.", "nowhere", "not held", "Not at all."),
        Verdict("It is short.", "nowhere", "held", "Ninety lines.", ours=True),
    ]
