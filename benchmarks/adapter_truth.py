"""Are the error bars of adapters on a language model of the right size?

    .venv/bin/python benchmarks/adapter_truth.py --data DIR --model DIR --page docs/adapter-truth.md

DIR as for `twinboot text`. The training queries of CLINC150 are cut into disjoint sets of ten per intent. The truth is
the standard deviation of the predicted probabilities over plain adapters, each trained on another set with another
start. Each method sees one of the sets. About four minutes of one core for each set. A row is a line of
out/adapter-truth/rows.csv as soon as it is done, and one that is there is not done again.
"""

from __future__ import annotations

import argparse
import csv
import platform
import random
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from torch import Tensor

from twinboot import Bootstrap, Estimate, error_bars
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
Draws = Callable[[Task, Any], Tensor]  # probabilities [draws, inputs, classes], from a task and its plain adapter


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


def members(task: Task, plain: Any, times: float = 1.0) -> Tensor:
    estimate = error_bars(
        plain,
        task.x.dataset(task.y),
        rounds=ROUNDS,
        epochs=max(1, round(task.epochs / ROUNDS)),
        perturb=0.0,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, times * task.lr),
        batch_size=text.TRAIN_BATCH,
        seed=task.seed,
        progress=False,
        collate_fn=collate,
    )
    assert estimate.members is not None
    return torch.stack([probs(task, estimate.sample(seed)) for seed in one_seed_each(estimate)])


def one_seed_each(estimate: Estimate) -> list[int]:
    """Seeds with which `sample` gives each of the members."""
    assert estimate.members is not None
    found: dict[int, int] = {}
    for seed in range(1000):
        found.setdefault(derive(seed, "sample") % len(estimate.members), seed)
    return list(found.values())


def probs(task: Task, model: Any) -> Tensor:
    return task.logits(model.eval()).softmax(1)


def twins(task: Task, plain: Any, **options: Any) -> Tensor:
    trainer, _ = text._twins(task, options={"bootstrap": Bootstrap(len(task.y), seed=task.seed, **options)})
    estimate = trainer.estimate()
    return torch.stack([probs(task, estimate.sample(seed)) for seed in range(task.samples)])


def dropout(task: Task, plain: Any) -> Tensor:
    return torch.stack([logits.softmax(1) for logits in text._masked(task, plain)])


def ensemble(task: Task, plain: Any) -> Tensor:
    others = [text.train(task, derive(task.seed, "member", k))[0].model for k in range(2)]
    return torch.stack([probs(task, model) for model in (plain, *others)])


def bootstrap(task: Task, plain: Any) -> Tensor:
    found = []
    for k in range(3):
        rows = Bootstrap(len(task.y), seed=derive(task.seed, "sample", k)).indices(0)
        found.append(probs(task, text.train(task.subset(rows), derive(task.seed, "bootstrap", k))[0].model))
    return torch.stack(found)


METHODS: dict[str, Draws] = {
    "error_bars": members,
    "error_bars, at five times the learning rate": partial(members, times=3.0),
    "MC dropout": dropout,
    "twins, sigma of the training": twins,
    "twins, split data": partial(twins, kind="split", cover=True),
    "ensemble of 3": ensemble,
    "three separate trainings on bootstrap samples": bootstrap,
}


def compared(config: Config, names: list[str], done: list[Row]) -> Iterator[Row]:
    with one_thread():
        every = tasks(config)
        plain = [text.train(task, task.seed)[0].model for task in every]
        y = every[0].test_y[:, None]
        truth = torch.stack([probs(task, model) for task, model in zip(every, plain, strict=True)]).double().var(0)
        for k, task in enumerate(every):
            for name in names:
                if any(row["method"] == name and int(row["set"]) == k for row in done):
                    continue
                began = time.process_time()
                drawn = METHODS[name](task, plain[k]).double()
                spread = drawn.var(0)
                yield {
                    "method": name,
                    "set": k,
                    "ratio": (spread.mean() / truth.mean()).sqrt().item(),
                    "rank": rank_correlation(spread.gather(1, y)[:, 0].numpy(), truth.gather(1, y)[:, 0].numpy()),
                    "nll": -drawn.mean(0).gather(1, y).log().mean().item(),
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
standard deviation of the predicted probabilities over plain adapters that were trained on {sets} disjoint sets, with
other starts. Each method sees one of the sets. *Spread ratio*: root mean square spread over all queries and intents,
relative to the truth; 1 is right. *Rank correlation*: of the spread with the truth, for the probability of the right
intent, over 1,500 other queries. *Core seconds*: beyond the training of the plain adapter. Mean and 95 % interval over
the sets. {versions}.

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
