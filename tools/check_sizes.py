"""
Modules and functions stay small enough to read in one go.

Counts lines that hold code or a docstring: blank lines and comments are free. What is larger stands in `EXEMPT` with
its reason; an entry that is no longer needed is a finding too.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULE_LIMIT = 450
FUNCTION_LIMIT = 60

# "src/reefknot/x.py" for a module, "src/reefknot/x.py:Class.method" for a function; beside it the reason.
EXEMPT: Mapping[str, str] = {}

_NOT_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)


@dataclass(frozen=True, slots=True)
class Oversize:
    """A module or a function with more lines than it may have."""

    key: str
    line: int
    size: int
    limit: int

    def __str__(self) -> str:
        path, _, function = self.key.partition(":")
        what = f"function {function}" if function else "module"
        return f"{path}:{self.line}: {what} has {self.size} lines, {self.limit} are allowed"


def code_lines(source: str) -> frozenset[int]:
    """The numbers of the lines that are neither blank nor only a comment."""
    text = source.splitlines()
    taken: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            taken.update(range(token.start[0], token.end[0] + 1))
    return frozenset(number for number in taken if text[number - 1].strip())


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its dotted name, methods and inner functions too."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + node.name, node
                yield from functions(node, f"{prefix}{node.name}.")
            case ast.ClassDef():
                yield from functions(node, f"{prefix}{node.name}.")
            case _:
                yield from functions(node, prefix)


def oversize(source: str, path: str) -> Iterator[Oversize]:
    """What in one module is too large."""
    lines = code_lines(source)
    if len(lines) > MODULE_LIMIT:
        yield Oversize(path, 1, len(lines), MODULE_LIMIT)
    for name, node in functions(ast.parse(source, path)):
        size = sum(1 for line in lines if node.lineno <= line <= (node.end_lineno or node.lineno))
        if size > FUNCTION_LIMIT:
            yield Oversize(f"{path}:{name}", node.lineno, size, FUNCTION_LIMIT)


def findings(root: Path, exempt: Mapping[str, str]) -> list[str]:
    """Everything to report about the modules under `root`/src, one line each."""
    found = [
        item
        for file in sorted((root / "src").rglob("*.py"))
        for item in oversize(file.read_text(encoding="utf-8"), file.relative_to(root).as_posix())
    ]
    report = [str(item) for item in found if item.key not in exempt]
    needed = {item.key for item in found}
    report += [f"{key}: exempt, yet not too large" for key in sorted(exempt) if key not in needed]
    report += [f"{key}: exempt without a reason" for key, reason in sorted(exempt.items()) if not reason.strip()]
    return report


def main() -> int:
    report = findings(ROOT, EXEMPT)
    print("\n".join(report) or f"modules hold to {MODULE_LIMIT} lines, functions to {FUNCTION_LIMIT}")
    return 1 if report else 0


if __name__ == "__main__":
    sys.exit(main())
