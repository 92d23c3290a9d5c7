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


def claims(page: Path) -> list[tuple[str, str]]:
    """Verdict and claim, as a page of results has them."""
    return re.findall(r"<summary><strong>(.*?)\.</strong> (.*)</summary>", page.read_text())


def test_the_index_of_results_has_every_page_with_its_claims() -> None:
    index = (ROOT / "docs/results.md").read_text()
    pages = {path.name: claims(path) for path in (ROOT / "docs/results").iterdir()}
    assert set(re.findall(r"\]\(results/([^)]*)\)", index)) == set(pages)
    for section in index.split("\n### ")[1:]:
        section = section.partition("\n## ")[0]
        [name] = re.findall(r"\]\(results/([^)]*)\)", section)
        assert sorted(re.findall(r"^- \*\*(.*?)\.\*\* (.*)$", section, re.MULTILINE)) == sorted(pages.pop(name))
    assert [name for name, found in pages.items() if found] == []


def nav() -> list[str]:
    """The pages that the navigation of the site lists."""
    listed = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return re.findall(r"^ +- (?:.*: )?([\w/-]+\.md)$", listed, re.MULTILINE)


def source_of(page: str) -> Path:
    """The file that becomes a page of the site."""
    if page in GENERATED:
        return ROOT / GENERATED[page]
    if page.startswith("gallery/"):
        return ROOT / "examples" / page.replace(".md", ".py")
    return ROOT / "docs" / page


GENERATED = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "gallery/index.md": "examples/gallery",
}


def test_the_navigation_of_the_site_has_every_page_once_and_no_other() -> None:
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    examples = [f"gallery/{path.stem}.md" for path in (ROOT / "examples/gallery").glob("*.py")]
    assert sorted(nav()) == sorted([*pages, *examples, *GENERATED])


def test_every_page_and_file_that_the_site_names_exists() -> None:
    assert [page for page in nav() if not source_of(page).exists()] == []
    config = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"\b(?:docs/_hooks|assets)/[\w.-]+\w", config)
    assert len(named) > 6
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / "docs" / name).exists()] == []
