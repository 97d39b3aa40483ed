"""
Two lives of one worker.

The first takes an order from the queue, does its effect once under its key, records, settles, and says after each step
what it was promised. It may end anywhere. The second finds the files as they are and carries on. What both leave behind
is evidence; `judging` reads it. The wrong ways to do it are here too, so that the judge can be shown to notice them.
"""

import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw

from reefknot.audit.port import AuditEntry, AuditQuery
from reefknot.core.canonical import canonical
from reefknot.errors import OutcomeUnknownError
from reefknot.idempotency.decorator import idempotent
from reefknot.idempotency.model import Done, KeyRecord
from reefknot.queue.model.work import Quarantine, Settled, WorkDone, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.port import Store
from reefknot.stores.sqlite import SqliteStore
from reefknot.stores.sqlite.idempotency import load
from tests.faults.vfs import Call, Hook

LEASE = 30.0
ORDERS = ("order-1", "order-2")
EARLIER = 40
"""Work that was done before the story begins, where the store has a past."""
EFFECTS = "effects.txt"
Keys = Callable[[], Awaitable[dict[str, KeyRecord]]]
Tell = Callable[[str, str, Any], None]
"""Told what was acknowledged, of which order, and with what value."""


class AheadClock(SystemClock):
    """The clock of this machine, `ahead` of it by so many seconds: leases run out without anybody waiting."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead

    def wall(self) -> float:
        return super().wall() + self.ahead


@dataclass(frozen=True)
class Way:
    """How the work is done. `flaw` names a wrong way."""

    mode: str = "retry"
    flaw: str = ""


class Sink:
    """Where effects show: a line in a file. With `dedup` it knows keys, and answers again what it answered first."""

    def __init__(self, folder: Path, hook: Hook, *, dedup: bool) -> None:
        self._path = folder / EFFECTS
        self._hook = hook
        self._dedup = dedup

    def do(self, order: str, owner: str) -> str:
        """The caller may end before it, or after it and before it hears the answer, and not in between."""
        answer = self._hook.around(Call("effect", EFFECTS), lambda: self._happen(order, owner))
        return self._hook.around(Call("effect answered", EFFECTS), lambda: answer)

    def _happen(self, order: str, owner: str) -> str:
        earlier = self.seen().get(order)
        if self._dedup and earlier:
            return earlier[0]
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(file, f"{order} {owner}\n".encode())
            os.fdatasync(file)
        finally:
            os.close(file)
        return owner

    def seen(self) -> dict[str, list[str]]:
        """Who did each order's effect, in order."""
        found: dict[str, list[str]] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                order, owner = line.split()
                found.setdefault(order, []).append(owner)
        return found


class Worker:
    """One life."""

    def __init__(self, store: Store, sink: Sink, way: Way, owner: str, tell: Tell) -> None:
        self._store = store
        self._sink = sink
        self._way = way
        self._owner = owner
        self._acknowledged = tell

    async def submit(self) -> None:
        for order in ORDERS:
            if self._way.flaw == "promises too early":
                self._acknowledged("enqueued", order, None)
            await self._store.work.enqueue([WorkItem(order, "charge")], events=[told("admission", order)])
            self._acknowledged("enqueued", order, None)

    async def work(self, most: int = 1) -> None:
        """Until nothing is left that can be claimed."""
        while items := await self._store.work.claim(most, WorkClaim(owner=self._owner, lease=LEASE)):
            for item in items:
                self._acknowledged("claimed", item.id, item.fence)
                settled = await self._charge(item.id)
                settlement = Settlement(item.id, self._owner, item.fence, settled, (told("settled", item.id),))
                (kept,) = await self._store.work.settle([settlement])
                if kept:
                    self._acknowledged("settled", item.id, _result(settled))

    async def _charge(self, order: str) -> Settled:
        key = f"{order}/{self._owner}" if self._way.flaw == "forgets the key" else order

        @idempotent(key=lambda _: key, mode=self._way.mode, lease=LEASE, wait=0, store=self._store, name="charge")
        async def charge(order: str, **_: Any) -> str:
            return self._sink.do(order, self._owner)

        try:
            result = await charge(order)
        except OutcomeUnknownError:
            return Quarantine("nobody knows whether it happened")
        self._acknowledged("recorded", order, result)
        return WorkDone(json.dumps(result))


def told(event_type: str, work_id: str) -> AuditEntry:
    return AuditEntry(canonical({"event_type": event_type, "work_id": work_id}), event_type, 0, work_id=work_id)


def _result(settled: Settled) -> Any:
    return json.loads(settled.result) if isinstance(settled, WorkDone) and settled.result is not None else None


async def first_life(folder: Path, way: Way, opener: Callable[..., Any], hook: Hook, say: Tell) -> None:
    """Everything once, with the writer's thread, as a worker does it; then an orderly end."""
    store = await SqliteStore(folder / "state.db", SystemClock(), opener=opener).start()
    await live(store, folder, way, hook, say)
    await store.close()


async def live(store: Store, folder: Path, way: Way, hook: Hook, say: Tell) -> None:
    """Submit every order, and do it."""
    worker = Worker(store, _sink(folder, way, hook), way, "first", say)
    await worker.submit()
    await worker.work()


async def second_life(folder: Path, way: Way, opener: Callable[..., Any], *, patience: float = 15.0) -> dict[str, Any]:
    """What is found, what is done about it, and how it all ends."""
    clock = AheadClock()
    store = await SqliteStore(folder / "state.db", clock, opener=opener, inline=True, patience=patience).start()
    check = await store.check()
    evidence = await carry_on(store, clock, folder, way, lambda: stored_keys(store))
    check_after = await store.check()
    await store.close()
    return evidence | {"whole": check.ok and check_after.ok}


async def carry_on(store: Store, clock: AheadClock, folder: Path, way: Way, keys: Keys) -> dict[str, Any]:
    """What is found in an open store, what is done about it, and how it all ends; `keys` reads every key in it."""
    began = time.monotonic()
    found = await _state(store, await keys())
    later: list[tuple[str, str, Any]] = []
    sink = _sink(folder, way, Hook())
    worker = Worker(store, sink, way, "second", lambda *said: later.append(said))
    await worker.submit()
    await worker.work(most=len(ORDERS))  # only what nobody holds
    before_the_lease = [order for what, order, _ in later if what == "claimed"]
    clock.ahead = 2 * LEASE + time.monotonic() - began
    await worker.work(most=len(ORDERS))
    ended = await _state(store, await keys())
    unknown = [key for key, (state, _) in ended["keys"].items() if state == "unknown"]
    resolved = [await store.idempotency.resolve(key, Done('"a person looked"')) for key in unknown]
    return {
        "found": found,
        "before_the_lease": before_the_lease,
        "later": later,
        "ended": ended,
        "resolved": resolved,
        "effects": sink.seen(),
    }


def _sink(folder: Path, way: Way, hook: Hook) -> Sink:
    return Sink(folder, hook, dedup=way.mode == "dedup" and way.flaw != "a sink that does not deduplicate")


async def _state(store: Store, keys: dict[str, KeyRecord]) -> dict[str, Any]:
    items = sorted((await store.work.search()).items, key=lambda item: item.id)
    recorded = await store.audit.read(AuditQuery(event_type="idempotency"))
    events = await store.audit.read()
    return {
        "items": {item.id: [item.state, item.fence, item.crashes, item.result] for item in items},
        "keys": {key: [record.state, record.result] for key, record in keys.items()},
        "records": [one["idempotency_key"] for one in map(_body, recorded) if one["action"] == "record"],
        "events": [[kept.entry.event_type, kept.entry.work_id] for kept in events],
    }


async def stored_keys(store: SqliteStore) -> dict[str, KeyRecord]:
    """Every key in the file."""

    def read(connection: apsw.Connection) -> dict[str, KeyRecord]:
        keys: Any = connection.execute("SELECT key FROM idempotency ORDER BY key").fetchall()
        return load(connection, [key for (key,) in keys])

    return await store._context.read(read)


def _body(kept: Any) -> Any:
    return json.loads(kept.entry.body)
