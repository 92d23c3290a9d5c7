"""The runs of the seismic task: their config, each method for all seeds at once, and what is kept of each."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch

from ..runner.experiment import Part, Tick, one_thread
from .cost import cost
from .descent import Method, Schedule, State, train
from .kernels import MIN_WIDTH, Problem, Response, Task, problem, size, slopes, tikhonov
from .scores import deciles, scores


@dataclass(frozen=True, kw_only=True)
class Config:
    """Table 1 and Figure 6: a field of 30 x 30 cells, seen through 4,096 kernels after a nonlinear response."""

    rows: int = 4096
    """Measurements, M. Section 4.3."""
    noise: float = 0.3
    """Standard deviation of their noise. Not stated; a fifth of the standard deviation of the signal."""
    beta: float = 1.0
    """The response is tanh(beta v), or its cubic proxy x - x^3 / 3 of x = beta v. Not stated; bends, but not flat."""
    width: float = 1.0
    """Of the Gaussian kernels, in cells. Not stated; with 2 a run of this length ends before it fits the noise."""
    spread: float = 1.0
    """The part of the field's sides in which centres lie. Not stated; all of it."""
    texture: float = 4.0
    """How smooth the true field is: the width, in cells, of the filter that white noise goes through. Not stated."""
    contrast: float = 0.5
    """Its standard deviation. Not stated; with beta 1 the response bends by up to a quarter there."""
    steps: int = 3200
    """Not stated; enough at this rate for the plain optimizer to fit noise."""
    rate: float = 0.001
    """Learning rate of Adam at the start. Appendix A.6."""
    decay: float = 0.9998
    """Factor on it in each step. Decayed exponentially, but how fast is not stated; so a cell can move by 2.4."""
    first_reset: int = 50
    """Steps to the first reset. Appendix A.6; the adaptive intervals from there are here 1.5 times the one before."""
    batch: int = 32
    """Of the runs with mini-batches. Appendix A.6 states both 32 and full batches."""
    seeds: int = 25
    """Runs of each method, each with its own field, kernels and noise. Table 1."""
    seed: int = 0
    """Of everything random."""
    turns: int = 60
    """Of 25 steps each in which the costs of a step are compared."""

    def __post_init__(self) -> None:
        for name in ("noise", "beta", "width", "spread", "texture", "contrast", "rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}.")
        if self.width < MIN_WIDTH:
            raise ValueError(f"width must be at least {MIN_WIDTH} cells, not {self.width}.")
        if not (self.spread <= 1 and 0 < self.decay <= 1):
            raise ValueError(f"spread and decay must be at most 1, not {self.spread} and {self.decay}.")
        if self.rows < 50 or not 1 <= self.batch <= self.rows // 2:
            raise ValueError(f"there must be at least 50 rows and two batches, not {self.rows} and {self.batch}.")
        if self.steps < 1 or self.seeds < 2 or self.turns < 2 or self.first_reset < 1:
            raise ValueError("steps and first_reset must be at least 1, seeds and turns at least 2.")


# Four times the rate and a quarter of the steps, and fewer rows, with which a run fits noise sooner.
QUICK = Config(rows=1024, seeds=3, steps=800, rate=0.004, decay=0.9992, turns=12)

# The runs, and what is kept of each: name of the row -> (run, state).
RUNS = {
    "standard": Method(),
    "hold-out": Method(hold_out=True),
    "sample": Method(2, mode="sample"),
    "mean": Method(2, mode="mean"),
    "centered": Method(2, mode="centered"),
    "no noise": Method(2, mode="sample", noise=0.0),
}
ROWS = {
    "standard, to the end": ("standard", "last"),
    "standard, stopped by a hold-out": ("hold-out", "clear"),
    "Twin-Boot as in the paper: sampling reset, to the end": ("sample", "last"),
    "mean reset, to the end": ("mean", "last"),
    "centered reset, to the end": ("centered", "last"),
    "no training noise, sampling reset, to the end": ("no noise", "last"),
    "Twin-Boot stopped by unseen, sampling reset": ("sample", "clear"),
    "Twin-Boot stopped by unseen, mean reset": ("mean", "clear"),
    "Twin-Boot stopped by unseen, centered reset": ("centered", "clear"),
}
PENALTIES = {"Tikhonov, small u, weight by a hold-out": size, "Tikhonov, smooth u, weight by a hold-out": slopes}
SHOWN = "Twin-Boot stopped by unseen, centered reset"
RESPONSES: tuple[Response, ...] = ("tanh", "cubic")


def parts(config: Config) -> list[Part]:
    found = [
        Part(f"cost {rows} {_called(batch)}", config.turns, partial(_cost, config, rows, batch), alone=True)
        for rows, batch in costed(config)
    ]
    for response in RESPONSES:
        for batch in (None, config.batch):
            for run in RUNS:
                name = f"{response} {_called(batch)} {run}"
                found.append(Part(name, config.steps, partial(_run, config, response, batch, run)))
        found.append(Part(f"{response} Tikhonov", config.seeds, partial(_penalised, config, response)))
    return found


def _problems(config: Config, response: Response) -> list[Problem]:
    c = config
    task = Task(c.rows, c.noise, c.beta, c.width, c.spread, response, c.texture, c.contrast)
    return [problem(task, c.seed * 1_000_000 + k) for k in range(c.seeds)]


def _schedule(config: Config, batch: int | None) -> Schedule:
    return Schedule(config.steps, config.rate, config.decay, config.first_reset, batch)


def _called(batch: int | None) -> str:
    return "full" if batch is None else str(batch)


def _run(config: Config, response: Response, batch: int | None, run: str, tick: Tick) -> dict[str, pd.DataFrame]:
    problems, method = _problems(config, response), RUNS[run]
    with nullcontext() if batch is None else one_thread():  # small batches are too small to share among threads
        trained = train(problems, method, _schedule(config, batch), config.seed, tick)
    setting = {"response": response, "batch": _called(batch)}
    tables: dict[str, list[pd.DataFrame]] = {"runs": [], "deciles": [], "maps": []}
    for row, (of, which) in ROWS.items():
        if of != run:
            continue
        kept: State = getattr(trained, which)
        tables["runs"].append(_scored(problems, kept, method, setting | {"method": row}))
        if method.replicas > 1:
            tables["deciles"].append(_labelled(deciles(problems, kept), **setting, method=row))
        if row == SHOWN:
            tables["maps"].append(_labelled(_maps(problems[0], kept), **setting))
    return {table: pd.concat(found, ignore_index=True) for table, found in tables.items() if found}


def _penalised(config: Config, response: Response, tick: Tick) -> dict[str, pd.DataFrame]:
    problems = _problems(config, response)
    fields: dict[str, list[torch.Tensor]] = {row: [] for row in PENALTIES}
    for p in problems:
        for row, roughness in PENALTIES.items():
            fields[row].append(tikhonov(p, roughness()))
        tick()
    found = []
    for row, own in fields.items():
        state = State(torch.stack(own), torch.zeros(len(own), 1), torch.zeros(len(own)))
        found.append(
            _scored(problems, state, Method(hold_out=True), {"response": response, "batch": "full", "method": row})
        )
    return {"runs": pd.concat(found, ignore_index=True)}


def costed(config: Config) -> list[tuple[int, int | None]]:
    """The numbers of measurements and the batches for which a step is timed: with more of them fixed costs weigh less,
    with a few at a time they are all there is."""
    return [(config.rows, None), (4 * config.rows, None), (config.rows, config.batch)]


def _cost(config: Config, rows: int, batch: int | None, tick: Tick) -> dict[str, pd.DataFrame]:
    [first, *_] = _problems(replace(config, rows=rows, seeds=2), "tanh")
    found = cost(first, _schedule(config, batch), config.turns, tick)
    return {"cost": _labelled(found, rows=rows, batch=_called(batch))}


def _scored(problems: list[Problem], state: State, method: Method, labels: dict[str, str]) -> pd.DataFrame:
    return _labelled(scores(problems, state, method), **labels, seed=range(len(problems)))


def _labelled(frame: pd.DataFrame, **labels: object) -> pd.DataFrame:
    return pd.concat([pd.DataFrame(labels, index=frame.index), frame], axis=1)


def _maps(problem: Problem, kept: State) -> pd.DataFrame:
    """Of the first seed, cell by cell."""
    down, across = torch.meshgrid(*(torch.arange(n) for n in problem.truth.shape), indexing="ij")
    columns = {"down": down, "across": across, "truth": problem.truth, "field": kept.field[0], "sigma": kept.sigma[0]}
    return pd.DataFrame({name: values.flatten().numpy() for name, values in columns.items()})


def main(table: pd.DataFrame, method: str | None = None) -> pd.DataFrame:
    """The rows of the paper's first choice: tanh and full batches; of one method, if it is named."""
    chosen = (table["response"] == "tanh") & (table["batch"] == "full")
    return table[chosen if method is None else chosen & (table["method"] == method)]
