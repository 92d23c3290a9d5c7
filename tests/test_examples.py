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


def test_digits_are_learned_in_one_call_and_doubt_finds_the_errors() -> None:
    said = subprocess.run([sys.executable, str(EXAMPLES / "digits.py")], capture_output=True, text=True, check=True)
    accuracy, pairs = re.search(r"accuracy (0\.\d+)", said.stdout), re.search(r"in (\d+)% of all pairs", said.stdout)
    assert accuracy is not None
    assert pairs is not None
    assert float(accuracy[1]) > 0.88
    assert int(pairs[1]) > 85
    assert said.stderr.startswith("epoch 1 of 15: ")
    assert "Warning" not in said.stderr
