"""Files that appear under their names whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden place beside `path` to write to. What is there at the end of the block takes the name `path`, by one
    rename; after an exception it is gone, and the file from before is as it was."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # another process may write the same file
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
