"""What the command line does: `twinboot gaussian`, `twinboot reproduce`, `twinboot report`, and so on."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .. import __version__
from ..training.checkpoints import DamagedError
from . import plots
from .registry import EXPERIMENTS
from .report import help_of, write_page, write_report
from .runner.experiment import Part, Tick, UnavailableError, label
from .runner.store import Run, RunError, UnfinishedError, carry_out, errors_explained, load

DESCRIPTION = f"""Twin-Boot {__version__}: repeat the paper's experiments.

Start with `twinboot reproduce --quick`: it runs all experiments that need no files, with few seeds, and writes a page.
`twinboot --version` prints the version.
"""


@dataclass(frozen=True, kw_only=True)
class Running:
    out: Path
    """Directory of runs; out/quick by default with --quick. Repeat the command to resume a run that was stopped."""
    jobs: int = 1
    """How many parts of an experiment run at once, each in a process of its own."""
    quick: bool = False
    """Fewer seeds and settings. All experiments together take under five minutes."""
    full: bool = False
    """All seeds and settings: the default."""


@dataclass(frozen=True, kw_only=True)
class RunExperiment(Running):
    """Run one experiment."""

    config: Annotated[Any, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class Reproduce(Running):
    """Run all experiments that need no files, and write the report."""

    seed: int | None = None
    """The seed of every experiment. By default each has its own."""


@dataclass(frozen=True, kw_only=True)
class Redraw:
    """Draw the figures of finished runs again, without running anything."""

    directory: tyro.conf.Positional[Path]
    """A run or a directory of runs, such as out/demo."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one HTML page about all finished runs: figures, numbers, verdicts and configs."""

    directory: tyro.conf.Positional[Path]
    """A run or a directory of runs, such as out/demo."""
    page: Path | None = None
    """Also write Markdown: one page per run in a folder (docs/results), or one page for all runs (docs/marmousi.md)."""
    prefix: str = ""
    """Put this before the names of the figures, which go into the folder figures beside the page, and of pages."""
    title: str = ""
    """Title of the pages. By default a page about one run has the title of its experiment."""
    about: str = ""
    """A paragraph for the top of the pages, in Markdown."""


class UsageError(Exception):
    """Wrong flags or values, in one sentence."""


@contextlib.contextmanager
def _checking_config() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None


def main(arguments: list[str]) -> int:
    """Carry out a command and return its exit code: 1 for a problem with files, 2 for wrong flags or values."""
    try:
        _carry_out(arguments)
    except (RunError, DamagedError, UsageError, UnavailableError, FloatingPointError) as error:
        print(f"twinboot: {error}", file=sys.stderr)
        return 1 if isinstance(error, (RunError, DamagedError)) else 2
    return 0


def _by_preset(arguments: list[str]) -> list[str]:
    """`seismic --preset paper` is the experiment seismic-paper: it differs in more than its settings."""
    for place, (flag, value) in enumerate(pairwise(arguments)):
        if flag == "--preset" and (name := f"{arguments[0]}-{value}") in EXPERIMENTS:
            return [name, *arguments[1:place], *arguments[place + 2 :]]
    return arguments


def _parse(arguments: list[str]) -> RunExperiment | Reproduce | Redraw | Report:
    """tyro ends the program with code 2 if a flag is wrong, and says which."""
    quick = "--quick" in arguments
    if quick and "--full" in arguments:
        raise UsageError("--quick and --full exclude each other.")
    # --quick changes the defaults of the other flags, which the help shows.
    out = Path("out/quick" if quick else "out/full")
    commands: dict[str, Any] = {
        name: RunExperiment(config=experiment.QUICK if quick else experiment.Config(), out=out)
        for name, experiment in EXPERIMENTS.items()
    }
    commands |= {"reproduce": Reproduce(out=out)}
    commands |= {"figure": Redraw(directory=tyro.MISSING), "report": Report(directory=tyro.MISSING)}
    for kind in (*(e.Config for e in EXPERIMENTS.values()), RunExperiment, Reproduce, Redraw, Report):
        _tidy_help(kind)
    if arguments and arguments[0] in commands:  # so that hints about a wrong flag are about this command alone
        commands = {arguments[0]: commands[arguments[0]]}
    about = {name: EXPERIMENTS[name].Config if name in EXPERIMENTS else type(c) for name, c in commands.items()}
    descriptions = {name: str(kind.__doc__) for name, kind in about.items()}
    choices: Any = tyro.extras.subcommand_type_from_defaults(commands, descriptions)
    style = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    with _checking_config():
        return tyro.cli(choices, prog="twinboot", description=DESCRIPTION, args=arguments, config=style)  # type: ignore[no-any-return]


@cache
def _tidy_help(config: type[Any]) -> None:
    """Tell tyro how to show each flag: the docstring without its line breaks, the type without None, and a default only
    if there is one."""

    def default(shown: str) -> str:
        return "" if shown in ("None", "False", "", "''") else f"(default: {shown})"

    hints = get_type_hints(config, include_extras=True)
    for name, text in help_of(config).items():
        shown = tyro.conf.arg(help=text, metavar=_metavar(hints[name]), help_behavior_hint=default)
        config.__annotations__[name] = Annotated[hints[name], shown]


def _metavar(hint: Any) -> str | None:
    """What stands for the value of a flag that may be None or a list: INT, or STR ...; None for what tyro shows."""
    optional = NoneType in get_args(hint)
    kind = next(kind for kind in get_args(hint) if kind is not NoneType) if optional else hint
    parts = get_args(kind) if get_origin(kind) is tuple else (kind,)
    if not optional and ... not in parts:
        return None
    return " ".join("..." if part is ... else part.__name__.upper() for part in parts)


def _carry_out(arguments: list[str]) -> None:
    arguments = _by_preset(arguments)
    command = _parse(arguments)
    began = time.perf_counter()
    if isinstance(command, RunExperiment):
        run = _run(arguments[0], command.config, command.out, command.jobs)
        with errors_explained(run):
            _print(run)
        print(f"\nfigure: {_draw(run)}\ntime: {time.perf_counter() - began:.0f} s")
    elif isinstance(command, Reproduce):
        _reproduce(command)
    elif isinstance(command, Redraw):
        for directory in _runs_in(command.directory):
            print(f"figure: {_draw(load(directory, EXPERIMENTS))}", flush=True)
    else:
        _report(command)


def _reproduce(command: Reproduce) -> None:
    for name, experiment in EXPERIMENTS.items():
        began = time.perf_counter()
        config = experiment.QUICK if command.quick else experiment.Config()
        with _checking_config():
            config = config if command.seed is None else replace(config, seed=command.seed)
        try:
            run = _run(name, config, command.out, command.jobs)
        except UnavailableError as error:
            print(f"twinboot: left out: {error}", file=sys.stderr)
            continue
        _draw(run)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    _report(Report(directory=command.out))


def _run(name: str, config: Any, out: Path, jobs: int) -> Run:
    if jobs < 1:
        raise UsageError(f"jobs must be at least 1, not {jobs}.")
    experiment = EXPERIMENTS[name]
    with _checking_config():
        parts = experiment.parts(config)
    directory = out / label(name, experiment, config)
    with _progress(name, parts) as begin:
        run = carry_out(name, experiment, config, directory, begin, jobs)
    if not run.fresh:
        made = f"by twinboot {run.about['twinboot']} ({run.about['revision']}), {run.about['started']}"
        print(f"{name}: this run was already finished, made {made}; to run it again, delete {directory}.")
    return run


def _report(command: Report) -> None:
    runs, unfinished = [], []
    for directory in _runs_in(command.directory):
        try:
            run = load(directory, EXPERIMENTS)
        except UnfinishedError as error:
            unfinished.append(str(error).replace(str(directory), directory.name))  # the page may be published
            print(f"twinboot: left out: {error}", file=sys.stderr)
            continue
        _draw(run)
        runs.append(run)
    if not runs:
        raise RunError(f"{command.directory} has no finished run to report: {unfinished[0]}")
    words: Any = {"title": command.title, "about": command.about}
    print(f"report: {write_report(runs, command.directory, **words, unfinished=unfinished)}")
    if command.page is None:
        return
    words |= {"figures": command.page.parent / "figures", "prefix": command.prefix}
    if command.page.suffix == ".md":
        print(f"page: {write_page(runs, command.page, **words, unfinished=unfinished)}")
    else:
        for run in runs:
            page = command.page / f"{command.prefix}{run.label}.md"
            print(f"page: {write_page([run], page, **words)}")


def _runs_in(directory: Path) -> list[Path]:
    """The runs in a directory, in the order of the paper; or the directory itself if it is a run."""
    if (directory / "run.json").exists():
        return [directory]
    patterns = [pattern for name in EXPERIMENTS for pattern in (f"{name}/run.json", f"{name}-*/run.json")]
    found = list(dict.fromkeys(path.parent for pattern in patterns for path in sorted(directory.glob(pattern))))
    if not found:
        raise RunError(f"there is no run in {directory}: `twinboot reproduce --quick --out {directory}` makes some.")
    return found


def _draw(run: Run) -> Path:
    console = Console(stderr=True)
    status = console.status(f"{run.name}: drawing") if console.is_terminal else contextlib.nullcontext()
    with status, errors_explained(run):
        return plots.save(lambda: run.experiment.figure(run.config, run.tables), run.directory)


def _print(run: Run) -> None:
    """Print the numbers and verdicts."""
    width = min(shutil.get_terminal_size((110, 1)).columns, 110) - 4
    for title, table in run.experiment.numbers(run.config, run.tables).items():
        print(f"\n{title}\n{table.to_string(index=False)}")
    print()
    for verdict in run.experiment.verdicts(run.config, run.tables):
        print(f"{verdict.status.upper()}: {verdict.claim} ({verdict.source})")
        print(textwrap.indent(textwrap.fill(verdict.evidence, width), "    "))


@contextlib.contextmanager
def _progress(name: str, parts: list[Part]) -> Iterator[Callable[[Part], Tick]]:
    """A progress bar for all parts together, on standard error. It is left out if that is not a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(name, total=sum(part.ticks for part in parts))

        def begin(part: Part) -> Tick:
            bars.update(task, description=f"{name}: {part.name}")
            return lambda: bars.advance(task)

        yield begin
