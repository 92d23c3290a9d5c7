"""What a model and a function are, in words by which two runs can be compared.

A checkpoint holds weights, and says nothing of what is done with them: with another activation or another loss they
would be taken for weights of the same run. So a run also keeps the class and the plain attributes of each module, and a
digest of what the user's own code compiles to, with the constants and the functions of the same file that it uses. Code
of installed libraries is known by its name. What a function reads from elsewhere, such as a file, is not compared.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable, Mapping
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def of_model(model: nn.Module) -> dict[str, str]:
    """Name of each module -> its class, its plain attributes, and a digest of its code if that is the user's own."""
    return {name or "(model)": _module(module) for name, module in model.named_modules()}


def of_function(function: Callable[..., Any]) -> str:
    """The name of a function or callable object, and a digest of its code and of what it carries.

    >>> of_function(nn.functional.l1_loss)
    'l1_loss'
    >>> of_function(lambda y, t: (y - t).abs()) == of_function(lambda y, t: (y - t) ** 2)
    False
    """
    inner = function.func if isinstance(function, functools.partial) else function
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    if isinstance(function, FunctionType) and _of_library(function.__code__):
        return name
    return f"{name} ({_digest(_told(function, set()))})"


def _module(module: nn.Module) -> str:
    kind = type(module)
    plain = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training" and _is_plain(v)}
    said = [kind.__qualname__, *(f"{name}={value!r}" for name, value in plain.items())]
    own = [
        _told(function, set())
        for base in kind.__mro__
        for name, function in vars(base).items()
        # What a class does when it is made shows in its weights and attributes.
        if isinstance(function, FunctionType) and not _of_library(function.__code__) and name[:2] != "__"
    ]
    return " ".join([*said, f"code {_digest(own)}"] if own else said)


def _told(value: Any, seen: set[int]) -> Any:
    """A value as nested lists of plain ones."""
    if _is_plain(value):
        return repr(value)
    if id(value) in seen:
        return "..."
    seen = seen | {id(value)}
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), _digest_of(value)]
    if isinstance(value, nn.Module):
        return [of_model(value), *(_told(t, seen) for t in value.state_dict().values() if isinstance(t, Tensor))]
    if isinstance(value, functools.partial):
        return [_told(part, seen) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        return [_told(value.__func__, seen), _told(value.__self__, seen)]
    if isinstance(value, FunctionType):
        return _function(value, seen)
    if isinstance(value, Mapping):
        return sorted([str(key), _told(part, seen)] for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return [_told(part, seen) for part in value]
    kind = value if isinstance(value, type) else type(value)
    call = vars(kind).get("__call__")
    return [
        kind.__qualname__,
        *([_told(call, seen), _told(vars(value), seen)] if isinstance(call, FunctionType) else []),
    ]


def _function(function: FunctionType, seen: set[int]) -> Any:
    code = function.__code__
    if _of_library(code):
        return function.__qualname__
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    known = function.__globals__
    used = [known[name] for name in _names(code) if name in known]
    same_file = [v for v in used if _is_plain(v) or (isinstance(v, FunctionType) and v.__globals__ is known)]
    carried = [function.__defaults__ or (), function.__kwdefaults__ or {}, cells, same_file]
    return [_code(code, function.__doc__), *(_told(part, seen) for part in carried)]


def _code(code: CodeType, docstring: str | None = None) -> Any:
    constants = [_constant(c) for c in code.co_consts if c is not docstring]
    return [code.co_code.hex(), list(code.co_names), constants]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, (tuple, frozenset)):
        parts = [_constant(part) for part in value]
        return sorted(parts, key=str) if isinstance(value, frozenset) else parts  # a set has no order
    return repr(value)


def _names(code: CodeType) -> list[str]:
    """The names that code, or code inside it, may look up."""
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _names(c)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) <= 100 and all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _of_library(code: CodeType) -> bool:
    return code.co_filename.startswith(LIBRARIES)


def _digest_of(t: Tensor) -> str:
    return "meta" if t.is_meta else _digest(t.detach().cpu().reshape(-1).tolist())


def _digest(told: Any) -> str:
    return blake2b(repr(told).encode(), digest_size=6).hexdigest()
