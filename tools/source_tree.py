"""
The modules under `src`, parsed once, and the graph of their imports.

`check_house.py` and `draw_map.py` both read it, so that the gate and the map cannot disagree about who imports whom.
The graph holds every import statement, inside functions and under `TYPE_CHECKING` too: a reader has to follow them all
the same. A module that is loaded by a name in a string is not in the graph.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_STATEMENT_LISTS = frozenset({"body", "orelse", "finalbody", "handlers", "cases"})

Graph = Mapping[str, frozenset[str]]
"""Module name → names of the modules it imports, all of them under `src`."""


@dataclass(frozen=True, slots=True)
class Module:
    """One source file: its dotted name, its path below the repository, its text and its syntax tree."""

    name: str
    path: str
    source: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    @property
    def package(self) -> str:
        """The dotted name of the package that holds this module; a package holds its own `__init__`."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def part(self) -> str:
        """The second part of the name: `core` of `reefknot.core.decide`. The root package's is its own name."""
        return self.name.split(".")[1] if "." in self.name else self.name


def read_modules(root: Path = ROOT) -> list[Module]:
    """Every module under `root`/src, sorted by path."""
    return [_read(file, root) for file in sorted((root / "src").rglob("*.py"))]


def _read(file: Path, root: Path) -> Module:
    path = file.relative_to(root).as_posix()
    parts = file.relative_to(root / "src").with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    source = file.read_text(encoding="utf-8")
    return Module(name, path, source, ast.parse(source, path))


def import_graph(modules: Sequence[Module]) -> Graph:
    """The imports between these modules. `from package import name` leads to the submodule of that name, if any."""
    known = {module.name for module in modules}
    return {module.name: frozenset(_targets(module, known)) - {module.name} for module in modules}


def _targets(module: Module, known: set[str]) -> Iterator[str]:
    for node in _statements(module.tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in known)
            case ast.ImportFrom(names=names):
                origin = _origin(node, module.package)
                for name in (f"{origin}.{alias.name}" for alias in names):
                    if name in known or origin in known:
                        yield name if name in known else origin
            case _:
                continue


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement beneath a node. Expressions, most of a tree, are not entered: no import hides in one."""
    for field in node._fields:
        if field in _STATEMENT_LISTS:
            for child in getattr(node, field) if isinstance(getattr(node, field), list) else ():
                yield child
                yield from _statements(child)


def _origin(node: ast.ImportFrom, package: str) -> str:
    """The absolute name after `from`, whether it was written absolute or with leading dots."""
    if not node.level:
        return node.module or ""
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def cycles(graph: Graph) -> list[list[str]]:
    """One shortest cycle for each knot of modules that can reach each other, beginning at its first name."""
    found = []
    for knot in _strongly_connected(graph):
        start = min(knot)
        found.append(_shortest_way_back(start, graph, knot))
    return sorted(found)


def _strongly_connected(graph: Graph) -> Iterator[frozenset[str]]:
    """Groups of two or more nodes of which each reaches every other."""
    reach = {name: reachable(name, graph) for name in graph}
    seen: set[str] = set()
    for name in sorted(graph):
        if name in reach[name] and name not in seen:
            knot = frozenset(other for other in reach[name] if name in reach[other])
            seen |= knot
            yield knot


def reachable(start: str, graph: Graph) -> frozenset[str]:
    """Every node that a path of one edge or more leads to; `start` itself only if it lies on a cycle."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph.get(waiting.pop(), frozenset()):
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    return frozenset(seen)


def _shortest_way_back(start: str, graph: Graph, knot: frozenset[str]) -> list[str]:
    came_from: dict[str, str] = {}
    waiting = [start]
    for name in waiting:
        for following in sorted(graph[name] & knot):
            if following == start:
                way = [name]
                while way[0] != start:
                    way.insert(0, came_from[way[0]])
                return [*way, start]
            if following not in came_from:
                came_from[following] = name
                waiting.append(following)
    raise AssertionError(f"{start} lies on no cycle")
