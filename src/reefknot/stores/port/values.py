"""
The port of named values: small JSON texts with versions, shared by all processes over one store.

The state of sources and schedules and the telemetry are values: few, small, and changed by whoever notices something. A
change names the version that it was made from, so of two processes that change a value at once one is refused, reads
again and decides anew.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from reefknot.audit.port import AuditEntry
from reefknot.core import checks
from reefknot.errors import ParameterError

LONGEST_NAME = 300
LONGEST_BODY = 262_144
"""Both are counted in bytes of UTF-8."""


class StoredValue(Struct, frozen=True):
    """A value as it is kept. Versions only grow; 0 is the version of a value that is not there."""

    name: str
    body: str
    version: int


def checked_name(name: str) -> str:
    """The name, if a value may have it; `ParameterError` otherwise."""
    accepted = f"a text of 1 to {LONGEST_NAME} bytes without half surrogate pairs"
    if not 0 < _size("name", name, accepted) <= LONGEST_NAME:
        raise ParameterError("name", name, accepted)
    return name


def checked_body(body: str) -> str:
    """The body, if a value may have it; `ParameterError` otherwise."""
    accepted = f"a text of at most {LONGEST_BODY} bytes without half surrogate pairs"
    size = _size("body", body, accepted)
    if size > LONGEST_BODY:
        raise ParameterError("body", f"{size} bytes", accepted)
    return body


def _size(parameter: str, text: str, accepted: str) -> int:
    try:
        return len(checks.text(parameter, text, accepted).encode())
    except UnicodeEncodeError as error:
        raise ParameterError(parameter, text, accepted) from error


class ValueStore(Protocol):
    """The named values of a store."""

    async def get(self, name: str) -> StoredValue | None:
        """The value, if there is one."""

    async def put(self, name: str, body: str, *, version: int, events: Sequence[AuditEntry] = ()) -> StoredValue | None:
        """
        Replace the value of this version (0: there is none yet), together with the events. None: it has another one.

        Raises `ParameterError` for a name or a body that is too long.
        """

    async def delete(self, name: str, *, version: int, events: Sequence[AuditEntry] = ()) -> bool:
        """Delete the value of this version, together with the events. False: it has another one."""

    async def list(self, prefix: str = "") -> Sequence[StoredValue]:
        """The values whose names begin with the prefix, in the order of their names."""
