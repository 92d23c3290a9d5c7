"""Pages about runs: for each its question, figure, verdicts, numbers, config, versions and timing.

write_report    one HTML page that contains its pictures, so that it opens from disk and needs no network; and the same
                in Markdown
write_page      a Markdown page for the docs, with the figures in a folder
"""

from __future__ import annotations

import base64
import html
import io
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from docstring_parser import parse_from_object
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from PIL import Image

from .. import __version__
from .._core.atomic import replacing
from . import plots
from .runner.experiment import Status, Verdict, command
from .runner.store import Run, errors_explained

ORDER: tuple[Status, ...] = ("held", "partly", "not held", "undecided")
TITLE = "What the paper claims, and what came out here"


def write_report(
    runs: Sequence[Run], directory: Path, title: str = "", about: str = "", unfinished: Sequence[str] = ()
) -> Path:
    """`report.html` and `report.md` in the directory of the runs. `about` is a paragraph for the top of the page;
    `unfinished` has a sentence for each run that was left out."""
    figures = [(run.directory / plots.FILES[0]).relative_to(directory).as_posix() for run in runs]
    content = _content(runs, figures, title or TITLE, about, unfinished)
    _render("report.md", content, directory / "report.md")
    return _render("report.html", content, directory / "report.html")


def write_page(
    runs: Sequence[Run],
    page: Path,
    figures: Path,
    prefix: str = "",
    title: str = "",
    about: str = "",
    unfinished: Sequence[str] = (),
) -> Path:
    """A Markdown page about the runs. Their figures go into the folder `figures`, as PREFIX + RUN.png. Without a title,
    a page about one run has the title of its experiment."""
    names = [f"{prefix}{run.label}.png" for run in runs]
    for folder in (page.parent, figures):
        folder.mkdir(parents=True, exist_ok=True)
    for run, name in zip(runs, names, strict=True):
        with replacing(figures / name) as partial:
            shutil.copyfile(run.directory / plots.FILES[0], partial)
    links = [Path(os.path.relpath(figures / name, page.parent)).as_posix() for name in names]
    title = title or (TITLE if len(runs) > 1 else "")
    return _render("report.md", _content(runs, links, title, about, unfinished), page)


def _render(template: str, content: Mapping[str, Any], path: Path) -> Path:
    is_html = template.endswith(".html")
    pages = Environment(
        loader=PackageLoader("twinboot.experiments"),
        autoescape=is_html,
        finalize=None if is_html else _as_markdown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    with replacing(path) as partial:
        partial.write_text(pages.get_template(template).render(content), encoding="utf-8")
    return path


def _as_markdown(value: object) -> str:
    """A value that Markdown shows as it is: on one line, without HTML or links."""
    if isinstance(value, Markup):  # Markdown already
        return value
    return html.escape(" ".join(str(value).splitlines()), quote=False).replace("](", r"]\(")


def _content(
    runs: Sequence[Run], figures: Sequence[str], title: str, about: str, unfinished: Sequence[str]
) -> dict[str, Any]:
    """The variables of both templates. `figures` are the links to the figures in Markdown."""
    sections = [_section(run) | {"figure": figure} for run, figure in zip(runs, figures, strict=True)]
    verdicts: list[Verdict] = [verdict for section in sections for verdict in section["verdicts"]]
    quick = [section["title"] for section in sections if "--quick" in section["command"].split()]
    which = "any verdict of this report" if len(quick) == len(sections) else f"the verdicts of: {', '.join(quick)}"
    return {
        "title": title,
        "about": about,
        "unfinished": unfinished,
        "sections": sections,
        "caution": f"Made with --quick, from few seeds. Do not quote {which}." if quick else "",
        "counts": _counts(verdicts),
        "version": __version__,
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def _counts(verdicts: Sequence[Verdict]) -> dict[str, list[tuple[int, Status]]]:
    """How many claims have which status, such as {"the paper": [(2, "held"), (1, "not held")], "our own": []}."""
    found = {}
    for whose, ours in (("the paper", False), ("our own", True)):
        count = Counter(verdict.status for verdict in verdicts if verdict.ours == ours)
        found[whose] = [(count[status], status) for status in ORDER if count[status]]
    return found


def _section(run: Run) -> dict[str, Any]:
    experiment, reasons = run.experiment, help_of(run.experiment.Config)
    light, dark = (embedded((run.directory / name).read_bytes()) for name in plots.FILES)
    with errors_explained(run):
        numbers, verdicts = experiment.numbers(run.config, run.tables), experiment.verdicts(run.config, run.tables)
        summary = experiment.in_words(run.config, run.tables) if hasattr(experiment, "in_words") else ""
    return {
        "run": run,
        "title": experiment.TITLE + (f" ({run.config.preset})" if hasattr(run.config, "preset") else ""),
        "summary": summary,
        "light": light,
        "dark": dark,
        "tables": [(title, list(t.columns), t.to_numpy().tolist()) for title, t in numbers.items()],
        "verdicts": verdicts,
        "counts": _counts(verdicts),
        "command": command(run.name, experiment, run.config),
        "config": [(name, value, reasons.get(name, "")) for name, value in run.about["config"].items()],
    }


def embedded(png: bytes) -> str:
    """A picture as a data URI: as lossless WebP, which has a third of the size, or as it is if that is smaller."""
    webp = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        # Figures are opaque. Method 6 takes ten times as long for 5 % less.
        picture.convert("RGB").save(webp, "WEBP", lossless=True, quality=70, method=4)
    kind, content = min(("webp", webp.getvalue()), ("png", png), key=lambda pair: len(pair[1]))
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def help_of(config: type[Any]) -> dict[str, str]:
    """Name of each field of a config -> the docstring under it, on one line."""
    found: dict[str, str] = {}
    for kind in reversed(config.__mro__[:-1]):
        found |= {
            field.arg_name: " ".join((field.description or "").split()) for field in parse_from_object(kind).params
        }
    return found
