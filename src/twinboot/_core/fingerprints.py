"""What a model and a function are, in words by which two runs can be compared.

A checkpoint holds weights, and says nothing of what is done with them: with another activation or another loss they
would be taken for weights of the same run. So a run also keeps the class and the plain attributes of each module, and a
digest of what the user's own code compiles to, with the constants and the functions of the same file that it uses. Code
of installed libraries is known by its name. What a function reads from elsewhere, such as a file, is not compared, and
neither are the parameters of a module that it uses: those of the model change while it trains. Another version of
Python compiles code to other bytes, so a run goes on with the version that it began with.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sysconfig
from collections.abc import Callable, Mapping
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
PLACES = ("name_or_path",)  # where a pretrained model was read from may change


def of_model(model: nn.Module) -> dict[str, str]:
    """Name of each module -> its class, its plain attributes, and a digest of its code if that is the user's own."""
    code = {kind: _code_of_class(kind) for kind in {type(module) for module in model.modules()}}
    return {name or "(model)": _module(module, code[type(module)]) for name, module in model.named_modules()}


def of_function(function: Callable[..., Any]) -> str:
    """The name of a function or callable object, and a digest of its code and of what it carries.

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
    return f"{name} ({_digest(_Teller().tell(function))})"


def _module(module: nn.Module, code: list[Any]) -> str:
    own = {k: v for k, v in vars(module).items() if not k.startswith("_") and k not in ("training", *PLACES)}
    said = [type(module).__qualname__, *(f"{name}={value!r}" for name, value in own.items() if _is_plain(value))]
    said += [f"{name}={_digest(_Teller().tell(value))}" for name, value in own.items() if isinstance(value, Mapping)]
    functions = {k: v for k, v in own.items() if callable(v) and not isinstance(v, (nn.Module, type))}
    said += [f"{name}={of_function(function)}" for name, function in functions.items()]
    return " ".join([*said, f"code {_digest(code)}"] if code else said)


def _code_of_class(kind: type[nn.Module]) -> list[Any]:
    """Of what the user wrote in a class. What it does when it is made shows in its weights and attributes."""
    found = []
    for base in kind.__mro__:
        for name, value in vars(base).items():
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(value, FunctionType) and not _of_library(value.__code__) and name[:2] != "__":
                found.append([name, _Teller().tell(value)])
    return found


class _Teller:
    """Values as nested lists of plain ones. What was told before is named by its number: functions may use each other
    in many ways."""

    def __init__(self) -> None:
        self.told: dict[int, int] = {}
        self.kept: list[Any] = []  # so that no address is used twice

    def tell(self, value: Any) -> Any:
        if _is_plain(value):
            return _repr(value)
        if id(value) in self.told:
            return f"number {self.told[id(value)]}"
        self.told[id(value)] = len(self.told)
        self.kept.append(value)
        try:
            return self._parts(value)
        except Exception:  # of an object that cannot be looked into its class is all that is known
            return type(value).__qualname__

    def _parts(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return [str(value.dtype), list(value.shape), _bytes(value)]
        if isinstance(value, np.ndarray):
            entries = self.tell(value.tolist()) if value.dtype.hasobject else _hex(value.tobytes())
            return [str(value.dtype), list(value.shape), entries]
        if isinstance(value, (np.generic, torch.dtype, torch.device)):
            return repr(value)
        if isinstance(value, (set, frozenset)):
            return sorted(map(_repr, value))
        if isinstance(value, nn.Module):
            return [of_model(value), [[name, self.tell(buffer)] for name, buffer in value.named_buffers()]]
        if isinstance(value, functools.partial):
            return [self.tell(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, MethodType):
            return [self.tell(value.__func__), self.tell(value.__self__)]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, Mapping):
            return sorted(([_repr(key), self.tell(part)] for key, part in value.items()), key=repr)
        if isinstance(value, (list, tuple)):
            return [self.tell(part) for part in value]
        if isinstance(value, type):
            return value.__qualname__
        call = inspect.getattr_static(type(value), "__call__", None)
        if not isinstance(call, FunctionType):
            return getattr(value, "__qualname__", type(value).__qualname__)
        held = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            held |= {name: getattr(value, name) for name in getattr(kind, "__slots__", ()) if hasattr(value, name)}
        return [type(value).__qualname__, self.tell(call), self.tell(held)]

    def _function(self, function: FunctionType) -> Any:
        if function is not inspect.unwrap(function):
            return self.tell(inspect.unwrap(function))
        code, known = function.__code__, function.__globals__
        if _of_library(code):
            return function.__qualname__
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        used = {name: known[name] for name in _globals(code) if name in known}
        same_file = {
            name: value
            for name, value in used.items()
            if _is_plain(value)
            or isinstance(value, (Tensor, np.ndarray, np.generic, Mapping, set))
            or (isinstance(value, FunctionType) and value.__globals__ is known)
        }
        carried = [function.__defaults__ or (), function.__kwdefaults__ or {}, cells, same_file]
        return [_code(code, function.__doc__), *(self.tell(part) for part in carried)]


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
    """The names that code, or code inside it, looks up among those of its file; those of attributes are not."""
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
    except ValueError:  # a number of thousands of digits
        return f"{type(value).__name__} of {value.bit_length()} bits"


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - which fails where there is none yet
    except ValueError:
        return False
    return True


def _of_library(code: CodeType) -> bool:
    return code.co_filename.startswith(LIBRARIES)


def _bytes(t: Tensor) -> str:
    if t.is_meta:
        return "meta"
    whole = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _hex(whole.tobytes())


def _digest(told: Any) -> str:
    return _hex(repr(told).encode())


def _hex(content: bytes) -> str:
    return blake2b(content, digest_size=6).hexdigest()
