"""A run: its parts are computed one after another or several at once, stored on disk, and read again.

    DIR/run.json          the experiment, its config, versions and timing; once finished, checksums of the tables
    DIR/TABLE.csv         the results, one row per observation
    DIR/parts/PART.json   the tables of a part, until the run is finished

Each file appears complete, so a run can be stopped at any time. The same call resumes it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ... import __version__
from ..._core.atomic import replacing
from ..._core.checks import one_line, require_types
from . import sealed
from .experiment import Experiment, Part, Tick, command, label

if sys.platform != "win32":
    import fcntl

FORMAT = 1  # of run.json


class RunError(Exception):
    """A problem with a run and its files, in one sentence for the user."""


class UnfinishedError(RunError):
    """The run was stopped before its end."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run."""

    name: str
    experiment: Experiment
    config: Any
    tables: dict[str, pd.DataFrame]
    about: dict[str, Any]  # the content of run.json
    directory: Path
    fresh: bool = False  # at least one part was computed just now

    @property
    def label(self) -> str:
        return label(self.name, self.experiment, self.config)


def carry_out(
    name: str,
    experiment: Experiment,
    config: Any,
    directory: Path,
    begin: Callable[[Part], Tick] = lambda part: lambda: None,
    jobs: int = 1,
) -> Run:
    """Compute the parts that are missing in the directory, and return the run.

    `begin(part)` returns the function to call at each tick of a part. With several jobs, parts run at once, each in a
    process of its own with its share of the threads.
    """
    parts = experiment.parts(config)  # raises ValueError for a wrong config, before anything is written
    with _locked(directory):
        if _is_finished(name, config, directory):
            return load(directory, {name: experiment})
        compute(parts, directory / "parts", begin, jobs)
        _finish(parts, directory)
        return dataclasses.replace(load(directory, {name: experiment}), fresh=True)


def load(directory: Path, experiments: dict[str, Experiment]) -> Run:
    """The finished run in a directory, its files checked against their checksums."""
    about = _read(directory)
    name = about["experiment"]
    if name not in experiments:
        raise RunError(f"{directory} holds a run of {name!r}, an experiment that this version does not have.")
    config = _config(experiments[name].Config, about["config"], directory)
    if about["tables"] is None:
        again = command(name, experiments[name], config)
        raise UnfinishedError(f"the run in {directory} is unfinished: `{again}` with the same --out resumes it.")
    tables = {}
    for table, expected in about["tables"].items():
        path = directory / f"{table}.csv"
        content = path.read_bytes() if path.exists() else b""
        if sealed.checksum(content) != expected:
            raise RunError(f"{path} is missing or damaged, or was edited: delete {directory} and run again.")
        tables[table] = pd.read_csv(io.BytesIO(content))
    return Run(name, experiments[name], config, tables, about, directory)


@contextmanager
def errors_explained(run: Run) -> Iterator[None]:
    """Around what shows a run: a run that was made by another version may not fit this one."""
    try:
        yield
    except (LookupError, ArithmeticError, AttributeError, TypeError, ValueError) as error:
        if run.fresh:
            raise
        raise RunError(
            f"the run in {run.directory}, made by twinboot {run.about['twinboot']}, does not fit this version "
            f"({type(error).__name__}: {one_line(error)}): delete it and run again."
        ) from None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let one process at a time work on a run. The system frees the lock when the process ends, also after a kill."""
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if sys.platform != "win32":  # which has no such lock
                lock = os.open(directory, os.O_RDONLY)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process is working on the run in {directory}.") from None
        except OSError as error:
            why = f"can't write to {directory}: {error.strerror}"
            raise RunError(f"{why}; choose another directory with --out.") from None
        yield


def _is_finished(name: str, config: Any, directory: Path) -> bool:
    """Begin a run, or check that the one in the directory has the same config."""
    if (directory / "run.json").exists():
        about = _read(directory)
        if about["experiment"] != name:
            raise RunError(f"{directory} holds a run of {about['experiment']!r}: choose another directory with --out.")
        # A setting that was added after the run had its default.
        wanted, there = _plain(config), _plain(_config(type(config), about["config"], directory))
        if different := [key for key in wanted if there[key] != wanted[key]]:
            key = different[0]
            raise RunError(
                f"{directory} holds a run with {key} {there[key]}, not {wanted[key]}: choose another directory with "
                "--out, or delete that one."
            )
        return about["tables"] is not None
    about = {
        "format": FORMAT,
        "experiment": name,
        "config": _plain(config),
        "twinboot": __version__,
        "revision": revision(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": None,
        "tables": None,
    }
    (directory / "parts").mkdir(exist_ok=True)
    try:
        sealed.write(directory / "run.json", about)
    except ValueError as error:
        raise RunError(f"this config can't be written to {directory}: {error}") from None
    return False


def _finish(parts: list[Part], directory: Path) -> None:
    """Join the parts to one file per table; then write the checksums, which make the run a finished one."""
    frames: dict[str, list[pd.DataFrame]] = {}
    seconds, revisions = 0.0, list[str | None]()
    for part in parts:
        path = directory / "parts" / f"{part.name}.json"
        try:
            result = sealed.read(path)
        except ValueError:
            raise RunError(f"{path} is damaged: delete it, and the same command computes that part again.") from None
        seconds += result["seconds"]
        revisions.append(result["revision"])
        for table, content in result["tables"].items():
            frame = pd.read_csv(io.StringIO(content), dtype=str, keep_default_na=False)  # every cell as it was written
            frames.setdefault(table, []).append(frame)
    checksums = {}
    for table, found in frames.items():
        joined = pd.concat(found, ignore_index=True).to_csv(index=False).encode()
        with replacing(directory / f"{table}.csv") as partial:
            partial.write_bytes(joined)
        checksums[table] = sealed.checksum(joined)
    about = _read(directory) | {"seconds": round(seconds, 2), "tables": checksums}
    if any(revisions):  # a run that was stopped may have been resumed by another revision
        about["revision"] = ", ".join(dict.fromkeys(filter(None, revisions)))
    sealed.write(directory / "run.json", about)
    shutil.rmtree(directory / "parts")


def _read(directory: Path) -> dict[str, Any]:
    path = directory / "run.json"
    if not path.exists():
        raise RunError(f"there is no run in {directory}: it has no run.json.")
    try:
        about = sealed.read(path)
    except ValueError:
        raise RunError(f"{path} is damaged or was edited: delete {directory} and run again.") from None
    if about["format"] != FORMAT:
        raise RunError(f"{path} is of format {about['format']}, this version reads {FORMAT}: use a matching version.")
    if not all(re.fullmatch(r"\w[\w -]*", table) for table in about["tables"] or ()):
        raise RunError(f"{path} names a table outside of {directory}: delete {directory} and run again.")
    return about


def _plain(config: Any) -> Any:
    """A config as JSON gives it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _config(kind: type[Any], plain: dict[str, Any], directory: Path) -> Any:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    try:
        require_types(kind.__init__, values)
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise RunError(
            f"the config in {directory / 'run.json'} does not fit this version ({one_line(error)}): delete "
            f"{directory} and run again."
        ) from None


def compute(parts: list[Part], directory: Path, begin: Callable[[Part], Tick], jobs: int) -> None:
    """Compute the parts that are not in the directory yet, and store each as soon as it is done."""
    missing = []
    for part in sorted(parts, key=lambda part: part.alone):
        if (directory / f"{part.name}.json").exists():
            _tick_through(part, begin(part))
        elif jobs == 1:
            _compute_one(part, directory, begin(part))
        else:
            missing.append(part)
    if missing:
        _compute_at_once(missing, directory, begin, jobs)


def _compute_at_once(parts: list[Part], directory: Path, begin: Callable[[Part], Tick], jobs: int) -> None:
    threads = max(1, torch.get_num_threads() // jobs)
    context = get_context("spawn")  # a fork of a process in which torch has threads may hang
    ended, end = context.Pipe(duplex=False)
    together, one_by_one = ([part for part in parts if part.alone is alone] for alone in (False, True))
    with end, ProcessPoolExecutor(jobs, context, _begin_process, (threads, ended)) as pool:
        try:
            for some, at_once in ((together, jobs), (one_by_one, 1)):
                rest = iter(some)  # submitted one by one, because the pool would begin others after an error
                running = {pool.submit(_compute_one, part, directory): part for part in islice(rest, at_once)}
                while running:
                    for done in wait(running, return_when=FIRST_COMPLETED).done:
                        part = running.pop(done)
                        done.result()
                        _tick_through(part, begin(part))
                        running |= {pool.submit(_compute_one, part, directory): part for part in islice(rest, 1)}
        except BrokenProcessPool:
            raise RunError("a process of this run was killed; the same command resumes the run.") from None
        except KeyboardInterrupt:
            end.close()  # otherwise the pool would wait for the parts that are running
            raise


def _begin_process(threads: int, ended: Connection) -> None:
    """The process ends when the run ends, however it does: otherwise it would write where the next run resumes."""

    def end_with_the_run() -> None:
        with suppress(OSError):  # on Windows
            ended.poll(None)  # returns when the run, or the system after a kill, closes the other end
        os._exit(1)

    threading.Thread(target=end_with_the_run, daemon=True).start()
    torch.set_num_threads(threads)


def _compute_one(part: Part, directory: Path, tick: Tick = lambda: None) -> None:
    code = revision()  # before the part runs: it may take hours, in which the files can change
    start, checkpoints = time.perf_counter(), directory / f"{part.name}.scratch"
    directory.mkdir(parents=True, exist_ok=True)
    if part.resumes:
        checkpoints.mkdir(exist_ok=True)
    tables = part.compute(tick, checkpoints) if part.resumes else part.compute(tick)
    result = {
        "seconds": round(time.perf_counter() - start, 3),
        "revision": code,
        "tables": {name: table.to_csv(index=False) for name, table in tables.items()},
    }
    sealed.write(directory / f"{part.name}.json", result)
    shutil.rmtree(checkpoints, ignore_errors=True)


def _tick_through(part: Part, tick: Tick) -> None:
    for _ in range(part.ticks):
        tick()


@cache  # files may change later, but not the code that this process has loaded
def revision() -> str | None:
    """The git revision of the source, marked if files were changed since. None where there is no checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        # Only if git tracks this file: an installed package may lie inside the checkout of another project.
        if subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True).returncode:
            return None
        found = subprocess.run([*git, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
        return found.stdout.strip() or None
    except OSError:  # git is not installed
        return None
