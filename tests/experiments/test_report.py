"""The report as a file, and as people see it, in a real browser."""

import base64
import html
import io
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import toy
from browser import browser, in_browser
from PIL import Image

from twinboot.experiments import cli, commands, fwi, gaussian, images, nist, plots, regressions, seismic, truth
from twinboot.experiments import text as language
from twinboot.experiments.report import ORDER, TITLE, embedded, help_of, write_page, write_report
from twinboot.experiments.runner.experiment import Verdict
from twinboot.experiments.runner.store import carry_out, load
from twinboot.experiments.seismic import estimates, paper, posterior, regimes
from twinboot.experiments.wells import basins, sweeps

TOY = html.escape(toy.TITLE)  # in Markdown


@pytest.fixture
def page(tmp_path: Path) -> Path:
    runs = []
    for name in ("first", "second"):
        run = carry_out(name, toy, toy.Config(), tmp_path / name)
        plots.save(lambda run=run: toy.figure(run.config, run.tables), tmp_path / name)
        runs.append(run)
    return write_report(runs, tmp_path)


def test_page_needs_nothing_from_outside(page: Path) -> None:
    text = page.read_text()
    sources = re.findall(r'(?:src|srcset|href)="([^"]{1,40})', text)
    outside = {source for source in sources if not source.startswith(("data:", "#"))}
    assert outside == {"https://arxiv.org/abs/2508.15019"}  # a link to follow, not loaded
    assert "url(" not in text
    assert "@import" not in text


def test_embedded_pictures_are_smaller_and_have_the_same_pixels(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    for name in plots.FILES:
        png = (tmp_path / "first" / name).read_bytes()
        uri = embedded(png)
        assert uri in text
        content = base64.b64decode(uri.partition(",")[2])
        assert len(content) < len(png) / 2
        pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in (png, content)]
        assert pictures[0].tobytes() == pictures[1].tobytes()


def test_page_says_what_each_run_is_about(page: Path) -> None:
    text = page.read_text()
    for whose, count in (("the paper", "2 held, 2 not held"), ("our own", "2 held")):
        line = re.search(f"<p>Claims of {whose}: (.*)", re.sub("</?span[^>]*>", "", text))
        assert line
        assert line[1] == f"{count}.</p>"
    assert text.count("By which all is multiplied.") == 2  # the reason of a setting, from the config's source
    assert text.count("Does it run?") == 2
    assert "torch" in text


def test_what_an_experiment_says_is_text_and_not_markup(page: Path) -> None:
    text = page.read_text()
    assert "<script>alert(1)" not in text
    assert "A toy &lt;experiment&gt; &amp; more" in text


@in_browser
@pytest.mark.parametrize(("width", "dark"), [(1000, False), (1000, True), (390, False)])
def test_page_in_a_browser(page: Path, width: int, dark: bool) -> None:
    with browser(width, dark) as driver:
        driver.get(page.as_uri())
        images = driver.execute_script(
            "return [...document.images].map(i => [i.complete, i.naturalWidth, i.naturalHeight, i.width, i.currentSrc])"
        )
        assert len(images) == 2
        for complete, natural_width, natural_height, shown, _ in images:
            assert complete
            assert min(natural_width, natural_height, shown) > 100
        light = driver.execute_script("return document.images[0].src")
        assert (images[0][4] != light) == dark  # another picture for dark pages
        background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(22, 24, 29)" if dark else "rgb(255, 255, 255)")
        tables = driver.execute_script("return [...document.querySelectorAll('table')].map(t => t.rows.length)")
        assert tables == [4, 4] * 2  # numbers and config, each with a head and three rows
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width  # no sideways scrolling
        reading = "document.querySelector('.reading')"
        assert driver.execute_script(f"return !{reading}.open && {reading}.previousElementSibling.tagName === 'MAIN'")
        driver.execute_script("document.querySelector(\"a[href='#reading']\").click()")
        words, meanings = (
            driver.execute_script(f"return document.querySelector('{k}').offsetWidth") for k in ("dt", "dd")
        )
        assert words < meanings  # on a phone, too
        assert driver.get_log("browser") == []


@in_browser
def test_a_long_word_of_a_command_breaks_on_a_phone(page: Path, tmp_path: Path) -> None:
    run = load(tmp_path / "first", {"first": toy})
    long = replace(run, config=toy.Config(seed=10**70))
    write_report([long], tmp_path)
    with browser(390) as driver:
        driver.get(page.as_uri())
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 390


@in_browser
@pytest.mark.parametrize("width", [1200, 600])
def test_a_wide_table_wraps_and_scrolls_only_where_that_is_not_enough(
    page: Path, tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {f"measure {k}": ["0.912 ± 0.005"] for k in range(10)}
    table = pd.DataFrame({"method": ["single, best loss, temperature by the hold-out"], **columns})
    monkeypatch.setattr(toy, "numbers", lambda config, tables: {"Many columns": table})
    write_report([load(tmp_path / "first", {"first": toy})], tmp_path)
    with browser(width) as driver:
        driver.get(page.as_uri())
        box = "document.querySelector('.scrolls')"
        seen, all_of_it = driver.execute_script(f"return [{box}.clientWidth, {box}.scrollWidth]")
        assert (all_of_it > seen) == (width < 1000)
        cell = driver.execute_script(f"return {box}.querySelectorAll('td')[1].textContent")
        assert cell == "0.912 ±\u00a00.005"  # an error stays with its sign
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width


@in_browser
def test_the_report_of_the_real_experiments_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them with hardly any seeds, through the command line."""
    few: Any = {"sizes": (20, 40), "seeds": 4}
    monkeypatch.setattr(gaussian, "QUICK", gaussian.Config(**few, replicas=(5,), falling=20))
    monkeypatch.setattr(basins, "QUICK", basins.Config(size=20, epochs=13, seeds=4))
    short: Any = {"size": 20, "epochs": 13, "rate_steps": (6, 9), "noises": (0.2,), "rates": (0.1,), "batches": (5,)}
    monkeypatch.setattr(sweeps, "QUICK", sweeps.Config(**few, **short))
    tiny: Any = {"shots": 8, "receivers": 10, "duration": 0.48, "steps": 2, "prior_steps": 2, "check": 1, "rounds": 1}
    monkeypatch.setattr(fwi, "QUICK", fwi.Config(**tiny, seeds=1))
    monkeypatch.setattr(seismic, "QUICK", seismic.Config(rows=64, seeds=2, steps=3, turns=2))
    one: Any = {"rows": (60,), "noise": (0.3,), "beta": (1.0,), "width": (1.0,), "spread": (1.0,)}
    monkeypatch.setattr(regimes, "QUICK", regimes.Config(**one, seeds=2, steps=3))
    little: Any = {"rounds": 2, "exact_rounds": 2, "mala": 100}
    monkeypatch.setattr(posterior, "QUICK", posterior.Config(**one, **little, seeds=2, steps=3))
    monkeypatch.setattr(paper, "QUICK", paper.Config(rows=64, test_rows=64, seeds=2, steps=60))
    monkeypatch.setattr(estimates, "QUICK", estimates.Config(seeds=2, steps=21))
    monkeypatch.setattr(images, "QUICK", images.Config(methods=("hold-out", "twins"), epochs=3, seeds=1, samples=2))
    monkeypatch.setattr(truth, "QUICK", replace(truth.QUICK, methods=("fit", "dropout"), epochs=2, sets=4, scored=2))
    monkeypatch.setattr(language, "QUICK", replace(language.QUICK, methods=("lora", "twins"), epochs=2, seeds=1))
    monkeypatch.setattr(nist, "QUICK", nist.Config(sets=("Misra1a",), rounds=10, fits=50))
    monkeypatch.setattr(regressions, "QUICK", regressions.Config(tasks=("linear",), sizes=(50,), sets=3, rounds=50))
    assert cli.main(["reproduce", "--quick", "--out", str(tmp_path)]) == 0  # uci is left out: it has no data
    text = (tmp_path / "report.html").read_text()
    assert len(text) < 3e6
    assert text.count("data:image") == 2 * 14  # each picture once, for light and for dark pages
    with browser() as driver:
        driver.get((tmp_path / "report.html").as_uri())
        pictures = driver.execute_script(
            "return [...document.images].map(i => Math.min(i.naturalWidth, i.naturalHeight))"
        )
        assert len(pictures) == 14
        assert min(pictures) > 500
        sections = driver.execute_script(
            "return [...document.querySelectorAll('section')].map(s => [s.id, s.querySelectorAll('.numbers').length,"
            " s.querySelectorAll('.verdict').length, s.querySelectorAll('table.config tbody tr').length])"
        )
        fields = {name: len(module.Config.__dataclass_fields__) for name, module in commands.EXPERIMENTS.items()}
        fields["text-toy"] = fields["text"]  # named by its preset
        expected = [["gaussian", 2, 4], ["basins", 1, 3], ["sweeps", 1, 5], ["images", 2, 6], ["seismic", 6, 4]]
        expected += [
            ["seismic-paper", 4, 5],
            ["regimes", 2, 2],
            ["estimates", 2, 2],
            ["posterior", 3, 4],
            ["fwi", 1, 3],
        ]
        expected += [["truth", 1, 3], ["text-toy", 1, 2], ["nist", 3, 3], ["regressions", 2, 2]]
        assert sections[3][2] in (4, 6)  # whether another method takes as long as twins is up to the clock
        sections[3][2] = 6
        assert sections == [[*row, fields[str(row[0])]] for row in expected]
        reasons = driver.execute_script(
            "return [...document.querySelectorAll('.config td:last-child')].map(t => t.innerHTML)"
        )
        assert all(reasons)  # every number has its source
        assert driver.get_log("browser") == []


@in_browser
def test_print_shows_the_configs_and_light_pictures(page: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    with browser(dark=True) as driver:
        driver.get(page.as_uri())
        driver.execute_script("dispatchEvent(new Event('beforeprint'))")
        assert driver.execute_script("return [...document.querySelectorAll('details')].every(d => d.open)")
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        # The picture for paper is loaded anew; until then there may be none to decode.
        script = "const i = document.images[0]; return i.complete && i.naturalWidth > 100 && i.currentSrc === i.src"
        WebDriverWait(driver, 10).until(lambda driver: driver.execute_script(script))
        assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_words_of_the_page_are_there_as_markdown_too(page: Path) -> None:
    text = page.with_suffix(".md").read_text()
    assert "<summary><strong>Not held.</strong> It is useful. (nowhere)</summary>" in text
    assert "<summary><strong>Held.</strong> It is short. (our claim: nowhere)</summary>" in text
    assert text.count("<details") == text.count("\n</details>\n") + text.endswith("\n</details>")
    assert "| part | \\|value\\| |\n|---|---|\n| 0.0 | 0.0 |" in text  # bars that make no columns


def test_an_experiment_may_say_in_words_what_came_out(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "in_words", lambda config, tables: f"<{len(tables)}> table.", raising=False)
    first = load(tmp_path / "first", {"first": toy})
    write_report([first, first], tmp_path)
    assert page.with_suffix(".md").read_text().count(f"\n\n&lt;1&gt; table.\n\n{toy.QUESTION}\n") == 2
    write_report([first], tmp_path)
    title, said, _ = page.with_suffix(".md").read_text().split("\n\n", 2)  # the first sentence of a page
    assert (title[0], said) == ("#", "&lt;1&gt; table.")
    assert "<p>&lt;1&gt; table.</p>" in page.read_text()


def test_a_page_of_the_docs_has_its_figures_beside_it(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "EXPERIMENTS", {"first": toy, "second": toy})
    words = ["--title", "Of toys", "--about", "They are small.", "--prefix", "toy-"]
    docs = tmp_path / "docs"
    assert cli.main(["report", str(tmp_path), "--page", str(docs / "toys.md"), *words]) == 0
    assert sorted(place.name for place in docs.rglob("*.*")) == ["toy-first.png", "toy-second.png", "toys.md"]
    assert (docs / "figures/toy-first.png").read_bytes() == (tmp_path / "first/figure.png").read_bytes()
    text = (docs / "toys.md").read_text()
    assert text.startswith("# Of toys\n\n- Claims of the paper: ")
    assert "\n\nThey are small.\n\n| experiment |" in text
    assert '\n\n<a id="first"></a>\n\n## ' in text
    assert f"![{TOY}](figures/toy-second.png)\n\n*{toy.CAPTION}*\n" in text
    assert f"[{TOY}](first/figure.png)" in page.with_suffix(".md").read_text()  # where the figure of a run is


def test_a_folder_gets_a_page_for_each_run_and_keeps_its_other_pages(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "EXPERIMENTS", {"first": toy, "second": toy})
    docs = tmp_path / "docs"
    assert cli.main(["report", str(tmp_path), "--page", f"{docs}/results/"]) == 0
    assert sorted(place.name for place in docs.rglob("*.*")) == ["first.md", "first.png", "second.md", "second.png"]
    first, second = docs / "results/first.md", docs / "results/second.md"
    assert first.read_text().startswith(f"# {TOY}\n\n- Claims of the paper: 1 held, 1 not held.\n")
    assert f"![{TOY}](../figures/first.png)" in first.read_text()
    assert "| experiment |" not in first.read_text()
    before = second.read_text()
    (docs / "results/own.md").write_text("# My own words\n")
    shutil.rmtree(tmp_path / "first")
    carry_out("first", toy, toy.Config(scale=2.0), tmp_path / "first")
    assert cli.main(["report", str(tmp_path / "first"), "--page", str(docs / "results")]) == 0
    assert "\n    twinboot first --scale 2.0\n" in first.read_text()
    assert second.read_text() == before
    assert (docs / "results/own.md").read_text() == "# My own words\n"


def told(tmp_path: Path, words: dict[str, str] | None = None, **about: Any) -> tuple[str, str]:
    """The Markdown of both kinds, where run.json says so."""
    run = load(tmp_path / "first", {"first": toy})
    runs = [replace(run, about=run.about | about)]
    report = write_report(runs, tmp_path, **(words or {}))
    assert "<script>alert" not in report.read_text()
    docs = write_page(runs, tmp_path / "docs" / "toys.md", tmp_path / "docs" / "figures", **(words or {}))
    return report.with_suffix(".md").read_text(), docs.read_text()


def test_what_an_experiment_says_is_no_markup_in_markdown_either(page: Path, tmp_path: Path) -> None:
    for text in told(tmp_path):
        assert "\n&lt;script&gt;alert(1)&lt;/script&gt;\n" in text
        tags = set(re.findall(r"</?(\w+)[^>]*>", text))
        assert tags <= {"a", "details", "summary", "strong"}  # what the page itself has


@pytest.mark.parametrize("key", ["twinboot", "revision", "torch", "platform"])
def test_what_a_file_says_is_text_in_markdown(key: str, page: Path, tmp_path: Path) -> None:
    said = "a <script>alert(1)</script>, <https://x.y>, [b](javascript:c), &lt;, 1 < 2 & 3"
    shown = (
        "a &lt;script&gt;alert(1)&lt;/script&gt;, &lt;https://x.y&gt;, [b]\\(javascript:c), &amp;lt;, 1 &lt; 2 &amp; 3"
    )
    for text in told(tmp_path, **{key: said}):
        assert shown in text
        assert "<script" not in text


def test_a_cell_of_a_table_stays_in_its_row(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pd.DataFrame({"set <i>": ["a\nb | <script>alert(1)"]})
    monkeypatch.setattr(toy, "numbers", lambda config, tables: {"Of\nsets": table})
    for text in told(tmp_path):
        assert "\nOf sets:\n\n| set &lt;i&gt; |\n|---|\n| a b \\| &lt;script&gt;alert(1) |\n" in text


def test_a_title_is_text_and_a_paragraph_is_markdown(page: Path, tmp_path: Path) -> None:
    words = {"title": "Of *toys* <b>", "about": "See [them](toys.html)\nor <https://x.y>."}
    for text in told(tmp_path, words):
        assert text.startswith("# Of *toys* &lt;b&gt;\n")
        assert "\nSee [them](toys.html)\nor <https://x.y>.\n" in text


def test_a_command_stays_in_its_block_of_code(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinboot.experiments.report.command", lambda *_: "a `` <i> `b`\n# c")
    for text in told(tmp_path):
        assert "\n\n    a `` <i> `b` # c\n\n" in text


def test_the_words_open_with_a_table_of_what_came_out(page: Path) -> None:
    text = page.with_suffix(".md").read_text()
    rows = [f"| [{TOY}](#{name}) | 1 held, 1 not held | 1 held |\n" for name in ("first", "second")]
    assert "|---|---|---|\n" + "".join(rows) + '\n<a id="first"></a>\n' in text


def test_both_pages_say_how_to_read_them_in_the_same_words(page: Path) -> None:
    told = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page.read_text())
    assert [word for word, _ in told][:5] == [*(status.capitalize() for status in ORDER), "±"]
    plain = re.findall(r"^- \*\*(.*?)\*\*: (.*)$", page.with_suffix(".md").read_text(), re.MULTILINE)
    assert plain == [row for row in told if row[0] in ("Held", "Not held")]  # the words that this page uses


def test_the_page_explains_each_column_of_the_images(page: Path) -> None:
    """But for the last one, which the title of the table explains."""
    told = [word.lower() for word in re.findall(r"<dt>(.*?)</dt>", page.read_text())]
    headings = [*images.COLUMNS.values(), images.TIME]
    assert [heading for heading in headings if heading.lower() not in told] == []


def test_page_names_the_runs_that_were_quick(page: Path, tmp_path: Path) -> None:
    assert "Do not quote" not in page.read_text()
    run = carry_out("first", toy, toy.QUICK, tmp_path / "quick" / "first")
    plots.save(lambda: toy.figure(run.config, run.tables), tmp_path / "quick" / "first")
    write_report([run], tmp_path / "quick")
    text = (tmp_path / "quick/report.html").read_text()
    assert '<p class="note">Made with --quick, from few seeds. Do not quote any verdict of this report.</p>' in text
    assert text.index("Do not quote") < text.index("Claims of the paper")  # read before what it is about
    docs = write_page([run], tmp_path / "docs" / "toys.md", tmp_path / "docs" / "figures")
    for place, title in ((tmp_path / "quick/report.md", TITLE), (docs, TOY)):
        said = "> Made with --quick, from few seeds. Do not quote any verdict of this report.\n"
        assert place.read_text().startswith(f"# {title}\n\n{said}")
    mixed = write_page([run, load(tmp_path / "first", {"first": toy})], docs, tmp_path / "docs" / "figures")
    assert "Do not quote the verdicts of: A toy &lt;experiment&gt; &amp; more.\n" in mixed.read_text()


def test_both_kinds_of_page_name_the_runs_that_are_not_finished(page: Path, tmp_path: Path) -> None:
    runs = [load(tmp_path / "first", {"first": toy})]
    unfinished = ["the run in a is not complete.", "the run in b is not complete."]
    report = write_report(runs, tmp_path, unfinished=unfinished)
    assert "<li>the run in b is not complete.</li>" in report.read_text()
    docs = write_page(runs, tmp_path / "docs" / "toys.md", tmp_path / "docs" / "figures", unfinished=unfinished)
    for place in (report.with_suffix(".md"), docs):
        said = "> Unfinished runs, which are not on this page:\n"
        said += "> - the run in a is not complete.\n> - the run in b is not complete.\n\n- Claims"
        assert said in place.read_text()


def test_every_figure_of_the_docs_is_there() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for page in docs.rglob("*.md"):
        linked = re.findall(r"\]\(((?:\.\./)?figures/.*?)\)", page.read_text())
        assert [name for name in linked if not (page.parent / name).exists()] == []
    assert "](../figures/gaussian.png)" in (docs / "results/gaussian.md").read_text()


def test_a_config_says_its_own_reason_where_it_changes_a_setting() -> None:
    general, own = help_of(basins.Setting), help_of(basins.Config)
    assert general["size"].endswith("as many as in Figure 1.")
    assert own["size"].endswith("few, so that sigma can be seen in the picture.")
    assert own["noise"] == general["noise"]
    assert set(own) == set(basins.Config.__dataclass_fields__)


def test_a_status_is_counted_only_if_a_claim_has_it(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = page.with_suffix(".md")
    assert "- Claims of the paper: 2 held, 2 not held.\n- Claims of our own: 2 held.\n" in words.read_text()
    verdict = Verdict("It lasts.", "nowhere", "undecided", "Too few runs.")
    monkeypatch.setattr(toy, "verdicts", lambda config, tables: [verdict])
    run = load(tmp_path / "first", {"first": toy})
    write_report([run], tmp_path)
    assert "- Claims of the paper: 1 undecided.\n\nThe paper" in words.read_text()
