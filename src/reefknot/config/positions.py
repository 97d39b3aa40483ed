"""
Where something was written, and what is wrong with it there.

Every text here becomes one printable line, because file names and keys come from outside and end in terminals and logs.
"""

import re

from msgspec import Struct

Path = tuple[str | int, ...]
"""The keys and list indexes that lead to a place in a document. `()` is the document itself."""

LONGEST_SEGMENT = 60

_BARE = re.compile(r"[\w/+-]+\Z")


def printable(text: str) -> str:
    """The text as one line that cannot steer a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shortened(text: str, most: int = LONGEST_SEGMENT) -> str:
    """The text's bounded beginning, on one line."""
    return printable(text if len(text) <= most else text[: most - 1] + "…")


def dotted(path: Path) -> str:
    """A path as people write it: `worker.retries.v2`, `sources[0].name`, `operations."nats.publish"`."""
    shown = ""
    for segment in path:
        if isinstance(segment, int):
            shown += f"[{segment}]"
            continue
        word = shortened(segment)
        if not _BARE.match(word.removesuffix("…")):
            word = '"' + word.replace('"', '\\"') + '"'
        shown += f".{word}" if shown else word
    return shown


class Mark(Struct, frozen=True):
    """A place: a file with line and column, counted from 1, or the name of what else was read."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        shown = printable(self.source)
        if self.line is not None:
            shown += f":{self.line}"
            if self.column is not None:
                shown += f":{self.column}"
        return shown


class Problem(Struct, frozen=True):
    """One mistake: where it stands, the path of the setting, and what is wrong."""

    mark: Mark
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.mark}: {self.path}: " if self.path else f"{self.mark}: "
        return printable(where + self.message)
