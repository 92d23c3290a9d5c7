"""The examples run as they are."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_deblurring_halves_the_error_and_knows_where_it_is(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "deblur.py"), str(tmp_path / "deblur.png")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    blurred, deblurred, correlation = (float(number) for number in re.findall(r"\d\.\d+", said)[:3])
    assert deblurred < blurred / 2
    assert correlation > 0.3
    assert (tmp_path / "deblur.png").stat().st_size > 10_000
