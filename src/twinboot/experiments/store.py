"""A run on disk: its config, its tables, and the parts of it that are done while it is not.

    DIR/run.json        the experiment, its config, versions, timing, and the checksum of each table once all is done
    DIR/TABLE.csv       the results, one row per observation
    DIR/parts/PART/     the tables of each part that is done, with their checksums, until all are

A part appears under its name by one rename, so what is there is whole, whenever the run was stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import time
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

if sys.platform != "win32":
    import fcntl

FORMAT = 1
KEYS = (
    *("format", "experiment", "config", "twinboot", "revision", "torch", "numpy", "python", "platform"),
    *("started", "seconds", "tables"),
)


class RunError(Exception):
    """Something about a run's files that the user should know, in one sentence."""


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
) -> Run:
    """Run the parts that are not done yet, and keep each as it is done. `begin` gives the tick of each part."""
    parts = experiment.parts(config)  # which may refuse the config, before anything is written
    with _alone(directory):
        if not _open(name, config, directory):
            _compute(parts, directory, begin)
            return replace(load(directory, {name: experiment}), fresh=True)
    return load(directory, {name: experiment})


def _compute(parts: list[Part], directory: Path, begin: Callable[[Part], Tick]) -> None:
    for part in parts:
        tick, place = begin(part), directory / "parts" / part.name
        if place.exists():
            for _ in range(part.ticks):
                tick()
            continue
        start = time.perf_counter()
        tables = part.compute(tick)
        _keep_part(place, tables, time.perf_counter() - start)
    _finish(parts, directory)


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
    tables = {table: _table(directory, table, checksum) for table, checksum in about["tables"].items()}
    return Run(name, config, tables, about)


def _table(directory: Path, table: str, checksum: str, **options: Any) -> pd.DataFrame:
    path = directory / f"{table}.csv"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"can't read {path}: {error.strerror}.") from None
    if _checksum(content) != checksum:
        raise RunError(f"{path} is damaged or was edited: delete {directory} and run again.")
    return pd.read_csv(io.BytesIO(content), **options)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the directory against a second process that would run the same at the same time."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise RunError(f"can't write to {directory}: {error.strerror}; choose another directory with --out.") from None
    try:
        try:
            if sys.platform != "win32":
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
        wanted = _plain(config)
        if about["experiment"] != name:
            raise RunError(f"{directory} holds a run of {about['experiment']!r}: choose another directory with --out.")
        if different := [key for key in wanted if about["config"].get(key, ...) != wanted[key]]:
            key = different[0]
            raise RunError(
                f"{directory} holds a run with {key} {about['config'].get(key)}, not {wanted[key]}: choose another "
                "directory with --out, or delete that one."
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
        "revision": _revision(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": None,
        "tables": None,
    }


def _keep_part(place: Path, tables: dict[str, pd.DataFrame], seconds: float) -> None:
    unfinished = place.with_name(f".{place.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    checksums = {}
    for name, table in tables.items():
        content = table.to_csv(index=False).encode()
        (unfinished / f"{name}.csv").write_bytes(content)
        checksums[name] = _checksum(content)
    (unfinished / "part.json").write_text(json.dumps({"seconds": round(seconds, 3), "tables": checksums}))
    unfinished.rename(place)


def _finish(parts: list[Part], directory: Path) -> None:
    """One file for each table, from the parts in their order; then their checksums, which make the run complete."""
    frames: dict[str, list[pd.DataFrame]] = {}
    seconds = 0.0
    for part in parts:
        place = directory / "parts" / part.name
        try:
            about = json.loads((place / "part.json").read_text())
            seconds += float(about["seconds"])
            checksums = dict(about["tables"])
        except (ValueError, KeyError, TypeError, FileNotFoundError):
            raise RunError(f"{place} is damaged: delete it, and the same command does that part again.") from None
        for table, checksum in checksums.items():
            frames.setdefault(table, []).append(_table(place, table, checksum, dtype=str, keep_default_na=False))
    checksums = {}
    for table, found in frames.items():
        content = pd.concat(found, ignore_index=True).to_csv(index=False).encode()
        (directory / f"{table}.csv").write_bytes(content)
        checksums[table] = _checksum(content)
    _write(directory / "run.json", _read(directory) | {"seconds": round(seconds, 2), "tables": checksums})
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


def _revision() -> str | None:
    """The git revision of the source, with a mark if it was changed since; None where there is no checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        # Only if this file is tracked there: an installed package may lie inside some other project's checkout.
        if subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True).returncode:
            return None
        found = subprocess.run([*git, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
        return found.stdout.strip() or None
    except OSError:
        return None
