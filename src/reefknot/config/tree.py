"""
A document as plain values, and one document laid over another.

`merge` is the only place where layers of configuration meet.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from reefknot.config.positions import Mark, Path

MarkOf = Callable[[Path], Mark | None]


class Tree(Struct, frozen=True):
    """A document as plain values, with the mark of every key and every list item."""

    value: dict[str, Any]
    marks: Mapping[Path, Mark]

    def mark(self, path: Path) -> Mark:
        """Where the path is written, or the nearest place above it that is."""
        for length in range(len(path), 0, -1):
            mark = self.marks.get(path[:length])
            if mark is not None:
                return mark
        return self.marks[()]


def _copied(value: Any, path: Path, mark_of: MarkOf, marks: dict[Path, Mark]) -> Any:
    """A copy of a value, and of the marks at and below its path."""
    mark = mark_of(path)
    if mark is not None:
        marks[path] = mark
    match value:
        case dict():
            return {key: _copied(item, (*path, key), mark_of, marks) for key, item in value.items()}
        case list():
            return [_copied(item, (*path, index), mark_of, marks) for index, item in enumerate(value)]
        case _:
            return value


def _forget(value: Any, path: Path, marks: dict[Path, Mark]) -> None:
    """Drop the marks of a value that is being replaced."""
    marks.pop(path, None)
    match value:
        case dict():
            for key, item in value.items():
                _forget(item, (*path, key), marks)
        case list():
            for index, item in enumerate(value):
                _forget(item, (*path, index), marks)
        case _:
            pass


def lay(
    over: Mapping[str, Any], onto: dict[str, Any], *, marks: dict[Path, Mark], mark_of: MarkOf, at: Path = ()
) -> None:
    """Lay one mapping over another in place, and its marks over the other's. Nothing of `over` is shared afterwards."""
    for key, item in over.items():
        path = (*at, key)
        below = onto.get(key)
        if isinstance(item, dict) and isinstance(below, dict):
            # The mapping keeps its earlier mark: the file's line says more than the variable that changed one field.
            lay(item, below, marks=marks, mark_of=mark_of, at=path)
            continue
        if key in onto:
            _forget(below, path, marks)
        onto[key] = _copied(item, path, mark_of, marks)


def merge(*trees: Tree) -> Tree:
    """
    Later over earlier, field by field.

    What is not given is inherited, null given is a value, lists replace. The marks follow the values. Null over a
    mapping forgets the mapping, so there, and only there, it matters which pair is merged first.
    """
    value: dict[str, Any] = {}
    marks: dict[Path, Mark] = {(): trees[0].marks[()] if trees else Mark("nothing configured")}
    for tree in trees:
        lay(tree.value, value, marks=marks, mark_of=tree.marks.get)
    return Tree(value, marks)
