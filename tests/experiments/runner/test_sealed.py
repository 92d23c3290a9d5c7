import json
import math
from pathlib import Path
from typing import Any

import pytest

from twinboot.experiments.runner import sealed

CONTENT = {"name": "größer", "values": [1, 2.5, None], "inner": {"b": True, "a": -3}}


def test_what_is_written_is_read_again_whatever_the_white_space(tmp_path: Path) -> None:
    sealed.write(tmp_path / "a.json", CONTENT)
    assert sealed.read(tmp_path / "a.json") == CONTENT
    written = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(written, indent=7, sort_keys=True))
    assert sealed.read(tmp_path / "a.json") == CONTENT


def test_a_changed_value_or_a_missing_checksum_is_refused(tmp_path: Path) -> None:
    sealed.write(tmp_path / "a.json", CONTENT)
    written = json.loads((tmp_path / "a.json").read_text()) | {"name": "smaller"}
    (tmp_path / "a.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"a\.json does not have the checksum that it names\.$"):
        sealed.read(tmp_path / "a.json")
    del written["checksum"]
    (tmp_path / "a.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"checksum"):
        sealed.read(tmp_path / "a.json")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, "\ud800"])
def test_what_would_not_be_read_is_not_written(value: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"inner": [value]}))
    with pytest.raises(ValueError):  # noqa: PT011
        sealed.read(tmp_path / "a.json")
    with pytest.raises(ValueError):  # noqa: PT011
        sealed.write(tmp_path / "b.json", {"inner": [value]})
    assert not (tmp_path / "b.json").exists()
