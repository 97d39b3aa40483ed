"""
The contracts of a store and of its named values.

All parts of a store share one database and one chain of events, so a change and its event are stored in one step.

Named values are small JSON texts with versions, shared by all processes over one store: the state of sources and
schedules, and the telemetry. A change names the version that it was made from, so of two processes that change a value
at once one is refused, reads again and decides again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec import Struct, json

from reefknot.core import checks
from reefknot.errors import ParameterError, StoreMovedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reefknot.audit.port import AuditEntry, AuditLog
    from reefknot.core.clock import Clock
    from reefknot.core.time import Moment
    from reefknot.errors import ReefknotError
    from reefknot.idempotency.port import IdempotencyStore
    from reefknot.queue.port.control import Control
    from reefknot.queue.port.quarantine import QuarantineStore
    from reefknot.queue.port.transport import Transport
    from reefknot.queue.port.work_queue import Leases, WorkQueue

LONGEST_NAME = 300
LONGEST_BODY = 262_144
"""Limits in bytes of UTF-8."""


class StoredValue(Struct, frozen=True):
    """A stored value. Versions only grow; 0 is the version of a missing value."""

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


MOVE = "store.move"
"""The named value of a store that is, or was, moved to another one or from one."""


Role = Literal["source", "target"]


class MoveMark(Struct, frozen=True):
    """
    The mark of a move, in both of its stores. Addresses are shown ones, times ms UTC.

    Nothing works on a source that has one, nor on a target whose move has not ended.
    """

    id: str
    role: Role
    source: str
    target: str
    began_at: int
    archive: str
    ended_at: int | None = None
    report: dict[str, Any] = {}
    """What was moved, once the move has ended."""

    @property
    def forbids_work(self) -> bool:
        """Whether nothing may work on the store that has this mark."""
        return self.role == "source" or self.ended_at is None

    def error(self) -> StoreMovedError:
        """The refusal to work on the store."""
        store = self.source if self.role == "source" else self.target
        again = f"`reefknot store move --from {self.source} --to {self.target}`"
        if self.ended_at is None:
            problem = f"a move from {self.source} to {self.target} is under way"
            return StoreMovedError(store, problem, f"{again} goes on with it, and with --cancel gives it up")
        problem = f"it was moved to {self.target}"
        way_out = f"use that one; to go back, `reefknot store move --from {self.target} --to` a new store"
        return StoreMovedError(store, problem, way_out)


async def move_mark(store: Store) -> tuple[MoveMark | None, int]:
    """The mark of a store's last move, and its version; None and 0 if there is none."""
    found = await store.values.get(MOVE)
    return (None, 0) if found is None else (json.decode(found.body, type=MoveMark), found.version)


async def refuse_moved(store: Store) -> None:
    """Raise `StoreMovedError` if nothing may work on the store because of a move."""
    found = await store.values.get(MOVE)
    if (refusal := refusal_in(None if found is None else found.body)) is not None:
        raise refusal


def refusal_in(body: str | None) -> StoreMovedError | None:
    """The refusal to work on a store whose mark has this body; None where it may be worked on, or has no mark."""
    mark = None if body is None else json.decode(body, type=MoveMark)
    return mark.error() if mark is not None and mark.forbids_work else None


class ValueStore(Protocol):
    """The named values of a store."""

    async def get(self, name: str) -> StoredValue | None:
        """The value, if there is one."""

    async def put(self, name: str, body: str, *, version: int, events: Sequence[AuditEntry] = ()) -> StoredValue | None:
        """
        Replace the value of this version (0: no value yet), together with the events. None: it has another version.

        Raises `ParameterError` for a name or a body that is too long.
        """

    async def delete(self, name: str, *, version: int, events: Sequence[AuditEntry] = ()) -> bool:
        """Delete the value of this version, together with the events. False: it has another version."""

    async def list(self, prefix: str = "") -> Sequence[StoredValue]:
        """The values whose names begin with the prefix, in the order of their names."""


class Store(Protocol):
    """A store, as `open_store` returns it."""

    @property
    def durable(self) -> bool:
        """Whether acknowledged writes survive the process and a power cut; on a server this depends on its settings."""

    @property
    def identity(self) -> str:
        """The place of the data, after the scheme of the engine: the same for two stores on one file."""

    @property
    def path(self) -> str | None:
        """The file of the store; None for an engine without files."""

    @property
    def read_only(self) -> bool:
        """Whether the store is open for reading only: every write is refused."""

    @property
    def failure(self) -> ReefknotError | None:
        """The error after which every write is refused until the store is opened again; None while it works."""

    @property
    def expires_by_itself(self) -> bool:
        """Whether keys and ended work past their retention are removed without a purge."""

    @property
    def reached_for(self) -> float:
        """Seconds for which the store has been reachable without a break; infinite for a store on this host."""

    @property
    def clock(self) -> Clock:
        """The clock of the store's records: deadlines and due times are compared with its wall time."""

    def moment(self) -> Moment:
        """The current moment by the store's clock: leases are compared with its steady time."""

    @property
    def idempotency(self) -> IdempotencyStore: ...

    @property
    def audit(self) -> AuditLog: ...

    @property
    def work(self) -> WorkQueue: ...

    @property
    def quarantine(self) -> QuarantineStore: ...

    @property
    def control(self) -> Control: ...

    @property
    def leases(self) -> Leases: ...

    @property
    def values(self) -> ValueStore: ...

    async def newest_record_at(self) -> int | None:
        """The time of the newest event, key or work item (ms UTC); None in an empty store."""

    async def room(self) -> int | None:
        """The bytes that the store can take, by the disk or the limits of the server; None where neither says."""

    def transport(self, *, keeps_shared: bool = False) -> Transport:
        """
        A new transport. All transports over one database exchange messages; the caller closes it.

        With `keeps_shared`, an engine that can keeps assignments of peers on the shared subject, each for one reader;
        with other engines every reader gets them.
        """

    def acquire_retention_lock(self) -> bool:
        """Become the one process that applies retention among those that share a disk. False when another one is."""

    async def close(self) -> None:
        """Finish pending writes, then close. A second call does nothing."""
