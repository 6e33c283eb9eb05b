"""Imports run one way: from what a user calls down to what a page is, and never in a circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import tierstore

ROOT = Path(tierstore.__file__).parent
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


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


def imported(name: str) -> set[str]:
    """The modules of tierstore that one names anywhere: also within functions, and for types only."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(member if member in MODULES else node.module for member in members)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return (found & MODULES.keys()) - {name}


def test_no_circle():
    TopologicalSorter(
        {name: imported(name) for name in MODULES}
    ).prepare()  # raises CycleError, which shows it


def test_no_arrow_points_upwards():
    def package(name: str) -> str:
        return [*name.split("."), ""][1]

    upwards = [
        f"{name} imports {other}"
        for name in MODULES
        for other in imported(name)
        if package(name) in ORDER and package(other) in ORDER
        if ORDER.index(package(other)) < ORDER.index(package(name))
        if name != "tierstore.daemon.__main__"  # a program
    ]
    assert upwards == []
