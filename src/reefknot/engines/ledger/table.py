"""
The table of a ledger: its name, and the statements on it.

The name is the only thing that is ever put into a statement, so it is checked as an identifier and quoted. Keys,
fingerprints and results are bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reefknot.errors import ParameterError, ParameterTypeError

TABLE = "reefknot_ledger"

_PART = r"[A-Za-z_][A-Za-z0-9_]{0,62}"
_NAME = re.compile(rf"{_PART}(?:\.{_PART})?")
_ACCEPTED = (
    "a name of letters, digits and _, at most 63 long and not starting with a digit; a schema may stand before it"
)


@dataclass(frozen=True, slots=True)
class Table:
    """A checked, quoted name. `mark` below is the driver's placeholder: `?` or `%s`."""

    quoted: str

    @classmethod
    def named(cls, name: str) -> Table:
        if not isinstance(name, str):
            raise ParameterTypeError("table", name, _ACCEPTED)
        if not _NAME.fullmatch(name):
            raise ParameterError("table", name, _ACCEPTED)
        return cls(".".join(f'"{part}"' for part in name.split(".")))

    def create(self, time_type: str, now: str) -> str:
        # A result of NULL is a key that is taken but not finished: seen by its own transaction only, unless somebody
        # commits in the middle. JSON's null is the text 'null'.
        return (
            f"CREATE TABLE IF NOT EXISTS {self.quoted} (key TEXT NOT NULL PRIMARY KEY, fingerprint TEXT NOT NULL, "
            f"result TEXT, created_at {time_type} NOT NULL DEFAULT {now})"
        )

    def take(self, mark: str) -> str:
        """Gives a row when the key was free."""
        return (
            f"INSERT INTO {self.quoted} (key, fingerprint) VALUES ({mark}, {mark}) "  # noqa: S608 - a checked name
            "ON CONFLICT (key) DO NOTHING RETURNING key"
        )

    def find(self, mark: str) -> str:
        return f"SELECT fingerprint, result FROM {self.quoted} WHERE key = {mark}"  # noqa: S608 - a checked name

    def keep(self, mark: str) -> str:
        """Gives a row when the key was taken and not finished."""
        return (
            f"UPDATE {self.quoted} SET result = {mark} "  # noqa: S608 - a checked name
            f"WHERE key = {mark} AND result IS NULL RETURNING key"
        )
