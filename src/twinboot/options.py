"""What is refused in one sentence wherever it is given: options that nobody takes, and values that cannot be."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

LONG = 60  # characters of a value in a sentence


def require_known(options: Iterable[str], asked: Callable[..., Any], *others: Callable[..., Any]) -> None:
    """Refuse names that neither the one who was asked takes nor those to whom options are passed on."""
    takers = [inspect.signature(taker).parameters.values() for taker in (asked, *others)]
    known = [p.name for taken in takers for p in taken if p.kind is not p.VAR_KEYWORD]
    for name in options:
        if name not in known:
            raise TypeError(f"{asked.__name__} has no option {name!r}{meant(name, known)}")


def shown(value: object) -> str:
    """A value as a sentence may quote it: on one line, and not at any length.

    >>> shown("a"), shown([[1, 2]] * 100)
    ("'a'", '[[1, 2], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2], ...')
    """
    try:
        said = " ".join(repr(value).split())
    except ValueError:  # a number of thousands of digits, which Python does not print
        said = f"a very large {type(value).__name__}"
    return said if len(said) <= LONG else f"{said[:LONG]}..."


def one_of(names: Sequence[str]) -> str:
    """
    >>> print(one_of(["a", "b", "c"]))
    "a", "b" or "c"
    """
    *others, last = (f'"{name}"' for name in names)
    return f"{', '.join(others)} or {last}"


def require_one_of(known: Sequence[str], what: str, value: object) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"unknown {what} {shown(value)}: use {one_of(known)}.")


def require_whole(name: str, value: object, least: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {shown(value)}{hint}.")


def require_number(name: str, value: object, positive: bool = False) -> None:
    """Refuse what is no finite number of at least 0, or above it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {shown(value)}.")
    if not 0 <= value < math.inf or (positive and value == 0):  # type: ignore[operator]
        least = "above" if positive else "of at least"
        raise ValueError(f"{name} must be a finite number {least} 0, not {shown(value)}.")


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}.")


def meant(word: str, known: Iterable[str]) -> str:
    """How a sentence ends that refuses a word: with the known one that is most like it, if any is.

    >>> meant("epoch", ["epochs", "noise"]), meant("x", ["epochs"])
    (": did you mean 'epochs'?", '.')
    """
    close = difflib.get_close_matches(word, known, 1)
    return f": did you mean {close[0]!r}?" if close else "."
