"""
Many rows, few statements.

Every statement that runs hands the interpreter's lock over and has to get it back, which beside a busy loop takes long.
So one statement takes several rows. It knows nothing of what they mean.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import apsw

SIZES = (32, 8, 1)
"""Rows of one statement. More in one are slower again; few sizes, because SQLite prepares each once."""


class Grouped:
    """
    A statement for any number of rows. `template` has one place, for the rows' values.

    An insert has to say `OR ROLLBACK`: SQLite then needs no way back to the middle of the transaction, and keeps no
    copy of every page it touches. The writer gives the whole transaction up on an error in any case.
    """

    __slots__ = ("texts",)

    def __init__(self, template: str, *, width: int) -> None:
        row = f"({', '.join('?' * width)})"
        self.texts = [(size, template.format(", ".join([row] * size))) for size in SIZES]

    def run(self, connection: apsw.Connection, rows: Sequence[Sequence[Any]]) -> None:
        at, number = 0, len(rows)
        for size, text in self.texts:
            while number - at >= size:
                connection.execute(text, tuple(chain.from_iterable(rows[at : at + size])))
                at += size
