"""Small JSON files that carry a checksum of their content, so that damage is noticed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..._core.atomic import replacing

SEAL = "checksum"


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a mapping and its checksum. ValueError if a number is not finite or a text is not valid Unicode."""
    sealed = {**content, SEAL: _seal(content)}
    with replacing(path) as partial:
        partial.write_text(json.dumps(sealed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """The mapping that `write` wrote. ValueError if the file was damaged or edited since."""
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found.pop(SEAL, None) == _seal(found):
            return found
    except RecursionError:  # brackets nested too deeply
        pass
    raise ValueError(f"{path} does not have the checksum that it names.")


def _seal(content: dict[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True, allow_nan=False, ensure_ascii=False).encode())
