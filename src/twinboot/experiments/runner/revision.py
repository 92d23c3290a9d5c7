"""Which revision of the source computes a run."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path


@cache
def loaded() -> str | None:
    """The revision as it was when this process first asked: its code does not change with the files."""
    return revision()


def revision() -> str | None:
    """The git revision of the source, with a mark if it was changed since; None where there is no checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        # Only if this file is tracked there: an installed package may lie inside some other project's checkout.
        if subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True).returncode:
            return None
        found = subprocess.run([*git, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
        return found.stdout.strip() or None
    except OSError:
        return None
