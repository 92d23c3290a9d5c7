"""A run on disk: its config, its tables, and the parts of it that are done while it is not.

    DIR/run.json        the experiment, its config, versions, timing, and the checksum of each table once all is done
    DIR/TABLE.csv       the results, one row per observation
    DIR/parts/PART/     the tables of each part that is done, with their checksums, until all are

See `parts.py` for how the parts are computed and kept.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from .. import __version__
from ..atomic import replacing
from .experiment import Experiment, Part, Tick, command
from .parts import RunError as RunError
from .parts import checksum, compute
from .revision import loaded

if sys.platform != "win32":
    import fcntl

FORMAT = 1
KEYS = (
    *("format", "experiment", "config", "twinboot", "revision", "torch", "numpy", "python", "platform"),
    *("started", "seconds", "tables"),
)


class UnfinishedError(RunError):
    """The run was stopped before its end."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is complete."""

    name: str
    config: Any
    tables: dict[str, pd.DataFrame]
    about: dict[str, Any]  # versions, timing and so on, as in run.json
    fresh: bool = False  # computed just now, at least in part, and not only read


def carry_out(
    name: str,
    experiment: Experiment,
    config: Any,
    directory: Path,
    begin: Callable[[Part], Tick] = lambda part: lambda: None,
    jobs: int = 1,
) -> Run:
    """Run the parts that are not done yet, and keep each as it is done. `begin` gives the tick of each part.

    With several jobs, so many parts run at once, each in a process of its own with its share of the threads.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, not {jobs}.")
    parts = experiment.parts(config)  # which may refuse the config, before anything is written
    loaded()
    with _alone(directory):
        if not _open(name, config, directory):
            compute(parts, directory / "parts", begin, jobs)
            _finish(parts, directory)
            return replace(load(directory, {name: experiment}), fresh=True)
    return load(directory, {name: experiment})


def load(directory: Path, experiments: dict[str, Experiment]) -> Run:
    """The complete run in a directory, its files checked against the checksums of the time they were written."""
    about = _read(directory)
    name = about["experiment"]
    if name not in experiments:
        raise RunError(f"{directory} holds a run of {name!r}, an experiment that this version does not have.")
    if about["tables"] is None:
        again = command(name, experiments[name], _config(experiments[name], about["config"], directory))
        raise UnfinishedError(f"the run in {directory} is not complete: `{again}` with the same --out goes on with it.")
    config = _config(experiments[name], about["config"], directory)
    tables = {table: _table(directory, table, expected) for table, expected in about["tables"].items()}
    return Run(name, config, tables, about)


def _table(directory: Path, table: str, expected: str, **options: Any) -> pd.DataFrame:
    path = directory / f"{table}.csv"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"can't read {path}: {error.strerror}.") from None
    if checksum(content) != expected:
        raise RunError(f"{path} is damaged or was edited: delete {directory} and run again.")
    return pd.read_csv(io.BytesIO(content), **options)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the directory against a second process that would run the same at the same time."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY) if sys.platform != "win32" else -1  # which cannot open a directory
    except OSError as error:
        raise RunError(f"can't write to {directory}: {error.strerror}; choose another directory with --out.") from None
    if sys.platform == "win32":
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process is at work on the run in {directory}.") from None
        yield
    finally:
        os.close(lock)


def _open(name: str, config: Any, directory: Path) -> bool:
    """Begin a run, or go on with one of the same config. True if it is complete."""
    if (directory / "run.json").exists():
        about = _read(directory)
        if about["experiment"] != name:
            raise RunError(f"{directory} holds a run of {about['experiment']!r}: choose another directory with --out.")
        wanted, there = _plain(config), _plain(type(config)()) | about["config"]  # what is newer had its default
        if different := [key for key in wanted if there[key] != wanted[key]]:
            key = different[0]
            raise RunError(
                f"{directory} holds a run with {key} {there[key]}, not {wanted[key]}: choose another directory with "
                "--out, or delete that one."
            )
        return about["tables"] is not None
    try:
        (directory / "parts").mkdir(parents=True, exist_ok=True)
        _write(directory / "run.json", _about(name, config))
    except OSError as error:
        raise RunError(f"can't write to {directory}: {error.strerror}; choose another directory with --out.") from None
    return False


def _about(name: str, config: Any) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "experiment": name,
        "config": _plain(config),
        "twinboot": __version__,
        "revision": loaded(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": None,
        "tables": None,
    }


def _finish(parts: list[Part], directory: Path) -> None:
    """One file for each table, from the parts in their order; then their checksums, which make the run complete."""
    frames: dict[str, list[pd.DataFrame]] = {}
    seconds, revisions = 0.0, list[str | None]()
    for part in parts:
        place = directory / "parts" / part.name
        try:
            about = json.loads((place / "part.json").read_text())
            seconds += float(about["seconds"])
            revisions.append(about.get("revision"))
            checksums = dict(about["tables"])
        except (ValueError, KeyError, TypeError, FileNotFoundError):
            raise RunError(f"{place} is damaged: delete it, and the same command does that part again.") from None
        for table, expected in checksums.items():
            frames.setdefault(table, []).append(_table(place, table, expected, dtype=str, keep_default_na=False))
    checksums = {}
    for table, found in frames.items():
        content = pd.concat(found, ignore_index=True).to_csv(index=False).encode()
        (directory / f"{table}.csv").write_bytes(content)
        checksums[table] = checksum(content)
    about = _read(directory) | {"seconds": round(seconds, 2), "tables": checksums}
    if any(revisions):  # of a run that was stopped, those of all who went on with it
        about["revision"] = ", ".join(dict.fromkeys(filter(None, revisions)))
    _write(directory / "run.json", about)
    shutil.rmtree(directory / "parts")


def _read(directory: Path) -> dict[str, Any]:
    path = directory / "run.json"
    try:
        about = json.loads(path.read_text())
        if about["format"] != FORMAT:
            raise RunError(
                f"{path} is of format {about['format']}, this version reads {FORMAT}: use a matching version."
            )
        found = {key: about[key] for key in KEYS}
        complete = isinstance(found["tables"], dict) and found["tables"] and isinstance(found["seconds"], (int, float))
        if not (isinstance(found["experiment"], str) and isinstance(found["config"], dict)):
            raise TypeError
        if not complete and found["tables"] is not None:
            raise TypeError
        return found
    except FileNotFoundError:
        raise RunError(f"there is no run in {directory}: it has no run.json.") from None
    except OSError as error:
        raise RunError(f"can't read {path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{path} is damaged: delete {directory} and run again.") from None


def _write(path: Path, about: dict[str, Any]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(about, indent=2) + "\n")


def _plain(config: Any) -> Any:
    """As it will come back from JSON."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _config(experiment: Experiment, plain: dict[str, Any], directory: Path) -> Any:
    try:
        return experiment.Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()})
    except (TypeError, ValueError):
        raise RunError(f"the config in {directory / 'run.json'} is damaged or of another version: run again.") from None
