"""Files that appear under their names whole or not at all."""

from __future__ import annotations

import errno
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden place beside `path` to write to. What is there at the end of the block takes the name `path`, by one
    rename; after an exception it is gone, and the file from before is as it was. What a killed process of this machine
    left of the same file is removed."""
    # Another process may write the same file, on another machine that shares the disk, too.
    host = re.sub(r"[^\w-]", "-", platform.node())
    partial = path.with_name(f".{path.name}.{host}.{os.getpid()}.partial")
    _remove_abandoned(path, host)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file is on the disk itself, for the case that power fails."""
    with path.open("r+b") as file:  # Windows syncs only what may be written
        try:
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):  # of a file system that knows no such thing
                raise


def _remove_abandoned(path: Path, host: str) -> None:
    own = re.compile(rf"\.{re.escape(path.name)}\.{re.escape(host)}\.(\d+)\.partial")
    with suppress(OSError):  # a folder that cannot be listed: the write itself will say what is wrong
        for name in os.listdir(path.parent):
            if (found := own.fullmatch(name)) and not _runs(int(found[1])):
                path.with_name(name).unlink(missing_ok=True)


def _runs(process: int) -> bool:
    if sys.platform == "win32":  # where to ask is to end it
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True
