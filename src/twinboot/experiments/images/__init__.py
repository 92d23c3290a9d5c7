"""Figures 4 and 5: image classifiers trained with Twin-Boot, compared with other methods.

config.py has the presets, methods.py the methods, run.py the runs, verdicts.py the claims.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from ..intervals import interval, with_error, with_interval
from ..runner.experiment import Tables
from .config import PRESETS, Config
from .figure import draw
from .run import SPARE, chosen, parts, ratios, timed
from .twins import TRAINED
from .verdicts import BASE, COLUMNS, HIGHER, OURS, OURS_BOTH, SIGNED, ahead, better, time_of_each, verdicts

TITLE = "Images: networks that know when they are wrong"
QUESTION = (
    "Does Twin-Boot close the gap between training and test, calibrate predictions, and beat other methods at the same "
    "cost?"
)
CAPTION = (
    "Top: accuracy of the mean of the twins and of a single model on training images and on images that neither "
    "trained on, whose lowest loss chooses the epoch for each seed (left out if there is one epoch); reliability "
    "diagrams on the test images, where the diagonal is perfect and bins of very few images have no dot. Middle: sigma "
    "of each layer over the epochs and at the end, for the first twins of the table. Bottom: accuracy, negative "
    "log-likelihood and calibration error on the test images for each row of the table except those of the last epoch "
    'alone, with a dot for each seed and a bar for the mean of several. Rows that end in "mean" predict with one '
    'model, without draws. Twins "with repeated samples" ("with draws" in the table) read a sample as often as the '
    "bootstrap drew it; the others read it once, with a weight. Where a table says so, other images of the training "
    "files replace the test images."
)
QUICK = Config(methods=("hold-out", "single", "dropout", "twins"), epochs=8, seeds=1)

CLEARLY = "; clearly: the 95 % interval of the difference on the same seeds leaves 0 out"
TIME = "time (single = 1)"

__all__ = ["CAPTION", "QUESTION", "QUICK", "TITLE", "Config", "figure", "numbers", "parts", "verdicts"]


def figure(config: Config, tables: Tables) -> Figure:
    return draw(tables, BASE, OURS, more=OURS_BOTH)


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    rows, (_, epochs, number) = tables["rows"], chosen(config)
    spread = f"mean and standard error of {number} seeds{CLEARLY}" if number > 1 else "one seed"
    if config.methods is None and (missing := set(PRESETS[config.preset].methods) - set(rows["method"])):
        spread += f"; {', '.join(sorted(missing))} was not run"
    images = f", the first {config.test} test images" if config.test else ""
    if config.spare:
        images = f", {config.test or SPARE} other images of the training files"
    title = f"{config.preset}, {epochs} epoch{'s' * (epochs > 1)}, {config.samples} draws{images}: {spread}"
    ratio, wide = ratios(tables["turns"]), rows.pivot(index="seed", columns="row")
    times, lines = time_of_each(rows, ratio), []
    for row, own in rows.groupby("row", sort=False):
        line = {"": row}
        for column in (column for column in COLUMNS if column in rows and rows[column].notna().any()):
            line[COLUMNS[column]] = with_error(own[column].mean(), own[column].sem(), "{:.3f}")
        line[TIME] = f"{times[row]:.2f}"
        if OURS in times and row != OURS:
            leads = [c for c in HIGHER if (ahead(wide, c, row) > 0 if number > 1 else better(wide, c, row, OURS))]
            heading = "clearly beats Twin-Boot in" if number > 1 else "beats Twin-Boot with this seed in"
            line[heading] = ", ".join(COLUMNS[column] for column in leads)
        lines.append(line)
    seconds = tables["turns"].groupby("kind")["seconds"].median()
    return {
        title: pd.DataFrame(lines).fillna(""),
        **_matched(wide),
        **(_changed(rows, wide["nll"]) if config.spare else {}),
        f"Time of an epoch of {timed(config)} images, in turns: median (least to most)": pd.DataFrame(
            {
                "kind": ratio.index,
                "relative": ["{:.2f} ({:.2f} to {:.2f})".format(*own) for own in ratio.to_numpy()],
                "s per epoch": seconds.map("{:.1f}".format).to_numpy(),
            }
        ),
    }


def _matched(wide: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What a matched spread does to predictions: against the same twins with the sigma of their training."""
    lines = []
    for trained in [row for row in wide["nll"] if row.endswith(TRAINED)]:
        row = trained.removesuffix(TRAINED)
        changes = {
            COLUMNS[column]: with_interval(wide[column][row] - wide[column][trained], SIGNED)
            for column in ("accuracy", "nll", "ece")
        }
        lines.append({"": row, **changes})
    title = "Draws with a matched spread minus draws with the sigma of the training, seed by seed: 95 % interval"
    return {title: pd.DataFrame(lines)} if lines else {}


def _changed(rows: pd.DataFrame, nll: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """How the NLL of each kind of twins differs from that of Twin-Boot."""
    firsts = rows.drop_duplicates("method")["row"]  # the row of a method that is its name alone
    lines = []
    for row in [row for row in firsts if row.startswith(OURS) and row != OURS and OURS in nll]:
        difference = nll[row] - nll[OURS]
        mean, half = interval(difference)
        answer = "worse" if mean > 0 else "better"
        if not abs(mean) > half:  # also with one seed, whose interval is NaN
            answer = "no clear difference" if len(nll) > 1 else "one seed alone: not judged"
        lower = f"{(difference < 0).sum()} of {len(nll)} seeds"
        lines.append({"": row, "NLL": with_error(mean, half, SIGNED), "lower with": lower, "than Twin-Boot": answer})
    title = "Changed settings: NLL minus that of Twin-Boot with the same seeds, on other training images; 95 % interval"
    return {title: pd.DataFrame(lines)} if lines else {}
