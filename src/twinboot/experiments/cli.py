"""The command line: `twinboot gaussian`, `twinboot reproduce`, `twinboot report`, and so on.

Exit codes: 0 done, 1 something about files, 2 wrong flags or values, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .._core.extras import how_to_install

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from .. import __version__
    from ..training.checkpoints import DamagedError
    from . import plots
    from .commands import Redraw, Report, Reproduce, RunExperiment, UsageError, parse
    from .registry import EXPERIMENTS
    from .report import write_page, write_report
    from .runner.experiment import Part, Tick, UnavailableError, label
    from .runner.store import Run, RunError, UnfinishedError, carry_out, load, shown
except ImportError as error:
    raise SystemExit(f"twinboot: the command line needs more packages ({error}): {how_to_install('cli')}") from None


def main(arguments: list[str] | None = None) -> int:
    """Carry out a command and give its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where there is no UTF-8, a sign less rather than no result
    try:
        if arguments == ["--version"]:
            print(f"twinboot {__version__}")
        else:
            _carry_out(arguments)
        sys.stdout.flush()
    except (RunError, DamagedError) as error:
        return _fail(str(error), 1)
    except (UsageError, UnavailableError, FloatingPointError) as error:
        return _fail(str(error), 2)
    except BrokenPipeError:  # as in `twinboot gaussian | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return _fail(f"{error.filename or 'output'}: {error.strerror}." if error.strerror else str(error), 1)
    except KeyboardInterrupt:
        again = shlex.join(["twinboot", *arguments])
        return _fail(f"stopped; what is done is kept. The same command goes on: {again}", 130)
    return 0


def _carry_out(arguments: list[str]) -> None:
    command = parse(arguments, EXPERIMENTS)
    if isinstance(command, RunExperiment):
        run, place = _run(arguments[0], command.config, command.out, command.jobs)
        with shown(run, place):
            _tell(run)
        print(f"figure: {_draw(run, place)}")
    elif isinstance(command, Reproduce):
        _reproduce(command)
    elif isinstance(command, Redraw):
        for directory in _runs_in(command.directory):
            print(f"figure: {_draw(load(directory, EXPERIMENTS), directory)}", flush=True)
    else:
        _report(command)


def _fail(message: str, code: int) -> int:
    print(f"twinboot: {message}", file=sys.stderr)
    return code


def _reproduce(command: Reproduce) -> None:
    for name, experiment in EXPERIMENTS.items():
        config = experiment.QUICK if command.quick else experiment.Config()
        if command.seed is not None:
            try:
                config = dataclasses.replace(config, seed=command.seed)
            except ValueError as error:
                raise UsageError(str(error)) from None
        try:
            run, place = _run(name, config, command.out, command.jobs)
        except UnavailableError as error:
            print(f"twinboot: left out: {error}", file=sys.stderr)
            continue
        _draw(run, place)
        print(f"{name}: {run.about['seconds']:.0f} s", flush=True)
    _report(Report(directory=command.out))


def _run(name: str, config: Any, out: Path, jobs: int) -> tuple[Run, Path]:
    if jobs < 1:
        raise UsageError(f"jobs must be at least 1, not {jobs}.")
    experiment = EXPERIMENTS[name]
    try:
        parts = experiment.parts(config)
    except ValueError as error:
        raise UsageError(str(error)) from None
    place = out / label(name, experiment, config)
    with _progress(name, parts) as begin:
        run = carry_out(name, experiment, config, place, begin, jobs)
    if not run.fresh:
        made = f"by twinboot {run.about['twinboot']} ({run.about['revision']}), {run.about['started']}"
        print(f"{name}: this run was complete already, made {made}; to run it again, delete {place}.")
    return run, place


def _report(command: Report) -> None:
    runs, unfinished = [], []
    for place in _runs_in(command.directory):
        try:
            run = load(place, EXPERIMENTS)
        except UnfinishedError as error:
            unfinished.append(str(error).replace(str(place), place.name))  # pages may be published
            print(f"twinboot: left out: {error}", file=sys.stderr)
            continue
        _draw(run, place)
        runs.append((run, place))
    if not runs:
        raise RunError(f"{command.directory} holds no finished run to report: {unfinished[0]}")
    words: Any = {"title": command.title, "about": command.about, "unfinished": unfinished}
    print(f"report: {write_report(runs, EXPERIMENTS, command.directory, **words)}")
    if command.page is not None:
        words |= {"prefix": command.prefix, "update": command.update}
        try:
            print(f"page: {write_page(runs, EXPERIMENTS, command.page, **words)}")
        except ValueError as error:  # a page that is not a report's
            raise RunError(str(error)) from None


def _runs_in(directory: Path) -> list[Path]:
    """The runs in a directory, in the order of the paper; or the directory itself if it is one."""
    if (directory / "run.json").exists():
        return [directory]
    found = [
        place.parent
        for name in EXPERIMENTS
        for place in sorted(directory.glob(f"{name}*/run.json"))
        if re.fullmatch(rf"{name}(-.+)?", place.parent.name)
    ]
    if not found:
        raise RunError(f"there is no run in {directory}: `twinboot reproduce --quick --out {directory}` makes some.")
    return found


def _draw(run: Run, directory: Path) -> Path:
    console = Console(stderr=True)
    status = console.status(f"{run.name}: drawing") if console.is_terminal else contextlib.nullcontext()
    with status, shown(run, directory):
        return plots.save(lambda: EXPERIMENTS[run.name].figure(run.config, run.tables), directory)


def _tell(run: Run) -> None:
    """The numbers and verdicts on the terminal."""
    experiment, width = EXPERIMENTS[run.name], min(shutil.get_terminal_size((110, 1)).columns, 110) - 4
    for title, table in experiment.numbers(run.config, run.tables).items():
        print(f"\n{title}\n{table.to_string(index=False)}")
    print()
    for verdict in experiment.verdicts(run.config, run.tables):
        print(f"{verdict.status.upper()}: {verdict.claim} ({verdict.source})")
        print(textwrap.indent(textwrap.fill(verdict.evidence, width), "    "))
    print(f"\n{run.about['seconds']:.0f} s")


@contextlib.contextmanager
def _progress(name: str, parts: list[Part]) -> Iterator[Callable[[Part], Tick]]:
    """A bar for all parts together, on standard error, and nothing at all where that is no terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(name, total=sum(part.ticks for part in parts))

        def begin(part: Part) -> Tick:
            bars.update(task, description=f"{name}: {part.name}")
            return lambda: bars.advance(task)

        yield begin
