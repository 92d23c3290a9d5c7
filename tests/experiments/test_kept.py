"""Sections that a page keeps while those of other runs change."""

import shutil
from pathlib import Path

import pytest
import toy

from twinboot.experiments import cli
from twinboot.experiments.kept import sections_of
from twinboot.experiments.runner.store import carry_out

RESULTS = Path(__file__).parents[2] / "docs/results.md"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a run of each of three experiments."""
    experiments = {"first": toy, "second": toy, "third": toy}
    monkeypatch.setattr(cli, "EXPERIMENTS", experiments)
    for name in experiments:
        carry_out(name, toy, toy.Config(), tmp_path / "runs" / name)
    return tmp_path / "runs"


def report(runs: Path, page: Path, *options: str) -> str:
    assert cli.main(["report", str(runs), "--page", str(page), *options]) == 0
    return page.read_text()


def test_a_page_is_the_same_whichever_of_its_runs_is_told_last(runs: Path, tmp_path: Path) -> None:
    whole = report(runs, tmp_path / "docs/page.md")
    for name in ("second", "third", "first"):
        assert report(runs / name, tmp_path / "docs/page.md", "--update") == whole


def test_a_new_section_comes_where_its_experiment_has_its_place(runs: Path, tmp_path: Path) -> None:
    whole = report(runs, tmp_path / "docs/page.md")
    for name in ("third", "first", "second"):
        grown = report(runs / name, tmp_path / "docs/grown.md", "--update")
    assert grown == whole


def test_a_changed_run_changes_its_own_section_and_figure_alone(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs/page.md"
    before = sections_of(report(runs, page))
    others = [tmp_path / f"docs/figures/{name}.png" for name in ("first", "third")]
    drawn = [figure.read_bytes() for figure in others]
    shutil.rmtree(runs)
    carry_out("second", toy, toy.Config(scale=2.0), runs / "second")
    after = sections_of(report(runs, page, "--update"))
    changed = [old["name"] for old, new in zip(before, after, strict=True) if old != new]
    assert changed == ["second"]
    assert after[1]["command"] == "twinboot second --scale 2.0"
    assert [figure.read_bytes() for figure in others] == drawn


def test_without_update_a_page_has_the_runs_at_hand_alone(runs: Path, tmp_path: Path) -> None:
    report(runs, tmp_path / "docs/page.md")
    assert [s["name"] for s in sections_of(report(runs / "second", tmp_path / "docs/page.md"))] == ["second"]


def test_a_kept_run_that_was_quick_is_still_said_to_be(runs: Path, tmp_path: Path) -> None:
    shutil.rmtree(runs)
    carry_out("first", toy, toy.QUICK, runs / "first")
    quick = report(runs, tmp_path / "docs/page.md")
    assert "Made with `--quick`" in quick
    shutil.rmtree(runs)
    carry_out("second", toy, toy.Config(), runs / "second")
    assert "Made with `--quick`" in report(runs, tmp_path / "docs/page.md", "--update")


def test_a_page_with_a_section_of_somebody_else_is_left_as_it_is(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs/page.md"
    edited = report(runs, page).replace("(#second)", "(#other)")
    page.write_text(edited)
    figures = {figure: figure.stat().st_mtime_ns for figure in page.parent.glob("figures/*")}
    assert cli.main(["report", str(runs), "--page", str(page), "--update"]) == 1
    assert "a section 'second' that no report wrote" in capsys.readouterr().err
    assert page.read_text() == edited
    assert {figure: figure.stat().st_mtime_ns for figure in figures} == figures


def test_a_page_of_somebody_else_is_left_as_it_is(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# My own words\n")
    assert cli.main(["report", str(runs), "--page", str(page), "--update"]) == 1
    assert page.read_text() == "# My own words\n"


def test_the_published_page_can_be_kept() -> None:
    text = RESULTS.read_text()
    found = sections_of(text)
    assert all(section["text"] in text for section in found)
    assert all((RESULTS.parent / "figures" / f"{section['name']}.png").exists() for section in found)
    for whose, counts in zip(("the paper", "our own"), zip(*(s["counts"] for s in found), strict=True), strict=True):
        [line] = [line for line in text.splitlines() if line.startswith(f"- Claims of {whose}: ")]
        total = {status: sum(dict(count).get(status, 0) for count in counts) for status in ("held", "partly")}
        for status, number in total.items():
            assert f" {number} {status}" in line
