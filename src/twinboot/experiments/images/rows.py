"""The rows and columns of the image experiment's table, and how two rows compare on the same seeds."""

from __future__ import annotations

import pandas as pd

from ..intervals import interval
from .cost import KINDS
from .recipes import TWINS
from .rivals import AS_DEAR, MORE

BASE, AVERAGED = "single, best loss on a hold-out", "single, averaged, best loss on a hold-out"
AS_LONG, OURS_LAST = "single, all images", f"{TWINS['twins'][0]}, last epoch alone"
OURS, DRAWS = (TWINS[method][0] for method in ("twins", "twins-draws"))
OURS_MEAN, OURS_DROPOUT, OURS_ALL = f"{OURS}, mean", TWINS["twins-dropout"][0], TWINS["twins-all"][0]
OURS_SPLIT, OURS_POOLED = TWINS["twins-split"][0], TWINS["twins-pooled"][0]
OURS_BOTH = TWINS["twins-pooled-dropout"][0]
OURS_CALIBRATED = f"{OURS}, calibrated"
CONTESTANTS = (
    *(OURS, OURS_CALIBRATED, OURS_DROPOUT, OURS_ALL),
    *(OURS_SPLIT, f"{OURS_SPLIT}, {TWINS['twins-split'][1].longer} times as long"),
    *(OURS_POOLED, f"{OURS_POOLED}, {TWINS['twins-pooled'][1].longer} times as long"),
    *(OURS_BOTH, f"{OURS_BOTH}, {TWINS['twins-pooled-dropout'][1].longer} times as long"),
)
# What others have, as they have it: not averaged over the epochs as twins are.
USUAL = (
    *(AS_LONG, *(f"single, {more} times as long" for more in (MORE, AS_DEAR))),
    *("ensemble of 2", "SWA", "MC dropout", "IVON"),
)
SIGNED = "{:+.3f}"
HIGHER = {"accuracy": True, "nll": False, "ece": False, "auroc": True}  # is better
COLUMNS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "adaptive_ece": "adaptive ECE",
    "unseen": "NLL, unseen",
    "gap": "gap",
    "auroc": "AUROC of errors",
    "ood_auroc": "AUROC of strange images",
}


def time_of_each(rows: pd.DataFrame, ratio: pd.DataFrame) -> dict[str, float]:
    """Of the training of each row, in trainings of a single model on all images."""
    first = rows.drop_duplicates("row")
    return {row.row: row.epochs * ratio.loc[KINDS[row.method], "median"] for row in first.itertuples()}


def ahead(wide: pd.DataFrame, column: str, row: str, ours: str = OURS) -> int:
    """1 if a row is clearly better than Twin-Boot, -1 if it is clearly worse: on the same seeds, by a 95 % interval."""
    mean, half = difference(wide, column, row, ours)
    if not abs(mean) > half:  # nor with one seed, whose interval is not a number
        return 0
    return 1 if (mean > 0) == HIGHER[column] else -1


def difference(wide: pd.DataFrame, column: str, row: str, other: str) -> tuple[float, float]:
    return interval(wide[column][row] - wide[column][other])
