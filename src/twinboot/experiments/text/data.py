"""Queries with their intents: the files of CLINC150 and Banking77, and generated sentences that need no file."""

from __future__ import annotations

import csv
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..._core.seeds import derive

CLINC = "clinc150_small.json"  # Larson et al. 2019, CC BY 3.0
BANKING = "banking77_{}.csv"  # Casanueva et al. 2020, CC BY 4.0; "train" and "test"
FILES = {"clinc150": (CLINC,), "banking77": (CLINC, BANKING.format("train"), BANKING.format("test"))}

Row = tuple[str, str]  # a query and its intent


@dataclass(frozen=True, eq=False)
class Queries:
    """A pool of queries to train on, test queries, and queries that have none of the intents."""

    train: Sequence[Row]
    test: Sequence[Row]
    strange: Sequence[str]

    @property
    def intents(self) -> list[str]:
        return sorted({intent for _, intent in self.train})

    def few(self, labels: int, seed: int) -> list[Row]:
        """So many random queries of each intent."""
        by_intent = defaultdict(list)
        for row in self.train:
            by_intent[row[1]].append(row)
        found = []
        for intent in self.intents:
            rows = by_intent[intent]
            if len(rows) < labels:
                raise ValueError(
                    f"the intent {intent!r} has {len(rows)} queries to train on: labels can't be {labels}."
                )
            found += random.Random(derive(seed, intent)).sample(rows, labels)
        return found

    def tests(self, queries: int, strange: int, seed: int) -> tuple[list[Row], list[str]]:
        """Random test queries, with an intent and without."""
        for name, wanted, there in (("queries", queries, self.test), ("strange", strange, self.strange)):
            if wanted > len(there):
                raise ValueError(f"there are {len(there)} test queries of that kind: {name} can't be {wanted}.")
        chosen = random.Random(derive(seed, "test"))
        return chosen.sample(list(self.test), queries), chosen.sample(list(self.strange), strange)


def read(preset: str, directory: str) -> Queries:
    """The queries of a preset from the files in a directory. Those out of scope are CLINC's, for Banking77 too."""
    folder = Path(directory)
    if missing := [name for name in FILES[preset] if not (folder / name).is_file()]:
        raise ValueError(f"{directory} has no file {missing[0]}.")
    clinc = _clinc(folder / CLINC)
    strange = [query for query, _ in clinc["oos_test"]]
    if preset == "clinc150":
        return Queries(clinc["train"], clinc["test"], strange)
    train, test = (_banking(folder / BANKING.format(part)) for part in ("train", "test"))
    if unknown := {intent for _, intent in test} - {intent for _, intent in train}:
        raise ValueError(f"{directory} has test queries of the intent {min(unknown)!r}, and none to train on.")
    return Queries(train, test, strange)


def _clinc(path: Path) -> dict[str, list[Row]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        parts = {part: [(str(query), str(intent)) for query, intent in found[part]] for part in PARTS}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{path} is not CLINC150: JSON with lists of [query, intent] for {', '.join(PARTS)}."
        ) from None
    return _without_empty(path, parts)


PARTS = ("train", "test", "oos_test")


def _banking(path: Path) -> list[Row]:
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = [(row["text"], row["category"]) for row in csv.DictReader(lines)]
    except (csv.Error, KeyError, UnicodeDecodeError):
        raise ValueError(f"{path} is not Banking77: CSV with the columns text and category.") from None
    return _without_empty(path, {"queries": rows})["queries"]


def _without_empty(path: Path, parts: dict[str, list[Row]]) -> dict[str, list[Row]]:
    for part, rows in parts.items():
        if not rows or not all(query and intent for query, intent in rows):
            raise ValueError(f"{path} has no {part}, or one without text or intent: is the file whole?")
    return parts


TOY_INTENTS, TOY_WORDS, TOY_FILLERS = 6, 4, 20


def generated(seed: int) -> Queries:
    """Sentences of four made-up words: two of the intent, of which each has four, and two that any sentence may have.
    Sentences out of scope have two words of no intent instead."""
    chosen = random.Random(derive(seed, "toy"))
    fillers = [f"filler{i}" for i in range(TOY_FILLERS)]

    def sentence(intent: str) -> str:
        words = chosen.sample([f"{intent}{i}" for i in range(TOY_WORDS)], 2) + chosen.sample(fillers, 2)
        return " ".join(chosen.sample(words, len(words)))

    def rows(each: int) -> list[Row]:
        return [(sentence(f"intent{k}"), f"intent{k}") for k in range(TOY_INTENTS) for _ in range(each)]

    return Queries(rows(40), rows(40), [sentence("other") for _ in range(200)])


def vocabulary(queries: Queries) -> list[str]:
    """All words of generated sentences."""
    texts: Iterable[str] = (*(query for query, _ in (*queries.train, *queries.test)), *queries.strange)
    return sorted({word for text in texts for word in text.split()})
