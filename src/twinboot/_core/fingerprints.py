"""Fingerprints of models and functions, by which a resumed run notices that they have changed.

A checkpoint holds weights, and not the code that uses them: another activation or loss would go unnoticed. So a run
also stores the class and the plain attributes of each module, and a digest of the user's bytecode with the constants
and the functions of the same file that it uses. Code of installed libraries is known by its name. Not compared are
what a function reads from elsewhere, such as a file, and the parameters of the modules that it uses, because those of
the model change in training. Other versions of Python have other bytecode, so resume with the version of the start.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sysconfig
from collections.abc import Callable, Mapping
from hashlib import blake2b
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
CHANGES = ("training", "name_or_path")  # attributes that may differ in the same run, such as a pretrained model's path


def of_model(model: nn.Module) -> dict[str, str]:
    """Name of each module -> its class, its plain attributes, and a digest of the user's code in it."""
    code = {kind: _code_of_class(kind) for kind in {type(module) for module in model.modules()}}
    return {name or "(model)": _module(module, code[type(module)]) for name, module in model.named_modules()}


def of_function(function: Callable[..., Any]) -> str:
    """The name of a function or callable object, and a digest of its code and of the values that it holds.

    >>> of_function(nn.functional.l1_loss)
    'l1_loss'
    >>> of_function(lambda y, t: (y - t).abs()) == of_function(lambda y, t: (y - t) ** 2)
    False
    """
    function = inspect.unwrap(function)
    inner = function.func if isinstance(function, functools.partial) else function
    name = str(getattr(inner, "__qualname__", type(inner).__qualname__))
    if isinstance(function, FunctionType) and _of_library(function.__code__):
        return name
    return f"{name} ({_digest(_Describer().describe(function))})"


def _module(module: nn.Module, code: list[Any]) -> str:
    own = {k: v for k, v in vars(module).items() if not k.startswith("_") and k not in CHANGES}
    said = [type(module).__qualname__, *(f"{name}={value!r}" for name, value in own.items() if _is_plain(value))]
    said += [
        f"{name}={_digest(_Describer().describe(value))}" for name, value in own.items() if isinstance(value, Mapping)
    ]
    functions = {k: v for k, v in own.items() if callable(v) and not isinstance(v, (nn.Module, type))}
    said += [f"{name}={of_function(function)}" for name, function in functions.items()]
    return " ".join([*said, f"code {_digest(code)}"] if code else said)


def _code_of_class(kind: type[nn.Module]) -> list[Any]:
    """The user's methods. The effect of `__init__` shows in the weights and attributes."""
    found = []
    for base in kind.__mro__:
        for name, value in vars(base).items():
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(value, FunctionType) and not _of_library(value.__code__) and name[:2] != "__":
                found.append([name, _Describer().describe(value)])
    return found


class _Describer:
    """Describes values by nested lists of plain ones. A value that comes again is described by its number: functions
    may use each other."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, Any]] = {}  # with the value itself, so that no other gets its id

    def describe(self, value: Any) -> Any:
        if _is_plain(value):
            return _repr(value)
        if id(value) in self.seen:
            return f"number {self.seen[id(value)][0]}"
        self.seen[id(value)] = len(self.seen), value
        try:
            return self._parts(value)
        except Exception:  # if an object does not show its parts, its class must do
            return type(value).__qualname__

    def _parts(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            bytes_of = value.detach().contiguous().reshape(-1).view(torch.uint8)
            entries = "meta" if value.is_meta else _hex(bytes_of.cpu().numpy().tobytes())
            return [str(value.dtype), list(value.shape), entries]
        if isinstance(value, np.ndarray):
            entries = self.describe(value.tolist()) if value.dtype.hasobject else _hex(value.tobytes())
            return [str(value.dtype), list(value.shape), entries]
        if isinstance(value, (np.generic, torch.dtype, torch.device)):
            return repr(value)
        if isinstance(value, (set, frozenset)):
            return sorted(map(_repr, value))
        if isinstance(value, nn.Module):
            return [of_model(value), [[name, self.describe(buffer)] for name, buffer in value.named_buffers()]]
        if isinstance(value, functools.partial):
            return [self.describe(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, MethodType):
            return [self.describe(value.__func__), self.describe(value.__self__)]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, Mapping):
            return sorted(([_repr(key), self.describe(part)] for key, part in value.items()), key=repr)
        if isinstance(value, (list, tuple)):
            return [self.describe(part) for part in value]
        if isinstance(value, type):
            return value.__qualname__
        call = inspect.getattr_static(type(value), "__call__", None)
        if not isinstance(call, FunctionType):
            return getattr(value, "__qualname__", type(value).__qualname__)
        held = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            held |= {name: getattr(value, name) for name in getattr(kind, "__slots__", ()) if hasattr(value, name)}
        return [type(value).__qualname__, self.describe(call), self.describe(held)]

    def _function(self, function: FunctionType) -> Any:
        if function is not inspect.unwrap(function):
            return self.describe(inspect.unwrap(function))
        code, known = function.__code__, function.__globals__
        if _of_library(code):
            return function.__qualname__
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]  # which is empty
        used = {name: known[name] for name in _globals(code) if name in known}
        same_file = {
            name: value
            for name, value in used.items()
            if _is_plain(value)
            or isinstance(value, (Tensor, np.ndarray, np.generic, Mapping, set))
            or (isinstance(value, FunctionType) and value.__globals__ is known)
        }
        carried = [function.__defaults__ or (), function.__kwdefaults__ or {}, cells, same_file]
        return [_code(code, function.__doc__), *(self.describe(part) for part in carried)]


def _code(code: CodeType, docstring: str | None = None) -> Any:
    constants = [_constant(c) for c in code.co_consts if c is not docstring]
    return [code.co_code.hex(), list(code.co_names), constants]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, (tuple, frozenset)):
        parts = [_constant(part) for part in value]
        return sorted(parts, key=str) if isinstance(value, frozenset) else parts  # a set has no order
    return _repr(value)


def _globals(code: CodeType) -> list[str]:
    """The global names that code, or code inside it, reads. Names of attributes are none."""
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _globals(c)]
    return list(dict.fromkeys([*own, *inner]))


def _is_plain(value: Any, deep: int = 3) -> bool:
    if isinstance(value, (tuple, list)):
        return deep > 0 and len(value) <= 100 and all(_is_plain(part, deep - 1) for part in value)
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python does not print integers with thousands of digits
        return f"{type(value).__name__} of {value.bit_length()} bits"


def _of_library(code: CodeType) -> bool:
    return code.co_filename.startswith(LIBRARIES)


def _digest(described: Any) -> str:
    return _hex(repr(described).encode())


def _hex(content: bytes) -> str:
    return blake2b(content, digest_size=6).hexdigest()
