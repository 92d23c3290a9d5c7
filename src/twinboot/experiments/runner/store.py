"""A run on disk: its config, its tables, and while it is unfinished the parts that are done.

    DIR/run.json        the experiment, its config, versions and timing; once finished, checksums of the tables
    DIR/TABLE.csv       the results, one row per observation
    DIR/parts/PART/     the tables of a part, until the run is finished

`parts.py` computes and stores the parts.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ... import __version__
from ..._core.checks import one_line, require_types
from . import sealed
from .experiment import Experiment, Part, Tick, command, label
from .parts import RunError as RunError
from .parts import compute, revision

if sys.platform != "win32":
    import fcntl

FORMAT = 1


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
    tables = {table: _table(directory, table, expected) for table, expected in about["tables"].items()}
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


def _table(directory: Path, table: str, expected: str, **options: Any) -> pd.DataFrame:
    path = directory / f"{table}.csv"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"can't read {path}: {error.strerror}.") from None
    if sealed.checksum(content) != expected:
        raise RunError(f"{path} is damaged or was edited: delete {directory} and run again.")
    return pd.read_csv(io.BytesIO(content), **options)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let one process at a time work on a run. The system frees the lock when the process ends, also after a kill."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY) if sys.platform != "win32" else None
    except OSError as error:
        raise RunError(f"can't write to {directory}: {error.strerror}; choose another directory with --out.") from None
    if lock is None:  # Windows has no such lock
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process is working on the run in {directory}.") from None
        yield
    finally:
        os.close(lock)


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
    try:
        (directory / "parts").mkdir(exist_ok=True)
        sealed.write(directory / "run.json", about)
    except OSError as error:
        raise RunError(f"can't write to {directory}: {error.strerror}; choose another directory with --out.") from None
    except ValueError as error:
        raise RunError(f"this config can't be written to {directory}: {error}") from None
    return False


def _finish(parts: list[Part], directory: Path) -> None:
    """Join the parts to one file per table; then write the checksums, which make the run a finished one."""
    frames: dict[str, list[pd.DataFrame]] = {}
    seconds, revisions = 0.0, list[str | None]()
    for part in parts:
        place = directory / "parts" / part.name
        try:
            about = sealed.read(place / "part.json")
        except (ValueError, OSError):
            raise RunError(f"{place} is damaged: delete it, and the same command computes that part again.") from None
        seconds += about["seconds"]
        revisions.append(about["revision"])
        for table, expected in about["tables"].items():
            frames.setdefault(table, []).append(_table(place, table, expected, dtype=str, keep_default_na=False))
    checksums = {}
    for table, found in frames.items():
        content = pd.concat(found, ignore_index=True).to_csv(index=False).encode()
        (directory / f"{table}.csv").write_bytes(content)
        checksums[table] = sealed.checksum(content)
    about = _read(directory) | {"seconds": round(seconds, 2), "tables": checksums}
    if any(revisions):  # a run that was stopped may have been resumed by another revision
        about["revision"] = ", ".join(dict.fromkeys(filter(None, revisions)))
    sealed.write(directory / "run.json", about)
    shutil.rmtree(directory / "parts")


def _read(directory: Path) -> dict[str, Any]:
    path = directory / "run.json"
    try:
        about = sealed.read(path)
    except FileNotFoundError:
        raise RunError(f"there is no run in {directory}: it has no run.json.") from None
    except OSError as error:
        raise RunError(f"can't read {path}: {error.strerror}.") from None
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
