"""What the docs say is tested is tested."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "works-with.md").read_text()


@cache
def names_in(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE))


def test_every_test_that_the_table_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 30
    assert [f"{file}::{test}" for file, test in named if test not in names_in(file)] == []


def test_every_cell_has_a_test() -> None:
    table = PAGE.split("\n\n")[2].splitlines()
    assert table[0].startswith("| | plain loop")
    cells = [cell.strip() for line in table[2:] for cell in line.strip("|").split("|")[1:]]
    assert [cell for cell in cells if not re.search(r"\[\d+\]$", cell)] == []
    numbers = [int(n) for n in re.findall(r"\[(\d+)\]", PAGE)]
    listed = [int(n) for n in re.findall(r"^(\d+)\. `tests/", PAGE, re.MULTILINE)]
    assert listed == list(range(1, max(numbers) + 1))
    assert list(dict.fromkeys(numbers)) == listed  # in the order in which a reader meets them
