"""Figure 1: two twins find the mean of a Gaussian cloud; is how far they stand apart the uncertainty of that mean?

The run and its closed forms are in `run.py`, the panels in `figure.py`; here is what is said of them.
"""

from __future__ import annotations

import math

import pandas as pd

from ..intervals import plus_minus
from ..runner.experiment import Status, Tables, Verdict, agrees, overall
from .figure import figure
from .run import QUICK, WEIGHTS, Config, parts, pooled, summary, tau_squared

__all__ = ["CAPTION", "QUESTION", "QUICK", "TITLE", "Config", "figure", "numbers", "parts", "verdicts"]

TITLE = "The mean of a Gaussian"
QUESTION = "Is the distance between two twins the uncertainty of what they estimate, and what does it cost?"
CAPTION = (
    "Top left: one run with the settings of Appendix A.2. Top right: the estimate of each run, once the rate has "
    "fallen to 0. Bottom left: root mean square of the estimates as a share of the bootstrap's own sigma, with two "
    'standard errors; lines are closed forms. "Few steps": as many as in the picture; "constant rate": before the '
    'rate falls; "twins": after. Bottom right: how much one estimate of sigma^2 varies between data sets, against '
    "its cost."
)


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    found = pooled(config, tables["estimates"])
    shown = pd.DataFrame(
        {
            "estimator": found["estimator"],
            "trainings": found["trainings"],
            "sigma² / bootstrap's": plus_minus(found["mean"], found["error"], 3),
            "expected": found["expected"].map("{:.3f}".format),
            "relative variance of sigma²": found["variance"].map("{:.4f}".format),
            "theory": found["theory"].map(lambda v: "" if math.isnan(v) else f"{v:.4f}"),
            "variance x trainings": (found["variance"] * found["trainings"]).map("{:.2f}".format),
        }
    )
    per_size = summary(config, tables["estimates"])
    per_size = per_size[per_size["estimator"] == "twins"]
    sizes = pd.DataFrame(
        {
            "M": per_size["size"],
            "true sigma": [f"{math.sqrt(config.variance / size):.3f}" for size in per_size["size"]],
            "rms of twins' sigma": [
                f"{math.sqrt(tau_squared(config, size) * mean):.3f}"
                for size, mean in zip(per_size["size"], per_size["mean"], strict=True)
            ],
            "sigma² / bootstrap's": plus_minus(per_size["mean"], per_size["error"], 3),
            "expected": per_size["expected"].map("{:.3f}".format),
            "relative variance of sigma²": per_size["variance"].map("{:.3f}".format),
        }
    )
    return {
        f"All M together, {config.seeds} data sets for each, ± standard error": shown,
        "Two twins, the rate fallen to 0, by the number of data M, ± standard error": sizes,
    }


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    found = pooled(config, tables["estimates"]).set_index("estimator")
    twins, constant, few = (found.loc[name] for name in reversed(config.stages))
    classical = found[found.index.str.startswith("bootstrap")]
    last = int(tables["path"]["step"].max())
    # A sample variance of n values with the kurtosis 3 + 12 / D of a chi-squared varies by (2 + 12 / D) / n.
    spread_error = twins["theory"] * math.sqrt((2 + 12 / WEIGHTS) / (config.seeds * len(config.sizes)))
    return [
        Verdict(
            "The two-sample estimator of sigma^2 is unbiased.",
            "Section 3.4",
            overall([agrees(twins["mean"], twins["error"])]),
            f"Once the rate has fallen to 0, sigma^2 is {twins['mean']:.3f} ± {twins['error']:.3f} of the bootstrap's "
            f"variance, which is (M - 1) / M of the true one; closed form {twins['expected']:.3f}.",
        ),
        Verdict(
            "The circles track the true uncertainty at every step of the run.",
            "Section 4.1, Figure 1",
            overall(agrees(math.sqrt(row["mean"]), row["error"] / 2) for row in (few, constant, twins)),  # of sigma
            f"They grow with the run: after its {last} steps {(1 - 2 * config.rate) ** last:.0%} of the way is still "
            "to go (with a loss that is the squared distance; the paper does not state its factor), and sigma^2 is "
            f"{few['mean']:.2f} ± {few['error']:.2f} of what it should be (closed form {few['expected']:.2f}). At a "
            f"constant rate it settles at {constant['mean']:.3f} ± {constant['error']:.3f} "
            f"({constant['expected']:.3f}), because the noise that sigma drives feeds back on it.",
        ),
        Verdict(
            f"Its relative variance is 2 / D, here {2 / WEIGHTS:.0f}; a classical bootstrap's is 2 / ((B - 1) D).",
            "Section 3.4",
            overall([agrees(twins["variance"], spread_error, twins["theory"])]),
            f"{twins['variance']:.2f} ± {spread_error:.2f} for two twins (theory {twins['theory']:.2f})"
            + "".join(
                f", {row.variance:.4f} for B = {row.trainings} (theory {row.theory:.4f})"
                for row in classical.itertuples()
            )
            + ". Theory includes what the data sets themselves differ by, which no number of trainings removes.",
        ),
        _cost(config, tables["estimates"], twins, classical),
    ]


def _cost(config: Config, estimates: pd.DataFrame, twins: pd.Series, classical: pd.DataFrame) -> Verdict:
    chosen = estimates[estimates["estimator"] == "twins"]
    low, high = (chosen["sigma2"] / (config.variance / chosen["size"])).pow(0.5).quantile([0.25, 0.75])
    status: Status = "partly" if agrees(twins["mean"], twins["error"]) else "not held"
    if config.seeds * len(config.sizes) < 50:
        status = "undecided"
    elif high < 1.5 * low:
        status = "held"
    evidence = (
        f"The cost is 2 trainings. But with two weights a single estimate is rough: half of them lie outside {low:.2f} "
        f"to {high:.2f} of the true sigma. What makes two twins enough is a group of many weights."
    )
    if len(classical):
        best = (twins["variance"] * 2 / (classical["variance"] * classical["trainings"])).max()
        evidence += f" Per training spent, a classical bootstrap is up to {best:.1f} times as precise here."
    claim = "Two samples do online what a classical bootstrap does at a prohibitive cost."
    return Verdict(claim, "Section 4.1", status, evidence)
