"""Figures 4 and 5: image classifiers trained with Twin-Boot, beside what else the same time could buy.

See `contenders.py` for the methods, `single.py` for how a single model is trained, `images_config.py` for the presets.
"""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from ..bootstrap import UNSEEN
from .experiment import Status, Tables, Verdict
from .images_config import PRESETS, Config
from .images_cost import KINDS, ratios
from .images_figure import draw, sigma_by_layer
from .images_run import chosen, parts, timed
from .intervals import interval, with_error
from .recipes import LONGER, TWINS, Recipe

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
    "it; the others read it once, with a weight."
)
QUICK = Config(methods=("hold-out", "single", "dropout", "twins"), epochs=8, seeds=1)

BASE, AVERAGED = "single, best loss on a hold-out", "single, averaged, best loss on a hold-out"
AS_LONG, OURS_LAST = "single, all images", f"{TWINS['twins'][0]}, last epoch alone"
OURS, DRAWS = (TWINS[method][0] for method in ("twins", "twins-draws"))
OURS_MEAN, OURS_DROPOUT, OURS_ALL = f"{OURS}, mean", TWINS["twins-dropout"][0], TWINS["twins-all"][0]
OURS_SPLIT = TWINS["twins-split"][0]
CONTESTANTS = OURS, OURS_DROPOUT, OURS_ALL, OURS_SPLIT, f"{OURS_SPLIT}, {LONGER} times as long"
SIGNED = "{:+.3f}"
HIGHER = {"accuracy": True, "nll": False, "ece": False, "auroc": True}  # is better
CLEARLY = "; clearly: the 95 % interval of the difference on the same seeds leaves 0 out"
DEARER = 1.1  # times the time of twins is as much, for times vary by a tenth from turn to turn
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
TIME = "time (single = 1)"
BESIDE, BEATS_ONCE = "than Twin-Boot", "beats Twin-Boot with this seed in"

__all__ = ["CAPTION", "QUESTION", "QUICK", "TITLE", "Config", "figure", "numbers", "parts", "verdicts"]


def figure(config: Config, tables: Tables) -> Figure:
    return draw(tables, BASE, OURS)


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    rows, (_, epochs, number) = tables["rows"], chosen(config)
    spread = f"mean and standard error of {number} seeds{CLEARLY}" if number > 1 else "one seed"
    if config.methods is None and (missing := set(PRESETS[config.preset].methods) - set(rows["method"])):
        spread += f"; {', '.join(sorted(missing))} was not run"
    judged = f", the first {config.test} test images" if config.test else ""
    title = f"{config.preset}, {epochs} epoch{'s' * (epochs > 1)}, {config.samples} draws{judged}: {spread}"
    ratio, wide = ratios(tables["turns"]), rows.pivot(index="seed", columns="row")
    times, told = _times(rows, ratio), []
    for row, own in rows.groupby("row", sort=False):
        line = {"": row}
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
        **_tried(wide),
        f"Time of an epoch of {timed(config)} images, in turns: median (least to most)": pd.DataFrame(
            {
                "kind": ratio.index,
                "relative": ["{:.2f} ({:.2f} to {:.2f})".format(*own) for own in ratio.to_numpy()],
                "s per epoch": seconds.map("{:.1f}".format).to_numpy(),
                "ms per step": [f"{1000 * s / _steps(config, kind):.0f}" for kind, s in seconds.items()],
            }
        ),
        "Memory of training": pd.DataFrame(
            {"method": costs.index, "peak, GiB": costs["memory"].map("{:.2f}".format).to_numpy()}
        ),
    }


def _steps(config: Config, kind: str) -> int:
    """Of an epoch; twins have as many with counts as with draws, of which those of a bootstrap that covers all images
    have more."""
    recipe = TWINS[kind][1] if kind in TWINS else Recipe()
    more = UNSEEN / 2 if recipe.cover and recipe.kind != "split" else 0
    return math.ceil(timed(config) * (1 + more) / round(config.batch * recipe.batch))


def _tried(wide: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What was changed about twins, and what it did to the loss by which such choices are made: never that of tests."""
    unseen, base = wide.get("unseen", pd.DataFrame()), f"{OURS}, calibrated"
    told, most = [], 0
    for name in [name for name, _ in TWINS.values() if name != OURS and {f"{name}, calibrated", base} <= set(unseen)]:
        apart = (unseen[f"{name}, calibrated"] - unseen[base]).dropna()
        mean, half = interval(apart)
        answer = "worse" if mean > 0 else "better"
        if len(apart) > 1 and not abs(mean) > half:
            answer = "no clear difference"
        if len(apart):
            told.append({"": name, "NLL, unseen": with_error(mean, half, SIGNED), "seeds": len(apart), BESIDE: answer})
        most = max(most, len(apart))
    if most < 2:
        return {}
    title = "What was tried: calibrated, on unseen images, less that of Twin-Boot on the same seeds; 95 % interval"
    return {title: pd.DataFrame(told)}


def _times(rows: pd.DataFrame, ratio: pd.DataFrame) -> dict[str, float]:
    """Of the training of each row, in trainings of a single model on all images."""
    first = rows.drop_duplicates("row")
    return {row.row: row.epochs * ratio.loc[KINDS[row.method], "median"] for row in first.itertuples()}


def _beats(wide: pd.DataFrame, row: str) -> str:
    """In what a row is clearly better than Twin-Boot; of one seed, in what it is better at all."""
    if len(wide) > 1:
        return ", ".join(COLUMNS[column] for column in HIGHER if _ahead(wide, column, row) > 0)
    better = {c: _difference(wide, c, row, OURS)[0] * (1 if higher else -1) > 0 for c, higher in HIGHER.items()}
    return ", ".join(COLUMNS[column] for column, ahead in better.items() if ahead)


def _ahead(wide: pd.DataFrame, column: str, row: str, ours: str = OURS) -> int:
    """1 if a row is clearly better than Twin-Boot, -1 if it is clearly worse: on the same seeds, by a 95 % interval."""
    mean, half = _difference(wide, column, row, ours)
    if not abs(mean) > half:  # nor with one seed, whose interval is not a number
        return 0
    return 1 if (mean > 0) == HIGHER[column] else -1


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    if config.test:  # a part of the test images is for a look, and decides nothing
        return []
    rows, number = tables["rows"], chosen(config)[2]
    if config.preset == "digits":  # the paper's claims are about CIFAR-10
        number = 0
    wide = rows.pivot(index="seed", columns="row")
    found = []
    if OURS in wide["nll"] and {AS_LONG, BASE} & set(rows["row"]):
        found.append(_smaller_gap(wide, number))
    if {OURS, BASE} <= set(rows["row"]):
        found.append(_calibrated(wide, number))
    if "sigma" in tables and chosen(config)[1] > 2:
        found += _structure(tables["sigma"], number)
    for ours in [row for row in CONTESTANTS if row in set(rows["row"])]:
        found += _equal_cost(rows, wide, ratios(tables["turns"]), ours)
    if {OURS, DRAWS} <= set(rows["row"]):
        found.append(_counts(wide, ratios(tables["turns"]), number))
    return found


def _difference(wide: pd.DataFrame, column: str, row: str, other: str) -> tuple[float, float]:
    return interval(wide[column][row] - wide[column][other])


def _status(number: int, answers: list[bool], least: int = 3) -> Status:
    if number < least:
        return "undecided"
    return "held" if all(answers) else "partly" if any(answers) else "not held"


def _scope(number: int) -> str:
    """What is to be said of numbers that decide nothing."""
    return "" if number else " (here on digits; the claim is about CIFAR-10)"


def _smaller_gap(wide: pd.DataFrame, number: int) -> Verdict:
    """By the gap alone, after the last epoch of both: a model that is stopped early has hardly fitted anything, and so
    a small gap, whatever it predicts. Where no single model trained as long, the stopped one has to do."""
    models = {
        AS_LONG: (OURS_LAST, "a single model that trains as long", "after the last epoch"),
        BASE: (OURS_MEAN, "a single model stopped by a hold-out", "of the mean, where what no twin saw stops it,"),
    }
    said = []
    compared = {row: told for row, told in models.items() if row in wide["gap"]}
    for row, (ours, single, when) in compared.items():
        gap, right = (with_error(*_difference(wide, column, ours, row), SIGNED) for column in ("gap", "accuracy"))
        ends = " to ".join(f"{wide['gap'][name].mean():.3f}" for name in (row, ours))
        said.append(f"Against {single} the gap {when} changes by {gap} ({ends}), test accuracy by {right}")
    first, (ours, single, _) = next(iter(compared.items()))
    mean, half = _difference(wide, "gap", ours, first)
    return Verdict(
        f"Twin-Boot has a smaller gap between training and test accuracy than {single}.",
        "Section 4.2, Figure 4a",
        _status(number, [mean + half < 0]),
        f"{'. '.join(said)}{_scope(number)}.",
    )


def _calibrated(wide: pd.DataFrame, number: int) -> Verdict:
    compared = (("ece", BASE), ("nll", BASE), ("nll", AVERAGED))
    changes = [_difference(wide, column, OURS, other) for column, other in compared]
    error, nll, fair = (with_error(*found, SIGNED) for found in changes)
    share = wide["ece"][OURS].mean() / wide["ece"][BASE].mean()
    return Verdict(
        "Predictions are better calibrated than those of a single model.",
        "Section 4.2, Figures 4b and 4c",
        _status(number, [mean + half < 0 for mean, half in changes[:2]]),
        f"Draws around the mean against a single model stopped by a hold-out: calibration error {error} "
        f"({share:.0%} of it), negative log-likelihood {nll}. Against a single model that is averaged "
        f"over the epochs in the same way the likelihood changes by {fair}{_scope(number)}.",
    )


def _structure(sigma: pd.DataFrame, number: int) -> list[Verdict]:
    mean = sigma_by_layer(sigma)
    peak, last = mean.max(axis=1), mean.iloc[:, -1]
    falls = last / peak
    order = last.sort_values(ascending=False)
    place = list(order.index).index("classifier") + 1
    return [
        Verdict(
            "Sigma starts high and decays to a stable structure over the layers.",
            "Section 4.2.1, Figure 5a",
            _status(number, [bool((falls < 0.5).all()), bool((falls < 0.9).mean() > 0.5)], least=1),
            f"At the end sigma is {falls.min():.0%} to {falls.max():.0%} of its highest value, which layers have after "
            f"epoch {int(mean.idxmax(axis=1).min())} to {int(mean.idxmax(axis=1).max())}{_scope(number)}.",
        ),
        Verdict(
            "The classifier is among the layers with the highest sigma.",
            "Section 4.2.1, Figure 5b",
            _status(number, [place <= math.ceil(len(order) / 4)], least=1),
            f"It is number {place} of {len(order)}; the highest is {order.index[0]}, {order.iloc[0]:.4f} against "
            f"{last['classifier']:.4f}{_scope(number)}.",
        ),
    ]


def _equal_cost(rows: pd.DataFrame, wide: pd.DataFrame, ratio: pd.DataFrame, ours: str) -> list[Verdict]:
    """Held: clearly ahead of all that costs no more, in accuracy, likelihood and calibration; partly: in some of them,
    and clearly behind nobody; not held: clearly behind somebody. Else, or with fewer than three seeds, undecided."""
    times = _times(rows, ratio)
    others = [row for row in times if not row.startswith(OURS)]
    rivals = [row for row in others if times[row] <= DEARER * times[ours]]
    if not rivals:
        return []
    answers = {column: [_ahead(wide, column, row, ours) for row in rivals] for column in ("accuracy", "nll", "ece")}
    first = [max(found) == -1 for found in answers.values()]
    behind = any(max(found) == 1 for found in answers.values())
    status: Status = "held" if all(first) else "not held" if behind else "partly" if any(first) else "undecided"
    said = []
    for column, found in answers.items():
        best = sorted(rivals, key=lambda row: wide[column][row].mean(), reverse=HIGHER[column])[0]
        apart = with_error(*_difference(wide, column, ours, best), SIGNED)
        place = f"is clearly ahead of {found.count(-1)} of them and clearly behind {found.count(1)}"
        if len(wide) == 1:  # of which nothing is clear
            place = f"is ahead of {_better_once(wide, column, ours, rivals)} of them with this seed"
        said.append(
            f"In {COLUMNS[column]} it {place}; against the best, '{best}' ({times[best]:.2f}), the difference is "
            f"{apart}"
        )
    left = [f"{row} ({times[row]:.2f})" for row in others if row not in rivals]
    verdict = Verdict(
        f"At equal cost {ours} predicts better than what else the time buys.",
        "the paper compares with a single model alone",
        status if len(wide) >= 3 else "undecided",
        f"{ours} takes {times[ours]:.2f} times as long as a single model; {len(rivals)} other ways to predict take "
        f"no longer, to a tenth. {'. '.join(said)}."
        + (f" Left out, for they take longer: {', '.join(left)}." if left else ""),
        ours=True,
    )
    return [verdict]


def _better_once(wide: pd.DataFrame, column: str, ours: str, rivals: list[str]) -> int:
    sign = 1 if HIGHER[column] else -1
    return sum(sign * _difference(wide, column, ours, row)[0] > 0 for row in rivals)


def _counts(wide: pd.DataFrame, ratio: pd.DataFrame, number: int) -> Verdict:
    time = ratio.loc["twins", "median"] / ratio.loc["twins-draws", "median"]
    worse = []
    for column, sign in (("accuracy", -1), ("nll", 1), ("ece", 1)):
        apart = sign * (wide[column][OURS] - wide[column][DRAWS])
        worse.append((COLUMNS[column], apart.mean(), apart.sem()))
    return Verdict(
        "Weights instead of repeated samples are no worse, at three quarters of the time.",
        '`resample="counts"`',
        _status(number, [time <= 0.75, *(apart <= error for _, apart, error in worse)]),
        f"{time:.2f} of the time; worse by "
        + ", ".join(f"{name} {with_error(apart, error, SIGNED)}" for name, apart, error in worse)
        + " (standard errors; negative is better).",
        ours=True,
    )
