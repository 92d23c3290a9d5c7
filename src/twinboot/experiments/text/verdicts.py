"""The claims about adapters. None is the paper's."""

from __future__ import annotations

import pandas as pd

from ..intervals import interval, with_interval
from ..runner.experiment import Status, Verdict, status
from .config import Config

PLAIN, TEMPERATURE, ENSEMBLE = "LoRA", "LoRA, temperature", "ensemble of 2"
OURS = ("twins", "error_bars")
MORE = 1.4  # times a plain adapter's time
TWICE = 2.1  # with a margin for the clock
FEW = 5  # with fewer seeds, an interval over them says little
BETTER = {"nll": -1, "ece": -1, "ood_entropy": 1}  # score -> the sign of an improvement
NAMES = {"nll": "NLL", "ece": "ECE", "ood_entropy": "AUROC"}
ASKED = {
    "nll": "Likelihood (NLL, lower is better)",
    "ece": "Calibration (ECE, lower is better)",
    "ood_entropy": "Detection of queries out of scope (AUROC, higher is better)",
}


def in_short(runs: pd.DataFrame, config: Config) -> str:
    """Who wins in each respect, the best of our rows or of the others; for the first number of labels."""
    wide, ours = _wide(runs, config)
    others = [name for name in wide["nll"] if name not in ours]
    if not ours or not others:
        return ""
    said = []
    for score, asked in ASKED.items():
        means = wide[score].mean() * BETTER[score]
        mine, rival = str(means[ours].idxmax()), str(means[others].idxmax())
        answer, _ = _better(wide, score, mine, rival)
        winner = ("a rival wins", "no clear winner", "Twin-Boot wins")[answer + 1]
        shown = [f"“{row}” has {wide[score][row].mean():.3f} at {_cost(wide, row)}" for row in (rival, mine)]
        said.append(f"{asked}: {winner}. {shown[0]}, {shown[1]}.")
    return " ".join(said)


def _wide(runs: pd.DataFrame, config: Config) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """Score -> its values [seed, method] for the first number of labels, on which all methods run; and our methods."""
    own = runs[runs["labels"] == config.labels[0]]
    wide = {score: own.pivot(index="seed", columns="method", values=score) for score in (*BETTER, "cost")}
    return wide, [name for name in wide["nll"] if name.startswith(OURS)]


def judge(runs: pd.DataFrame, config: Config) -> list[Verdict]:
    wide, ours = _wide(runs, config)
    few = len(wide["nll"]) < FEW or config.preset == "toy"
    if not ours or PLAIN not in wide["nll"]:
        return []
    return [
        *(_below(wide, row, ours, few) for row in (PLAIN, TEMPERATURE) if row in wide["nll"]),
        *([_ensemble(wide, ours, few)] if ENSEMBLE in wide["nll"] else []),
        _best(wide, ours, few),
    ]


def _better(wide: dict[str, pd.DataFrame], score: str, one: str, other: str) -> tuple[int, str]:
    """1 if a row is clearly better than another on the same seeds, -1 if clearly worse, else 0; and the difference."""
    difference = wide[score][one] - wide[score][other]
    mean, half = interval(difference)
    clearly = abs(mean) > half
    return int(clearly) * (1 if mean * BETTER[score] > 0 else -1), with_interval(difference, "{:+.3f}")


def _cost(wide: dict[str, pd.DataFrame], row: str) -> str:
    return f"{wide['cost'][row].mean():.2f} times LoRA's time"


def _status(answers: list[int], few: bool) -> Status:
    """Held: clearly better in all. Partly: in some, and clearly worse in none."""
    return status(min(answers) == 1, max(answers) == 1 and min(answers) >= 0, few)


def _below(wide: dict[str, pd.DataFrame], other: str, ours: list[str], few: bool) -> Verdict:
    """By the best of our rows in this respect."""
    said, answers = [], []
    for score in ("nll", "ece"):
        best = wide[score][ours].mean().idxmin()
        answer, difference = _better(wide, score, str(best), other)
        answers.append(answer)
        said.append(f"{NAMES[score]} {difference} ({best}, {_cost(wide, str(best))})")
    claim = f"Twin-Boot has a lower NLL and ECE than {other}."
    return Verdict(claim, "not in the paper", _status(answers, few), f"{'; '.join(said)}.", ours=True)


def _ensemble(wide: dict[str, pd.DataFrame], ours: list[str], few: bool) -> Verdict:
    cheap = [row for row in ours if wide["cost"][row].mean() <= MORE]
    said, answers = [], [-1]
    for row in ours:
        answer, difference = _better(wide, "nll", row, ENSEMBLE)
        said.append(f"{row} {difference} at {_cost(wide, row)}")
        answers += [answer] if row in cheap else []
    held = max(answers) >= 0
    return Verdict(
        f"At no more than {MORE} times LoRA's time, Twin-Boot's NLL is no worse than that of an ensemble of two.",
        "not in the paper",
        status(held, too_few=few),
        f"Difference of the NLL: {'; '.join(said)}.",
        ours=True,
    )


def _best(wide: dict[str, pd.DataFrame], ours: list[str], few: bool) -> Verdict:
    cheap = [row for row in wide["cost"] if wide["cost"][row].mean() <= TWICE]
    means = wide["ood_entropy"].mean()
    mine, others = [row for row in cheap if row in ours], [row for row in cheap if row not in ours]
    claim = "Of methods with at most twice LoRA's time, none detects queries out of scope clearly better by entropy."
    if not mine:
        return Verdict(claim, "not in the paper", status(False, too_few=few), "No row of ours is so cheap.", ours=True)
    best, rival = str(means[mine].idxmax()), str(means[others].idxmax())
    answer, difference = _better(wide, "ood_entropy", best, rival)
    return Verdict(
        claim,
        "not in the paper",
        status(answer >= 0, too_few=few),
        f"AUROC of {best} is {means[best]:.3f}, and of the best other, {rival}, {means[rival]:.3f}: {difference}.",
        ours=True,
    )
