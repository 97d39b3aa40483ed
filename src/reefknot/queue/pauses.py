"""
Pauses of the queue: the job types and tenants whose work is not begun until an operator resumes it.

They are one value of the store, which every process reads: routers dispatch nothing of what is paused, and workers hand
due retries of it back. Submissions are accepted, and wait.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct

from reefknot.audit.port import AuditEntry
from reefknot.core.clock import Clock
from reefknot.core.limits import globbed
from reefknot.runtime.log import RepeatedErrors
from reefknot.runtime.timeouts import STORE_S
from reefknot.stores.port import Store

VALUE = "queue.pauses"
COMMAND = "queue"
"""The name of the command after which processes read the pauses again."""
READ_EVERY_S = 30.0
"""How often they are read in any case: a process that was cut off may have missed the command."""
MOST_PAUSES = 1000
MOST_TRIES = 20


class Pause(Struct, frozen=True, omit_defaults=True):
    """A paused job type, in which `*` stands for any text, or a paused tenant. Times are milliseconds UTC."""

    what: str
    """`type` or `tenant`."""
    name: str
    since: int = 0
    until: int | None = None
    who: str = ""
    why: str = ""

    def holds(self, kind: str, tenant: str, wall_ms: int) -> bool:
        """Whether work of this type and tenant is not begun now."""
        fits = globbed(self.name, kind) if self.what == "type" else self.name == tenant
        return fits and self.is_on(wall_ms)

    def is_on(self, wall_ms: int) -> bool:
        """Whether its time is not over."""
        return self.until is None or wall_ms < self.until

    def __str__(self) -> str:
        return f"{self.what} {self.name}"


_pauses = msgspec.json.Decoder(list[Pause])


class Pauses:
    """The pauses in force, as this process knows them."""

    def __init__(self, pauses: Sequence[Pause] = ()) -> None:
        self.all = tuple(pauses)
        self.changed: list[Callable[[], None]] = []
        """Called after each change."""

    def of(self, kind: str, tenant: str | None, wall_ms: int) -> Pause | None:
        """The pause for which work of this type and tenant is not begun; None when it may begin."""
        return next((one for one in self.all if one.holds(kind, tenant or "", wall_ms)), None)

    def replace(self, pauses: Sequence[Pause]) -> None:
        """Follow other pauses."""
        if self.all != tuple(pauses):
            self.all = tuple(pauses)
            for changed in self.changed:
                changed()


class PauseWatch:
    """The pauses of one store, read again after each command that changes them, and now and then."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._errors = RepeatedErrors()
        self._look = asyncio.Event()
        self.pauses = Pauses()

    def look(self) -> None:
        """Read them again soon."""
        self._look.set()

    async def read(self) -> None:
        """Read them now. A store that does not answer leaves them as they are."""
        try:
            async with asyncio.timeout(STORE_S):
                self.pauses.replace(await read_pauses(self._store))
        except Exception as error:
            self._errors.log("the pauses of the queue cannot be read", error, self._clock.now())

    async def follow(self) -> None:
        """Follow them until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(READ_EVERY_S):
                    await self._look.wait()
            self._look.clear()
            await self.read()


async def read_pauses(store: Store) -> list[Pause]:
    """The pauses that the store keeps, those that are over among them."""
    return (await _read(store))[0]


async def _read(store: Store) -> tuple[list[Pause], int]:
    kept = await store.values.get(VALUE)
    return ([], 0) if kept is None else (_pauses.decode(kept.body), kept.version)


async def change_pauses(
    store: Store, change: Callable[[list[Pause]], list[Pause] | None], *, events: Sequence[AuditEntry]
) -> bool:
    """Replace the pauses by `change(pauses)`, together with the events; False when it answers None, for no change."""
    for _ in range(MOST_TRIES):
        before, version = await _read(store)
        after = change(before)
        if after is None:
            return False
        if await store.values.put(VALUE, msgspec.json.encode(after).decode(), version=version, events=events):
            await store.control.post(COMMAND)
            return True
    raise TimeoutError("the pauses are being changed by others all the time")
