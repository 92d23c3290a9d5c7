"""Rooms and arrows: which part of the package may import which, read from the source."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import twinboot

PACKAGE = Path(__file__).parents[1] / "src" / "twinboot"

# Room -> the rooms that it may import. Each may import itself; the public names of the top may be used by the last two.
METHOD = {"_core", "groups", "resets", "estimate", "twins"}
ROOMS: dict[str, set[str]] = {
    "_core": set(),
    "groups": {"_core"},
    "resets": {"_core"},
    "estimate": {"_core", "groups"},
    "metrics": {"_core", "estimate"},
    "data": {"_core"},
    "twins": {"_core", "groups", "resets", "estimate"},
    "distributed": METHOD,
    "training": METHOD | {"data"},
    "inverse": METHOD | {"data", "training"},
    "parameters": METHOD | {"data", "training"},
    "integrations": METHOD | {"data", "training", "(top)"},
    "experiments": METHOD | {"data", "training", "inverse", "parameters", "integrations", "metrics", "(top)"},
}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


def names_imported(module: str) -> Iterator[tuple[str, str, bool]]:
    """For each import from the package, inside functions too: module, name, and whether it is for annotations alone.
    `import twinboot.x` is name "x" of module "twinboot", and `import twinboot` name "twinboot" of module ""."""
    tree = ast.parse(FILES[module].read_text())
    annotations = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        found: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            found = [(start, name) for start, _, name in (alias.name.rpartition(".") for alias in node.names)]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            found = [(start, alias.name) for alias in node.names]
        for start, name in found:
            if (start or name).split(".")[0] == "twinboot":
                yield start, name, node in annotations


def imported(module: str) -> Iterator[str]:
    """The modules of the package that a module imports, but not for annotations alone."""
    for start, name, for_annotations in names_imported(module):
        if not for_annotations:
            full = f"{start}.{name}".lstrip(".")
            yield full if full in FILES else start


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "(top)"


GRAPH = {module: set(imported(module)) - {module} for module in FILES}


def test_the_top_has_about_a_dozen_entries_and_each_has_a_place_in_the_plan() -> None:
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    entries -= {"__init__", "__main__"}
    assert entries == set(ROOMS)
    assert len(entries) <= 14


@pytest.mark.parametrize("module", sorted(FILES))
def test_arrows_go_one_way(module: str) -> None:
    room = room_of(module)
    if room == "(top)" or module == "twinboot.__main__":
        allowed = {"experiments"} if module == "twinboot.__main__" else set(ROOMS) - {"experiments", "integrations"}
    else:
        allowed = ROOMS[room] | {room}
    wrong = {other for other in GRAPH[module] if room_of(other) not in allowed}
    assert not wrong


# Helpers without anything of the method in them, which experiments share with the library.
PLAIN = {"seeds", "atomic", "extras", "checks", "batches", "threads"}


def is_public(start: str, name: str) -> bool:
    if start == "twinboot":
        return name in {*twinboot.__all__, "metrics", "__version__"}
    if start in ("twinboot.resets", "twinboot.metrics", "twinboot.groups", "twinboot.integrations.huggingface"):
        return not name.startswith("_")
    if start.startswith("twinboot._core"):
        return (name if start == "twinboot._core" else start.rpartition(".")[2]) in PLAIN
    return f"`{start}.{name}`" in (PACKAGE.parents[1] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("module", sorted(m for m in FILES if m.startswith("twinboot.experiments")))
def test_experiments_use_public_names(module: str) -> None:
    """Those of `twinboot`, and those that docs/api.md lists for experiments."""
    found = [(start, name) for start, name, _ in names_imported(module) if not start.startswith("twinboot.experiments")]
    assert [pair for pair in found if not is_public(*pair)] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    edges = {
        # `from . import x` names the package itself as well; the circle would be one of its modules and those it needs.
        module: {o for o in others if not module.startswith(f"{o}.")}
        for module, others in GRAPH.items()
    }
    try:
        order = list(TopologicalSorter(edges).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")
    assert "twinboot.twins" in order


def test_the_graph_is_read_right() -> None:
    assert "twinboot.groups" in GRAPH["twinboot.twins"]
    assert "twinboot.experiments.report" in GRAPH["twinboot.experiments.commands"]
    assert "twinboot.experiments.commands" in GRAPH["twinboot.experiments.cli"]  # inside a function and a try block
    assert "twinboot.groups" not in GRAPH["twinboot._core.copies"]  # for annotations alone
    assert "twinboot.resets" in GRAPH["twinboot"]
