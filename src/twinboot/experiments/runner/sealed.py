"""Small JSON files that carry a checksum of what they say, so that a damaged one is not taken for another."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from ..._core.atomic import replacing

SEAL = "checksum"
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # with line ends and half characters


def checksum(content: bytes) -> str:
    """Of a file's content, as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a mapping and its checksum. What `read` would refuse is a ValueError here, too."""
    _check(content)
    with replacing(path) as partial:
        partial.write_text(json.dumps({**content, SEAL: _seal(content)}, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """What was written, without the checksum. Files of earlier versions have none, and are not held against it.

    Whoever can write the file can write its checksum, too, so what is read must still be judged. ValueError if it is
    not a mapping with the checksum that it names, or if it holds a number that is not finite or too large, or text
    with a line end or another control character, which would not stay in one line of a message or a table.
    """
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"{path} holds no mapping.")
        seal = found.pop(SEAL, None)
        _check(found)
        if seal not in (None, _seal(found)):
            raise ValueError(f"{path} does not have the checksum that it names.")
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply.") from None
    return found


def _seal(content: dict[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True).encode())


def _check(value: Any) -> None:
    if isinstance(value, dict):
        _check([*value, *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check(item)
    elif isinstance(value, str) and CONTROL.search(value):
        raise ValueError(f"text must have no line end and no control character, as {value!r} has.")
    elif isinstance(value, (int, float)) and not abs(value) <= sys.float_info.max:
        raise ValueError("numbers must be finite, and no larger than those of 64 bits.")
