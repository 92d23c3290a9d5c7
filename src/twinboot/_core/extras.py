"""How to get what a plain install leaves out, for sentences about what is missing."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The end of such a sentence. It names a clone, as no package index has this library yet.

    >>> how_to_install("plots")
    "pip install '.[plots]' in a clone of twinboot."
    """
    return f"pip install '.[{extra}]' in a clone of twinboot."
