"""Checks of arguments. Each refuses a wrong value in one sentence that says what to give instead."""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import UnionType
from typing import Any, Literal, SupportsIndex, TypeGuard, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

LONG = 60  # the most characters of a value in a message


def require_known(options: Iterable[str], function: Callable[..., Any], *others: Callable[..., Any]) -> None:
    """Refuse options that neither the function takes nor the functions to which it passes options on."""
    signatures = [inspect.signature(taker).parameters.values() for taker in (function, *others)]
    known = [p.name for parameters in signatures for p in parameters if p.kind is not p.VAR_KEYWORD]
    for name in options:
        if name not in known:
            raise TypeError(f"{function.__name__} has no option {name!r}{meant(name, known)}")


def shown(value: object) -> str:
    """A value for a message: on one line, and cut if it is long.

    >>> shown("a"), shown([[1, 2]] * 100)
    ("'a'", '[[1, 2], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2], ...')
    """
    try:
        said = " ".join(repr(value).split())
        if " at 0x" in said:  # a function, or an object that shows nothing but its address
            kind = type(value).__name__
            said = f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
    except ValueError:  # Python does not print integers with thousands of digits
        said = f"a very large {type(value).__name__}"
    return said if len(said) <= LONG else f"{said[:LONG]}..."


def one_line(error: BaseException) -> str:
    """The message of a library's error, for the end of a sentence."""
    return " ".join(str(error).split()).rstrip(".")


def one_of(names: Iterable[str]) -> str:
    """
    >>> print(one_of(["a", "b", "c"]))
    "a", "b" or "c"
    """
    return _joined(f'"{name}"' for name in names)


def _joined(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def require_one_of(known: Sequence[str], what: str, value: object) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"unknown {what} {shown(value)}: use {one_of(known)}.")


def require_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse arguments that do not have the types of a function's annotations.

    Call `require_types(fit, locals())` in the first lines of `fit`. Annotations cannot express ranges, for instance:
    the function checks those itself.
    """
    for name, (fits, words) in _expected(function).items():
        if name in given and not fits(given[name]):
            raise TypeError(f"{name} must be {words}, not {shown(given[name])}.")


Kind = tuple[Callable[[Any], bool], str]  # whether a value has a type, and how messages call the type


@cache
def _expected(function: Callable[..., Any]) -> dict[str, Kind]:
    function = inspect.unwrap(function)
    found = {}
    for name, hint in function.__annotations__.items():
        with suppress(NameError):  # a type that is imported for annotations alone
            found[name] = _kind(eval(hint, function.__globals__) if isinstance(hint, str) else hint)
    found.pop("return", None)
    return found


def _kind(hint: Any) -> Kind:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:  # the function itself refuses unknown strings, by a message of its own
        return (lambda value: isinstance(value, str) or any(value is part for part in parts)), one_of(parts)
    if parts and kind in (Union, UnionType, tuple, Sequence):
        inner = [_kind(part) for part in parts if part is not ...]
        if kind is tuple:
            return _tuple([fits for fits, _ in inner], ... in parts)
        if kind is Sequence:
            fits, words = inner[0]
            each = "" if inner[0] is _ANYTHING else f", each {words}"
            return (lambda value: _is_sequence(value) and all(map(fits, value))), f"a sequence{each}"
        words = _joined(dict.fromkeys(words for _, words in inner))
        return (lambda value: any(fits(value) for fits, _ in inner)), words
    if kind in _KINDS:
        return _KINDS[kind]
    if isinstance(kind, type) and not getattr(kind, "_is_protocol", False) and not issubclass(kind, Dataset):
        return (lambda value: isinstance(value, kind)), _NAMES.get(kind, f"a {kind.__name__}")
    return _ANYTHING


def _tuple(each: list[Callable[[Any], bool]], any_length: bool) -> Kind:
    def fits(value: Any) -> bool:
        if not isinstance(value, (tuple, list)):
            return False
        expected = each * len(value) if any_length else each
        return len(value) == len(expected) and all(fit(part) for fit, part in zip(expected, value, strict=True))

    return fits, "a tuple" if any_length else f"a tuple of {len(each)}"


def is_number(value: Any) -> bool:
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_meta and not value.is_complex():
        return value.dtype != torch.bool
    if isinstance(value, int):
        return not isinstance(value, bool) and value.bit_length() < 1024  # larger ones are beyond all floats
    return isinstance(value, (float, np.integer, np.floating))


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_iterable(value: Any) -> bool:
    return (hasattr(value, "__iter__") or hasattr(value, "__getitem__")) and getattr(value, "ndim", 1) != 0


def _is_sequence(value: Any) -> bool:
    indexed = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return indexed and _is_iterable(value) and not isinstance(value, (str, bytes, Mapping))


_ANYTHING: Kind = (lambda value: True, "anything")
_KINDS: dict[Any, Kind] = {
    bool: (lambda value: isinstance(value, (bool, int, np.bool_)) and value in (0, 1), "True or False"),
    int: (lambda value: is_whole(value) and abs(int(value)) < 2**63, "a whole number"),
    SupportsIndex: (is_whole, "an integer"),
    float: (is_number, "a number"),
    Callable: (callable, "a function"),
    Iterable: (_is_iterable, "an iterable"),
    Any: _ANYTHING,
    object: _ANYTHING,
}
_NAMES = {
    type(None): "None",
    str: "a string",
    os.PathLike: "a path",
    Mapping: "a mapping",
    nn.Module: "a torch.nn.Module",
    Tensor: "a tensor",
}


def require_whole(name: str, value: object, least: int, hint: str = "") -> None:
    if not is_whole(value) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {shown(value)}{hint}.")


def require_samples(samples: object) -> None:
    """Refuse a number of draws that gives neither the mean alone nor a spread."""
    if not is_whole(samples) or samples < 0 or samples == 1:
        raise ValueError(f"samples must be 0, for the mean alone, or at least 2, for a spread, not {shown(samples)}.")


def require_number(name: str, value: object, positive: bool = False) -> None:
    """Refuse what is not a finite number of at least 0, or above 0 if it must be `positive`."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number, not {shown(value)}.")
    if not 0 <= float(value) < math.inf or (positive and float(value) == 0):  # type: ignore[arg-type]
        least = "above" if positive else "of at least"
        raise ValueError(f"{name} must be a finite number {least} 0, not {shown(value)}.")


def require_level(level: object) -> None:
    """Refuse what is not the probability of an interval."""
    if not is_number(level) or not 0 < level < 1:  # type: ignore[operator]
        raise ValueError(f"level must lie between 0 and 1, such as 0.9, not {shown(level)}.")


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}.")
    if value.is_meta or value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor with values, not a sparse one or one on the meta device.")


def meant(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word. It names the most similar known word, if there is one.

    >>> meant("epoch", ["epochs", "noise"]), meant("x", ["epochs"])
    (": did you mean 'epochs'?", '.')
    """
    close = difflib.get_close_matches(word, known, 1)
    return f": did you mean {close[0]!r}?" if close else "."
