"""Beyond the paper: is the spread of predictions right?

The truth is the standard deviation of the predictions over plain models that were trained on different training sets.
Each method estimates it from one set alone.

config.py has the settings, tasks.py the data and the plain training, methods.py the methods, scores.py the scores.
"""

from __future__ import annotations

import sys
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from ..datasets import image_files
from ..datasets.array_files import checksum
from ..images.methods import require_ivon
from ..intervals import with_interval
from ..runner.experiment import Part, Tables, Tick, UnavailableError, Verdict, one_thread
from ..uci.data import LAYOUT
from .config import LEAST, PRESETS, SETS, Config
from .figure import draw
from .methods import METHODS
from .scores import CELL, LEVEL, PLAIN, draw_rows, quality, truth_rows, truths, with_scores
from .tasks import available, plain, pool_of, task_of
from .verdicts import judge

__all__ = ["CAPTION", "QUESTION", "QUICK", "TITLE", "Config", "figure", "numbers", "parts", "verdicts"]

TITLE = "The spread of predictions against the truth"
QUESTION = "Do predictions vary as much as those of models that were trained on other data?"
CAPTION = (
    "The truth is the standard deviation of the predictions over plain models that were trained on different training "
    "sets with different seeds. Each method estimates it from one set. Left: its root mean square spread relative to "
    "the truth; 1 is right, and the band is from 0.8 to 1.25. Middle: rank correlation of the two over the test "
    "inputs: does the method say where predictions are uncertain? Right: share of the test inputs whose "
    f"{LEVEL:.0%} interval holds the expected prediction, the mean over the other training sets; the band is from "
    "85 % to 95 %. Bars are 95 % intervals over the training sets."
)
QUICK = Config(
    methods=("fit", "error_bars", "dropout", "ensemble"),
    sizes=(200,),
    lrs=(3e-3,),
    epochs=20,
    sets=8,
    scored=3,
    inputs=200,
    members=(2,),
)
BLOCK = 5  # plain models of a part
COLUMNS = {  # score -> its title and format
    "ratio": ("spread ratio", "{:.2f}"),
    "rank": ("rank correlation", "{:.2f}"),
    "covered": (f"in {LEVEL:.0%} interval", "{:.2f}"),
    "covered_probs": ("the same, of probabilities", "{:.2f}"),
    "own_ratio": ("ratio to own spread", "{:.2f}"),
    "nll": ("NLL", "{:.3f}"),
    "accuracy": ("accuracy", "{:.3f}"),
    "rmse": ("RMSE", "{:.3f}"),
    "point_nll": ("NLL of the point prediction", "{:.3f}"),
    "point_accuracy": ("accuracy of the point prediction", "{:.3f}"),
    "point_rmse": ("RMSE of the point prediction", "{:.3f}"),
    "cost": ("time (plain = 1)", "{:.2f}"),
}


def parts(config: Config) -> list[Part]:
    """For each size and learning rate the plain models in blocks, then the methods, one set after the other."""
    _require(config)
    found = []
    for size in config.all_sizes:
        sets = number_of_sets(config, size)
        for lr in config.all_lrs:
            cell = f"{size} {lr:g}"
            for start in range(0, sets, BLOCK):
                block = range(start, min(start + BLOCK, sets))
                found.append(Part(f"{cell} truth {start}", len(block), partial(_truth, config, size, lr, block)))
            found += [
                Part(f"{cell} {name} {number}", 1, partial(_run, config, size, lr, number, name))
                for number in range(config.scored)
                for name in config.methods
            ]
    return found


def _require(config: Config) -> None:
    """Refuse, before anything is trained, what cannot run."""
    preset = PRESETS[config.preset]
    if preset.needs and config.data is None:
        dataset = {"fashion": "fashion-mnist"}.get(config.preset, config.preset)
        kind = LAYOUT if config.preset == "protein" else image_files.wanted(dataset)
        raise UnavailableError(f"the preset {config.preset} needs --data {preset.needs}: {kind}.")
    if config.checksum and checksum(str(config.data)) != config.checksum:
        raise ValueError(f"{config.data} is not the file that the checksum belongs to: was it changed?")
    if len(pool_of(config).test_x) < config.inputs:
        raise ValueError(f"there are {len(pool_of(config).test_x)} test inputs: inputs can't be {config.inputs}.")
    for size in config.all_sizes:
        number_of_sets(config, size)
    if "ivon" in config.methods:
        require_ivon()


def number_of_sets(config: Config, size: int) -> int:
    """How many training sets of a size there are for the truth."""
    there = available(config, size)
    if there is None:
        return config.sets or max(SETS, config.scored)
    least = max(LEAST, config.scored, config.sets or 0)
    if there < least:
        raise ValueError(
            f"the training samples of {config.preset} make {there} disjoint sets of {size}: {least} are needed; use "
            "smaller sizes, or fewer sets."
        )
    return config.sets or min(there, max(SETS, config.scored))


def _truth(config: Config, size: int, lr: float, block: range, tick: Tick) -> dict[str, pd.DataFrame]:
    """The predictions of some plain models."""
    kind, target, tables = PRESETS[config.preset].kind, pool_of(config).test_y, list[pd.DataFrame]()
    runs = []
    for number in block:
        with one_thread():
            trained = plain(config, size, lr, number)
            predicted = task_of(config, size, lr, number).predict(trained.model)
        tables.append(truth_rows(kind, predicted, target).assign(size=size, lr=lr, set=number))
        about = {"size": size, "lr": lr, "set": number, "method": PLAIN, "df": 0.0, "seconds": trained.seconds}
        runs.append(about | quality(kind, predicted[None], predicted, target))
        tick()
    return {"truth": pd.concat(tables, ignore_index=True), "runs": pd.DataFrame(runs)}


def _run(config: Config, size: int, lr: float, number: int, name: str, tick: Tick) -> dict[str, pd.DataFrame]:
    """A method on one training set."""
    kind, target, task = PRESETS[config.preset].kind, pool_of(config).test_y, task_of(config, size, lr, number)
    with one_thread():
        trained = plain(config, size, lr, number)
        try:
            found = METHODS[name](task, trained, config.members)
        except FloatingPointError as error:  # a method may fail on a set, which the table then has one less of
            print(f"twinboot: left out: {name} on set {number} of {size} samples: {error}", file=sys.stderr)
            found = {}
    tick()
    if not found:
        return {}
    draws, runs = [], []
    for row, own in found.items():
        about = {"size": size, "lr": lr, "set": number, "method": row}
        draws.append(draw_rows(kind, own, target).assign(**about))
        runs.append(about | {"df": own.df, "seconds": own.seconds} | quality(kind, own.draws, own.point, target))
    return {"draws": pd.concat(draws, ignore_index=True), "runs": pd.DataFrame(runs)}


def figure(config: Config, tables: Tables) -> Figure:
    return draw(scored(tables))


def scored(tables: Tables) -> pd.DataFrame:
    return with_scores(tables["truth"], tables["draws"], tables["runs"])


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    """A table for each size and learning rate."""
    found = {}
    for cell, own in scored(tables).groupby(CELL):
        truth, lines = truths(tables["truth"])[cell], []
        for method, rows in own.groupby("method", sort=False):
            line = {"": method, "sets": rows["set"].nunique()}
            for column, (title, form) in COLUMNS.items():
                if column in own and own[column].notna().any():
                    line[title] = with_interval(rows[column], form).replace("nan", "")
            lines.append(line)
        title = (
            "{} samples, learning rate {:g}: mean and 95 % interval over the sets; the truth of {} sets is known well "
            "enough for a rank correlation of {:.2f}"
        )
        found[title.format(*cell, len(truth.sets), truth.best_rank)] = pd.DataFrame(lines)
    return found


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    return judge(scored(tables))
