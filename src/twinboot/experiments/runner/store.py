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
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pandas as pd
import torch

from ... import __version__
from . import sealed
from .experiment import Experiment, Part, Tick, command
from .parts import RunError as RunError
from .parts import compute
from .revision import loaded
from .sealed import checksum

if sys.platform != "win32":
    import fcntl

FORMAT = 1
KEYS: dict[str, tuple[type, ...]] = {
    "format": (int,),
    "experiment": (str,),
    "config": (dict,),
    **dict.fromkeys(("twinboot", "torch", "numpy", "python", "platform", "started"), (str,)),
    "revision": (str, NoneType),
    "seconds": (int, float, NoneType),  # none until the run is complete, nor tables
    "tables": (dict, NoneType),
}
PART_KEYS: dict[str, tuple[type, ...]] = {"seconds": (int, float), "revision": (str, NoneType), "tables": (dict,)}
CENTURY = 3.2e9  # seconds
TABLE = re.compile(r"\w[\w -]*")  # a name that stays in its directory


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
    config = _config(experiments[name].Config, about["config"], directory)
    if about["tables"] is None:
        again = command(name, experiments[name], config)
        raise UnfinishedError(f"the run in {directory} is not complete: `{again}` with the same --out goes on with it.")
    tables = {table: _table(directory, table, expected) for table, expected in about["tables"].items()}
    return Run(name, config, tables, about)


@contextmanager
def shown(run: Run, directory: Path) -> Iterator[None]:
    """For what is drawn or said of a run: one that was not computed just now may be of another version, or have a
    config that its tables do not fit."""
    try:
        yield
    except (LookupError, ArithmeticError, AttributeError, TypeError, ValueError) as error:
        if run.fresh:
            raise
        made = f"the run in {directory}, made by twinboot {run.about['twinboot']},"
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise RunError(f"{made} can't be shown by this version ({what}): delete it and run again.") from None


def _table(directory: Path, table: str, expected: str, **options: Any) -> pd.DataFrame:
    path = directory / f"{table}.csv"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"can't read {path}: {error.strerror}.") from None
    try:
        if checksum(content) == expected:
            return pd.read_csv(io.BytesIO(content), **options)
    except (ValueError, OverflowError):
        pass  # no table, although its checksum is right
    raise RunError(f"{path} is damaged or was edited: delete {directory} and run again.")


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
        # A setting that is newer than the run had its default.
        wanted, there = _plain(config), _plain(_config(type(config), about["config"], directory))
        if different := [key for key in wanted if there[key] != wanted[key]]:
            key = different[0]
            raise RunError(
                f"{directory} holds a run with {key} {there[key]}, not {wanted[key]}: choose another directory with "
                "--out, or delete that one."
            )
        return about["tables"] is not None
    try:
        (directory / "parts").mkdir(parents=True, exist_ok=True)
        sealed.write(directory / "run.json", _about(name, config))
    except OSError as error:
        raise RunError(f"can't write to {directory}: {error.strerror}; choose another directory with --out.") from None
    except ValueError as error:
        raise RunError(f"this config can't be written to {directory}: {error}") from None
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
            about = _checked(sealed.read(place / "part.json"), PART_KEYS)
        except (ValueError, KeyError, TypeError, OSError):
            raise RunError(f"{place} is damaged: delete it, and the same command does that part again.") from None
        seconds += about["seconds"]
        revisions.append(about["revision"])
        for table, expected in about["tables"].items():
            frames.setdefault(table, []).append(_table(place, table, expected, dtype=str, keep_default_na=False))
    checksums = {}
    for table, found in frames.items():
        content = pd.concat(found, ignore_index=True).to_csv(index=False).encode()
        (directory / f"{table}.csv").write_bytes(content)
        checksums[table] = checksum(content)
    about = _read(directory) | {"seconds": round(seconds, 2), "tables": checksums}
    if any(revisions):  # of a run that was stopped, those of all who went on with it
        about["revision"] = ", ".join(dict.fromkeys(filter(None, revisions)))
    sealed.write(directory / "run.json", about)
    shutil.rmtree(directory / "parts")


def _read(directory: Path) -> dict[str, Any]:
    path = directory / "run.json"
    try:
        about = sealed.read(path)
        if type(about["format"]) is int and about["format"] != FORMAT:
            raise RunError(
                f"{path} is of format {about['format']}, this version reads {FORMAT}: use a matching version."
            )
        found = _checked(about, KEYS)
        if found["tables"] is not None and not (found["tables"] and found["seconds"] is not None):
            raise TypeError
        return found
    except FileNotFoundError:
        raise RunError(f"there is no run in {directory}: it has no run.json.") from None
    except OSError as error:
        raise RunError(f"can't read {path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{path} is damaged: delete {directory} and run again.") from None


def _checked(about: dict[str, Any], keys: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    """What has these keys alone, each with a value of its type, a time that a run can take, and tables whose names are
    no paths."""
    if about.keys() - keys.keys() or not all(isinstance(about[key], kinds) for key, kinds in keys.items()):
        raise TypeError
    if not 0 <= (about["seconds"] or 0) < CENTURY or not all(map(TABLE.fullmatch, about["tables"] or ())):
        raise ValueError
    return about


def _plain(config: Any) -> Any:
    """As it will come back from JSON."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _config(kind: type[Any], plain: dict[str, Any], directory: Path) -> Any:
    values, hints = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}, get_type_hints(kind)
    try:
        if all(_fits(value, hints[name]) for name, value in values.items()):
            return kind(**values)
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    raise RunError(
        f"the config in {directory / 'run.json'} is damaged or of another version: delete {directory} and run again."
    )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type that a setting has."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is Literal:
        return value in inner
    if kind is tuple:
        each = inner[:1] * len(value) if isinstance(value, tuple) and inner[1:] == (...,) else inner
        return isinstance(value, tuple) and len(value) == len(each) and all(map(_fits, value, each))
    return type(value) is hint or (hint is float and type(value) is int)
