"""The rows and columns of the image experiment's table, and what they say about each claim."""

from __future__ import annotations

import math

import pandas as pd

from ..intervals import interval, with_error
from ..networks import Normalisation
from ..runner.experiment import Status, Tables, Verdict, status
from .config import PRESETS, Config
from .figure import sigma_by_layer
from .methods import AS_DEAR, MORE, find
from .run import chosen, ratios
from .twins import TWINS

OURS, DRAWS, OURS_POOLED, OURS_BOTH = (row for row, _ in TWINS.values())
OURS_MEAN, OURS_LAST = f"{OURS}, mean", f"{OURS}, last epoch alone"
BASE, AVERAGED = "single, best loss on a hold-out", "single, averaged, best loss on a hold-out"
AS_LONG = "single, all images"
CONTESTANTS = (
    *(OURS, f"{OURS}, calibrated"),
    *(OURS_POOLED, f"{OURS_POOLED}, {TWINS['twins-pooled'][1].longer} times as long"),
    *(OURS_BOTH, f"{OURS_BOTH}, {TWINS['twins-pooled-dropout'][1].longer} times as long"),
)
# Other methods as they are usually trained: without the weight averaging of `fit`.
USUAL = (
    *(AS_LONG, *(f"single, {more} times as long" for more in (MORE, AS_DEAR))),
    *("ensemble of 2", "SWA", "MC dropout", "IVON"),
)
SIGNED = "{:+.3f}"
HIGHER = {"accuracy": True, "nll": False, "ece": False, "auroc": True}  # whether higher is better
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
DEARER = 1.1  # relative times up to this count as equal: they vary by a tenth from turn to turn


def time_of_each(rows: pd.DataFrame, ratio: pd.DataFrame) -> dict[str, float]:
    """Training time of each row, relative to a single model on all images."""
    first = rows.drop_duplicates("row")
    return {row.row: row.epochs * ratio.loc[find(row.method).kind, "median"] for row in first.itertuples()}


def ahead(wide: pd.DataFrame, column: str, row: str, ours: str = OURS) -> int:
    """1 if a row is clearly better than ours, -1 if it is clearly worse: by a 95 % interval over the same seeds."""
    mean, half = difference(wide, column, row, ours)
    if not abs(mean) > half:  # also with one seed, whose interval is NaN
        return 0
    return 1 if (mean > 0) == HIGHER[column] else -1


def better(wide: pd.DataFrame, column: str, row: str, other: str) -> bool:
    """Whether the mean of a row is better than another's."""
    return (1 if HIGHER[column] else -1) * difference(wide, column, row, other)[0] > 0


def difference(wide: pd.DataFrame, column: str, row: str, other: str) -> tuple[float, float]:
    return interval(wide[column][row] - wide[column][other])


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    if config.test or config.spare:  # only the whole test set decides
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
    if {OURS, DRAWS} & set(rows["row"]) and chosen(config)[1] > 2:
        sigma = tables["sigma"]
        of_the_paper = sigma[sigma["method"].isin(["twins", "twins-draws"])]
        found += _structure(of_the_paper, number, PRESETS[config.preset].normalisation)
    times = time_of_each(rows, ratios(tables["turns"]))
    for ours in [row for row in CONTESTANTS if row in times]:
        found += [*_equal_cost(wide, times, ours), *_ahead_of_usual(wide, times, ours)]
    if {OURS, DRAWS} <= set(rows["row"]):
        found.append(_counts(wide, tables["turns"], number))
    return found


def _status(number: int, answers: list[bool], least: int = 3) -> Status:
    return status(all(answers), any(answers), number < least)


def _scope(number: int) -> str:
    return "" if number else " (here on digits; the claim is about CIFAR-10)"


def _smaller_gap(wide: pd.DataFrame, number: int) -> Verdict:
    """Judged by the gap after the last epoch of both: a model that is stopped early has a small gap whatever it
    predicts. It is used only if no single model trained as long."""
    models = {
        AS_LONG: (OURS_LAST, "a single model that trains as long", "after the last epoch"),
        BASE: (OURS_MEAN, "a single model stopped by a hold-out", "of the mean, stopped by out-of-bag images,"),
    }
    said = []
    compared = {row: model for row, model in models.items() if row in wide["gap"]}
    for row, (ours, single, when) in compared.items():
        gap, right = (with_error(*difference(wide, column, ours, row), SIGNED) for column in ("gap", "accuracy"))
        ends = " to ".join(f"{wide['gap'][name].mean():.3f}" for name in (row, ours))
        said.append(f"Against {single} the gap {when} changes by {gap} ({ends}), test accuracy by {right}")
    first, (ours, single, _) = next(iter(compared.items()))
    mean, half = difference(wide, "gap", ours, first)
    return Verdict(
        f"Twin-Boot has a smaller gap between training and test accuracy than {single}.",
        "Section 4.2, Figure 4a",
        _status(number, [mean + half < 0]),
        f"{'. '.join(said)}{_scope(number)}.",
    )


def _calibrated(wide: pd.DataFrame, number: int) -> Verdict:
    compared = (("ece", BASE), ("nll", BASE), ("nll", AVERAGED))
    changes = [difference(wide, column, OURS, other) for column, other in compared]
    error, nll, fair = (with_error(*found, SIGNED) for found in changes)
    share = wide["ece"][OURS].mean() / wide["ece"][BASE].mean()
    return Verdict(
        "Predictions are better calibrated than those of a single model.",
        "Section 4.2, Figures 4b and 4c",
        _status(number, [mean + half < 0 for mean, half in changes[:2]]),
        f"Draws around the mean against a single model stopped by a hold-out: calibration error {error} "
        f"({share:.0%} of it), negative log-likelihood {nll}. Against a single model with the same weight averaging "
        f"the negative log-likelihood changes by {fair}{_scope(number)}.",
    )


def _span(low: float, high: float, form: str) -> str:
    """Two numbers as a range, or one of them if they look alike."""
    ends = form.format(low), form.format(high)
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _structure(sigma: pd.DataFrame, number: int, normalisation: Normalisation) -> list[Verdict]:
    """The claims are about networks with weight norm; BatchNorm adds layers."""
    mean, scope = sigma_by_layer(sigma), _scope(number)
    if normalisation == "batch":
        number, scope = 0, " (here with BatchNorm; the claim is about weight norm)"
    peak, last = mean.max(axis=1), mean.iloc[:, -1]
    falls = last / peak
    own, higher = last["classifier"], last[last > last["classifier"]]
    rank = f"the classifier has the highest sigma, {own:.4f}"
    if len(higher):
        rank = f"{len(higher)} have a higher sigma than the classifier ({own:.4f}); the highest is that of "
        rank += f"{last.idxmax()} ({last.max():.4f})"
    first, final = (int(mean.idxmax(axis=1).agg(which)) for which in ("min", "max"))
    return [
        Verdict(
            "Sigma starts high and decays to a stable structure over the layers.",
            "Section 4.2.1, Figure 5a",
            _status(number, [bool((falls < 0.5).all()), bool((falls < 0.9).mean() > 0.5)], least=1),
            f"At the end, sigma of a layer is {_span(falls.min(), falls.max(), '{:.0%}')} of its highest value, "
            f"reached after epoch {_span(first, final, '{}')}{scope}.",
        ),
        Verdict(
            "The classifier is among the layers with the highest sigma.",
            "Section 4.2.1, Figure 5b",
            _status(number, [len(higher) < math.ceil(len(last) / 4)], least=1),
            f"Of {len(last)} layers, {rank}{scope}.",
        ),
    ]


def _equal_cost(wide: pd.DataFrame, times: dict[str, float], ours: str) -> list[Verdict]:
    """Held: clearly ahead of all methods that cost no more, in accuracy, NLL and ECE. Partly: in some of these, and
    clearly behind none. Not held: clearly behind one. Otherwise, or with fewer than three seeds, undecided."""
    others = [row for row in times if not row.startswith(OURS)]
    rivals = [row for row in others if times[row] <= DEARER * times[ours]]
    if not rivals:
        return []
    answers = {column: [ahead(wide, column, row, ours) for row in rivals] for column in ("accuracy", "nll", "ece")}
    first = [max(found) == -1 for found in answers.values()]
    behind = any(max(found) == 1 for found in answers.values())
    answer: Status = "held" if all(first) else "not held" if behind else "partly" if any(first) else "undecided"
    said = [_beside(wide, column, ours, {row: times[row] for row in rivals}) for column in answers]
    left = [f"{row} ({times[row]:.2f})" for row in others if row not in rivals]
    verdict = Verdict(
        f"At equal cost {ours} predicts better than other methods.",
        "the paper compares with a single model alone",
        answer if len(wide) >= 3 else "undecided",
        f"{ours} takes {times[ours]:.2f} times as long as a single model; {len(rivals)} other rows take at most "
        f"{DEARER} times as long as that. {'. '.join(said)}."
        + (f" Left out because they take longer: {', '.join(left)}." if left else ""),
        ours=True,
    )
    return [verdict]


def _beside(wide: pd.DataFrame, column: str, ours: str, rivals: dict[str, float]) -> str:
    """A comparison of a row with rivals, given with their times."""
    found = [ahead(wide, column, row, ours) for row in rivals]
    best = sorted(rivals, key=lambda row: wide[column][row].mean(), reverse=HIGHER[column])[0]
    apart = with_error(*difference(wide, column, ours, best), SIGNED)
    place = f"is clearly ahead of {found.count(-1)} of them and clearly behind {found.count(1)}"
    if len(wide) == 1:
        place = f"is ahead of {sum(better(wide, column, ours, row) for row in rivals)} of them with this seed"
    return (
        f"In {COLUMNS[column]} it {place}; against the best, '{best}' ({rivals[best]:.2f}), the difference is {apart}"
    )


def _ahead_of_usual(wide: pd.DataFrame, times: dict[str, float], ours: str) -> list[Verdict]:
    """For twins within the time limit. Held: clearly ahead of each in NLL and ECE. Partly: ahead by the mean. Not held:
    behind one of them by the mean. With fewer than three seeds, undecided."""
    if times[ours] > MORE or not set(USUAL) <= set(times):
        return []
    both = ("nll", "ece")
    clearly = all(ahead(wide, column, row, ours) == -1 for column in both for row in USUAL)
    by_mean = all(better(wide, column, ours, row) for column in both for row in USUAL)
    said = [_beside(wide, column, ours, {row: times[row] for row in USUAL}) for column in both]
    verdict = Verdict(
        f"{ours} has a lower NLL and ECE than single models on all images, an ensemble of two, SWA, MC dropout and "
        f"IVON as they are usually trained, for at most {MORE} times the time of a single model.",
        "the paper compares with a single model alone",
        status(clearly, by_mean, len(wide) < 3),
        f"It takes {times[ours]:.2f} times as long. {'. '.join(said)}.",
        ours=True,
    )
    return [verdict]


def _counts(wide: pd.DataFrame, turns: pd.DataFrame, number: int) -> Verdict:
    seconds = turns.pivot(index="turn", columns="kind", values="seconds")
    relative = seconds["twins"] / seconds["twins-draws"]
    worse = {
        column: (-1 if HIGHER[column] else 1) * (wide[column][OURS] - wide[column][DRAWS])
        for column in ("accuracy", "nll", "ece")
    }
    return Verdict(
        "Weights instead of repeated samples are no worse, at three quarters of the time.",
        '`resample="counts"`',
        _status(number, [relative.median() <= 0.75, *(apart.mean() <= apart.sem() for apart in worse.values())]),
        f"{relative.median():.2f} ({relative.min():.2f} to {relative.max():.2f}) of the time; worse by "
        + ", ".join(f"{COLUMNS[c]} {with_error(apart.mean(), apart.sem(), SIGNED)}" for c, apart in worse.items())
        + " (standard errors; negative is better).",
        ours=True,
    )
