"""
`Operator`: who asks, over which open store, and what may be shown.

Every operation takes an operator first, and returns what JSON can carry: the command line prints it, the HTTP API sends
it, a page draws it. A request that cannot be fulfilled raises `OperationError`, a value that is not accepted
`ParameterError`; neither knows of exit codes or HTTP statuses. Who asks others to act waits until they have (`polled`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from reefknot import clock
from reefknot.audit.journal import Journal, envelope
from reefknot.audit.model.event import OperatorAction
from reefknot.core.redaction import Redactor
from reefknot.runtime.log import printable
from reefknot.runtime.processes import own_identity

if TYPE_CHECKING:
    from reefknot.audit.port import AuditEntry
    from reefknot.policy.settings import Settings
    from reefknot.queue.client import Client
    from reefknot.stores.port import Store

R = TypeVar("R")
T = TypeVar("T")

LONGEST_ACTOR = 200
LONGEST_REASON = 500
SLICE_S = 0.002
"""How long a list is worked on before others have their turn."""
_POLL_S = 0.1


class Operator(Struct, frozen=True):
    """An operator at a store."""

    store: Store
    redactor: Redactor
    named_actor: str | None = None
    """The name that the operator claims; None for the user of this process."""
    settings: Settings | None = None
    """The checked configuration; None when nothing is configured, or nothing was checked."""
    shown: str = ""
    """The URL of the store for messages, without credentials."""

    @property
    def actor(self) -> str:
        """The actor of an audited action."""
        return actor_name(self.named_actor)

    def client(self) -> Client:
        """A client of the store, which refuses a submission that the configured queue has no room for."""
        from reefknot.queue.connect import client_of

        bound = {} if self.settings is None else {"size": self.settings.queue_size}
        return client_of(self.store, self.store.clock, **bound)

    def reason(self, because: str) -> str:
        """The reason of an action as it may be kept: without secrets, and not longer than a reason is."""
        return self.redactor(because)[:LONGEST_REASON]

    def event(
        self, action: str, subject: str | None = None, *, tenant_id: str | None = None, **details: Any
    ) -> AuditEntry:
        """The audit entry of an operator's action, secrets hidden. User, host and process are those of this process,
        whatever name is claimed."""
        mine = own_identity()
        hidden: Any = self.redactor.tree(details)
        event = OperatorAction(
            **envelope(wall=clock.wall(), tenant_id=tenant_id),
            actor=self.actor,
            os_user=mine.user,
            host=mine.host,
            process=mine.process,
            action=action,
            subject=None if subject is None else self.redactor(subject),
            details=hidden or None,
        )
        return Journal(None, redactor=self.redactor).entries([event])[0]


def actor_name(claimed: str | None) -> str:
    """The name of an actor: the claimed one, else the user of this system."""
    from getpass import getuser

    if claimed:
        return printable(claimed)[:LONGEST_ACTOR]
    try:
        return getuser()
    except (KeyError, OSError, ImportError):
        return "unknown"


async def in_slices(make: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The list of what `make` makes of each item. Others on this loop have as much time in between as this takes."""
    made: list[R] = []
    began = perf_counter()
    for item in items:
        made.append(make(item))
        if perf_counter() - began > SLICE_S:
            await asyncio.sleep(SLICE_S)
            began = perf_counter()
    return made


async def polled(look: Callable[[], Awaitable[R]], seconds: float, *, enough: Callable[[R], object] = bool) -> R:
    """The first result of `look` that is enough, else the last one within these seconds."""
    found = await look()
    for _ in range(int(seconds / _POLL_S)):
        if enough(found):
            break
        await asyncio.sleep(_POLL_S)
        found = await look()
    return found
