"""What a trial is, a child process for it, and the verdict on an exception."""

from __future__ import annotations

import ctypes
import dis
import errno
import json
import os
import random
import re
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import twinboot
from twinboot._core.seeds import derive

PACKAGE = str(Path(twinboot.__file__).parent)
CALLER = str(Path(__file__).with_name("pool.py"))  # stands for the code of whoever calls the library
# Of an integration, the framework's own checks come first, and what they say passes through, too.
FRAMEWORKS = ("sklearn", "lightning", "transformers", "accelerate")
MEMORY = 4 * 2**30  # bytes that a child may map beyond what it has at the start
PROCESSES = 64  # that it may start
LIBC, DIE_WITH_PARENT = ctypes.CDLL(None), 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True)
class Trial:
    """One try. What it draws depends on the campaign's seed, its kind and its number alone."""

    kind: str
    number: int
    campaign: int = 0

    @property
    def random(self) -> random.Random:
        return random.Random(derive(self.campaign, self.kind, self.number))

    def record(self, what: str, outcome: str, note: str = "", *, bad: bool = False) -> Record:
        return Record(self.kind, self.number, what, outcome, note, bad)


@dataclass(frozen=True)
class Record:
    """What became of a trial: `what` and `outcome` are its row and column in a table."""

    kind: str
    number: int
    what: str
    outcome: str
    note: str
    bad: bool

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}  {self.what}: {self.outcome}. {self.note}"


class DiedError(Exception):
    """A child process ended without a result."""


class LateError(DiedError):
    """A child process was stopped because its time was over."""


def forked(work: Callable[[], Any], seconds: float, limited: bool = False) -> Any:
    """What `work` gives, as JSON has it, from a child process, whose memory and processes may be limited. A new Python
    needs seconds to import torch, a fork of one that has it needs milliseconds."""
    read, write = os.pipe()

    def answer() -> None:
        os.close(read)
        try:
            if limited:
                _limit()
            said = {"found": work()}
        except BaseException:  # of the campaign: what the library raises is judged inside `work`
            said = {"failed": traceback.format_exc()}
        with os.fdopen(write, "w") as file:
            file.write(json.dumps(said) + "\n")

    child = start(answer)
    os.close(write)
    with os.fdopen(read, "rb", buffering=0) as file:
        said, late = _line(file.fileno(), time.monotonic() + seconds)
    status = stop(child, at_once=late or said.endswith(b"\n"))
    if late:
        raise LateError(f"still at work after {seconds:g} seconds")
    if not said.endswith(b"\n"):
        raise DiedError(f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}")
    found = json.loads(said)
    if "failed" in found:
        raise RuntimeError(f"the campaign itself failed:\n{found['failed']}")
    return found["found"]


def start(work: Callable[[], object]) -> int:
    """Run `work` in a child process without output, in a group of its own, so that all that it starts ends with it."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        with suppress(OSError):  # also done here, so that the group is there whoever comes first
            os.setpgid(child, child)
        return child
    code = 1
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        LIBC.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        warnings.simplefilter("ignore")
        work()
        code = 0
    finally:
        os._exit(code)


def stop(child: int, *, at_once: bool = True) -> int:
    """End a child process and all that it started; its exit code, or minus the signal that it died of."""
    if at_once:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return status


def _line(place: int, until: float) -> tuple[bytes, bool]:
    """What comes until the end of a line or of the file, and whether time was over before. (Processes that a child
    started may keep the file open after its own end.)"""
    said = b""
    while not said.endswith(b"\n"):
        ready, _, _ = select.select([place], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return said, True
        part = os.read(place, 2**16)
        if not part:
            break
        said += part
    return said, False


def _limit() -> None:
    """Of this process, memory and processes: what asks for far too much is told so, and does not take the machine with
    it."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    left, fork = iter(range(PROCESSES)), os.fork

    def limited() -> int:  # the system's own limit does not hold for an administrator
        if next(left, None) is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    os.fork = limited


REFUSED, OWN, RAW = "refused in one sentence", "the caller's or framework's own error", "raw error"


def verdict(error: BaseException) -> tuple[str, str]:
    """What an exception is, and its type and message. The library refuses by a `raise` of its own, in one sentence.
    What a caller's own code raises passes through. All else is raw: a bad value went on until something failed."""
    frames = list(_frames(error.__traceback__))
    told = f"{type(error).__name__}: {_one_line(error)}"
    last = max((i for i, (file, _) in enumerate(frames) if file.startswith(PACKAGE)), default=-1)
    beyond = [file for file, _ in frames[last + 1 :]]
    if CALLER in beyond or _wrong_arity(error) or any(f"/{name}/" in file for file in beyond for name in FRAMEWORKS):
        return OWN, told
    file, raises = frames[-1]
    if raises and file.startswith(PACKAGE) and _is_sentence(error):
        return REFUSED, told
    return RAW, f"{told} ({Path(file).name})"


def _frames(trace: TracebackType | None) -> list[tuple[str, bool]]:
    """For each frame its file, and whether it stopped at a `raise`."""
    found = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append((code.co_filename, code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]))
        trace = trace.tb_next
    return found


def _wrong_arity(error: BaseException) -> bool:
    """A function of the caller's that does not take what it is called with: Python says so before it has a frame."""
    return isinstance(error, TypeError) and "callers" in str(error).lower() and " argument" in str(error)


def _is_sentence(error: BaseException) -> bool:
    said = str(error)
    return said.endswith((".", "?")) and "\n" not in said


def _one_line(error: BaseException) -> str:
    """Its message without addresses, which differ each time. The name of a temporary folder may look like one."""
    said = re.sub(r"\b0x[0-9a-f]+", "0x...", "\\n".join(str(error).splitlines()))
    return said if len(said) <= 300 else said[:300] + " ..."
