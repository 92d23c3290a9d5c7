"""Figures 4 and 5: image classifiers trained with Twin-Boot, beside what else the same time could buy.

See `contenders.py` for the methods, `config.py` for the presets, `verdicts.py` for the claims.
"""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from ...data.bootstrap import UNSEEN
from ..intervals import interval, with_error
from ..runner.experiment import Tables
from .config import PRESETS, Config
from .cost import ratios
from .figure import draw
from .recipes import TWINS, Recipe
from .rows import BASE, COLUMNS, HIGHER, OURS, OURS_BOTH, SIGNED, ahead, difference, time_of_each
from .run import SPARE, chosen, parts, timed
from .verdicts import verdicts

TITLE = "Images: networks that know when they are wrong"
QUESTION = (
    "Does Twin-Boot close the gap between training and test, calibrate predictions, and stay ahead of what else the "
    "same time could buy?"
)
CAPTION = (
    "Above: where some images are left to choose by, accuracy of the mean of the twins and of a single model on "
    "training images and on those, whose lowest loss tells which epoch is kept with each seed; reliability diagrams on "
    "the test images, where the diagonal is perfect and bins of very few images have no dot. Middle: sigma of each "
    "layer over the epochs and at the end, of the first twins of the table. Below: accuracy, negative log-likelihood "
    "and calibration error on the test images, of each row of the table but for those of the last epoch alone, a dot "
    'for each seed and a bar for their mean. Rows that end in "mean" predict with one model, without draws of its '
    'weights. Twins "with repeated samples", in the table "with draws", read a sample as often as the bootstrap drew '
    "it; the others read it once, with a weight. Where a table says so, other images of the training files take the "
    "place of the test images."
)
QUICK = Config(methods=("hold-out", "single", "dropout", "twins"), epochs=8, seeds=1)

CLEARLY = "; clearly: the 95 % interval of the difference on the same seeds leaves 0 out"
TIME = "time (single = 1)"
BESIDE, OF_OURS = "than Twin-Boot", "NLL of Twin-Boot, same seeds"
BEATS_ONCE = "beats Twin-Boot with this seed in"

__all__ = ["CAPTION", "QUESTION", "QUICK", "TITLE", "Config", "figure", "numbers", "parts", "verdicts"]


def figure(config: Config, tables: Tables) -> Figure:
    return draw(tables, BASE, OURS, more=OURS_BOTH)


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    rows, (_, epochs, number) = tables["rows"], chosen(config)
    spread = f"mean and standard error of {number} seeds{CLEARLY}" if number > 1 else "one seed"
    if config.methods is None and (missing := set(PRESETS[config.preset].methods) - set(rows["method"])):
        spread += f"; {', '.join(sorted(missing))} was not run"
    judged = f", the first {config.test} test images" if config.test else ""
    if config.spare:
        judged = f", {config.test or SPARE} other images of the training files"
    title = f"{config.preset}, {epochs} epoch{'s' * (epochs > 1)}, {config.samples} draws{judged}: {spread}"
    ratio, wide = ratios(tables["turns"]), rows.pivot(index="seed", columns="row")
    times, told = time_of_each(rows, ratio), []
    for row, own in rows.groupby("row", sort=False):
        line = {"": row if len(own) == number else f"{row} (first seed alone)"}
        for column in (column for column in COLUMNS if column in rows and rows[column].notna().any()):
            line[COLUMNS[column]] = with_error(own[column].mean(), own[column].sem(), "{:.3f}")
        line[TIME] = f"{times[row]:.2f}"
        if OURS in times and row != OURS:
            line["clearly beats Twin-Boot in" if number > 1 else BEATS_ONCE] = _beats(wide, row)
        told.append(line)
    costs = tables["costs"].groupby("method", sort=False)[["memory"]].mean()
    seconds = tables["turns"].groupby("kind")["seconds"].median()
    return {
        title: pd.DataFrame(told).fillna(""),
        **(_tried(wide) if config.spare else {}),
        f"Time of an epoch of {timed(config)} images, in turns: median (least to most)": pd.DataFrame(
            {
                "kind": ratio.index,
                "relative": ["{:.2f} ({:.2f} to {:.2f})".format(*own) for own in ratio.to_numpy()],
                "s per epoch": seconds.map("{:.1f}".format).to_numpy(),
                "ms per step": [f"{1000 * s / _steps(config, kind):.0f}" for kind, s in seconds.items()],
            }
        ),
        "Peak memory of the process that trains, with its data": pd.DataFrame(
            {"method": costs.index, "peak, GiB": costs["memory"].map("{:.2f}".format).to_numpy()}
        ),
    }


def _steps(config: Config, kind: str) -> int:
    """Of an epoch; twins have as many with counts as with draws, of which those of a bootstrap that covers all images
    have more. Twins that divide images have fewer of them where some are left unseen."""
    recipe = TWINS[kind][1] if kind in TWINS else Recipe()
    more = {("multinomial", True): UNSEEN / 2, ("split", False): -UNSEEN}.get((recipe.kind, recipe.cover), 0.0)
    return math.ceil(timed(config) * (1 + more) / config.batch)


def _tried(wide: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What was changed about twins, and what it did to the loss of images that nothing was trained on and no test."""
    told, nll = [], wide["nll"]
    for name in [name for name, _ in TWINS.values() if name != OURS and {name, OURS} <= set(nll)]:
        apart = (nll[name] - nll[OURS]).dropna()
        mean, half = interval(apart)
        answer = "worse" if mean > 0 else "better"
        if not abs(mean) > half:  # nor with one seed, whose interval is not a number
            answer = "no clear difference" if len(apart) > 1 else "one seed alone: not judged"
        lower = f"{(apart < 0).sum()} of {len(apart)} seeds"
        same = nll[OURS][apart.index].mean()
        change = with_error(mean, half, SIGNED)
        told.append({"": name, "NLL": change, OF_OURS: f"{same:.3f}", "lower with": lower, BESIDE: answer})
    if not told:
        return {}
    title = "What was tried: NLL of other training images, less that of Twin-Boot on the same seeds; 95 % interval"
    return {title: pd.DataFrame(told)}


def _beats(wide: pd.DataFrame, row: str) -> str:
    """In what a row is clearly better than Twin-Boot; of one seed, in what it is better at all."""
    if len(wide) > 1:
        return ", ".join(COLUMNS[column] for column in HIGHER if ahead(wide, column, row) > 0)
    better = {c: difference(wide, c, row, OURS)[0] * (1 if higher else -1) > 0 for c, higher in HIGHER.items()}
    return ", ".join(COLUMNS[column] for column, ahead in better.items() if ahead)
