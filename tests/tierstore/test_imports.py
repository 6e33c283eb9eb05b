"""Imports run one way: from what a user calls down to what a page is, and never in a circle."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGES = ("tierstore_tools", "tierstore_proxy", "tierstore_engine", "tierstore_connectors", "tierstore")
# Packages of tierstore/, each may import those behind it (and modules that are in no package).
ORDER = (
    "cli",
    "daemon",
    "dashboard",
    "testing",
    "cluster",
    "client",
    "core",
    "packs",
    "store",
    "index",
    "wire",
    "tiers",
    "policy",
)


def modules_of(package: str) -> dict[str, Path]:
    """The files of a package, by the names that they are imported by. Imports none of them."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not on the path"
    [root] = map(Path, spec.submodule_search_locations or ())
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = {name: path for package in PACKAGES for name, path in modules_of(package).items()}


class Declared(NamedTuple):
    """The imports of a file, the name and lines of each class, and those of each function: of its statements,
    without its arguments and its docstring. (A command's arguments are its help.)"""

    imports: list[ast.Import | ast.ImportFrom]
    classes: list[tuple[str, int]]
    functions: list[tuple[str, int]]


@cache
def declared(path: Path) -> Declared:
    """The imports, classes and functions of a file."""
    imports, classes, functions = [], [], []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.ClassDef):
            classes.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(node) is not None and len(node.body) > 1
            functions.append((node.name, (node.end_lineno or 0) - node.body[documented].lineno + 1))
    return Declared(imports, classes, functions)


@cache
def imported(name: str) -> set[str]:
    """The modules of these packages that one names anywhere: also within functions, and for types only."""
    found = set()
    for node in declared(MODULES[name]).imports:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(member if member in MODULES else node.module for member in members)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return (found & MODULES.keys()) - {name}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle(package: str) -> None:
    names = {name for name in MODULES if name.split(".")[0] == package}
    TopologicalSorter(
        {name: imported(name) & names for name in names}
    ).prepare()  # raises CycleError, which shows it


def test_packages_import_one_way() -> None:
    TopologicalSorter(
        {
            package: {other.split(".")[0] for name in modules_of(package) for other in imported(name)}
            - {package}
            for package in PACKAGES
        }
    ).prepare()


def test_no_arrow_points_upwards():
    def package(name: str) -> str:
        return [*name.split("."), ""][1] if name.split(".")[0] == "tierstore" else ""

    upwards = [
        f"{name} imports {other}"
        for name in modules_of("tierstore")
        for other in imported(name)
        if package(name) in ORDER and package(other) in ORDER
        if ORDER.index(package(other)) < ORDER.index(package(name))
        if name != "tierstore.daemon.__main__"  # a program
    ]
    assert upwards == []


@cache
def files() -> dict[str, Declared]:
    """What each module and script outside of tests declares."""
    scripts = {path.name: path for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py")}
    return {name: declared(path) for name, path in {**MODULES, **scripts}.items()}


def test_a_class_name_stands_once() -> None:
    """A reader who searches for a class finds one."""
    places: dict[str, list[str]] = {}
    for module, file in files().items():
        for name, _ in file.classes:
            places.setdefault(name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_no_class_is_longer_than_500_lines() -> None:
    assert [each for file in files().values() for each in file.classes if each[1] > 500] == []


def test_no_function_has_more_than_55_lines_of_statements() -> None:
    assert [
        (module, each) for module, file in files().items() for each in file.functions if each[1] > 55
    ] == []


def test_no_test_imports_the_conftest_of_another_folder() -> None:
    """Helpers that several folders need are in ``tierstore.testing`` or a module of ``tests``."""
    tests = Path(__file__).parents[1]
    found = []
    for path in tests.rglob("*.py"):
        own = ".".join(("tests", *path.relative_to(tests).parent.parts, "conftest"))
        for name in re.findall(r"^\s*from (\w[\w.]*\.conftest) import", path.read_text(), re.M):
            if name != own:
                found.append(f"{path.relative_to(tests)}: {name}")
    assert found == []
