"""
House rules for the shape of the source: sizes, names, docstrings and import cycles, in one report.

    check_house.py [--summary] [RULE ...]

Without a rule all are checked. `--summary` prints a table of counts by rule and package instead of the findings. The
exit code is 1 when anything is found.

Blank lines and comments do not count against a ceiling, and do count towards the floor: no limit is a reason to leave a
comment out. A deliberate violation stands in `EXEMPT` with its reason; an entry that is no longer needed is a finding
too.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from reefknot.stores.port.engines import ENGINES
from tools.source_tree import ROOT, Graph, Module, cycles, import_graph, reachable, read_modules

MODULE_CEILING = 450
MODULE_LENGTH = 601  # all lines: comments and docstrings too
MODULE_FLOOR = 60
IMPORTERS_OF_A_SMALL_MODULE = 4
FUNCTION_CEILING = 60
# Lines and modules of each product, with room for small changes: see docs/decisions/0059-budgets-leave-room.md.
# Raising one needs a decision record; a product that has shrunk is lowered with it.
BUDGETS: Mapping[str, tuple[int, int]] = {
    "app": (2_450, 8),
    "audit": (4_700, 17),
    "console": (22_000, 75),
    "core": (2_450, 15),
    "demo": (850, 4),
    "idempotency": (2_400, 12),
    "ingest": (10_550, 34),
    "policy": (4_850, 18),
    "queue": (16_200, 55),
    "retrying": (4_020, 14),
    "runtime": (2_650, 18),
    "steps": (3_900, 17),
    "stores": (16_400, 49),
    "testing": (4_600, 19),
}
# Parts of a name by which a module is a contract or a value, importable from every product.
OPEN = frozenset({"model", "port"})

WIRE = "reefknot.stores.jetstream.wire"

# Schemes of stores, and classes of the engines: tested for in `stores` only.
SCHEMES = frozenset(ENGINES)
_PACKAGES = "|".join({one.package.rpartition(".")[2] for one in ENGINES.values()})
_ENGINE_CLASS = re.compile(rf"(?i:{_PACKAGES})\w*(Store|Log|Queue|Transport|Engine)")

# A docstring's first word names a thing. These point at one that the reader has not met yet, or ask.
PRONOUNS = frozenset({"it", "its", "they", "those", "these", "whoever", "whose", "nobody", "somebody", "one"})
QUESTIONS = frozenset({"what", "who", "as", "how", "where", "when"})
_FIRST_WORDS = re.compile(r"\s*([a-z]+)(?:['’][a-z]+)?(?:\s+([a-z]+))?(?![\w-])", re.IGNORECASE)

# Key → reason. Keys: "rule path"; "rule path:name" for a function, class or docstring; "import-cycles importer ->
# imported" for one import that may lie on a cycle, because only a type needs it.
EXEMPT: Mapping[str, str] = {
    "module-ceiling src/reefknot/queue/model/work.py": "the record of work and the one table of its moves: see 0072",
    "module-ceiling src/reefknot/stores/jetstream/state.py": "what a process knows of a store: see 0072",
    "module-ceiling src/reefknot/stores/jetstream/work.py": "the work queue as the port has it: see 0072",
    "module-ceiling src/reefknot/stores/sqlite/work.py": "the work queue as the port has it: see 0072",
    "module-floor src/reefknot/audit/log_sink.py": "an engine is a module of its own, and this one is small",
}

_Def = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation: the rule, where it is, and what is wrong. `name` tells findings of one file apart."""

    rule: str
    path: str
    line: int
    message: str
    part: str
    name: str = ""

    @property
    def key(self) -> str:
        """The entry of `EXEMPT` that would excuse this finding."""
        return f"{self.rule} {self.path}:{self.name}" if self.name else f"{self.rule} {self.path}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


class Source:
    """The whole tree as the rules see it: modules, imports, entry points. Everything is computed once."""

    def __init__(self, root: Path, exempt: Mapping[str, str]) -> None:
        self.root = root
        self.exempt = exempt
        self.modules = read_modules(root)
        self.definitions = {module.name: tuple(_definitions(module.tree)) for module in self.modules}

    @cached_property
    def graph(self) -> Graph:
        """Imports without those of the root package, which names everything for type checkers and loads it on use."""
        graph = import_graph(self.modules)
        return {name: imports for name, imports in graph.items() if "." in name}

    @cached_property
    def importers(self) -> Counter[str]:
        return Counter(target for targets in self.graph.values() for target in targets)

    @cached_property
    def entry_points(self) -> frozenset[str]:
        """Modules that something outside loads: commands and plugins named by `pyproject.toml`, and `__main__`."""
        file = self.root / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.exists() else {}
        groups = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
        named = {target.partition(":")[0] for group in groups for target in group.values()}
        return frozenset(named | {module.name for module in self.modules if module.name.endswith(".__main__")})


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Def]]:
    """Every function and class with its dotted name, nested ones too."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield prefix + child.name, child
                yield from _definitions(child, f"{prefix}{child.name}.")
            case ast.stmt() | ast.excepthandler() | ast.match_case():
                yield from _definitions(child, prefix)
            case _:
                continue


def code_lines(module: Module) -> frozenset[int]:
    """The numbers of the lines that are neither blank nor only a comment."""
    inside_text: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno and node.end_lineno > node.lineno:
            inside_text.update(range(node.lineno, node.end_lineno + 1))
    numbered = ((number, line.strip()) for number, line in enumerate(module.source.splitlines(), 1))
    return frozenset(number for number, line in numbered if line and (line[0] != "#" or number in inside_text))


def module_ceiling(source: Source) -> Iterator[Finding]:
    for module in source.modules:
        if (length := len(module.source.splitlines())) <= MODULE_CEILING:
            continue
        if length > MODULE_LENGTH:
            message = f"module has {length} lines in all, {MODULE_LENGTH} are allowed"
            yield Finding("module-ceiling", module.path, 1, message, module.part)
        if (lines := len(code_lines(module))) > MODULE_CEILING:
            message = f"module has {lines} lines of code, {MODULE_CEILING} are allowed"
            yield Finding("module-ceiling", module.path, 1, message, module.part)


def module_floor(source: Source) -> Iterator[Finding]:
    for module in source.modules:
        lines = len(module.source.splitlines())
        if lines >= MODULE_FLOOR or module.is_package or module.name in source.entry_points:
            continue
        if (importers := source.importers[module.name]) < IMPORTERS_OF_A_SMALL_MODULE:
            message = (
                f"module has {lines} lines and {importers} importers; under {MODULE_FLOOR} lines "
                f"it needs {IMPORTERS_OF_A_SMALL_MODULE}: merge it into the module it is read with"
            )
            yield Finding("module-floor", module.path, 1, message, module.part)


def product_budget(source: Source) -> Iterator[Finding]:
    for product, (most_lines, most_modules) in BUDGETS.items():
        modules = [module for module in source.modules if module.part == product]
        lines = sum(len(module.source.splitlines()) for module in modules)
        count = sum(not module.is_package for module in modules)
        for name, size, most in (("lines", lines, most_lines), ("modules", count, most_modules)):
            if size > most:
                path = f"src/reefknot/{product}"
                message = (
                    f"product has {size} {name}, {most} are allowed: merge, or raise the budget by a decision record"
                )
                yield Finding("product-budget", path, 1, message, product, name)


def open_modules(source: Source) -> Iterator[Finding]:
    """Imports of a flow by the core, a model or a port: every product may import these, so none may lead back up."""
    for module in source.modules:
        if not _is_open(module.name):
            continue
        for target in sorted(source.graph.get(module.name, frozenset())):
            if not _is_open(target) and target != "reefknot.errors":
                message = f"{module.name} imports {target}: models and ports import core, models and ports only"
                yield Finding("open-modules", module.path, 1, message, module.part, target)


def _is_open(name: str) -> bool:
    parts = name.split(".")
    return len(parts) > 1 and (parts[1] == "core" or not OPEN.isdisjoint(parts[2:]))


def function_ceiling(source: Source) -> Iterator[Finding]:
    for module in source.modules:
        long = [
            (name, node)
            for name, node in source.definitions[module.name]
            if not isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= FUNCTION_CEILING
        ]
        lines = code_lines(module) if long else frozenset()
        for name, node in long:
            size = sum(1 for line in lines if node.lineno <= line <= (node.end_lineno or 0))
            if size > FUNCTION_CEILING:
                message = f"function {name} has {size} lines of code, {FUNCTION_CEILING} are allowed"
                yield Finding("function-ceiling", module.path, node.lineno, message, module.part, name)


def class_names(source: Source) -> Iterator[Finding]:
    """Class names that two modules use. Variants in one module, one of which is defined, are one class."""
    places: dict[str, list[tuple[Module, int]]] = defaultdict(list)
    for module in source.modules:
        found = ((name, node) for name, node in source.definitions[module.name] if isinstance(node, ast.ClassDef))
        first = {name.rpartition(".")[2]: node.lineno for name, node in reversed(list(found))}
        for name, line in first.items():
            places[name].append((module, line))
    for name, defined in sorted(places.items()):
        if len(defined) > 1:
            for module, line in defined:
                others = ", ".join(other.path for other, _ in defined if other is not module)
                message = f"class {name} is also in {others}"
                yield Finding("class-names", module.path, line, message, module.part, name)


def first_words(source: Source) -> Iterator[Finding]:
    for module in source.modules:
        documented: list[tuple[str, ast.Module | _Def]] = [("", module.tree), *source.definitions[module.name]]
        for name, node in documented:
            word = pointing_word(ast.get_docstring(node, clean=False) or "")
            if word:
                line = node.body[0].lineno
                message = f"docstring of {name or 'the module'} begins with {word!r}: name the thing instead"
                yield Finding("first-words", module.path, line, message, module.part, name)


def pointing_word(docstring: str) -> str:
    """The pronoun or question word that a docstring begins with, as written; "" if it begins with something else."""
    found = _FIRST_WORDS.match(docstring)
    if found is None:
        return ""
    first, second = found[1], found[2] or ""
    if f"{first} {second}".lower() == "the same":
        return f"{first} {second}"
    return first if first.lower() in PRONOUNS | QUESTIONS else ""


def private_client(source: Source) -> Iterator[Finding]:
    """Private names of nats-py outside the one module that holds them to their contract."""
    for module in source.modules:
        if module.name == WIRE:
            continue
        for node in ast.walk(module.tree):
            match node:
                case ast.Attribute(value=ast.Name(id="client") | ast.Attribute(attr="client"), attr=name) if (
                    name.startswith("_") and not name.startswith("__")
                ):
                    message = f"client.{name} is a private name of nats-py: use it in {WIRE}"
                    yield Finding("private-client", module.path, node.lineno, message, module.part, name)


def engine_tests(source: Source) -> Iterator[Finding]:
    """Tests of an address's scheme or of an engine's class: outside `stores`, the descriptor of the engine is asked."""
    for module in source.modules:
        if module.part == "stores":
            continue
        for node in ast.walk(module.tree):
            match node:
                case ast.Call(func=ast.Attribute(attr="startswith" | "removeprefix"), args=[tested]):
                    is_test = any(text.partition(":")[0] in SCHEMES for text in _texts(tested))
                case ast.Compare(left=left, comparators=others):
                    is_test = any(text.endswith(":") and text[:-1] in SCHEMES for one in others for text in _texts(one))
                    is_test |= "rstrip" in ast.dump(left) and any(set(_texts(one)) & SCHEMES for one in others)
                case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                    names = (one.id for one in ast.walk(kinds) if isinstance(one, ast.Name))
                    is_test = any(_ENGINE_CLASS.fullmatch(name) for name in names)
                case _:
                    continue
            if is_test:
                text = ast.unparse(node)
                message = f"{text} asks which engine a store has: ask `stores.port.engine`, or the open store"
                yield Finding("engine-tests", module.path, node.lineno, message, module.part, text)


def _texts(node: ast.AST) -> Iterator[str]:
    """The texts that stand in an expression."""
    return (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))


def import_cycles(source: Source) -> Iterator[Finding]:
    """Modules that import each other. An exempt import is taken out of the graph, and reported to be excused."""
    modules = {module.name: module for module in source.modules}
    graph = {name: set(imports) for name, imports in source.graph.items()}
    for key in source.exempt:
        rule, _, edge = key.partition(" ")
        importer, _, imported = edge.partition(" -> ")
        if rule == "import-cycles" and importer in reachable(imported, source.graph) and imported in graph[importer]:
            graph[importer].remove(imported)
            yield Finding("import-cycles", edge, 1, "import on a cycle", modules[importer].part)
    for cycle in cycles({name: frozenset(imports) for name, imports in graph.items()}):
        module = modules[cycle[0]]
        message = "modules import each other: " + " → ".join(name.partition(".")[2] for name in cycle)
        yield Finding("import-cycles", module.path, 1, message, module.part)


RULES: Mapping[str, Callable[[Source], Iterator[Finding]]] = {
    "module-ceiling": module_ceiling,
    "module-floor": module_floor,
    "product-budget": product_budget,
    "open-modules": open_modules,
    "function-ceiling": function_ceiling,
    "class-names": class_names,
    "first-words": first_words,
    "private-client": private_client,
    "engine-tests": engine_tests,
    "import-cycles": import_cycles,
}


def findings(root: Path, exempt: Mapping[str, str] = EXEMPT, rules: Sequence[str] = ()) -> list[Finding]:
    """Every violation under `root`, in the order of the rules, without those that are exempt."""
    source = Source(root, exempt)
    chosen = list(rules) or list(RULES)
    found = [finding for rule in chosen for finding in RULES[rule](source)]
    needed = {finding.key for finding in found}
    report = [finding for finding in found if finding.key not in exempt]
    for key, reason in exempt.items():
        rule, _, path = key.partition(" ")
        if rule in chosen and (key not in needed or not reason.strip()):
            message = "exempt, yet nothing is found there" if key not in needed else "exempt without a reason"
            report.append(Finding(rule, path, 1, message, part="exempt"))
    return report


def summary(found: Sequence[Finding], rules: Sequence[str] = ()) -> str:
    """A table: a row for each package with findings, a column for each rule, and the sums."""
    columns = [*(rules or RULES), "all"]
    counts: Counter[tuple[str, str]] = Counter()
    for finding in found:
        for row in (finding.part, "all"):
            counts[row, finding.rule] += 1
            counts[row, "all"] += 1
    rows = [*sorted({finding.part for finding in found}), "all"]
    lines = ["".join([f"{'package':<12}", *(f"{column:>18}" for column in columns)])]
    lines += ["".join([f"{row:<12}", *(f"{counts[row, column] or '·':>18}" for column in columns)]) for row in rows]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    rules = [argument for argument in arguments if argument != "--summary"]
    if unknown := [rule for rule in rules if rule not in RULES]:
        print(f"no such rule: {', '.join(unknown)}; there are {', '.join(RULES)}", file=sys.stderr)
        return 2
    found = findings(ROOT, EXEMPT, rules)
    if "--summary" in arguments:
        print(summary(found, rules))
    else:
        print("\n".join(map(str, found)) or f"nothing against {', '.join(rules or RULES)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
