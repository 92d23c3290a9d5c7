import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from twinboot.experiments.runner import revision as module
from twinboot.experiments.runner.revision import revision


# A source archive may be tested where there is no git; what a run records there is the next test. CI has it, or fails.
@pytest.mark.skipif(not (shutil.which("git") or os.environ.get("CI")), reason="it makes a checkout with git")
def test_the_revision_is_that_of_the_checkout_the_source_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # a hook of git, for one, would send it to another checkout
    source, other = tmp_path / "store.py", tmp_path / "other.py"
    source.write_text("")
    other.write_text("")
    monkeypatch.setattr(module, "__file__", str(source))
    assert revision() is None  # no checkout
    person = ["-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "store.py"], [*person, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    clean = revision()
    assert re.fullmatch("[0-9a-f]{12,}", str(clean))
    source.write_text("changed = True")
    assert revision() == f"{clean}-dirty"
    monkeypatch.setattr(module, "__file__", str(other))
    assert revision() is None  # a file that this checkout does not track


def test_the_revision_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert revision() is None
