import csv
import json
from pathlib import Path
from typing import Any

import pytest

from twinboot.experiments.text.data import CLINC, Queries, generated, read, vocabulary

CONTENT: dict[str, list[list[str]]] = {
    "train": [["how much", "money"], ["how far", "travel"], ["how much more", "money"]],
    "val": [],
    "test": [["what does it cost", "money"]],
    "oos_test": [["who are you", "oos"]],
}


def clinc(folder: Path, **changes: Any) -> str:
    (folder / CLINC).write_text(json.dumps(CONTENT | changes))
    return str(folder)


def banking(folder: Path, **rows: list[tuple[str, str]]) -> str:
    for part, own in rows.items():
        with (folder / f"banking77_{part}.csv").open("w", newline="") as lines:
            csv.writer(lines).writerows([("text", "category"), *own])
    return clinc(folder)


def test_clinc_has_queries_for_training_for_testing_and_out_of_scope(tmp_path: Path) -> None:
    found = read("clinc150", clinc(tmp_path))
    assert found.train == [("how much", "money"), ("how far", "travel"), ("how much more", "money")]
    assert found.test == [("what does it cost", "money")]
    assert found.strange == ["who are you"]
    assert found.intents == ["money", "travel"]


def test_banking_may_have_commas_and_line_breaks_and_takes_clincs_queries_out_of_scope(tmp_path: Path) -> None:
    where = banking(tmp_path, train=[("my card,\nplease", "card")], test=[("a card", "card")])
    found = read("banking77", where)
    assert found.train == [("my card,\nplease", "card")]
    assert found.strange == ["who are you"]


def test_files_that_are_missing_damaged_or_of_another_kind_get_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"has no file {CLINC}"):
        read("clinc150", str(tmp_path))
    for content in ("[", "[1, 2]", '{"train": []}', '{"train": [1], "test": [], "oos_test": []}', "\x00"):
        (tmp_path / CLINC).write_text(content)
        with pytest.raises(ValueError, match="is not CLINC150"):
            read("clinc150", str(tmp_path))
    with pytest.raises(ValueError, match="no train, or one without text"):
        read("clinc150", clinc(tmp_path, train=[["", "money"]]))
    with pytest.raises(ValueError, match="test queries of the intent 'loan', and none to train on"):
        read("banking77", banking(tmp_path, train=[("a card", "card")], test=[("a loan", "loan")]))
    (tmp_path / "banking77_train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is not Banking77: CSV with the columns text and category"):
        read("banking77", str(tmp_path))


def test_each_intent_gives_the_same_number_of_queries_and_seeds_give_others() -> None:
    queries = generated(0)
    rows = queries.few(5, seed=0)
    assert [intent for _, intent in rows] == [intent for intent in queries.intents for _ in range(5)]
    assert rows == queries.few(5, seed=0)
    assert set(rows) != set(queries.few(5, seed=1))
    assert set(rows) <= set(queries.train)
    with pytest.raises(ValueError, match=r"'intent0' has 40 queries to train on: labels can't be 41\."):
        queries.few(41, seed=0)


def test_tests_are_drawn_without_repetition_and_no_more_than_there_are() -> None:
    queries = Queries([("a", "x")], [(str(k), "x") for k in range(9)], ["p", "q"])
    known, strange = queries.tests(9, 2, seed=3)
    assert sorted(known) == sorted(queries.test)
    assert sorted(strange) == ["p", "q"]
    with pytest.raises(ValueError, match="there are 2 test queries of that kind: strange can't be 3"):
        queries.tests(9, 3, seed=3)


def test_generated_sentences_of_an_intent_share_its_words_and_strange_ones_have_none() -> None:
    queries = generated(1)
    for text, intent in (*queries.train, *queries.test):
        assert sum(word.startswith(intent) for word in text.split()) == 2
    assert not any("intent" in text for text in queries.strange)
    assert {word for text in queries.strange for word in text.split()} <= set(vocabulary(queries))
