"""Options that are passed on: a name that nobody takes is refused, with the one that may have been meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def require_known(options: Iterable[str], asked: Callable[..., Any], *others: Callable[..., Any]) -> None:
    """Refuse names that neither the one who was asked takes nor those to whom options are passed on."""
    takers = [inspect.signature(taker).parameters.values() for taker in (asked, *others)]
    known = [p.name for taken in takers for p in taken if p.kind is not p.VAR_KEYWORD]
    for name in options:
        if name not in known:
            raise TypeError(f"{asked.__name__} has no option {name!r}{meant(name, known)}")


def meant(word: str, known: Iterable[str]) -> str:
    """How a sentence ends that refuses a word: with the known one that is most like it, if any is.

    >>> meant("epoch", ["epochs", "noise"]), meant("x", ["epochs"])
    (": did you mean 'epochs'?", '.')
    """
    close = difflib.get_close_matches(word, known, 1)
    return f": did you mean {close[0]!r}?" if close else "."
