"""How to install what a plain install leaves out, for error messages."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The end of a message about a missing package. pip takes the extra from the installed twinboot, so this works
    without a clone, and although no package index has twinboot.

    >>> how_to_install("plots")
    'pip install "twinboot[plots]"'
    """
    return f'pip install "twinboot[{extra}]"'
