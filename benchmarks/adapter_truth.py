"""Are the error bars of adapters on a language model of the right size?

    .venv/bin/python benchmarks/adapter_truth.py --data DIR --model DIR --page docs/adapter-truth.md

DIR as for `twinboot text`. The training queries of CLINC150 are cut into disjoint sets of ten per intent. The truth is
the standard deviation of the predicted probabilities over plain adapters, each trained on another set from another
random start. Each method sees one of the sets. About seven minutes of one core for each set. A row is a line of
out/adapter-truth/rows.csv as soon as it is done, and one that is there is not done again: after a change of the code,
delete that file.
"""

from __future__ import annotations

import argparse
import csv
import platform
import random
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import transformers
from torch import Tensor

from twinboot import Bootstrap, error_bars
from twinboot._core.atomic import replacing
from twinboot._core.seeds import derive
from twinboot.experiments.intervals import with_interval
from twinboot.experiments.runner.experiment import one_thread
from twinboot.experiments.text import methods as text
from twinboot.experiments.text.config import Config
from twinboot.experiments.text.encoder import collate
from twinboot.experiments.text.methods import Task
from twinboot.experiments.truth.scores import rank_correlation

RESULTS = Path("out/adapter-truth/rows.csv")
PER_INTENT = 10  # training queries
SETS = 4  # of the 50 queries per intent; the rest are the inputs of the comparison
ROUNDS = 3
SCORES = {"ratio": "spread ratio", "rank": "rank correlation", "nll": "NLL", "seconds": "core seconds"}
Row = dict[str, Any]
Found = tuple[Tensor, Tensor]  # probabilities [inputs, classes], and their standard deviations


def tasks(config: Config) -> list[Task]:
    """One for each set, with the same inputs."""
    queries = text.queries_of(config)
    by_intent = defaultdict(list)
    for query in queries.train:
        by_intent[query[1]].append(query)
    for rows in by_intent.values():
        random.Random(0).shuffle(rows)
    pool = [by_intent[intent] for intent in queries.intents]
    parts = [[row for rows in pool for row in rows[k * PER_INTENT :][:PER_INTENT]] for k in range(SETS + 1)]
    base = text.task_of(config, PER_INTENT, 0)
    found = [
        (
            base.encoder.features([query for query, _ in rows], config.layers),
            text._labels(queries, [i for _, i in rows]),
        )
        for rows in parts
    ]
    *training, (test, test_y) = found
    return [
        replace(base, x=x, y=y, test=test, test_y=test_y, seed=derive(0, "set", k)) for k, (x, y) in enumerate(training)
    ]


def around(task: Task, plain: Any, keep: Literal["members", "sigma"] = "members", times: float = 1.0) -> Found:
    estimate = error_bars(
        plain,
        task.x.dataset(task.y),
        rounds=ROUNDS,
        epochs=max(1, round(task.epochs / ROUNDS)),
        keep=keep,
        perturb=0.0,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, times * task.lr),
        batch_size=text.TRAIN_BATCH,
        seed=task.seed,
        progress=False,
        collate_fn=collate,
    )
    predicted = estimate.predict((task.test.hidden, task.test.mask), task.samples)  # or all members, which are fewer
    return predicted.probs, predicted.std


def probs(task: Task, model: Any) -> Tensor:
    return task.logits(model.eval()).softmax(1)


def twins(task: Task, plain: Any, spread: float = 0.0, **options: Any) -> Found:
    drawn = Bootstrap(len(task.y), seed=task.seed, **options)
    trainer, _ = text._twins(task, options={"bootstrap": drawn, "spread": spread})
    labels = torch.zeros(len(task.test), dtype=torch.long)  # predict leaves them out
    predicted = trainer.predict(task.test.rows(labels), task.samples)
    return predicted.probs, predicted.std


def of(each: Iterable[Tensor]) -> Found:
    """From the probabilities of some models."""
    stacked = torch.stack(list(each)).double()
    return stacked.mean(0), stacked.std(0)


def dropout(task: Task, plain: Any) -> Found:
    return of(logits.softmax(1) for logits in text._masked(task, plain))


def ensemble(task: Task, plain: Any) -> Found:
    others = [text.train(task, derive(task.seed, "member", k))[0].model for k in range(2)]
    return of(probs(task, model) for model in (plain, *others))


def bootstrap(task: Task, plain: Any) -> Found:
    found = []
    for k in range(3):
        rows = Bootstrap(len(task.y), seed=derive(task.seed, "sample", k)).indices(0)
        found.append(probs(task, text.train(task.subset(rows), derive(task.seed, "bootstrap", k))[0].model))
    return of(found)


METHODS: dict[str, Callable[[Task, Any], Found]] = {  # from a task and its plain adapter
    "error_bars": around,
    "error_bars, sigma": partial(around, keep="sigma"),
    "error_bars, at five times the learning rate": partial(around, times=3.0),
    "MC dropout": dropout,
    "twins, sigma of the training": twins,
    "twins, spread=0.3": partial(twins, spread=0.3),
    "twins, split data": partial(twins, kind="split", cover=True),
    "ensemble of 3": ensemble,
    "three separate trainings on bootstrap samples": bootstrap,
}


def compared(config: Config, names: list[str], done: list[Row]) -> Iterator[Row]:
    there = {(row["method"], int(row["set"])) for row in done}
    if not {(name, k) for name in names for k in range(SETS)} - there:
        return
    with one_thread():
        every = tasks(config)
        plain = [text.train(task, task.seed)[0].model for task in every]
        y = every[0].test_y[:, None]
        truth = torch.stack([probs(task, model) for task, model in zip(every, plain, strict=True)]).double().var(0)
        for k, task in enumerate(every):
            for name in names:
                if (name, k) in there:
                    continue
                began = time.process_time()
                mean, std = (found.double() for found in METHODS[name](task, plain[k]))
                spread = std.square()
                yield {
                    "method": name,
                    "set": k,
                    "ratio": (spread.mean() / truth.mean()).sqrt().item(),
                    "rank": rank_correlation(spread.gather(1, y)[:, 0].numpy(), truth.gather(1, y)[:, 0].numpy()),
                    "nll": -mean.gather(1, y).log().mean().item(),
                    "seconds": time.process_time() - began,
                }


def page(rows: list[Row]) -> str:
    lines = [f"| | sets | {' | '.join(SCORES.values())} |", "|---" * (len(SCORES) + 2) + "|"]
    for name in METHODS:
        own = [row for row in rows if row["method"] == name]
        if own:
            values = [with_interval(pd.Series([float(row[s]) for row in own]), "{:.2f}") for s in SCORES]
            lines.append(f"| {name} | {len(own)} | {' | '.join(values)} |")
    versions = (
        f"PyTorch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    )
    return PAGE.format(table="\n".join(lines), versions=versions, sets=SETS, per_intent=PER_INTENT)


PAGE = """# Error bars of adapters against the truth

Written by `benchmarks/adapter_truth.py --data DIR --model DIR --page docs/adapter-truth.md`.

LoRA adapters on MiniLM-L6, with {per_intent} queries for each of the 150 intents of CLINC150. The truth is the
standard deviation of the predicted probabilities over {sets} plain adapters. Each was trained on its own queries, from
its own random start. Each method sees the queries of one of them. *Spread ratio*: root mean square spread over all
queries and intents, relative to the truth; 1 is right. *Rank correlation*: of the spread with the truth, for the
probability of the right intent, over 1,500 other queries. *Core seconds*: of training beyond that of the plain adapter
and of all predictions. Mean and 95 % interval over the sets. All queries are of the training file, so the NLL is not
that of [the experiment](results/text.md), whose queries are of the test file. {versions}.

{table}
"""


def store(rows: list[Row]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with replacing(RESULTS) as partial_file, partial_file.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["method", "set", *SCORES])
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="DIR", help="with clinc150_small.json")
    parser.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face encoder of the BERT family")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--page", type=Path, help="write the table to this file")
    options = parser.parse_args()
    config = Config(preset="clinc150", data=options.data, model=options.model, labels=(PER_INTENT,))
    rows: list[Row] = list(csv.DictReader(RESULTS.open(newline=""))) if RESULTS.exists() else []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the twins ended with a training loss")  # the table shows what they give
        for row in compared(config, options.methods, rows):
            rows.append(row)
            store(rows)
            print(row, flush=True)
    print(page(rows))
    if options.page:
        options.page.write_text(page(rows))


if __name__ == "__main__":
    main()
