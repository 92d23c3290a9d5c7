"""The parts of a run: computed one after another or several at once, and each kept as soon as it is done.

A part appears under its name by one rename, so what is there is whole, whenever the run was stopped.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pandas as pd
import torch

from . import sealed
from .experiment import Part, Tick
from .revision import loaded


class RunError(Exception):
    """Something about a run and its files that the user should know, in one sentence."""


def compute(parts: list[Part], directory: Path, begin: Callable[[Part], Tick], jobs: int) -> None:
    """Compute the parts that are not in the directory yet. `begin` gives the tick of each."""
    waiting = []
    for part in sorted(parts, key=lambda part: part.alone):
        if (directory / part.name).exists():
            _tick_through(part, begin(part))
        elif jobs == 1:
            _compute_one(part, directory, begin(part))
        else:
            waiting.append(part)
    if waiting:
        _compute_at_once(waiting, directory, begin, jobs)


def _compute_at_once(parts: list[Part], directory: Path, begin: Callable[[Part], Tick], jobs: int) -> None:
    threads = max(1, torch.get_num_threads() // jobs)
    context = get_context("spawn")  # processes that begin anew: a fork of one in which torch has threads may hang
    ended, end = context.Pipe(duplex=False)
    together, one_by_one = ([part for part in parts if part.alone is alone] for alone in (False, True))
    with end, ProcessPoolExecutor(jobs, context, _begin_process, (threads, ended)) as pool:
        try:
            for some, at_once in ((together, jobs), (one_by_one, 1)):
                rest = iter(some)  # a part is handed in when a process is free: what is handed in can't be taken back
                running = {pool.submit(_compute_one, part, directory): part for part in islice(rest, at_once)}
                while running:
                    for done in wait(running, return_when=FIRST_COMPLETED).done:
                        part = running.pop(done)
                        done.result()
                        _tick_through(part, begin(part))
                        running |= {pool.submit(_compute_one, part, directory): part for part in islice(rest, 1)}
        except BrokenProcessPool:
            raise RunError("a process of this run was ended from outside; the same command goes on.") from None
        except KeyboardInterrupt:
            end.close()  # else the pool would wait for the parts that are under way
            raise


def _begin_process(threads: int, ended: Connection) -> None:
    threading.Thread(target=_end_with_the_run, args=(ended,), daemon=True).start()
    torch.set_num_threads(threads)
    loaded()  # asked at a part's end, it would be the revision of then


def _end_with_the_run(ended: Connection) -> None:
    """However the run ends: a process that went on would write where the next one resumes."""
    with suppress(OSError):  # as Windows has it
        ended.poll(None)  # until the other end is closed, by the run or, when it is killed, by the system
    os._exit(1)


def _compute_one(part: Part, directory: Path, tick: Tick = lambda: None) -> None:
    start, scratch = time.perf_counter(), directory / f"{part.name}.scratch"
    if part.resumes:
        scratch.mkdir(exist_ok=True)
    tables = part.compute(tick, scratch) if part.resumes else part.compute(tick)
    _keep(directory / part.name, tables, time.perf_counter() - start)
    shutil.rmtree(scratch, ignore_errors=True)


def _tick_through(part: Part, tick: Tick) -> None:
    for _ in range(part.ticks):
        tick()


def _keep(place: Path, tables: dict[str, pd.DataFrame], seconds: float) -> None:
    unfinished = place.with_name(f".{place.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    checksums = {}
    for name, table in tables.items():
        content = table.to_csv(index=False).encode()
        (unfinished / f"{name}.csv").write_bytes(content)
        checksums[name] = sealed.checksum(content)
    sealed.write(unfinished / "part.json", {"seconds": round(seconds, 3), "revision": loaded(), "tables": checksums})
    unfinished.rename(place)
