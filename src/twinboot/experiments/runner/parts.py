"""The parts of a run: computed one after another or several at once, and each stored as soon as it is done.

A part gets its name by one rename, so a stored part is complete, whenever the run was stopped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from . import sealed
from .experiment import Part, Tick


class RunError(Exception):
    """A problem with a run and its files, in one sentence for the user."""


def compute(parts: list[Part], directory: Path, begin: Callable[[Part], Tick], jobs: int) -> None:
    """Compute the parts that are not in the directory yet. `begin(part)` returns the function to call at each tick."""
    missing = []
    for part in sorted(parts, key=lambda part: part.alone):
        if (directory / part.name).exists():
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
    threading.Thread(target=_end_with_the_run, args=(ended,), daemon=True).start()
    torch.set_num_threads(threads)


def _end_with_the_run(ended: Connection) -> None:
    """End this process when the run ends, however it does: otherwise it would write where the next run resumes."""
    with suppress(OSError):  # on Windows
        ended.poll(None)  # returns when the run, or the system after a kill, closes the other end
    os._exit(1)


def _compute_one(part: Part, directory: Path, tick: Tick = lambda: None) -> None:
    code = revision()  # before the part runs: it may take hours, in which the files can change
    start, checkpoints = time.perf_counter(), directory / f"{part.name}.scratch"
    if part.resumes:
        checkpoints.mkdir(exist_ok=True)
    tables = part.compute(tick, checkpoints) if part.resumes else part.compute(tick)
    seconds = round(time.perf_counter() - start, 3)
    unfinished = directory / f".{part.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    checksums = {}
    for name, table in tables.items():
        content = table.to_csv(index=False).encode()
        (unfinished / f"{name}.csv").write_bytes(content)
        checksums[name] = sealed.checksum(content)
    sealed.write(unfinished / "part.json", {"seconds": seconds, "revision": code, "tables": checksums})
    unfinished.rename(directory / part.name)
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
