"""Pages about runs: for each its question, figure, numbers, verdicts, versions and timing.

write_report    one HTML page that holds all it shows, pictures included, so that it opens from disk and needs no
                network; and its words in Markdown
write_page      the same Markdown as a page of the docs, with the figures beside it; sections of runs that are no longer
                at hand can stay (`kept.py`)
"""

from __future__ import annotations

import ast
import base64
import inspect
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from .. import __version__
from .._core.atomic import replacing
from . import plots
from .kept import sections_of
from .runner.experiment import Experiment, Status, Verdict, command, label
from .runner.store import Run, shown

ORDER: tuple[Status, ...] = ("held", "partly", "not held", "undecided")
TITLE = "What the paper claims, and what came out here"
Runs = Sequence[tuple[Run, Path]]  # with the places of their figures


def write_report(
    runs: Runs,
    experiments: Mapping[str, Experiment],
    directory: Path,
    title: str = TITLE,
    about: str = "",
    unfinished: Sequence[str] = (),
) -> Path:
    """`report.html` in the directory of the runs; its words also as `report.md`. `about` is a paragraph of your own,
    `unfinished` has a sentence for each run that was begun but not finished."""
    figures = [(place / plots.FILES[0]).relative_to(directory).as_posix() for _, place in runs]
    content = _content(runs, experiments, figures, title, about, unfinished)
    _render("report.md", content, directory / "report.md")
    return _render("report.html", content, directory / "report.html")


def write_page(
    runs: Runs,
    experiments: Mapping[str, Experiment],
    page: Path,
    title: str = TITLE,
    about: str = "",
    prefix: str = "",
    unfinished: Sequence[str] = (),
    update: bool = False,
) -> Path:
    """The page DIR/NAME.md, and the figure of each run as DIR/figures/RUN.png, with the prefix before RUN. With
    `update` the page keeps its sections of other runs."""
    names = [label(run.name, experiments[run.name], run.config) for run, _ in runs]
    there = sections_of(page.read_text(encoding="utf-8")) if update and page.exists() else []
    kept = [section for section in there if section["name"] not in names]
    figures = [f"figures/{prefix}{name}.png" for name in names]
    (page.parent / "figures").mkdir(parents=True, exist_ok=True)
    for figure, (_, place) in zip(figures, runs, strict=True):
        with replacing(page.parent / figure) as partial:
            shutil.copyfile(place / plots.FILES[0], partial)
    return _render("report.md", _content(runs, experiments, figures, title, about, unfinished, kept), page)


def _render(template: str, content: Mapping[str, Any], path: Path) -> Path:
    """HTML escapes what is put in by itself; Markdown has to be told how."""
    html = template.endswith(".html")
    pages = Environment(
        loader=PackageLoader("twinboot.experiments"),
        autoescape=html,
        finalize=None if html else _as_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"without_html": without_html, "as_code": _as_code}
    with replacing(path) as partial:
        partial.write_text(pages.get_template(template).render(content), encoding="utf-8")
    return path


def without_html(markdown: str) -> Markup:
    """Markdown whose HTML tags are shown and do nothing. Links in angle brackets stay.

    >>> print(without_html("*So* <b>bold</b>, 1 < 2, <https://example.org>"))
    *So* &lt;b>bold&lt;/b>, 1 < 2, <https://example.org>
    """
    return Markup(re.sub(r"<(?=[a-zA-Z/!?])(?!https?://[^\s<>]*>)", "&lt;", markdown))


def _as_text(value: object) -> str:
    """What Markdown shows as it is: one line, with no HTML and no link."""
    if isinstance(value, Markup):  # Markdown already
        return value
    line = " ".join(str(value).splitlines())
    for pattern, escaped in ((r"&(?=#?\w+;)", "&amp;"), (r"<(?=[a-zA-Z/!?])", "&lt;"), (r"\]\(", r"]\\(")):
        line = re.sub(pattern, escaped, line)
    return line


def _as_code(text: str) -> Markup:
    """A span of code, whose fence is longer than any row of backticks in it."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    room = " " * (len(fence) > 1)
    return Markup(f"{fence}{room}{_as_text(text)}{room}{fence}")


def _content(
    runs: Runs,
    experiments: Mapping[str, Experiment],
    figures: Sequence[str],
    title: str,
    about: str,
    unfinished: Sequence[str],
    kept: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """What both pages show; `figures` has the address of each run's figure, for Markdown. `kept` are sections that an
    earlier page has; all come in the order of the experiments."""
    sections = [
        _section(run, place, experiments[run.name]) | {"figure": figure}
        for (run, place), figure in zip(runs, figures, strict=True)
    ]
    if kept:
        names = list(experiments)
        sections = sorted([*sections, *kept], key=lambda s: (_place(s["name"], names), s["name"]))
    by = {
        whose: sum((Counter(dict(section["counts"][number])) for section in sections), Counter[str]())
        for number, whose in enumerate(("the paper", "our own"))
    }
    return {
        "title": title,
        "about": about,
        "unfinished": unfinished,
        "sections": sections,
        "quick": [section["title"] for section in sections if "--quick" in section["command"].split()],
        "counts": [(whose, _ordered(own)) for whose, own in by.items() if own],
        "version": __version__,
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def _place(name: str, experiments: Sequence[str]) -> int:
    """Of the experiment that a section is of, which is named after it and, with a dash, its preset."""
    return next((i for i, e in enumerate(experiments) if name == e or name.startswith(f"{e}-")), len(experiments))


def _count(verdicts: Sequence[Verdict]) -> list[tuple[str, int]]:
    """How many have each status that any has."""
    return _ordered(Counter(verdict.status for verdict in verdicts))


def _ordered(count: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(status, count[status]) for status in ORDER if count.get(status)]


def _section(run: Run, place: Path, experiment: Experiment) -> dict[str, Any]:
    light, dark = (_embedded(place / name) for name in plots.FILES)
    reasons = _reasons(experiment.Config)
    with shown(run, place):
        numbers, verdicts = experiment.numbers(run.config, run.tables), experiment.verdicts(run.config, run.tables)
    return {
        "name": label(run.name, experiment, run.config),
        "title": experiment.TITLE + (f" ({run.config.preset})" if hasattr(run.config, "preset") else ""),
        "question": experiment.QUESTION,
        "caption": experiment.CAPTION,
        "light": light,
        "dark": dark,
        "tables": [(title, list(t.columns), t.to_numpy().tolist()) for title, t in numbers.items()],
        "verdicts": verdicts,
        "counts": [_count([v for v in verdicts if v.ours == ours]) for ours in (False, True)],
        "command": command(run.name, experiment, run.config),
        "config": [(name, value, reasons.get(name, "")) for name, value in run.about["config"].items()],
        "about": run.about,
        "files": sorted(f"{table}.csv" for table in run.tables),
    }


def _reasons(config: type[Any]) -> dict[str, str]:
    """What stands under each field of a config in the source: the text that the command line shows for its flag."""
    found: dict[str, str] = {}
    for kind in reversed(config.__mro__[:-1]):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(reason))):
                    found[name] = reason
    return found


def _embedded(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
