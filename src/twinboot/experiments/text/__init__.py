"""Beyond the paper: a pretrained language model is fine-tuned with few labelled queries, and has to know when it does
not know.

config.py has the settings, data.py the queries, encoder.py the model, methods.py the methods, cost.py and scores.py
what is measured, figure.py and verdicts.py what is shown of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ..._core.extras import how_to_install
from ..intervals import with_interval
from ..runner.experiment import Part, Tables, Tick, UnavailableError, Verdict, one_thread
from .config import Config
from .data import FILES
from .figure import draw
from .verdicts import in_short, judge

__all__ = ["CAPTION", "QUESTION", "QUICK", "TITLE", "Config", "figure", "in_words", "numbers", "parts", "verdicts"]

TITLE = "Fine-tuning a language model on few labels"
QUESTION = "Does a classifier of texts know when it does not know?"
CAPTION = (
    "Adapters (LoRA) on a pretrained encoder, trained on a few queries of each intent. Each line is a method: the mean "
    "over seeds, with 95 % intervals. The cheapest is at the top; time is that of one core, relative to a plain "
    "adapter (LoRA). Blue and orange: Twin-Boot. A number with an arrow is off the scale."
)
QUICK = Config(
    preset="toy",
    labels=(16,),
    methods=("lora", "dropout", "ensemble", "laplace", "twins", "split", "error_bars"),
    seeds=3,
    epochs=10,
    lr=3e-2,
    samples=8,
    queries=200,
    strange=150,
)
COLUMNS = {  # score -> its title and format
    "cost": ("time (LoRA = 1)", "{:.2f}"),
    "accuracy": ("accuracy", "{:.3f}"),
    "nll": ("NLL", "{:.3f}"),
    "ece": ("ECE", "{:.3f}"),
    "ood_entropy": ("AUROC out of scope, entropy", "{:.3f}"),
    "ood_information": ("AUROC out of scope, mutual information", "{:.3f}"),
    "aurc": ("AURC", "{:.4f}"),
    "answered": ("accuracy at 80 % coverage", "{:.3f}"),
    "set_size": ("size of 90 % sets", "{:.2f}"),
    "seconds": ("core seconds", "{:.0f}"),
    "memory": ("peak memory of a training, MiB", "{:.0f}"),
}
HELD_OUT = 5  # every fifth query of the table of choices is held out
# What the table of choices tries, besides the settings of the run. The lowest learning rate of IVON is its authors',
# for trainings of 10,000 steps; these here have some hundred.
TRIED: dict[str, list[dict[str, Any]]] = {
    "LoRA": [{"lr": 1e-3}, {"lr": 3e-3}, {"lr": 5e-3}, {"lr": 1e-2}, {"layers": 2}, {"epochs": 20}],
    "IVON": [{"ivon_lr": 0.03}, {"ivon_lr": 0.3}, {"ivon_lr": 1.0}, {"ivon_lr": 3.0}],
}


def parts(config: Config) -> list[Part]:
    """The choices; then for each number of labels and seed the methods, one after the other."""
    if missing := [name for name in ("transformers", "peft", "ivon") if find_spec(name) is None]:
        raise UnavailableError(f"text needs {missing[0]}: {how_to_install('huggingface,compare')}")
    if config.preset != "toy":
        if config.data is None:
            raise UnavailableError(
                f"the preset {config.preset} needs --data DIRECTORY, with {', '.join(FILES[config.preset])}."
            )
        if config.model is None:
            raise UnavailableError(
                f"the preset {config.preset} needs --model DIRECTORY, with a Hugging Face encoder of the BERT family."
            )
        for path in (config.data, config.model):
            if not Path(path).is_dir():
                raise ValueError(f"there is no directory {path}.")
    from .methods import queries_of

    pool = queries_of(config)
    for labels in config.labels:
        pool.few(labels, 0)
    pool.tests(config.queries, config.strange, 0)
    found = [
        Part(f"choice {adapter} {k}", 1, partial(_choice, config, adapter, k))
        for adapter, tried in TRIED.items()
        if config.preset != "toy" and (adapter == "LoRA" or "ivon" in config.methods)
        for k in range(len(tried))
    ]
    return found + [
        Part(f"{labels} {name} {number}", 1, partial(_run, config, labels, number, name))
        for labels in config.labels
        for number in range(config.seeds)
        for name in config.methods_for(labels)
    ]


def _choice(config: Config, adapter: str, which: int, tick: Tick) -> dict[str, pd.DataFrame]:
    """The scores of a plain adapter on held-out training queries, which are those of no other part."""
    from .methods import hold_out_scores

    tried = replace(config, **TRIED[adapter][which])
    with one_thread():
        found = hold_out_scores(tried, adapter, HELD_OUT)
    tick()
    lr = tried.lr if adapter == "LoRA" else tried.ivon_lr
    about = {"adapter": adapter, "layers": tried.layers, "lr": lr, "epochs": tried.epochs}
    return {"choices": pd.DataFrame([about | found])}


def _run(config: Config, labels: int, number: int, name: str, tick: Tick) -> dict[str, pd.DataFrame]:
    """A method with the training queries of one seed."""
    from .methods import METHODS, task_of, trained, warm_up
    from .scores import scores

    with one_thread():
        warm_up(config)
        task = task_of(config, labels, number)
        found = METHODS[name](task, partial(trained, config, labels, number))
        if labels != config.labels[0]:
            found = islice(found, 1)
        about = {"labels": labels, "seed": number, "intents": task.classes}
        rows = [about | {"method": row} | asdict(own.cost) | scores(own, task.test_y) for row, own in found]
    tick()
    return {"runs": pd.DataFrame(rows)}


def with_cost(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with their time relative to the mean of a plain adapter."""
    plain = runs[runs["method"] == "LoRA"].groupby("labels")["seconds"].mean()
    return runs.assign(cost=runs["seconds"] / runs["labels"].map(plain))


def figure(config: Config, tables: Tables) -> Figure:
    return draw(with_cost(tables["runs"]))


def numbers(config: Config, tables: Tables) -> dict[str, pd.DataFrame]:
    """A table for each number of labels, and one of the choices."""
    runs, found = with_cost(tables["runs"]), {}
    for labels in config.labels:
        own = runs[runs["labels"] == labels]
        rows = [dict(_row(method, group)) for method, group in own.groupby("method", sort=False)]
        title = f"{labels} training queries for each of {own['intents'].iloc[0]} intents: mean and 95 % interval"
        columns = ["", *(name for name, _ in COLUMNS.values())]
        shown = pd.DataFrame(rows).reindex(columns=columns).dropna(axis=1, how="all").fillna("")
        found[f"{title} over {own['seed'].nunique()} seeds"] = shown
    if "choices" in tables:
        shown = tables["choices"].copy()
        shown["NLL"], shown["accuracy"] = (shown.pop(name).map("{:.3f}".format) for name in ("nll", "accuracy"))
        shown["lr"] = shown["lr"].map("{:g}".format)
        title = (
            f"Settings of plain adapters, judged by {1 / HELD_OUT:.0%} of {config.labels[0]} other queries per intent"
        )
        found[title] = shown.rename(columns={"lr": "learning rate"})
    return found


def _row(method: object, runs: pd.DataFrame) -> Iterator[tuple[str, object]]:
    yield "", method
    for column, (title, form) in COLUMNS.items():
        if column in runs and runs[column].notna().all():
            yield title, with_interval(runs[column], form)


def verdicts(config: Config, tables: Tables) -> list[Verdict]:
    return judge(with_cost(tables["runs"]), config)


def in_words(config: Config, tables: Tables) -> str:
    return in_short(with_cost(tables["runs"]), config)
