"""The command: all trials side by side, the record of them, the tables and the page.

Each trial draws from a seed of its own, so that one can be repeated alone: `--only corrupt:1234`. Records are appended
to a file as they come, and a campaign that was stopped goes on from there, as long as the code is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import sys
import tempfile
import textwrap
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from . import corrupt, disk, inputs, kills
from .trials import PACKAGE, Record, Trial, start, stop

# Each has KIND, TITLE, ABOUT, ROWS_ARE, OUTCOMES, `prepare(numbers)` and `run(trial)`; some `run_all`, `order`, `row`.
PARTS: dict[str, Any] = {part.KIND: part for part in (kills, corrupt, disk, inputs)}
NUMBERS = {"kill": 1000, "corrupt": 10_000, "disk": 200, "input": 1000}
TOGETHER = 50  # trials that share a process, where they can
COMMAND = "python benchmarks/chaos"


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(1)  # a process in which torch has threads cannot be forked safely
    try:
        with tempfile.TemporaryDirectory(prefix="chaos-") as tempfile.tempdir:  # of killed processes, too
            return _run(options)
    finally:
        tempfile.tempdir = None


def _run(options: argparse.Namespace) -> int:
    if options.only:
        found = [record for kind, number in options.only for record in attempt([Trial(kind, number, options.seed)])]
        print(*found, sep="\n")
        return int(any(record.bad for record in found))
    began = time.monotonic()
    numbers = {kind: getattr(options, kind) for kind in PARTS}
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"seed-{options.seed}-{fingerprint()}.jsonl"
    for kind, number in numbers.items():
        carry_out(kind, number, options.seed, file, options.jobs)
    found = [record for record in read(file) if record.number < numbers[record.kind]]
    minutes = (time.monotonic() - began) / 60
    print(f"{tables(found)}\n\nIn {minutes:.1f} minutes; all trials are in {file}.")
    unexpected = [record for record in found if record.bad]
    if options.verbose:
        print("\nAccepted:", *(str(r) for r in found if r.kind == "input" and r.outcome == inputs.ACCEPTED), sep="\n")
    if unexpected:
        print(f"\nUnexpected, {len(unexpected)}; to repeat one: {COMMAND} --seed {options.seed} --only KIND:NUMBER")
        print(*unexpected, sep="\n")
    if options.page:
        options.page.write_text(page(found, options.seed), encoding="utf-8")
    return int(bool(unexpected))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    told = {"kill": "kills", "corrupt": "corruptions", "disk": "full-disks", "input": "inputs"}
    for kind, name in told.items():
        parser.add_argument(f"--{name}", dest=kind, type=int, default=NUMBERS[kind], metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of the whole campaign")
    parser.add_argument("--jobs", type=int, default=2, help="so many trials at once")
    parser.add_argument("--only", type=_trial, nargs="+", metavar="KIND:NUMBER", help="repeat these trials")
    parser.add_argument("--out", type=Path, default=Path("out/chaos"), help="where the records are kept")
    parser.add_argument("--page", type=Path, help="a page in Markdown to write, such as docs/chaos.md")
    parser.add_argument("--verbose", action="store_true", help="list the bad inputs that were accepted, too")
    return parser.parse_args(arguments)


def _trial(word: str) -> tuple[str, int]:
    kind, _, number = word.partition(":")
    if kind not in PARTS or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is no trial: give one such as {next(iter(PARTS))}:12")
    return kind, int(number)


def fingerprint() -> str:
    """Of the library and of this campaign: records of other code say nothing of this one."""
    files = sorted([*Path(PACKAGE).rglob("*.py"), *Path(__file__).parent.glob("*.py")])
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


# Trials side by side


def carry_out(kind: str, number: int, seed: int, file: Path, jobs: int) -> None:
    """Run the trials that are not in the file yet, in so many processes, and add what became of them."""
    done = {record.number for record in read(file) if record.kind == kind}
    left = [n for n in range(number) if n not in done]
    if not left:
        return
    began = time.monotonic()
    PARTS[kind].prepare(left)
    left = getattr(PARTS[kind], "order", list)(left)
    workers = [start(lambda some=left[job::jobs]: _work(kind, some, seed, file)) for job in range(jobs)]
    try:
        waiting = set(workers)
        while waiting:
            waiting -= {w for w in waiting if os.waitid(os.P_PID, w, os.WEXITED | os.WNOHANG | os.WNOWAIT)}
            if sys.stderr.isatty():
                print(f"\r{kind}: {_count(kind, file)} of {number}", end="", file=sys.stderr, flush=True)
            time.sleep(0.2)
    finally:
        codes = [stop(worker) for worker in workers]
    if any(codes):
        raise RuntimeError(f"the processes of the campaign ended with {codes}: the same command goes on.")
    print(f"\r{kind}: {len(left)} trials in {time.monotonic() - began:.0f} seconds", file=sys.stderr, flush=True)


def attempt(trials: list[Trial]) -> list[Record]:
    part = PARTS[trials[0].kind]
    try:
        return part.run_all(trials) if hasattr(part, "run_all") else [part.run(trial) for trial in trials]
    except Exception:  # a trial that goes wrong by itself is no reason to leave out the others
        if len(trials) > 1:
            return [record for trial in trials for record in attempt([trial])]
        return [trials[0].record("the campaign itself", "failed", traceback.format_exc(), bad=True)]


def _work(kind: str, numbers: list[int], seed: int, file: Path) -> None:
    records = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    size = TOGETHER if hasattr(PARTS[kind], "run_all") else 1
    for first in range(0, len(numbers), size):
        found = attempt([Trial(kind, number, seed) for number in numbers[first : first + size]])
        lines = "".join(f"\n{json.dumps(dataclasses.asdict(record))}" for record in found)
        os.write(records, lines.encode())  # at once, whoever else writes


def read(file: Path) -> list[Record]:
    """The records so far, in the order of trials; one that a stop cut off is left out."""
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(ValueError):
            record = Record(**json.loads(line))
            found[record.kind, record.number] = record
    return sorted(found.values(), key=lambda record: (list(PARTS).index(record.kind), record.number))


def _count(kind: str, file: Path) -> int:
    return file.read_bytes().count(f'"kind": "{kind}"'.encode()) if file.exists() else 0


# What became of them


def tables(found: list[Record]) -> str:
    """For each kind of trial a table of counts: what was tried, and what became of it."""
    return "\n\n".join(
        _table(part, own) for kind, part in PARTS.items() if (own := [r for r in found if r.kind == kind])
    )


def _table(part: Any, found: list[Record]) -> str:
    row_of = getattr(part, "row", lambda record: record.what)
    counts = Counter((row_of(record), record.outcome) for record in found)
    rows = sorted({row for row, _ in counts}, key=str.lower)
    outcomes = list(dict.fromkeys([*part.OUTCOMES, *(outcome for _, outcome in counts)]))
    sums = [sum(counts[row, outcome] for row in rows) for outcome in outcomes]
    lines = [
        f"## {part.TITLE}: {sum(not record.bad for record in found):,} of {len(found):,} as expected",
        "",
        _filled(part.ABOUT),
        "",
        f"| {part.ROWS_ARE} | {' | '.join(outcomes)} |",
        "|---|" + "---:|" * len(outcomes),
        *(f"| {row} | {' | '.join(f'{counts[row, outcome]:,}' for outcome in outcomes)} |" for row in rows),
        f"| **all** | {' | '.join(f'**{total:,}**' for total in sums)} |",
    ]
    return "\n".join(lines)


def page(found: list[Record], seed: int) -> str:
    about = [_filled(paragraph) for paragraph in ABOUT.strip().split("\n\n")]
    setup = (
        f"Seed {seed}. PyTorch {torch.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}."
    )
    unexpected = [record for record in found if record.bad]
    listed = ["Unexpected:", "\n".join(f"- `{record}`" for record in unexpected)] if unexpected else []
    return "\n\n".join(["# What the library withstands", *about, setup, tables(found), *listed]) + "\n"


def _filled(paragraph: str) -> str:
    return textwrap.fill(" ".join(paragraph.split()), 120, break_on_hyphens=False, break_long_words=False)


ABOUT = """
Written by `make chaos` (`python benchmarks/chaos --page docs/chaos.md`): random damage, and what became of it. Each
trial draws from a seed of its own, derived from that of the campaign, its kind and its number, and can be repeated
alone by `--only KIND:NUMBER`.

A *refusal* is an exception that the library raises itself, with a message of one sentence. A *raw error* comes from
inside PyTorch, NumPy or Python, and an exception of the caller's own model, function or dataset passes through.
"""
