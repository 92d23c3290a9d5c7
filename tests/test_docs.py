"""What the docs say is tested is tested, and their links lead somewhere."""

import re
from functools import cache
from pathlib import Path

import pytest

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


def anchors(page: Path) -> set[str]:
    """GitHub's: a heading in lower case, without punctuation, with hyphens for spaces; or an id of one's own."""
    content = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", content, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'id="([^"]+)"', content))


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    for link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if target == ROOT / "docs" / "chaos.md" and not target.exists():  # written by `make chaos`
            continue
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_of_results_links_every_page() -> None:
    index = (ROOT / "docs/results.md").read_text()
    pages = sorted(path.name for path in (ROOT / "docs/results").iterdir())
    assert sorted(re.findall(r"\]\(results/([^)]*)\)", index)) == pages
