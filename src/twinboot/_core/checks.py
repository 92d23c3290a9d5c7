"""What is refused in one sentence wherever it is given: options that nobody takes, and values that cannot be."""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import UnionType
from typing import Any, Literal, SupportsIndex, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

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
        if " at 0x" in said:  # a function, or an object that shows nothing but its address
            kind = type(value).__name__
            said = f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
    except ValueError:  # a number of thousands of digits, which Python does not print
        said = f"a very large {type(value).__name__}"
    return said if len(said) <= LONG else f"{said[:LONG]}..."


def one_line(error: BaseException) -> str:
    """What an error of a library says, for the end of a sentence."""
    return " ".join(str(error).split()).rstrip(".")


def one_of(names: Sequence[str]) -> str:
    """
    >>> print(one_of(["a", "b", "c"]))
    "a", "b" or "c"
    """
    *others, last = (f'"{name}"' for name in names)
    return f"{', '.join(others)} or {last}" if others else last


def require_one_of(known: Sequence[str], what: str, value: object) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"unknown {what} {shown(value)}: use {one_of(known)}.")


def require_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse arguments that are not of the types that a function's annotations name: `require_types(fit, locals())` as
    one of its first lines. What annotations cannot say, such as a range, is up to the function."""
    for name, (fits, words) in _expected(function).items():
        if name in given and not fits(given[name]):
            raise TypeError(f"{name} must be {words}, not {shown(given[name])}.")


@cache
def _expected(function: Callable[..., Any]) -> dict[str, tuple[Callable[[Any], bool], str]]:
    function = inspect.unwrap(function)
    found = {}
    for name, hint in function.__annotations__.items():
        with suppress(NameError):  # a type that is imported for annotations alone
            found[name] = _kind(eval(hint, function.__globals__) if isinstance(hint, str) else hint)
    return {name: kind for name, kind in found.items() if kind is not None and name != "return"}


def _kind(hint: Any) -> tuple[Callable[[Any], bool], str] | None:
    """What a value of an annotated type is, and how a sentence calls it; None where any value may be one."""
    if hint in (Any, object):
        return None
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = [_kind(part) for part in parts]
        if None in kinds:
            return None
        fits, words = zip(*(kind for kind in kinds if kind), strict=True)
        *others, last = dict.fromkeys(words)
        return (lambda value: any(fit(value) for fit in fits)), f"{', '.join(others)} or {last}" if others else last
    if origin is Literal:
        return (lambda value: isinstance(value, str) or any(value is part for part in parts)), one_of(parts)
    if origin is tuple:
        inner = [_kind(part) for part in parts if part is not ...]
        each = [kind[0] if kind else (lambda value: True) for kind in inner]
        long = None if ... in parts else len(parts)
        return (
            lambda value: (
                isinstance(value, (tuple, list))
                and long in (None, len(value))
                and all(fit(v) for fit, v in zip(each * len(value) if long is None else each, value, strict=False))
            )
        ), f"a tuple{f' of {long}' if long else ''}"
    kind = origin or hint
    if kind is Sequence and (of := _kind(parts[0])) is not None:
        plain = next(fits for known, fits, _ in _KINDS if known is kind)
        return (lambda value: plain(value) and all(map(of[0], value))), f"a sequence, each {of[1]}"
    for known, fits_, words_ in _KINDS:
        if kind is known:
            return fits_, words_
    if isinstance(kind, type) and not getattr(kind, "_is_protocol", False) and not issubclass(kind, Dataset):
        return (lambda value: isinstance(value, kind)), f"a {kind.__name__}"
    return None


def is_number(value: Any) -> bool:
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_meta and not value.is_complex():
        return value.dtype != torch.bool
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        float(value)
    except OverflowError:  # a whole number beyond all floats
        return False
    return True


_KINDS: list[tuple[Any, Callable[[Any], bool], str]] = [
    (type(None), lambda value: value is None, "None"),
    (bool, lambda value: isinstance(value, (bool, int, np.bool_)) and value in (0, 1), "True or False"),
    (
        int,
        lambda value: isinstance(value, (int, np.integer)) and not isinstance(value, bool) and abs(int(value)) < 2**63,
        "a whole number",
    ),
    (SupportsIndex, lambda value: isinstance(value, (int, np.integer)) and not isinstance(value, bool), "an integer"),
    (float, is_number, "a number"),
    (str, lambda value: isinstance(value, str), "a string"),
    (os.PathLike, lambda value: isinstance(value, os.PathLike), "a path"),
    (Callable, callable, "a function"),
    (Mapping, lambda value: isinstance(value, Mapping), "a mapping"),
    (
        Sequence,
        lambda value: (
            (
                hasattr(value, "__getitem__")
                and hasattr(value, "__len__")
                and not isinstance(value, (str, bytes, Mapping))
            )
            and getattr(value, "ndim", 1) != 0
        ),
        "a sequence",
    ),
    (
        Iterable,
        lambda value: (hasattr(value, "__iter__") or hasattr(value, "__getitem__")) and getattr(value, "ndim", 1) != 0,
        "an iterable",
    ),
    (nn.Module, lambda value: isinstance(value, nn.Module), "a torch.nn.Module"),
    (Tensor, lambda value: isinstance(value, Tensor), "a tensor"),
]


def require_whole(name: str, value: object, least: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {shown(value)}{hint}.")


def require_number(name: str, value: object, positive: bool = False) -> None:
    """Refuse what is no finite number of at least 0, or above it."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number, not {shown(value)}.")
    if not 0 <= float(value) < math.inf or (positive and float(value) == 0):  # type: ignore[arg-type]
        least = "above" if positive else "of at least"
        raise ValueError(f"{name} must be a finite number {least} 0, not {shown(value)}.")


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}.")
    if value.is_meta or value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor with values, not a sparse one or one on the meta device.")


def meant(word: str, known: Iterable[str]) -> str:
    """How a sentence ends that refuses a word: with the known one that is most like it, if any is.

    >>> meant("epoch", ["epochs", "noise"]), meant("x", ["epochs"])
    (": did you mean 'epochs'?", '.')
    """
    close = difflib.get_close_matches(word, known, 1)
    return f": did you mean {close[0]!r}?" if close else "."
