"""
What must not stand in the source, nor in the repository: unsafe calls, open promises, vague names, odd English.

Unsafe calls are found in the syntax tree: a word in a docstring is no finding, and a call behind an alias of its module
is one. Wording is checked in everything that people read: comments, docstrings and all other strings of `src/`, pages
of the dashboard and documents. A place where a word is right stands in `ALLOWED` with its reason; an entry that is no
longer needed is a finding too.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent

LOCK_FILES = frozenset(
    {
        "uv.lock",
        "poetry.lock",
        "pdm.lock",
        "Pipfile.lock",
        "package-lock.json",
        "npm-shrinkwrap.json",
        "yarn.lock",
        "pnpm-lock.yaml",
    }
)
VAGUE_NAMES = frozenset({"utils", "helpers", "common", "base", "misc"})
UNSAFE_MODULES = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill"})
UNSAFE_BUILTINS = frozenset({"eval", "exec"})
UNSAFE_YAML = frozenset({"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"})
UNFINISHED = re.compile(r"\b(TODO|FIXME)\b")  # the words this file looks for
INSTALLED_BY_NAME = re.compile(r"pip install [^\n`]*(?<![\w./-])['\"]?reefknot(?=[\['\"`\s]|$)", re.MULTILINE)

# Odd or worn-out English -> the plain form. "There is none" is right, and `None` with a capital is a value of Python.
WORDING: Mapping[str, str] = {
    "nobody": "name who does not, or use the passive: 'is not read'",
    "somebody": "name the caller, the operator or the process",
    "whoever": "name the caller, the operator or the process",
    "told": "say what is sent, reported or logged",
    "anew": "again, or a verb with re-",
    "beside": "next to; in addition to; as well as",
    "is none": "say what happens instead: 'is ignored', 'does not count'",
    "so many": "name the number: 'at most 5', 'this number of'",
    "so long": "name the duration: 'for at most 5 s', 'after this time'",
    "what came of it": "the result, the outcome",
}
# "phrase path" -> why the phrase is right there.
ALLOWED: Mapping[str, str] = {}
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINE_LENGTH = 120

_PHRASE = re.compile(
    r"\b(?:" + "|".join(phrase.replace(" ", r"\s+") for phrase in WORDING if phrase != "is none") + r")\b",
    re.IGNORECASE,
)
_IS_NONE = re.compile(r"\b(?<!there )(?<!There )[Ii][Ss]\s+(?:none|NONE)\b")
_FENCE = re.compile(r"\s*(```+|~~~+)")
_TARGET = re.compile(r"(?<=\])\([^)\s]*\)|<?https?://[^\s>]+>?")

Finding = tuple[int, str]


def _imported(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """(module, name or "", the name it is bound to) of every import in a statement."""
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield alias.name, "", alias.asname or alias.name.partition(".")[0]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            for alias in names:
                yield module, alias.name, alias.asname or alias.name
        case _:
            return


def _import_findings(node: ast.AST) -> Iterator[Finding]:
    line = getattr(node, "lineno", 1)
    for module, name, _ in _imported(node):
        if module.partition(".")[0] in UNSAFE_MODULES:
            yield line, f"{module}: loading it can run code"
        if module == "yaml" and name in UNSAFE_YAML:
            yield line, f"yaml.{name}: use the safe loader"


def _call_findings(node: ast.Call, yaml_names: frozenset[str]) -> Iterator[Finding]:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="builtins"), attr=name) if name in UNSAFE_BUILTINS:
            yield node.lineno, f"{name}: runs text as code"
        case ast.Attribute(value=ast.Name(id=module), attr=name) if module in yaml_names and name in UNSAFE_YAML:
            yield node.lineno, f"yaml.{name}: use the safe loader"


def syntax_findings(source: str, path: str) -> Iterator[Finding]:
    """Unsafe imports and calls, and code that is not there yet."""
    nodes = list(ast.walk(ast.parse(source, path)))
    bound = [triple for node in nodes for triple in _imported(node)]
    yaml_names = frozenset(alias for module, name, alias in bound if module == "yaml" and not name)
    for node in nodes:
        yield from _import_findings(node)
        match node:
            case ast.Call():
                yield from _call_findings(node, yaml_names)
            case ast.Raise(exc=ast.Name(id="NotImplementedError") | ast.Call(func=ast.Name(id="NotImplementedError"))):
                yield node.lineno, "NotImplementedError: write it, or leave it out"
            case _:
                continue


def text_findings(source: str) -> Iterator[Finding]:
    """Promises in comments and strings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in {tokenize.COMMENT, tokenize.STRING} and (found := UNFINISHED.search(token.string)):
            yield token.start[0], f"{found.group()}: do it, or open an issue"


def name_findings(path: str) -> Iterator[Finding]:
    """Names that say nothing about what is inside."""
    for part in PurePosixPath(path).with_suffix("").parts:
        if part.strip("_") in VAGUE_NAMES:
            yield 1, f"a module named {part!r} says nothing about what is inside"


def install_findings(text: str) -> Iterator[Finding]:
    """Commands that install reefknot by name: until it is released, a package of that name belongs to someone else."""
    for found in INSTALLED_BY_NAME.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, "reefknot is not on an index: pip install '.[extra]', or a wheel"


def _prose(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every string and every block of comments; parts of one string that stand apart are one text."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)):
                yield node.lineno, text
            case ast.JoinedStr(values=values):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in values]
                yield node.lineno, "".join(parts)
            case _:
                continue
    yield from _comments(source)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every block of comment lines, and of every comment behind code."""
    first, block = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("#")
        if not token.line.lstrip().startswith("#"):
            yield line, text
        elif line == first + len(block):
            block.append(text)
        else:
            yield first, "\n".join(block)
            first, block = line, [text]
    yield first, "\n".join(block)


def wording_findings(text: str, first: int = 1) -> Iterator[tuple[int, str]]:
    """(line, phrase) of every odd phrase in a text that begins at line `first`; a phrase may go over a line's end."""
    for pattern in (_PHRASE, _IS_NONE):
        for found in pattern.finditer(text):
            if text[: found.start()].endswith("`") and text[found.end() :].startswith("`"):
                continue  # a literal name
            yield first + text.count("\n", 0, found.start()), " ".join(found.group().lower().split())


def long_lines(markdown: str) -> Iterator[Finding]:
    """Lines of prose that are too long for a readable diff; tables, headings, code and targets of links may be."""
    fence = ""
    for number, line in enumerate(markdown.splitlines(), start=1):
        if mark := _FENCE.match(line):
            fence = "" if fence and mark.group(1).startswith(fence) else fence or mark.group(1)
        elif not fence and not line.lstrip().startswith(("|", "#")):
            length = len(_TARGET.sub("", line))
            if length > LINE_LENGTH:
                yield number, f"{length} characters: one sentence a line, or wrap at {LINE_LENGTH}"


def _documents(root: Path) -> list[Path]:
    return [*sorted((root / "docs").rglob("*.md")), *(root / name for name in DOCUMENTS if (root / name).exists())]


def text_report(root: Path, allowed: Mapping[str, str] = ALLOWED) -> list[str]:
    """Everything to report about text that people read, one line each."""
    report: list[str] = []
    unused = set(allowed)
    for file in [*sorted((root / "src").rglob("*.py")), *sorted((root / "src").rglob("*.html")), *_documents(root)]:
        path = file.relative_to(root).as_posix()
        text = file.read_text(encoding="utf-8")
        pieces = _prose(text) if file.suffix == ".py" else [(1, text)]
        phrases = {found for first, piece in pieces for found in wording_findings(piece, first)}
        if file.suffix == ".html":
            phrases = {found for found in phrases if found[1] != "is none"}  # a test of the template language
        unused -= {f"{phrase} {path}" for _, phrase in phrases}
        found = [
            (line, f"{phrase!r}: {WORDING[phrase]}") for line, phrase in phrases if f"{phrase} {path}" not in allowed
        ]
        if file.suffix == ".md":
            found += long_lines(text)
        report += [f"{path}:{line}: {message}" for line, message in sorted(found)]
    return report + [f"tools/check_words.py:1: ALLOWED has {key!r}, which is not needed" for key in sorted(unused)]


def tracked_files(root: Path) -> list[str]:
    """The files git knows; without git, those at the top."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return [entry.name for entry in root.iterdir() if entry.is_file()]
    return [name for name in listed.stdout.split("\0") if name]


def findings(root: Path) -> list[str]:
    """Everything to report, one line each."""
    report = [
        f"{name}:1: a lock file names a registry; pins go into constraints.txt"
        for name in tracked_files(root)
        if PurePosixPath(name).name in LOCK_FILES
    ]
    for name in sorted(tracked_files(root)):
        if name.startswith(("src/", "docs/", "deploy/", "examples/")) or name == "README.md":
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            report += [f"{name}:{line}: {message}" for line, message in install_findings(text)]
    for file in sorted((root / "src").rglob("*.py")):
        path = file.relative_to(root).as_posix()
        source = file.read_text(encoding="utf-8")
        found = [*name_findings(path), *syntax_findings(source, path), *text_findings(source)]
        report += [f"{path}:{line}: {message}" for line, message in sorted(found)]
    return report


def main() -> int:
    report = [*findings(ROOT), *text_report(ROOT)]
    print(
        "\n".join(report)
        or "no unsafe call, open promise, vague name or lock file; no odd phrase, no long line of prose"
    )
    return 1 if report else 0


if __name__ == "__main__":
    sys.exit(main())
