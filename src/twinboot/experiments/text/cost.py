"""What a training costs: time of one core, and memory."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Cost:
    """Of one training, or of several, one after the other."""

    seconds: float = 0.0  # of one core
    memory: float = 0.0  # MiB at most, beyond what the process held before; nan where the system does not tell

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, max(self.memory, other.memory, key=lambda x: (math.isnan(x), x)))


@contextmanager
def measured() -> Iterator[Cost]:
    """The cost of what is done inside the block, known at its end.

    >>> with measured() as cost:
    ...     pages = bytearray(2**26)
    >>> cost.memory > 60 or cost.memory != cost.memory
    True
    """
    cost, before = Cost(), _restart()
    began = time.process_time()
    yield cost
    cost.seconds = time.process_time() - began
    cost.memory = _resident("VmHWM") - before if before is not None else math.nan


def _restart() -> float | None:
    """Let the peak begin from what is in use now, and return that."""
    if not sys.platform.startswith("linux"):
        return None
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc: what is freed goes back to the system
    if trim is not None:
        trim(0)
    try:
        RESET.write_text("5")
    except OSError:
        return None
    return _resident("VmRSS")


def _resident(field: str) -> float:
    """MiB of this process: VmRSS is what it holds now, VmHWM the most since the last restart."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024
