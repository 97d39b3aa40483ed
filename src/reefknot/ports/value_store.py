"""
The port of named values: small JSON texts with versions, shared by all processes over one store.

The state of sources and schedules and the telemetry are values: few, small, and changed by whoever notices something. A
change names the version that it was made from, so of two processes that change a value at once one is refused, reads
again and decides anew.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from reefknot.ports.audit_log import AuditEntry

LONGEST_NAME = 300
LONGEST_BODY = 262_144


class StoredValue(Struct, frozen=True):
    """A value as it is kept. Versions only grow; 0 is the version of a value that is not there."""

    name: str
    body: str
    version: int


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
