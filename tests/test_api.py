"""Every public name is documented in docs/api.md, and every documented name exists."""

import ast
import inspect
import re
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import twinboot

DOCS = Path(__file__).parents[1] / "docs"
ROWS = re.findall(r"^\| (`.*?) \| (.*) \|$", (DOCS / "api.md").read_text(), re.MULTILINE)
PUBLIC = ("twinboot", "twinboot.resets", "twinboot.metrics")
PUBLIC += tuple(f"twinboot.integrations.{name}" for name in ("sklearn", "lightning", "huggingface"))
# What stands in backticks in a row and is no Python name: extras, and the kinds of `Bootstrap`, which are values.
WORDS = {"sklearn", "lightning", "huggingface", "metrics", "Trainer", *twinboot.data.bootstrap.KINDS}


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def name_of(code: str) -> str:
    return code.partition("(")[0].partition("=")[0]


def found(name: str) -> Any:
    """The object that a dotted name means, or `name` of twinboot; a module if there is one."""
    full = name if name.startswith("twinboot") else f"twinboot.{name}"
    try:
        return import_module(full)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("twinboot"):
            raise
    start, _, last = full.rpartition(".")
    return getattr(import_module(start), last)


def members(thing: Any) -> set[str]:
    """Names that one can write after a dot, of instances too, and the arguments."""
    if isinstance(thing, ModuleType):
        return {*vars(thing), *(name for kind in vars(thing).values() if isinstance(kind, type) for name in dir(kind))}
    names = set(dir(thing))
    if inspect.isclass(thing):
        names |= set(re.findall(r"\bself\.(\w+)", inspect.getsource(thing)))
        names |= {name for kind in thing.__mro__ for name in getattr(kind, "__annotations__", {})}
    with suppress(TypeError, ValueError):  # no callable, or one without a signature
        names |= set(inspect.signature(thing).parameters)
    return names


def test_the_table_is_read() -> None:
    assert len(ROWS) > 20
    assert ROWS[0][0].startswith("`Twins(model")


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_documented(module: str) -> None:
    pytest.importorskip(module, reason="an extra is not installed", exc_type=ImportError)
    names = import_module(module).__all__
    documented = {name_of(code) for row in ROWS for cell in row for code in quoted(cell)}
    assert sorted(set(names) - documented) == []
    assert all(inspect.getdoc(found(f"{module}.{name}")) for name in names)


@pytest.mark.parametrize(("names", "purpose"), ROWS, ids=[row[0] for row in ROWS])
def test_every_documented_name_exists(names: str, purpose: str) -> None:
    try:
        things = [found(name_of(code)) for code in quoted(names)]
    except ImportError as error:
        if 'pip install "twinboot[' not in str(error):  # a broken import of our own must fail
            raise
        pytest.skip(f"an extra is not installed: {error}")
    for code, thing in zip(quoted(names), things, strict=True):
        if "(" in code:
            require_arguments(code, thing)
    known = set(twinboot.__all__) | WORDS | set().union(*map(members, things))
    for code in quoted(purpose):
        if not code.startswith('"') and not code.endswith(".md"):
            assert name_of(code) in known, code


def require_arguments(code: str, thing: Any) -> None:
    """The arguments of a call in the table are those of the function, in its order, with its defaults."""
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    parameters = inspect.signature(thing).parameters
    given = [ast.unparse(argument) for argument in call.args if ast.unparse(argument) != "..."]
    given += [str(keyword.arg) for keyword in call.keywords]
    assert given == [name for name in parameters if name in given], code
    for keyword in call.keywords:
        if ast.unparse(keyword.value) != "...":
            assert ast.literal_eval(keyword.value) == parameters[str(keyword.arg)].default, code


@pytest.mark.parametrize("page", sorted((DOCS / "reference").glob("*.md")), ids=lambda page: page.stem)
def test_every_name_of_the_reference_exists(page: Path) -> None:
    for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
        assert found(name) is not None
