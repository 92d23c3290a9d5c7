"""The extras that sentences name are there to be installed."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_extra_that_a_sentence_names_is_one() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "extras.py"]
    named = {extra for source in sources for extra in re.findall(r"how_to_install\('(\w+)'\)", source)}
    assert {"sklearn", "lightning", "huggingface", "cli"} <= named <= set(known)


def test_each_integration_has_an_extra_of_its_name() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    modules = {path.stem for path in (ROOT / "src/twinboot/integrations").glob("*.py")}
    assert modules - {"__init__", "card", "resuming"} == {"sklearn", "lightning", "huggingface"} <= set(known)
