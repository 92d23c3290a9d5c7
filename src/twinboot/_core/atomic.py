"""Write files so that a reader finds the old content or the new, and never a part."""

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
    """Gives a hidden file beside `path` to write to. At the end of the block it is renamed to `path`.

    After an exception it is deleted, and the file at `path` stays as it was. Hidden files that killed processes of this
    machine left are deleted, too.
    """
    # Processes on several machines that share the disk may write the same file.
    host = re.sub(r"[^\w-]", "-", platform.node())
    partial = path.with_name(f".{path.name}.{host}.{os.getpid()}.partial")
    own = re.compile(rf"\.{re.escape(path.name)}\.{re.escape(host)}\.(\d+)\.partial")
    with suppress(OSError):  # if the folder cannot be listed, the write itself reports that
        for name in os.listdir(path.parent):
            if (found := own.fullmatch(name)) and not _runs(int(found[1])):
                path.with_name(name).unlink(missing_ok=True)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file is on the disk, so that it survives a power failure."""
    with path.open("r+b") as file:  # Windows syncs only files that are open for writing
        try:
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):  # the file system cannot sync
                raise


def _runs(process: int) -> bool:
    if sys.platform == "win32":  # os.kill would end the process
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it runs, and belongs to another user
        pass
    return True
