"""One HTML page about runs: for each its question, figure, numbers, verdicts, config, versions and timing.

The page holds everything it shows, pictures included, so it opens from disk and needs no network.
"""

from __future__ import annotations

import ast
import base64
import inspect
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from . import __version__, plots
from .atomic import replacing
from .experiments.experiment import Experiment, Status, Verdict, command, label
from .experiments.store import Run

ORDER: tuple[Status, ...] = ("held", "partly", "not held", "undecided")


def write_report(runs: Sequence[tuple[Run, Path]], experiments: Mapping[str, Experiment], directory: Path) -> Path:
    """`report.html` in the directory, about runs and the places of their figures; its words also as `report.md`."""
    escape = select_autoescape(["html"])
    pages = Environment(loader=PackageLoader("twinboot"), autoescape=escape, trim_blocks=True, lstrip_blocks=True)
    sections = [_section(run, place, experiments[run.name]) for run, place in runs]
    verdicts = [verdict for section in sections for verdict in section["verdicts"]]
    content = {
        "sections": sections,
        "counts": [
            (whose, _count(own))
            for whose, ours in (("the paper", False), ("our own", True))
            if (own := [verdict for verdict in verdicts if verdict.ours == ours])
        ],
        "version": __version__,
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    for name in ("report.md", "report.html"):
        with replacing(directory / name) as partial:
            partial.write_text(pages.get_template(name).render(content), encoding="utf-8")
    return directory / "report.html"


def _count(verdicts: Sequence[Verdict]) -> list[tuple[str, int]]:
    """How many have each status; the undecided ones only where there are any."""
    count = Counter(verdict.status for verdict in verdicts)
    return [(status, count[status]) for status in ORDER if count[status] or status != "undecided"]


def _section(run: Run, place: Path, experiment: Experiment) -> dict[str, Any]:
    light, dark = (_embedded(place / name) for name in plots.FILES)
    numbers, reasons = experiment.numbers(run.config, run.tables), _reasons(experiment.Config)
    return {
        "name": label(run.name, experiment, run.config),
        "title": experiment.TITLE + (f" ({run.config.preset})" if hasattr(run.config, "preset") else ""),
        "question": experiment.QUESTION,
        "caption": experiment.CAPTION,
        "light": light,
        "dark": dark,
        "tables": [(title, list(t.columns), t.to_numpy().tolist()) for title, t in numbers.items()],
        "verdicts": experiment.verdicts(run.config, run.tables),
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
