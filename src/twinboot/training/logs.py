"""The progress of a run: a line per epoch, a CSV file, TensorBoard."""

from __future__ import annotations

import csv
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from .._core.atomic import replacing

History = Mapping[str, Sequence[float]]
DATA_SHARE = "data_share/"  # and the name of a group: a column. The slash makes TensorBoard show these together.


class Log(Protocol):
    def add(self, row: Mapping[str, float]) -> None: ...


def show(history: History, epochs: int) -> None:
    """Print one line about the last epoch to standard error."""
    row = {name: values[-1] for name, values in history.items()}
    left = sum(history["seconds"]) / len(history["seconds"]) * (epochs - row["epoch"])
    unseen = f", unseen {row['unseen']:.4g}" if "unseen" in row else ""
    accuracy = f", accuracy {row['accuracy']:.1%}" if "accuracy" in row else ""
    shares = [v for name, v in row.items() if name.startswith(DATA_SHARE) and math.isfinite(v)]
    data = f" ({min(shares):.0%} to {max(shares):.0%} of its square by data)" if shares else ""
    best = " *" if unseen and row["unseen"] <= min(history["unseen"]) else ""
    print(
        f"epoch {row['epoch']:.0f} of {epochs}: loss {row['train']:.4g}{unseen}{accuracy}, sigma "
        f"{row['sigma_least']:.2g} to {row['sigma_most']:.2g}{data}, {_time(left)} left{best}",
        file=sys.stderr,
        flush=True,
    )


def show_round(number: int, rounds: int, epoch: int, epochs: int, loss: float, left: float) -> None:
    """Print one line about an epoch of `error_bars` to standard error."""
    print(
        f"round {number} of {rounds}, epoch {epoch} of {epochs}: loss {loss:.4g}, {_time(left)} left",
        file=sys.stderr,
        flush=True,
    )


def show_restart(after: float, before: float, factor: float) -> None:
    """Say on standard error that the first round of `error_bars` begins anew."""
    print(
        f"the twins have a loss of {after:.4g}, the model {before:.4g}: the first round begins anew, with {factor:.2g} "
        "times the learning rate",
        file=sys.stderr,
        flush=True,
    )


def show_finished(checkpoint: object, after: str) -> None:
    """Say on standard error that the run was already finished, and after how much."""
    print(
        f"{checkpoint} has this run, finished after {after}: nothing was trained. To train again, "
        "delete it or use another directory.",
        file=sys.stderr,
        flush=True,
    )


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def open_log(where: str | os.PathLike[str] | None, history: History) -> Iterator[Log]:
    """A log that starts with the earlier epochs of a resumed run."""
    if where is None:
        yield _Nowhere()
    elif str(where).split(":")[0] == "tensorboard":
        directory = str(where).partition(":")[2] or None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError("log='tensorboard' needs TensorBoard: pip install tensorboard.") from None
        with SummaryWriter(directory, purge_step=0) as writer:  # the earlier epochs are written again
            log = _TensorBoard(writer)
            for values in zip(*history.values(), strict=True):
                log.add(dict(zip(history, values, strict=True)))
            yield log
    else:
        path = Path(where)
        if path.suffix != ".csv":
            raise ValueError(f"log must be a file.csv, 'tensorboard' or 'tensorboard:DIRECTORY', not {str(where)!r}.")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {str(path.parent)!r} to write the log to.")
        file = _Csv(path, history)
        file.write()
        yield file


class _Nowhere:
    def add(self, row: Mapping[str, float]) -> None:
        pass


class _Csv:
    """Writes the whole history after each epoch, so that the file is complete whenever the run ends."""

    def __init__(self, path: Path, history: History) -> None:
        self.path, self.history = path, history

    def add(self, row: Mapping[str, float]) -> None:
        self.write()

    def write(self) -> None:
        try:
            with replacing(self.path) as partial, partial.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(self.history)
                writer.writerows(zip(*self.history.values(), strict=True))
        except OSError as error:
            raise OSError(
                f"can't write the log {self.path}: {error.strerror}; the log before it is unchanged."
            ) from None


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def add(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name != "epoch":
                self.writer.add_scalar(name, value, int(row["epoch"]))
