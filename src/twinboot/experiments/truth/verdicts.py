"""The claims about the spread. None is the paper's."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from ..intervals import interval, with_interval
from ..runner.experiment import Verdict, status
from .scores import CELL, LEVEL

OURS = {"fit": "fit", "error_bars": "error_bars"}  # row of the table -> its name in a claim
DROPOUT = "MC dropout, averaged"
RATIO = (0.8, 1.25)
COVERED = (0.85, 0.95)
FEW = 5  # with fewer sets, an interval over them says little


def judge(found: pd.DataFrame) -> list[Verdict]:
    """`found` has the columns of `with_scores`."""
    rows = found[found["method"].isin([*OURS, DROPOUT])]
    too_few = bool(rows.groupby([*CELL, "method"])["set"].nunique().min() < FEW)
    verdicts = []
    for method in (method for method in OURS if method in set(rows["method"])):
        own = rows[rows["method"] == method]
        ratio = "The spread of {} is 0.8 to 1.25 times the true one for every size and learning rate."
        verdicts.append(_within(own, "ratio", RATIO, ratio.format(OURS[method]), too_few))
        if DROPOUT in set(rows["method"]):
            verdicts.append(_no_worse(rows, method, too_few))
        holds = f"{LEVEL:.0%} intervals of {OURS[method]} hold the expected prediction in 85 % to 95 % of the cases."
        verdicts.append(_within(own, "covered", COVERED, holds, too_few))
    return verdicts


def _verdict(claim: str, cells: dict[str, bool], evidence: str, too_few: bool) -> Verdict:
    """Partly: in at least half of the cells."""
    good = sum(cells.values())
    decided = status(good == len(cells), 2 * good >= len(cells), too_few)
    return Verdict(claim, "not in the paper", decided, f"In {good} of {len(cells)}: {evidence}.", ours=True)


def _by_cell(rows: pd.DataFrame, judged: Callable[[pd.DataFrame], tuple[bool, str]]) -> tuple[dict[str, bool], str]:
    answers, said = {}, []
    for (size, lr), own in rows.groupby(CELL):
        answers[f"{size}, {lr}"], shown = judged(own)
        said.append(f"{shown} (N {size:g}, lr {lr:g})")
    return answers, "; ".join(said)


def _within(own: pd.DataFrame, column: str, band: tuple[float, float], claim: str, too_few: bool) -> Verdict:
    """Whether the mean over the sets lies in a band."""

    def judged(cell: pd.DataFrame) -> tuple[bool, str]:
        return band[0] <= cell[column].mean() <= band[1], with_interval(cell[column], "{:.2f}")

    return _verdict(claim, *_by_cell(own, judged), too_few)


def _no_worse(rows: pd.DataFrame, method: str, too_few: bool) -> Verdict:
    """Whether the rank correlation is not clearly lower than that of averaged MC dropout on the same sets."""

    def judged(cell: pd.DataFrame) -> tuple[bool, str]:
        wide = cell.pivot(index="set", columns="method", values="rank")
        difference = (wide[method] - wide[DROPOUT]).dropna()
        mean, half = interval(difference)
        return not mean + half < 0, with_interval(difference, "{:+.2f}")

    claim = f"The rank correlation of {OURS[method]} with the true spread is no worse than that of averaged MC dropout."
    return _verdict(claim, *_by_cell(rows[rows["method"].isin([method, DROPOUT])], judged), too_few)
