"""The map over what the paper leaves open: for which seismic tasks does Twin-Boot win, and with which protocol?

All tasks with the same number of measurements, and all their seeds, are trained together: see `descent.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..intervals import change
from ..runner.experiment import Part, Status, Tables, Tick, Verdict, one_thread, refuse_repeated, status
from .descent import METHODS, Schedule, require_training, scores, train
from .kernels import MIN_WIDTH, Setting, problems

TITLE = "Seismic inversion: the map of regimes"
QUESTION = (
    "For which numbers of measurements, noises, responses, kernels and places does Twin-Boot find a better field?"
)
CAPTION = (
    "Each square is one task. Blue: Twin-Boot's error of the field is lower than the other's; orange: higher; the "
    "number is the change of the mean over the seeds, in per cent. Pale: the 95 % interval of the change, paired by "
    "seed, contains 0."
)
RUNS = ("standard", "hold-out", "sample", "mean", "centered")
Result = tuple[str, str]  # a run, and one of its states
PAPER, OURS = ("sample", "last"), ("centered", "clear")
END, STOPPED = ("standard", "last"), ("hold-out", "clear")
RESULTS: dict[str, Result] = {
    "Adam, end": END,
    "Adam, hold-out": STOPPED,
    "sample, end": PAPER,
    "mean, end": ("mean", "last"),
    "centered, end": ("centered", "last"),
    "mean, unseen": ("mean", "clear"),
    "centered, unseen": OURS,
    "sample, unseen": ("sample", "clear"),
}
COMPARISONS = {
    "the paper's protocol (sampling reset, to the end)\nagainst Adam to the end": (PAPER, END),
    "stopped by unseen, centered reset\nagainst Adam to the end": (OURS, END),
    "stopped by unseen, centered reset\nagainst Adam stopped by a hold-out": (OURS, STOPPED),
}
SHADES = ["#7fb2e0", "#dbe9f6", "#fbe6d3", "#eeb27c"]  # from clearly lower to clearly higher
AXES = ("rows", "noise", "beta", "width", "spread")
TAIL = 0.025  # where nothing differs, this share of the 95 % intervals lies below 0 by chance, and as many above


@dataclass(frozen=True, kw_only=True)
class Config:
    """Beyond the paper: the seismic task for a grid of settings that the paper does not state."""

    rows: tuple[int, ...] = (300, 1000, 4096)
    """Measurements. Section 4.3 states 4,096, but not how many of them are for training."""
    noise: tuple[float, ...] = (0.03, 0.3)
    """Their noise; the signal's standard deviation is about 1.5 at width 1. Not stated."""
    beta: tuple[float, ...] = (1.0, 3.0)
    """The response is tanh(beta v): bent, or nearly a switch. Not stated."""
    width: tuple[float, ...] = (1.0, 2.0)
    """Of the kernels, in cells: well posed, or ill posed. Not stated."""
    spread: tuple[float, ...] = (0.7, 1.0)
    """Part of the sides in which centres lie: with 0.7 a rim of the field is hardly measured. Not stated."""
    steps: int = 2000
    """In each run. Not stated."""
    lr: float = 0.002
    """Learning rate of Adam. Appendix A.6 has 0.001; twice that for half as many steps gives nearly the same runs."""
    decay: float = 0.9996
    """Factor on the learning rate in each step."""
    seeds: int = 4
    """Problems of each task."""
    seed: int = 0
    """Of everything random."""

    def __post_init__(self) -> None:
        refuse_repeated(self, *AXES)
        for name in AXES:
            if not all(value > 0 for value in getattr(self, name)):
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}.")
        if min(self.width) < MIN_WIDTH:
            raise ValueError(f"width must be at least {MIN_WIDTH} cells, not {self.width}.")
        if min(self.rows) < 50 or max(self.spread) > 1:
            raise ValueError(f"rows must be at least 50 and spread at most 1, not {self.rows} and {self.spread}.")
        require_training(self)


QUICK = Config(rows=(300, 1000), noise=(0.3,), beta=(1.0,), seeds=2, steps=600, lr=0.006, decay=0.9987)


def parts(config: Config) -> list[Part]:
    return [
        Part(f"{run} {rows}", config.steps, partial(_run, config, run, rows)) for rows in config.rows for run in RUNS
    ]


def _run(config: Config, run: str, rows: int, tick: Tick) -> dict[str, pd.DataFrame]:
    settings = [Setting(rows, *rest) for rest in product(config.noise, config.beta, config.width, config.spread)]
    given, method = [p for setting in settings for p in problems(setting, config.seed, config.seeds)], METHODS[run]
    with one_thread():
        states = train(given, method, Schedule(config.steps, config.lr, config.decay), config.seed, tick)
    labels = {name: [getattr(p.setting, name) for p in given] for name in AXES}
    labels["seed"] = list(range(config.seeds)) * len(settings)
    frames = [scores(given, states[state], method).assign(**labels, state=state) for state in ("last", "clear")]
    return {"runs": pd.concat(frames, ignore_index=True).assign(run=run)}


def compare(runs: pd.DataFrame, ours: Result, theirs: Result) -> pd.DataFrame:
    """For each task the relative change of the mean error from theirs to ours, and whether the 95 % interval of that
    change excludes 0: -1 is a win, 1 a loss, 0 neither."""
    found = []
    for task, own in runs.groupby(list(AXES)):
        mean, half = change(own.pivot(index="seed", columns=["run", "state"], values="error"), ours, theirs)
        clear = int(np.sign(mean)) if abs(mean) > half else 0
        found.append({**dict(zip(AXES, task, strict=True)), "change": mean, "clear": clear})
    return pd.DataFrame(found)


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    runs, counts = tables["runs"], []
    for name, (ours, theirs) in COMPARISONS.items():
        found = compare(runs, ours, theirs)
        counts.append(
            {
                "Twin-Boot": name.replace("\n", " "),
                "tasks": len(found),
                "clearly lower error": _count(found, -1),
                "undecided": _count(found, 0),
                "clearly higher": _count(found, 1),
                "median change": f"{found['change'].median():+.0%}",
            }
        )
    errors = runs.pivot_table(index=list(AXES), columns=["run", "state"], values="error")
    shown = {title: errors[result].map("{:.4f}".format).to_list() for title, result in RESULTS.items()}
    return {
        f"How many tasks, by {config.seeds} seeds each (95 %)": pd.DataFrame(counts),
        "Error of the field (MSE), mean over the seeds": errors.index.to_frame(index=False).assign(**shown),
    }


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    paper, end, stopped = (compare(tables["runs"], *pair) for pair in COMPARISONS.values())
    few = config.seeds < 3
    chance = f"By chance {TAIL * len(paper):.1f} are expected in each direction"
    of_end, of_stopped = _status(end), _status(stopped)
    return [
        Verdict(
            "Twin-Boot lowers the reconstruction error, by the paper's protocol.",
            "Section 4.3, Table 1",
            "undecided" if few else _status(paper),
            f"Clearly in {_summary(paper)}; Table 1 has -71 %. {chance}.{_common(paper, 'won')}",
        ),
        Verdict(
            "Twin-Boot with out-of-bag stopping lowers the reconstruction error.",
            "after Section 4.3, with that stop and the centered reset",
            "undecided" if few else of_end if of_end == of_stopped else "partly",
            f"Against Adam to the end, clearly in {_summary(end)}. Against Adam stopped by a "
            f"hold-out, clearly in {_summary(stopped)}. {chance}, more than {by_chance(len(end))} in under 5 % of maps."
            f"{_common(end, 'won against Adam to the end')}"
            f"{_common(stopped, 'won against Adam stopped by a hold-out')}",
            ours=True,
        ),
    ]


def by_chance(tasks: int) -> int:
    """The most wins that chance alone gives in 95 of 100 maps, if the tasks are independent.

    >>> by_chance(48), by_chance(8)
    (3, 1)
    """
    wins = torch.distributions.Binomial(tasks, torch.tensor(TAIL)).log_prob(torch.arange(tasks + 1.0)).exp()
    return int((wins.cumsum(0) < 0.95).sum())


def _status(found: pd.DataFrame) -> Status:
    """Not held: no more clear wins than chance gives, or than clear losses. Otherwise held if the losses are no more
    than chance gives, and partly if they are."""
    wins, losses, chance = _count(found, -1), _count(found, 1), by_chance(len(found))
    won = wins > max(chance, losses)
    return status(won and losses <= chance, won)


def _summary(found: pd.DataFrame) -> str:
    """How many tasks were clearly won and lost, and the best of the wins."""
    counts = f"{_count(found, -1)} of {len(found)} tasks, the other way in {_count(found, 1)}"
    won = found[found["clear"] < 0]
    if won.empty:
        return counts
    best = won.loc[won["change"].idxmin()]
    return f"{counts}, at best by {best['change']:+.0%} ({', '.join(f'{name} {best[name]:g}' for name in AXES)})"


def _count(found: pd.DataFrame, sign: int) -> int:
    return int((found["clear"] == sign).sum())


def _common(found: pd.DataFrame, what: str) -> str:
    """What all clear wins have in common, if there are at least two."""
    won = found[found["clear"] < 0]
    shared = [f"{name} {won[name].iloc[0]:g}" for name in AXES if len(won) > 1 and won[name].nunique() == 1]
    return f" All {len(won)} that are clearly {what} have {' and '.join(shared)}." if shared else ""


def figure(config: Config, tables: Tables) -> Figure:
    drawn = Figure(figsize=(15.5, 1.6 + 0.62 * 3 * len(config.noise) * len(config.beta) + 1.9), layout="constrained")
    panels = np.ravel(drawn.subplots(1, len(COMPARISONS), sharey=True))
    for axes, (name, pair) in zip(panels, COMPARISONS.items(), strict=True):
        _draw_map(axes, config, compare(tables["runs"], *pair).set_index(list(AXES)))
        axes.set(title=name, xlabel="kernels: width in cells, spread of their centres")
    # On several lines, so that a map of few rows has room for it.
    panels[0].set_ylabel("noise of the data;\nresponse tanh(beta v);\nM measurements")
    names = ("clearly lower error", "lower, not clearly", "higher, not clearly", "clearly higher error")
    patches = [Patch(color=colour, label=name) for colour, name in zip(SHADES, names, strict=True)]
    title = "Twin-Boot against the other; the number is the change of the error in per cent"
    drawn.legend(handles=patches, title=title, loc="outside lower center", ncols=4, fontsize=11, title_fontsize=11)
    return drawn


def _draw_map(axes: Axes, config: Config, found: pd.DataFrame) -> None:
    down = list(product(config.noise, config.beta, config.rows))
    across = list(product(config.width, config.spread))
    shade = np.zeros((len(down), len(across)))
    for (i, (noise, beta, rows)), (j, (width, spread)) in product(enumerate(down), enumerate(across)):
        task = found.loc[(rows, noise, beta, width, spread)]
        lower = task["change"] < 0
        shade[i, j] = (0 if lower else 3) if task["clear"] else (1 if lower else 2)
        axes.text(j, i, f"{100 * task['change']:+.1f}", ha="center", va="center", color="#222222")
    axes.imshow(shade, cmap=ListedColormap(SHADES), vmin=-0.5, vmax=3.5, aspect="auto")
    axes.set_xticks(range(len(across)), [f"width {w:g}\nspread {s:g}" for w, s in across])
    axes.set_yticks(range(len(down)), [f"noise {n:g}, beta {b:g}, M = {m}" for n, b, m in down])
    axes.tick_params(length=0)
    for edge in range(len(config.rows), len(down), len(config.rows)):
        axes.axhline(edge - 0.5, color="#222222", lw=1.2)  # on the squares, which are light on any page
