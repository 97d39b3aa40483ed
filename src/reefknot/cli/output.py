"""
What a command shows: JSON for programs, tables for people, talk on stderr.

Nothing that comes from outside reaches a terminal as a control character. Colours are for terminals, and not when
`NO_COLOR` is set; elsewhere the width is bounded, so that a table in a log stays a table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120
"""Columns when nobody says how many there are."""


def printable(text: str, *, keep: str = "") -> str:
    """The text without anything that steers a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def say(text: str) -> None:
    """A line of talk. When nobody hears it, the exit code still says how it ended."""
    try:
        print(printable(text), file=sys.stderr)
    except OSError:
        return


def put(text: str = "") -> None:
    """Lines of data."""
    print(printable(text, keep="\n"))


def where(source: str) -> str:
    """A place, without the folder that the reader is in."""
    return source.removeprefix(os.getcwd() + os.sep)


def jsonable(value: object) -> Any:
    """A value as JSON has it: enums as text, no limit as null."""
    match value:
        case Enum():
            return value.value
        case float():
            return value if isfinite(value) else None
        case dict():
            return {str(key): jsonable(one) for key, one in value.items()}
        case list() | tuple():
            return [jsonable(one) for one in value]
        case None | bool() | int() | str():
            return value
        case _:
            return str(value)


def put_json(value: object) -> None:
    """A JSON document, in which a control character is an escape."""
    from json import dumps

    text = dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False)
    if not text.isascii():
        text = "".join(char if char.isprintable() or char == "\n" else dumps(char)[1:-1] for char in text)
    print(text)


def console() -> Console:
    """Where tables are drawn."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _width(), highlight=False, markup=False, emoji=False)


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return min(max(int(columns), 40), 400) if columns.isascii() and columns.isdigit() else WIDTH


def put_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, styles: Sequence[str] = (), whole: Sequence[str] = ()
) -> None:
    """A table for people. `styles` are colours by column; the `whole` columns are not broken into lines."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        style = styles[number] if number < len(styles) else ""
        table.add_column(column, style=style, overflow="fold", no_wrap=column in whole)
    for row in rows:
        table.add_row(*(Text(printable(cell, keep="\n")) for cell in row))
    _trimmed(table)


def _trimmed(table: Any) -> None:
    """Without the blanks that pad the last column when nobody sees its edge."""
    here = console()
    if here.is_terminal:
        here.print(table)
        return
    with here.capture() as captured:
        here.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
